// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The ways to multiply bytes that a target may have: int8_sums-inl.h and int8_tiles-inl.h, once for each, and int8_amx-inl.h.
#if defined(OUTRIDER_BACKEND_HIGHWAY_INT8_WAYS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUTRIDER_BACKEND_HIGHWAY_INT8_WAYS_INL_H_
#undef OUTRIDER_BACKEND_HIGHWAY_INT8_WAYS_INL_H_
#else
#define OUTRIDER_BACKEND_HIGHWAY_INT8_WAYS_INL_H_
#endif

#include <hwy/highway.h>

#undef OUTRIDER_HAVE_AMX
#define OUTRIDER_BEFORE_INT8_WAY HWY_BEFORE_NAMESPACE();
#define OUTRIDER_INT8_WAY widening
#define OUTRIDER_INT8_KIND 0
#include "outrider/backend/highway/int8_sums-inl.h"
#include "outrider/backend/highway/int8_tiles-inl.h"
#undef OUTRIDER_INT8_WAY
#undef OUTRIDER_INT8_KIND

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
#define OUTRIDER_INT8_WAY maddubs
#define OUTRIDER_INT8_KIND 1
#include "outrider/backend/highway/int8_sums-inl.h"
#include "outrider/backend/highway/int8_tiles-inl.h"
#undef OUTRIDER_INT8_WAY
#undef OUTRIDER_INT8_KIND

// Part of no Highway target that is common: looked for at run time (table-inl.h).
#undef OUTRIDER_BEFORE_INT8_WAY
#if defined(OUTRIDER_EMULATED_VNNI)
#define OUTRIDER_BEFORE_INT8_WAY HWY_BEFORE_NAMESPACE();
#elif HWY_TARGET == HWY_AVX2
#define OUTRIDER_BEFORE_INT8_WAY HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avxvnni")
#else
#define OUTRIDER_BEFORE_INT8_WAY HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512vnni")
#endif
#define OUTRIDER_INT8_WAY vnni
#define OUTRIDER_INT8_KIND 2
#include "outrider/backend/highway/int8_sums-inl.h"
#include "outrider/backend/highway/int8_tiles-inl.h"
#undef OUTRIDER_INT8_WAY
#undef OUTRIDER_INT8_KIND

// Whether this target has kernels for AMX, whose CPUs all have AVX-512 too.
#if defined(OUTRIDER_EMULATED_AMX) || (HWY_ARCH_X86_64 && HWY_CAP_GE512 && defined(__linux__))
#define OUTRIDER_HAVE_AMX 1
#include "outrider/backend/highway/int8_amx-inl.h"
#endif
#endif
#undef OUTRIDER_BEFORE_INT8_WAY
#if !defined(OUTRIDER_HAVE_AMX)
#define OUTRIDER_HAVE_AMX 0
#endif

#endif
