// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <concepts>
#include <cstddef>
#include <span>

#include "outrider/config.hpp"
#include "outrider/core/scalar.hpp"

namespace outrider {

/// How many leading tokens two texts share.
[[nodiscard]] inline std::size_t common_prefix(std::span<const token_id> a, std::span<const token_id> b) noexcept {
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

/// A target that can go back to an earlier length: gemma4::session, or a program's own.
template <class T>
concept rewindable_target = requires(T& target, const T& view, std::size_t n) {
  { view.committed() } -> std::convertible_to<std::size_t>;
  { target.truncate(n) } -> std::same_as<bool>;
  target.clear();
};

/// Makes `target` ready for `prompt`, a whole text from its first token on, keeping what it has processed of it: cuts it back to the prefix
/// that both share, or clears it where that is no longer possible. Returns how many tokens of the prompt are committed afterwards; the
/// others, at least one, are the prompt of generate(). `committed`: the tokens at the target's positions 0 … committed() - 1.
/// Precondition: the prompt has at least one token, and `committed` as many as the target.
template <rewindable_target Target>
[[nodiscard]] std::size_t reuse_prefix(Target& target, std::span<const token_id> committed, std::span<const token_id> prompt) noexcept {
  OUTRIDER_ASSERT(!prompt.empty() && committed.size() == target.committed());
  const std::size_t shared = common_prefix(committed, prompt.first(prompt.size() - 1));
  if (target.truncate(shared)) return shared;
  target.clear();
  return 0;
}

}  // namespace outrider
