// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <span>

#include "outrider/config.hpp"
#include "outrider/decode/statistics.hpp"

namespace outrider::detail {

/// How often drafts hold, from counts that forget: by position, and by the drafter's own confidence where it says one. A draft counts only
/// if all before it held.
class running_acceptance {
 public:
  static constexpr std::size_t buckets = 6;
  static constexpr std::array<float, buckets> edges{0, 0.2f, 0.4f, 0.6f, 0.8f, 0.95f};  // bucket b: from edges[b] to below the next

  /// P(draft i holds | those before it held), i from 1.
  [[nodiscard]] double rate(std::size_t i) const noexcept { return rate_[i]; }
  /// What drafting while the confidence is at least edges[b] means: how often a draft is one of these, and how often such a one holds.
  struct gate {
    double passes = 1, holds = 0;
  };
  [[nodiscard]] gate from(std::size_t b) const noexcept {
    double all = 0, kept = 0, held = 0;
    for (std::size_t i = 0; i < buckets; ++i) {
      all += seen_[i];
      if (i >= b) kept += seen_[i], held += seen_[i] * bucket_rate(i);
    }
    return {kept / all, held / kept};
  }
  /// Whether enough is known of confidences to use them.
  [[nodiscard]] bool knows_confidence() const noexcept { return informed_ >= 16; }

  /// `stopped`: a further draft was refused for its confidence being below edges[gate_bucket].
  void record(const round_record& round, bool stopped, std::size_t gate_bucket) noexcept {
    const std::size_t tried = (std::min)(round.accepted + 1, round.drafted);
    const bool confident = std::any_of(round.confidence.begin(), round.confidence.end(), [](float c) { return c > 0; });
    watch_for_change(round, tried, confident);
    for (std::size_t i = 1; i <= max_draft_length; ++i) {
      const double keep = 1 - 1 / (i <= tried ? memory : idle_memory);
      tries_[i] *= keep, hits_[i] *= keep;
      if (i > tried) continue;
      tries_[i] += 1, hits_[i] += i <= round.accepted ? 1 : 0;
    }
    if (confident || stopped)
      record_confidence(round, confident ? tried : 0, stopped, gate_bucket);
    else
      informed_ *= 0.9;
    update_rates();
  }

  running_acceptance() noexcept { update_rates(); }

 private:
  static constexpr double memory = 50, idle_memory = 200;  // rounds
  static constexpr double prior_rate = 0.7;

  [[nodiscard]] static std::size_t bucket_of(float confidence) noexcept {
    std::size_t b = buckets - 1;
    while (b > 0 && !(confidence >= edges[b])) --b;
    return b;
  }
  [[nodiscard]] double bucket_rate(std::size_t b) const noexcept {
    const double middle = 0.5 * (edges[b] + (b + 1 < buckets ? edges[b + 1] : 1.0f));
    return (bucket_hits_[b] + 2 * middle) / (bucket_tries_[b] + 2);
  }

  void record_confidence(const round_record& round, std::size_t tried, bool stopped, std::size_t gate_bucket) noexcept {
    for (std::size_t b = 0; b < buckets; ++b) {
      seen_[b] *= 1 - 1 / memory;
      bucket_tries_[b] *= 1 - 1 / idle_memory, bucket_hits_[b] *= 1 - 1 / idle_memory;
    }
    for (std::size_t i = 0; i < round.confidence.size() && i < round.drafted; ++i) {
      const std::size_t b = bucket_of(round.confidence[i]);
      seen_[b] += 1;
      if (i >= tried) continue;
      bucket_tries_[b] *= 1 - 1 / bucket_memory, bucket_hits_[b] *= 1 - 1 / bucket_memory;
      bucket_tries_[b] += 1, bucket_hits_[b] += i < round.accepted ? 1 : 0;
      informed_ = (std::min)(informed_ + 1, 64.0);
    }
    if (!stopped) return;
    double below = 0;
    for (std::size_t b = 0; b < gate_bucket; ++b) below += seen_[b];
    if (below < 0.01) seen_[gate_bucket - 1] += 0.01, below += 0.01;
    for (std::size_t b = 0; b < gate_bucket; ++b) seen_[b] *= 1 + 1 / below;  // which of them it was is not known: as usual
  }

  /// CUSUM: if rounds go on being better or worse than expected, the text has changed, and most of what was counted is forgotten at once.
  void watch_for_change(const round_record& round, std::size_t tried, bool confident) noexcept {
    if (tried == 0) return;
    double mean = 0, square = 0, all = 1;  // of the accepted drafts: sum of P(m >= i), sum of (2i - 1) P(m >= i)
    for (std::size_t i = 1; i <= round.drafted; ++i) {
      all *= confident && i <= round.confidence.size() ? bucket_rate(bucket_of(round.confidence[i - 1])) : rate_[i];
      mean += all, square += static_cast<double>(2 * i - 1) * all;
    }
    const double deviation = std::sqrt((std::max)(square - mean * mean, 0.05));
    const double surprise = (static_cast<double>(round.accepted) - mean) / deviation;
    better_ = (std::max)(0.0, better_ + surprise - 0.5), worse_ = (std::max)(0.0, worse_ - surprise - 0.5);
    if (better_ < alarm && worse_ < alarm) return;
    better_ = worse_ = 0;
    for (std::size_t i = 1; i <= max_draft_length; ++i) tries_[i] *= 0.1, hits_[i] *= 0.1;
    for (std::size_t b = 0; b < buckets; ++b) bucket_tries_[b] *= 0.1, bucket_hits_[b] *= 0.1;
  }

  /// Positions seldom tried lean on the one before them and on all together.
  void update_rates() noexcept {
    double tries = 2, hits = 2 * prior_rate;
    for (std::size_t i = 1; i <= max_draft_length; ++i) tries += tries_[i], hits += hits_[i];
    const double pool = hits / tries;
    rate_[0] = pool;
    for (std::size_t i = 1; i <= max_draft_length; ++i) rate_[i] = (hits_[i] + lean * 0.5 * (pool + rate_[i - 1])) / (tries_[i] + lean);
  }

  static constexpr double lean = 8, bucket_memory = 100, alarm = 8;

  std::array<double, max_draft_length + 1> tries_{}, hits_{}, rate_{};
  std::array<double, buckets> seen_{1, 1, 1, 1, 1, 1}, bucket_tries_{}, bucket_hits_{};
  double informed_ = 0;            // drafts with a confidence of late
  double better_ = 0, worse_ = 0;  // CUSUM
};

}  // namespace outrider::detail
