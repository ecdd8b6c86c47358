// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "outrider/decode/drafter.hpp"

namespace outrider::testing {

/// Knows the whole text, prompt included, and drafts it with the errors it is told to make: the first right[r] guesses of round r are right,
/// all behind them wrong. The list starts again when it ends. It guesses as many tokens as it is asked for, past an end of text too.
class scripted_drafter {
 public:
  static constexpr draft_needs needs{};
  static constexpr std::size_t everything = static_cast<std::size_t>(-1);

  scripted_drafter(std::vector<token_id> text, std::vector<std::size_t> right) : text_(std::move(text)), right_(std::move(right)) {}

  template <class Target>
  std::size_t propose(const Target& target, const draft_request&, std::span<token_id> out) noexcept {
    const std::size_t n = target.committed() + 1, right = right_[round_++ % right_.size()];
    for (std::size_t i = 0; i < out.size(); ++i) {
      const token_id truth = n + i < text_.size() ? text_[n + i] : 0;
      out[i] = i < right ? truth : (truth + 1) % static_cast<token_id>(target.vocab_size());
    }
    return out.size();
  }

 private:
  std::vector<token_id> text_;
  std::vector<std::size_t> right_;
  std::size_t round_ = 0;
};

/// A round as a drafter sees it.
struct draft_round {
  std::size_t n = 0;       // tokens known before it
  std::size_t drafts = 0;  // proposed
  bool operator==(const draft_round&) const = default;
};

/// Another drafter, with a list of its rounds.
template <class Drafter>
class recorded_drafter {
 public:
  static constexpr draft_needs needs = Drafter::needs;
  std::vector<draft_round> rounds;

  explicit recorded_drafter(Drafter& drafter) : drafter_(&drafter) {}

  template <class Target>
  std::size_t propose(const Target& target, const draft_request& request, std::span<token_id> out) {
    const std::size_t drafts = drafter_->propose(target, request, out);
    rounds.push_back({target.committed() + 1, drafts});
    return drafts;
  }

 private:
  Drafter* drafter_;
};

}  // namespace outrider::testing
