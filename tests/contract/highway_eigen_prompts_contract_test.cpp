// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The products of eigen_prompts; all its other ops are those of the backend below.
#include "outrider/backend/eigen.hpp"
#include "outrider/backend/highway.hpp"
#define OUTRIDER_TESTED_BACKENDS outrider::eigen_prompts<outrider::highway>
#include "linear_contract.hpp"
