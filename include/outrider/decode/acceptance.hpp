// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>

#include "outrider/config.hpp"
#include "outrider/core/scalar.hpp"

namespace outrider {

/// How many drafts hold: the number of leading i < count with picks[i] == drafts[i]. picks[i] is the target's choice after draft i - 1, so
/// the first difference is itself a valid token and the text is the target's own, whatever was drafted.
[[nodiscard]] OUTRIDER_HD constexpr std::size_t count_accepted(const token_id* drafts, const token_id* picks, std::size_t count) noexcept {
  std::size_t accepted = 0;
  while (accepted < count && picks[accepted] == drafts[accepted]) ++accepted;
  return accepted;
}

}  // namespace outrider
