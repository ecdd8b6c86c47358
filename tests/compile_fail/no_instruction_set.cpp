// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The statically compiled SIMD backend without flags for an instruction set: never silently slow.
// expect: error: .*outrider: .*-march=native.* at run time .*highway_dispatch.hpp.*outrider::highway_dispatch
// machine: x86_64
// twin flags: -mavx2 -mfma -mf16c -mbmi -mbmi2 -maes -mpclmul
#include "outrider/backend/highway.hpp"
