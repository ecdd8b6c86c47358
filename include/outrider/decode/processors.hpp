// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "outrider/config.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/storage.hpp"
#include "outrider/error.hpp"

namespace outrider {

/// How tokens are drawn. The order, and what each step means, is that of huggingface transformers: repetition penalty, presence and
/// frequency penalty (which it lacks), temperature, top-k, top-p, min-p.
struct sampling_options {
  double temperature = 0;         // logits are divided by it; 0: always the most likely token, whatever top_k, top_p and min_p say
  std::size_t top_k = 0;          // keeps the k largest, and what equals the least of them; 0: all
  double top_p = 1;               // keeps the most likely tokens until their probabilities reach it, the last one included; 1: all
  double min_p = 0;               // keeps tokens with at least this share of the largest probability; 0: all
  double repetition_penalty = 1;  // logits of tokens of the text, once each: divided by it, or multiplied where negative
  double presence_penalty = 0;    // taken from the logits of tokens of the text, once each
  double frequency_penalty = 0;   // taken as often as the token occurs
  std::uint64_t seed = 0;         // a text is a function of the model, the prompt, these options, and nothing else
  std::uint64_t sequence = 0;     // tells apart texts of one seed
};

/// Errors: argument_invalid for values outside what the comments allow; penalties may be any finite number, the repetition penalty above 0.
inline void check(const sampling_options& options) {
  const auto demand = [](bool good, const char* name, double found, const char* allowed) {
    if (!good)
      throw error(error_code::argument_invalid,
                  std::string("outrider: ") + name + " is " + std::to_string(found) + "; it must be " + allowed);
  };
  demand(std::isfinite(options.temperature) && options.temperature >= 0, "the temperature", options.temperature,
         "a finite number, 0 (always the most likely token) or above");
  demand(options.top_p > 0 && options.top_p <= 1, "top_p", options.top_p, "above 0 and at most 1");
  demand(options.min_p >= 0 && options.min_p <= 1, "min_p", options.min_p, "from 0 to 1");
  demand(std::isfinite(options.repetition_penalty) && options.repetition_penalty > 0, "the repetition penalty", options.repetition_penalty,
         "a finite number above 0");
  demand(std::isfinite(options.presence_penalty), "the presence penalty", options.presence_penalty, "a finite number");
  demand(std::isfinite(options.frequency_penalty), "the frequency penalty", options.frequency_penalty, "a finite number");
}

/// A token that may be drawn. score: (logit − largest logit of the row) / temperature, so exp(score) is its weight and the best has 0.
struct candidate {
  token_id id = 0;
  double score = 0;
};

/// An entry of a distribution: a list with each token once, the rest having none.
struct token_probability {
  token_id id = 0;
  double probability = 0;
};

/// The score of a logit; largest > −∞. A NaN stays one, and +∞ leaves the others no weight.
[[nodiscard]] inline double score_of(float logit, float largest, double temperature) noexcept {
  return logit >= largest ? 0.0 : (double{logit} - double{largest}) / temperature;
}

/// Sum of exp(score).
[[nodiscard]] inline double total_weight(std::span<const candidate> candidates) noexcept {
  double sum = 0;
  for (const candidate& c : candidates) sum += std::exp(c.score);
  return sum;
}

namespace detail {

/// Memory that is taken at the first use of a size and kept. What it holds is worth nothing, so a copy has none of its own yet.
template <class T>
class reusable {
 public:
  reusable() = default;
  reusable(const reusable&) noexcept {}
  reusable& operator=(const reusable&) noexcept { return *this; }
  reusable(reusable&&) noexcept = default;
  reusable& operator=(reusable&&) noexcept = default;
  ~reusable() = default;

  /// `count` elements: zeros at first, then whatever the last user left. Errors: out_of_memory.
  [[nodiscard]] std::span<T> first(std::size_t count) {
    if (memory_.size() < count) memory_ = buffer<T, host_space>(count);
    return memory_.span().first(count);
  }

