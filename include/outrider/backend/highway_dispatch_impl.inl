// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The kernels of highway_dispatch.hpp for every instruction set, and the choice among them. Include it first, in exactly one .cpp of the
// program; that file needs no -m flags. CMake has it ready made: link outrider::highway_dispatch.
#if defined(OUTRIDER_HIGHWAY_DISPATCH_IMPL)
#error \
    "outrider: outrider/backend/highway_dispatch_impl.inl is included twice in one translation unit; it belongs into exactly one .cpp, once"
#elif defined(HWY_HIGHWAY_INCLUDED) || defined(HWY_TARGETS)
#error "outrider: outrider/backend/highway_dispatch_impl.inl must be the first include of its .cpp: a Highway header came before it"
#else
#define OUTRIDER_HIGHWAY_DISPATCH_IMPL

// On x86-64 one slow baseline, AVX2 and AVX-512: what else Highway has adds nothing to float kernels but compile time. On Arm NEON: the
// kernels want vectors of a fixed size.
#if !defined(HWY_WANT_AVX3_DL)
#define HWY_WANT_AVX3_DL  // 1.0.3 refuses -march=sapphirerapids without it
#endif
#include <hwy/detect_targets.h>
#if !HWY_DISABLED_TARGETS
#undef HWY_DISABLED_TARGETS
#if !HWY_ARCH_X86
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#elif defined(HWY_AVX10_2)
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_AVX3_SPR | HWY_AVX10_2)
#elif defined(HWY_AVX3_SPR)
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_AVX3_SPR)
#else
#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_AVX3_DL)
#endif
#endif

#define HWY_TARGET_INCLUDE <outrider/backend/highway/table-inl.h>
#include <hwy/foreach_target.h>
// The compiler's own target comes last.
#include <outrider/backend/highway/table-inl.h>

#include <outrider/backend/highway_dispatch.hpp>

namespace outrider {

HWY_EXPORT(kernels);
const detail::kernel_table* detail::best_kernels() noexcept { return HWY_DYNAMIC_DISPATCH(kernels)(); }

}  // namespace outrider

#endif
