// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The kernels for AVX2 on a machine that has more, dot products of bytes emulated: few machines have these in AVX2's width.
#define OUTRIDER_EMULATED_VNNI
#define OUTRIDER_EMULATED_AMX
#if defined(__AVX2__)
#define HWY_DISABLED_TARGETS (HWY_AVX2 - 1)  // what is better than AVX2 has lower bits
#endif
#include "int8_ways.hpp"
