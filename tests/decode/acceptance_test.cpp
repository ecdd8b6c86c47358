// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/decode/acceptance.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "law.hpp"
#include "outrider/backend/reference.hpp"
#include "support/refusal.hpp"

namespace {

using namespace outrider;
using testing::misfit;

using law = std::vector<token_probability>;

static_assert(sampler_for<ratio_sampling, reference>);

const law p{{0, 0.05}, {1, 0.4}, {3, 0.25}, {4, 0.2}, {6, 0.1}};
const law q{{0, 0.3}, {1, 0.1}, {2, 0.2}, {3, 0.25}, {6, 0.15}};

/// A token of the list by one uniform number.
token_id drawn_from(const law& list, double u) {
  for (const token_probability& t : list)
    if ((u -= t.probability) < 0) return t.id;
  return list.back().id;
}

/// Counts of rule(draft, accept, draw) for drafts drawn from q.
template <class Rule>
std::vector<std::size_t> outcomes(std::uint64_t seed, Rule&& rule) {
  const noise drafts(seed, 1), decisions(seed, 2);
  std::vector<std::size_t> counts(8);
  for (std::size_t n = 0; n < 50000; ++n) {
    const token_id draft = drawn_from(q, drafts.uniform(n, 0));
    ++counts[static_cast<std::size_t>(rule(draft, decisions.uniform(n, 0), decisions.uniform(n, 1)))];
  }
  return counts;
}

TEST_CASE("the leading equal tokens are accepted") {
  const token_id drafts[] = {1, 2, 3}, all[] = {1, 2, 3}, middle[] = {1, 9, 3}, none[] = {0, 2, 3};
  CHECK(count_accepted(drafts, all, 3) == 3);
  CHECK(count_accepted(drafts, middle, 3) == 1);
  CHECK(count_accepted(drafts, none, 3) == 0);
  CHECK(count_accepted(drafts, all, 0) == 0);
}

TEST_CASE("a draft is accepted up to the ratio of the probabilities") {
  CHECK(ratio_choice(p, q, 0, 0.05 / 0.3 - 1e-9, 0.5) == 0);
  CHECK(ratio_choice(p, q, 0, 0.05 / 0.3 + 1e-9, 0.5) != 0);
  CHECK(ratio_choice(p, q, 1, 1 - 1e-9, 0.5) == 1);  // the target likes it better
}

TEST_CASE("what takes the place of a refused draft is drawn from the residual") {
  // max(p − q, 0): 0.3 for token 1, 0.2 for token 4
  CHECK(ratio_choice(p, q, 0, 0.99, 0.6 - 1e-9) == 1);
  CHECK(ratio_choice(p, q, 0, 0.99, 0.6 + 1e-9) == 4);
  CHECK(ratio_choice(p, q, 2, 1e-9, 1 - 1e-12) == 4);
}

TEST_CASE("a draft that the target excludes is refused, even if the proposal excludes it as well") {
  CHECK(ratio_choice(p, q, 2, 1e-9, 0.1) == 1);
  CHECK(ratio_choice(p, q, 7, 1e-9, 0.1) == 1);
}

TEST_CASE("without a residual the draw is from the target") {
  CHECK(ratio_choice(p, p, 2, 0.5, 1e-9) == 0);
  CHECK(ratio_choice(p, p, 2, 0.5, 1 - 1e-9) == 6);
}

TEST_CASE("a refused draft never comes back through the residual") {
  for (std::size_t n = 0; n < 5000; ++n) {
    const noise source(21, 0);
    const token_id draft = drawn_from(q, source.uniform(n, 2));
    const double accept = source.uniform(n, 0);
    const token_id other = ratio_choice(p, q, draft, accept, source.uniform(n, 1));
    const auto in = [&](const law& list) {
      const auto at = std::find_if(list.begin(), list.end(), [&](const token_probability& t) { return t.id == draft; });
      return at == list.end() ? 0.0 : at->probability;
    };
    REQUIRE((other == draft) == (in(p) > 0 && accept * in(q) <= in(p)));
  }
}

TEST_CASE("the ratio rule has the target's law, though the drafts have another") {
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    CAPTURE(seed);
    const auto counts = outcomes(seed, [](token_id d, double accept, double draw) { return ratio_choice(p, q, d, accept, draw); });
    CHECK(misfit(counts, p) < 1);
    CHECK(misfit(counts, q) > 1);
  }
}

TEST_CASE("rules that only look right are found out by the same test") {
  // accepting with p(d) and drawing anew from all of p
  CHECK(misfit(outcomes(1,
                        [](token_id d, double accept, double draw) {
                          double target = 0;
                          for (const token_probability& t : p)
                            if (t.id == d) target = t.probability;
                          return accept < target ? d : drawn_from(p, draw);
                        }),
               p) > 1);
  // the ratio, but one number for both decisions
  CHECK(misfit(outcomes(1, [](token_id d, double accept, double) { return ratio_choice(p, q, d, accept, accept); }), p) > 1);
}

// --- the sampler

struct group {
  std::vector<float> logits;
  std::vector<token_id> text;
  std::vector<law> proposals;
};

