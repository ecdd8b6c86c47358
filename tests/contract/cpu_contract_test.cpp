// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/backend/cpu.hpp"
#include "outrider/backend/eigen.hpp"
#define OUTRIDER_TESTED_BACKENDS outrider::cpu, outrider::eigen_prompts<outrider::highway>
#include "ops_contract.hpp"
