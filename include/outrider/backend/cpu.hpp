// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The backend to use on a CPU.
#pragma once
#if defined(OUTRIDER_HIGHWAY_DISPATCH)
#include "outrider/backend/highway_dispatch.hpp"
#else
#include "outrider/backend/highway.hpp"
#endif

namespace outrider {

/// Run-time dispatch where the program has its translation unit (OUTRIDER_HIGHWAY_DISPATCH, set by CMake's outrider::highway_dispatch), else the
/// compiler's own target.
///
/// Prompt rows take the same row-exact tiles as decoding, so that cutting a prompt into chunks changes no bit, and speed is little reason to
/// do otherwise. GFLOP/s of one Zen 4 core (g++ 12 -O3), tiles / Eigen panels of eigen.hpp, for weights [6144, 1536] and [1536, 6144]:
///                  AVX-512 bf16       AVX-512 f32        AVX2 bf16          AVX2 f32
///     m = 16     87/40   93/41      61/39   65/43      79/42   82/44      55/42   58/41
///     m = 64     92/67   90/66      81/65   63/68      84/75   80/72      72/74   56/72
///     m = 128    92/75   92/69      76/73   65/69      84/83   83/81      72/84   59/74
/// Who reads long prompts with f32 weights names eigen_prompts<cpu>.
#if defined(OUTRIDER_HIGHWAY_DISPATCH)
using cpu = highway_dispatch;
#else
using cpu = highway;
#endif

}  // namespace outrider