std::vector<token_id> decide(ratio_sampling& sampler, group g) {
  reference_context ctx{execution{1}};
  const std::size_t rows = g.proposals.size() + 1, cols = g.logits.size() / rows;
  std::vector<std::span<const token_probability>> proposals(g.proposals.begin(), g.proposals.end());
  std::vector<token_id> out(rows, 77);
  sampler.pick_against<reference>(ctx, {g.logits.data(), rows, cols, cols}, g.text, proposals, out.data());
  return out;
}

TEST_CASE("without drafts the ratio sampler draws as sampling does") {
  const sampling_options options{.temperature = 1, .seed = 5};
  ratio_sampling ratio(options);
  sampling plain(options);
  reference_context ctx{execution{1}};
  for (std::size_t n = 0; n < 50; ++n) {
    std::vector<float> row{1, 2, 3, 2.5f, 0};
    const std::vector<token_id> text(n);
    token_id token = -1, same = -1;
    plain.pick<reference>(ctx, {row.data(), 1, 5, 5}, text, &token);
    ratio.pick<reference>(ctx, {row.data(), 1, 5, 5}, text, &same);
    CHECK(same == token);
    CHECK(decide(ratio, {row, text, {}}) == std::vector<token_id>{token});
  }
}

TEST_CASE("rows behind a refused draft are not decided") {
  ratio_sampling sampler({.temperature = 1});
  // Row 0 allows 1 and 2 only, and its draft is 0; row 1 would accept.
  constexpr float no = -INFINITY;
  const auto out = decide(sampler, {{no, 1, 1, 5, no, no, 1, 1, 1}, {9, 0, 0}, {{{0, 1}}, {{0, 1}}}});
  CHECK((out[0] == 1 || out[0] == 2));
  CHECK(out[1] == -1);
  CHECK(out[2] == -1);
  const token_id drafts[] = {0, 0};
  CHECK(count_accepted(drafts, out.data(), 2) == 0);
}

TEST_CASE("temperature 0: a draft is accepted when it is the most likely token") {
  ratio_sampling sampler(sampling_options{});
  const group g{{0, 3, 1, 2, 0, 1, 0, 1, 4}, {5, 1, 0}, {{{1, 0.5}, {2, 0.5}}, {{0, 1}}}};
  CHECK(decide(sampler, g) == std::vector<token_id>{1, 0, 2});
}

TEST_CASE("two drafts and a token of the target's have the joint law of three plain draws") {
  // Rows depend on the token before them, drafts come from other rows with noise of their own; text of three tokens per trial.
  const auto row = [](token_id last, double shift) {
    std::vector<float> logits(3);
    for (std::size_t c = 0; c < 3; ++c) logits[c] = static_cast<float>(std::sin(1.7 * last + 2.3 * static_cast<double>(c) + shift));
    return logits;
  };
  const auto softmax = [](const std::vector<float>& logits) {
    law list;
    double total = 0;
    for (const float s : logits) total += std::exp(double{s});
    for (std::size_t c = 0; c < logits.size(); ++c) list.push_back({static_cast<token_id>(c), std::exp(double{logits[c]}) / total});
    return list;
  };
  law joint;
  for (token_id a = 0; a < 3; ++a)
    for (token_id b = 0; b < 3; ++b)
      for (token_id c = 0; c < 3; ++c) {
        const auto at = [&](token_id last, token_id next) { return softmax(row(last, 0))[static_cast<std::size_t>(next)].probability; };
        joint.push_back({9 * a + 3 * b + c, at(0, a) * at(a, b) * at(b, c)});
      }

  std::vector<std::size_t> counts(27);
  std::size_t accepted = 0;
  constexpr std::size_t trials = 20000;
  for (std::uint64_t trial = 0; trial < trials; ++trial) {
    ratio_sampling sampler({.temperature = 1, .seed = 31, .sequence = trial});
    const noise drafting(32, trial);
    std::vector<token_id> text{0};
    std::uint32_t asked = 0;
    while (text.size() < 4) {
      group g{{}, text, {}};
      const std::size_t drafts = (std::min)(std::size_t{2}, 3 - text.size());
      for (std::size_t i = 0; i < drafts; ++i) {
        g.proposals.push_back(softmax(row(g.text.back(), 0.8)));
        g.text.push_back(drawn_from(g.proposals.back(), drafting.uniform(text.size() + i, asked++)));
      }
      for (std::size_t i = 0; i <= drafts; ++i) {
        const std::vector<float> logits = row(g.text[text.size() - 1 + i], 0);
        g.logits.insert(g.logits.end(), logits.begin(), logits.end());
      }
      const std::vector<token_id> out = decide(sampler, g);
      const std::size_t held = count_accepted(g.text.data() + text.size(), out.data(), drafts);
      accepted += held;
      text.insert(text.end(), out.begin(), out.begin() + static_cast<std::ptrdiff_t>(held + 1));
    }
    ++counts[static_cast<std::size_t>(9 * text[1] + 3 * text[2] + text[3])];
  }
  CHECK(accepted > trials / 10);  // drafts did matter
  CHECK(misfit(counts, joint) < 1);
}

TEST_CASE("the ratio sampler refuses what sampling refuses") {
  CHECK(
      testing::mentions(testing::refusal(error_code::argument_invalid, [] { ratio_sampling sampler({.top_p = 0}); }), "top_p", "above 0"));
}

}  // namespace
