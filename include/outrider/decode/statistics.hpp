// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "outrider/config.hpp"

namespace outrider {

/// One pass of the target behind the prompt, as draft-length policies and traces see it; a plain pass has no drafts.
struct round_record {
  std::size_t position = 0;                      // tokens known when the round began
  std::size_t drafted = 0, accepted = 0;         // accepted: leading drafts that held
  std::size_t emitted = 0;                       // tokens it gave the text: accepted + 1, fewer where the text ended within
  bool doubted = false;                          // drafting ended at a token that the drafter gave less than the least confidence
  double draft_seconds = 0, verify_seconds = 0;  // 0 where no clock runs
  std::size_t joint_drafts = 0;  // not 0: a device made and verified so many drafts at one go, and verify_seconds is the time of all of it
  std::span<const float> confidence = {};  // of each draft, 0 where the drafter says none; empty if nobody asked. Valid during the call
};

/// What a generation did, or several of them (+=). A round is a target pass with drafts; the prompt's own passes are counted nowhere.
struct statistics {
  std::size_t texts = 0;          // generations
  std::size_t prompt_tokens = 0;  // processed, those of a prefix that was committed already not among them
  std::size_t tokens = 0;         // emitted
  /// passes[k][m]: target passes with k drafts of which m were accepted and emitted; passes[0][0] are the plain ones.
  std::array<std::array<std::size_t, max_draft_length + 1>, max_draft_length + 1> passes{};
  double prefill_seconds = 0, draft_seconds = 0,
         verify_seconds = 0;  // verify: target passes, choosing and joint drafts, plain passes included
  double decode_seconds = 0;  // everything after the prompt, the caller's callback included

  statistics& operator+=(const statistics& more) noexcept {
    texts += more.texts;
    prompt_tokens += more.prompt_tokens;
    tokens += more.tokens;
    for (std::size_t k = 0; k <= max_draft_length; ++k)
      for (std::size_t m = 0; m <= k; ++m) passes[k][m] += more.passes[k][m];
    prefill_seconds += more.prefill_seconds;
    draft_seconds += more.draft_seconds;
    verify_seconds += more.verify_seconds;
    decode_seconds += more.decode_seconds;
    return *this;
  }

  [[nodiscard]] std::size_t plain_passes() const noexcept { return passes[0][0]; }
  [[nodiscard]] std::size_t rounds() const noexcept { return sum_from(1, 0); }
  [[nodiscard]] std::size_t drafted() const noexcept {
    std::size_t sum = 0;
    for (std::size_t i = 1; i <= max_draft_length; ++i) sum += drafted_at(i);
    return sum;
  }
  [[nodiscard]] std::size_t accepted() const noexcept {
    std::size_t sum = 0;
    for (std::size_t i = 1; i <= max_draft_length; ++i) sum += accepted_at(i);
    return sum;
  }
  /// Rounds that drafted, accepted at least i tokens; i from 1.
  [[nodiscard]] std::size_t drafted_at(std::size_t i) const noexcept { return sum_from(i, 0); }
  [[nodiscard]] std::size_t accepted_at(std::size_t i) const noexcept { return sum_from(i, i); }
  /// accepted / drafted; 0 without drafts.
  [[nodiscard]] double acceptance_rate() const noexcept { return ratio(accepted(), drafted()); }
  /// Mean tokens of a round, the target's own included: 1 + accepted / rounds.
  [[nodiscard]] double tokens_per_round() const noexcept { return 1 + ratio(accepted(), rounds()); }
  /// Tokens per target pass; the prompt's pass yields the first token of a text.
  [[nodiscard]] double tokens_per_pass() const noexcept { return ratio(tokens, texts + rounds() + plain_passes()); }
  /// Tokens per second after the prompt; 0 if nothing was decoded.
  [[nodiscard]] double tokens_per_second() const noexcept {
    return tokens > texts && decode_seconds > 0 ? static_cast<double>(tokens - texts) / decode_seconds : 0;
  }

 private:
  [[nodiscard]] std::size_t sum_from(std::size_t least_drafts, std::size_t least_accepted) const noexcept {
    std::size_t sum = 0;
    for (std::size_t k = least_drafts; k <= max_draft_length; ++k)
      for (std::size_t m = least_accepted; m <= k; ++m) sum += passes[k][m];
    return sum;
  }
  [[nodiscard]] static double ratio(std::size_t a, std::size_t b) noexcept {
    return b == 0 ? 0 : static_cast<double>(a) / static_cast<double>(b);
  }
};

}  // namespace outrider
