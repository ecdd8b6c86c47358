// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <limits>
#include <optional>

#include "outrider/config.hpp"

namespace outrider {

/// a · b, or nothing if the product does not fit. Sizes read from a file go through here before they are used.
[[nodiscard]] constexpr std::optional<std::size_t> checked_multiply(std::size_t a, std::size_t b) noexcept {
  if (b != 0 && a > (std::numeric_limits<std::size_t>::max)() / b) return std::nullopt;
  return a * b;
}

/// a + b, or nothing if the sum does not fit.
[[nodiscard]] constexpr std::optional<std::size_t> checked_add(std::size_t a, std::size_t b) noexcept {
  if (a > (std::numeric_limits<std::size_t>::max)() - b) return std::nullopt;
  return a + b;
}

[[nodiscard]] OUTRIDER_HD constexpr std::size_t divide_up(std::size_t a, std::size_t b) noexcept { return a / b + (a % b != 0 ? 1 : 0); }

}  // namespace outrider
