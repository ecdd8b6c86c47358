// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The contract of backend/ops.hpp, all of it, on the CUDA backend.
#include "emulated_device.hpp"
#if OUTRIDER_DEVICE_SLOWNESS > 1
#define OUTRIDER_CONTRACT_EVERY OUTRIDER_DEVICE_SLOWNESS
#endif
#include "outrider/backend/cuda.hpp"
#include "support/on_device.hpp"

namespace {
using cuda_from_host = outrider::testing::on_device<outrider::cuda>;
}
#define OUTRIDER_TESTED_BACKENDS cuda_from_host
#include "contract/ops_contract.hpp"
