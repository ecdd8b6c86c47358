// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The backend whose prompt rows round differently from decoded ones: what a prompt gives, and what is drafted behind it.
#include "outrider/backend/eigen.hpp"
#include "outrider/backend/highway.hpp"
#define OUTRIDER_TESTED_BACKENDS outrider::eigen_prompts<outrider::highway>
#include "golden_data.hpp"

template <>
inline constexpr bool models::prompts_are_exact<outrider::eigen_prompts<outrider::highway>> = false;

#include "drafts_golden.hpp"
#include "forward_golden.hpp"