 private:
  buffer<T, host_space> memory_;
};

}  // namespace detail

/// Makes candidates of logit rows in host memory. Allocates when rows get wider, so at its first row as a rule; one thread at a time.
class row_processor {
 public:
  /// Errors: argument_invalid, see check().
  explicit row_processor(const sampling_options& options) : options_(options) { check(options); }

  [[nodiscard]] const sampling_options& options() const noexcept { return options_; }
  /// Takes the memory that rows of so many columns need. Errors: out_of_memory.
  void reserve(std::size_t columns) {
    static_cast<void>(list_.first(columns));
    if (options_.top_p < 1) static_cast<void>(edge_.first(columns));
  }
  [[nodiscard]] bool penalises() const noexcept {
    return options_.repetition_penalty != 1 || options_.presence_penalty != 0 || options_.frequency_penalty != 0;
  }
  /// Whether there are tokens that candidates() drops; if not, it is a long list of everything.
  [[nodiscard]] bool filters(std::size_t columns) const noexcept {
    return limits_count(columns) || options_.top_p < 1 || options_.min_p > 0;
  }

  /// The penalties, in place, for what follows `text`. Column c is token c; tokens without a column are passed over.
  void penalise(std::span<float> logits, std::span<const token_id> text) {
    if (!penalises()) return;
    const std::span<std::uint32_t> counts = counts_.first(logits.size());  // all zero between calls
    const std::span<token_id> distinct = distinct_.first(logits.size());
    std::size_t size = 0;
    for (const token_id id : text)
      if (id >= 0 && static_cast<std::size_t>(id) < logits.size() && counts[static_cast<std::size_t>(id)]++ == 0) distinct[size++] = id;
    for (const token_id id : distinct.first(size)) {
      const auto c = static_cast<std::size_t>(id);
      const double s = double{logits[c]}, r = options_.repetition_penalty;
      const double taken = options_.presence_penalty + options_.frequency_penalty * counts[c];
      constexpr double most = (std::numeric_limits<float>::max)();  // what is beyond stays comparable; −∞ stays what it is
      if (std::isfinite(s)) logits[c] = static_cast<float>(std::clamp((s < 0 ? s * r : s / r) - taken, -most, most));
      counts[c] = 0;
    }
  }

  /// What temperature, top-k, top-p and min-p leave of a row, in the order of columns; at least the largest. What is −∞ or NaN is never there.
  ///   ids       the token of each column; empty: column c is token c
  ///   largest   the row's largest logit, above −∞
  /// Precondition: temperature > 0. The result is valid until the next call.
  [[nodiscard]] std::span<const candidate> candidates(std::span<const float> logits, std::span<const token_id> ids, float largest) {
    OUTRIDER_ASSERT(options_.temperature > 0 && (ids.empty() || ids.size() == logits.size()));
    float least = std::numeric_limits<float>::lowest();
    if (limits_count(logits.size())) least = (std::max)(least, kth_largest(logits));
    if (options_.top_p >= 1 && options_.min_p > 0) least = (std::max)(least, below_min_p(largest));
    const std::span<candidate> list = list_.first(logits.size());
    std::size_t size = 0;
    for (std::size_t c = 0; c < logits.size(); ++c)
      if (logits[c] >= least)
        list[size++] = {ids.empty() ? static_cast<token_id>(c) : ids[c], score_of(logits[c], largest, options_.temperature)};
    if (options_.top_p < 1) size = keep_top_p(list.first(size), edge_.first(logits.size()));
    if (options_.min_p > 0) {
      const double lowest = std::log(options_.min_p);
      size = keep(list.first(size), [&](const candidate& c) { return c.score >= lowest; });
    }
    return list.first(size);
  }

 private:
  [[nodiscard]] bool limits_count(std::size_t columns) const noexcept { return options_.top_k > 0 && options_.top_k < columns; }

