// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The products of the contract on cuda_gemm_prompts, whose prompts are cuBLASLt's.
#include "emulated_device.hpp"
#define OUTRIDER_CONTRACT_EVERY (OUTRIDER_DEVICE_SLOWNESS == 1 ? 1 : 3 * OUTRIDER_DEVICE_SLOWNESS + 2)
#include "outrider/backend/cuda.hpp"
#include "support/on_device.hpp"

namespace {
using gemm_prompts = outrider::testing::on_device<outrider::cuda_gemm_prompts>;
}
#define OUTRIDER_TESTED_BACKENDS gemm_prompts
#include "contract/linear_contract.hpp"
