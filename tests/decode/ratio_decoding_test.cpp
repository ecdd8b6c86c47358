// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The classical rule in the decoding loop: the law of the text is the target's, whatever distribution drafts were drawn from.
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "hash_target.hpp"
#include "law.hpp"
#include "outrider/core/rng.hpp"
#include "outrider/decode/speculative_decoder.hpp"

namespace {

using namespace outrider;
using testing::hash_target;
using testing::misfit;

constexpr std::size_t vocabulary = hash_target::vocabulary;

/// Draws all its guesses from one distribution: half of it on token 7, the rest even.
class lopsided_drafter {
 public:
  static constexpr draft_needs needs{};
  explicit lopsided_drafter(std::uint64_t seed) : noise_(seed, 99) {
    for (std::size_t id = 0; id < vocabulary; ++id) law_[id] = {static_cast<token_id>(id), id == 7 ? 0.5 : 0.5 / (vocabulary - 1)};
    proposals_.fill(law_);
  }
  lopsided_drafter(const lopsided_drafter&) = delete;
  lopsided_drafter& operator=(const lopsided_drafter&) = delete;

  template <class Target>
  std::size_t propose(const Target&, const draft_request& request, std::span<token_id> out) {
    for (std::size_t i = 0; i < out.size(); ++i) {
      double left = noise_.uniform(request.text.size() + i, 0);
      std::size_t id = 0;
      while (id + 1 < vocabulary && (left -= law_[id].probability) > 0) ++id;
      out[i] = static_cast<token_id>(id);
    }
    count_ = out.size();
    return count_;
  }
  [[nodiscard]] std::span<const std::span<const token_probability>> proposals() const noexcept {
    return std::span(proposals_).first(count_);
  }

 private:
  noise noise_;
  std::array<token_probability, vocabulary> law_;
  std::array<std::span<const token_probability>, max_draft_length> proposals_;
  std::size_t count_ = 0;
};

/// What follows `text` in hash_target at temperature 1: logit 1 for one token, 0 for the others.
std::vector<double> law_behind(const std::vector<token_id>& text) {
  const double total = std::exp(1.0) + vocabulary - 1;
  std::vector<double> p(vocabulary, 1 / total);
  p[static_cast<std::size_t>(hash_target::next(text))] = std::exp(1.0) / total;
  return p;
}

TEST_CASE("the second and third token of a text follow the target's law, drafts from another one notwithstanding") {
  constexpr std::size_t texts = 60'000;
  const std::vector<token_id> prompt{3, 1, 4};
  std::vector<double> second(vocabulary, 0), third(vocabulary, 0);
  const std::vector<double> first = law_behind(prompt);
  for (std::size_t a = 0; a < vocabulary; ++a) {
    std::vector<token_id> text = prompt;
    text.push_back(static_cast<token_id>(a));
    const std::vector<double> behind_a = law_behind(text);
    for (std::size_t b = 0; b < vocabulary; ++b) {
      second[b] += first[a] * behind_a[b];
      text.push_back(static_cast<token_id>(b));
      const std::vector<double> behind_b = law_behind(text);
      for (std::size_t c = 0; c < vocabulary; ++c) third[c] += first[a] * behind_a[b] * behind_b[c];
      text.pop_back();
    }
  }
  std::vector<std::size_t> counts[2]{std::vector<std::size_t>(vocabulary), std::vector<std::size_t>(vocabulary)};
  statistics sum;
  for (std::size_t i = 0; i < texts; ++i) {
    hash_target target(4, 16);
    lopsided_drafter drafter(i);
    sampling_options draws;
    draws.temperature = 1, draws.seed = i;
    speculative_decoder decoder(target, drafter, ratio_sampling(draws), fixed<2>{});
    std::vector<token_id> out;
    const generate_options options{.max_new_tokens = 4, .clock = nullptr};
    sum += decoder.generate(prompt, options, [&](token_id token) { out.push_back(token); }).stats;
    for (std::size_t t = 0; t < 2; ++t) ++counts[t][static_cast<std::size_t>(out[t + 1])];
  }
  CHECK(sum.accepted() > texts / 10);
  const auto law = [](const std::vector<double>& p) {
    std::vector<token_probability> out;
    for (std::size_t id = 0; id < p.size(); ++id) out.push_back({static_cast<token_id>(id), p[id]});
    return out;
  };
  CHECK(misfit(counts[0], law(second)) < 1);
  CHECK(misfit(counts[1], law(third)) < 1);
}

}  // namespace