  /// One pass: what is above the best k so far is collected, and from time to time cut back to k. Linear for any order of the logits.
  [[nodiscard]] float kth_largest(std::span<const float> logits) {
    const std::size_t k = options_.top_k, room = (std::min)(logits.size(), k > logits.size() / 2 ? logits.size() : 2 * k + 64);
    const std::span<float> best = best_.first(room);
    float bar = -std::numeric_limits<float>::infinity();
    std::size_t size = 0;
    const auto cut = [&] {
      const auto kth = best.begin() + static_cast<std::ptrdiff_t>(k - 1);
      std::nth_element(best.begin(), kth, best.begin() + static_cast<std::ptrdiff_t>(size), [](float a, float b) { return a > b; });
      bar = *kth;
      size = k;
    };
    for (const float s : logits) {
      if (!(s > bar)) continue;
      if (size == room) cut();
      if (s > bar) best[size++] = s;
    }
    if (size >= k) cut();
    return bar;
  }

  /// A logit surely below those that min-p keeps, so that the list stays short; a rounding of the row's size decides nothing.
  [[nodiscard]] float below_min_p(float largest) const noexcept {
    const double span = -options_.temperature * std::log(options_.min_p);
    const double bound = double{largest} - span - 0x1p-20 * (std::abs(double{largest}) + span);
    return bound > double{std::numeric_limits<float>::lowest()} ? static_cast<float>(bound) : std::numeric_limits<float>::lowest();
  }

  template <class Good>
  static std::size_t keep(std::span<candidate> list, Good&& good) noexcept {
    return static_cast<std::size_t>(std::remove_if(list.begin(), list.end(), [&](const candidate& c) { return !good(c); }) - list.begin());
  }

  /// Best first; of equals the lower id.
  struct falling {
    bool operator()(const candidate& a, const candidate& b) const noexcept { return a.score != b.score ? a.score > b.score : a.id < b.id; }
  };

  /// A token stays if those before it, best first, have less than P of all weight. The weight is gathered in steps of score; only the step in
  /// which it reaches P is looked at token by token, halved until few are left: nothing long is ever sorted. `edge`: room for as many.
  [[nodiscard]] std::size_t keep_top_p(std::span<candidate> list, std::span<candidate> edge) const noexcept {
    constexpr std::size_t steps = 1024;
    double depth = 0;
    for (const candidate& c : list) depth = (std::max)(depth, -c.score);
    const double steps_per_score = depth > 0x1p-30 ? double{steps} / (std::min)(depth, 64.0) : 0;  // what is lower has no weight
    const auto step_of = [&](const candidate& c) {
      return static_cast<std::size_t>((std::min)((std::min)(-c.score, 64.0) * steps_per_score, double{steps - 1}));
    };
    double weights[steps] = {}, total = 0, before = 0;
    for (const candidate& c : list) weights[step_of(c)] += std::exp(c.score);
    for (const double w : weights) total += w;
    const double wanted = options_.top_p * total;
    std::size_t step = 0;
    while (step < steps && before + weights[step] < wanted) before += weights[step++];
    if (step == steps) return list.size();

    auto first = edge.begin();
    auto last = std::copy_if(list.begin(), list.end(), first, [&](const candidate& c) { return step_of(c) == step; });
    while (last - first > 16) {
      const auto middle = first + (last - first) / 2;
      std::nth_element(first, middle, last, falling{});
      double upper = 0;
      for (auto it = first; it != middle; ++it) upper += std::exp(it->score);
      if (before + upper < wanted) {
        before += upper;
        first = middle;
      } else {
        last = middle;
      }
    }
    std::sort(first, last, falling{});
    candidate worst = *first;
    for (; first != last && before < wanted; ++first) {
      worst = *first;
      before += std::exp(first->score);
    }
    return keep(list, [&](const candidate& c) { return !falling{}(worst, c); });
  }

  sampling_options options_;
  detail::reusable<std::uint32_t> counts_;
  detail::reusable<token_id> distinct_;
  detail::reusable<float> best_;
  detail::reusable<candidate> list_, edge_;
};

}  // namespace outrider
