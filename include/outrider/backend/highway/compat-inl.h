// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The few vector operations the kernels need beyond Highway 1.0.3, in a form that works on every later version too. Included once per
// target, like all *-inl.h files: the guard follows Highway's toggle.
#if defined(OUTRIDER_BACKEND_HIGHWAY_COMPAT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUTRIDER_BACKEND_HIGHWAY_COMPAT_INL_H_
#undef OUTRIDER_BACKEND_HIGHWAY_COMPAT_INL_H_
#else
#define OUTRIDER_BACKEND_HIGHWAY_COMPAT_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "outrider/core/scalar.hpp"

// Loops over accumulators must be unrolled at every optimisation level, or the accumulators live in memory.
#if !defined(OUTRIDER_UNROLL)
#if defined(__clang__)
#define OUTRIDER_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define OUTRIDER_UNROLL _Pragma("GCC unroll 16")
#else
#define OUTRIDER_UNROLL
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace outrider {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

static_assert(!HWY_HAVE_SCALABLE, "outrider: the kernels need vectors of a fixed size; on Arm, disable the SVE targets and use NEON");

using floats = hn::ScalableTag<float>;
using vec = hn::Vec<floats>;
constexpr std::size_t lanes = HWY_MAX_BYTES / sizeof(float);

/// Lanes p[0 … lanes - 1] as floats, exactly.
HWY_INLINE vec load(const float* p) { return hn::LoadU(floats(), p); }
HWY_INLINE vec load(const bf16* p) {
  const hn::Rebind<std::uint16_t, floats> narrow;
  const hn::Rebind<std::uint32_t, floats> wide;
  return hn::BitCast(floats(), hn::ShiftLeft<16>(hn::PromoteTo(wide, hn::LoadU(narrow, &p->bits))));
}
HWY_INLINE vec load(const f16* p) {
  const hn::Rebind<std::uint16_t, floats> narrow;
  const hn::Rebind<hwy::float16_t, floats> half;
  const auto bits = hn::LoadU(narrow, &p->bits);
  const vec value = hn::PromoteTo(floats(), hn::BitCast(half, bits));
#if HWY_ARCH_ARM_A64 || (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2)
  return value;
#else  // no instruction for it: Highway's own conversion takes NaN and infinity for numbers
  const hn::Rebind<std::uint32_t, floats> wide;
  const auto word = hn::PromoteTo(wide, bits), exponent = hn::Set(wide, 0x7c00u);
  const auto special = hn::Or(hn::ShiftLeft<16>(hn::And(word, hn::Set(wide, 0x8000u))),
                              hn::Or(hn::Set(wide, 0x7f800000u), hn::ShiftLeft<13>(hn::And(word, hn::Set(wide, 0x3ffu)))));
  return hn::IfThenElse(hn::RebindMask(floats(), hn::Eq(hn::And(word, exponent), exponent)), hn::BitCast(floats(), special), value);
#endif
}

HWY_INLINE vec load(const std::int8_t* p) {
  const hn::Rebind<std::int8_t, floats> narrow;
  const hn::Rebind<std::int32_t, floats> wide;
  return hn::ConvertTo(floats(), hn::PromoteTo(wide, hn::LoadU(narrow, p)));
}

/// The first n < lanes elements of p, the other lanes zero. Reads nothing behind p[n - 1], where a mapping may end or padding may be NaN.
template <class T>
HWY_NOINLINE vec load_first(const T* p, std::size_t n) {
  HWY_ALIGN T lane[lanes] = {};
  std::memcpy(static_cast<void*>(lane), p, n * sizeof(T));
  return load(lane);
}
HWY_INLINE void store(vec v, float* p) { hn::StoreU(v, floats(), p); }
HWY_NOINLINE inline void store_first(vec v, float* p, std::size_t n) {
  HWY_ALIGN float lane[lanes];
  hn::Store(v, floats(), lane);
  std::memcpy(p, lane, n * sizeof(float));
}

/// Asks for the cache line at p, which may lie anywhere.
template <class T>
HWY_INLINE void prefetch(const T* p) {
  hwy::Prefetch(p);
}

/// Asks for the cache line at p in the second-level cache: from there it comes in time, and the first level keeps what is in use.
HWY_INLINE void prefetch_second_level(const std::byte* p) {
#if HWY_ARCH_X86
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
#else
  hwy::Prefetch(p);
#endif
}

/// The distance at which a stream of weights is asked for ahead of its use, and the request: measured on Zen 3 (AVX2) and Zen 4 (AVX-512).
constexpr std::size_t prefetch_distance = HWY_CAP_GE512 ? 8192 : 1024;
HWY_INLINE void prefetch_ahead(const std::byte* p) {
#if HWY_CAP_GE512
  prefetch_second_level(p);
#else
  hwy::Prefetch(p);
#endif
}

/// Keeps a value in a register: GCC would rather read it anew for every use, and two reads a cycle are what a core has for all its operands.
template <class V>
HWY_INLINE void hold([[maybe_unused]] V& v) {
#if HWY_ARCH_X86 && (defined(__GNUC__) || defined(__clang__))
#if HWY_CAP_GE512
  asm("" : "+v"(v.raw));
#else
  asm("" : "+x"(v.raw));
#endif
#endif
}

HWY_INLINE vec zero() { return hn::Zero(floats()); }
HWY_INLINE vec set(float value) { return hn::Set(floats(), value); }
HWY_INLINE float sum_of_lanes(vec v) { return hn::GetLane(hn::SumOfLanes(floats(), v)); }
HWY_INLINE float max_of_lanes(vec v) { return hn::GetLane(hn::MaxOfLanes(floats(), v)); }

}  // namespace HWY_NAMESPACE
}  // namespace outrider
HWY_AFTER_NAMESPACE();

#endif
