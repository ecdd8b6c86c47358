// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/backend/cpu.hpp"
#define OUTRIDER_TESTED_BACKENDS outrider::cpu
#include "golden_data.hpp"

template <>
inline constexpr bool models::prompts_are_exact<outrider::cpu> = false;  // prompt rows may go through panels of floats

#include "golden.hpp"
