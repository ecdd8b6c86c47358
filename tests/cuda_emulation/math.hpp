// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// CUDA's vector types and scalar intrinsics on the CPU. 16-bit floats are outrider's own. What kernels must not use because its result is the
// hardware's business (__expf, rsqrtf, ...) is not there.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

// ---------------------------------------------------------------- vector types

#define OUTRIDER_EMULATION_VECTORS(name, T)                          \
  struct alignas(2 * sizeof(T)) name##2 {                            \
    T x, y;                                                          \
  };                                                                 \
  struct name##3 {                                                   \
    T x, y, z;                                                       \
  };                                                                 \
  struct alignas(4 * sizeof(T)) name##4 {                            \
    T x, y, z, w;                                                    \
  };                                                                 \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }         \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
OUTRIDER_EMULATION_VECTORS(char, signed char)
OUTRIDER_EMULATION_VECTORS(uchar, unsigned char)
OUTRIDER_EMULATION_VECTORS(short, short)
OUTRIDER_EMULATION_VECTORS(ushort, unsigned short)
OUTRIDER_EMULATION_VECTORS(int, int)
OUTRIDER_EMULATION_VECTORS(uint, unsigned)
OUTRIDER_EMULATION_VECTORS(float, float)
#undef OUTRIDER_EMULATION_VECTORS

namespace outrider::cuda_emulation {

/// A product or a summand that the compiler must not fuse with what comes after or before.
inline float rounded(float v) {
#if defined(__x86_64__) && !defined(__FMA__) && !defined(__FMA4__)
  return v;  // there is no fused operation
#else
  volatile float kept = v;
  return kept;
#endif
}

}  // namespace outrider::cuda_emulation

namespace outrider::cuda_emulation::cuda_names {

// ---------------------------------------------------------------- integers

inline int __dp4a(int a, int b, int c) {
  for (int shift = 0; shift < 32; shift += 8) c += int{static_cast<signed char>(a >> shift)} * int{static_cast<signed char>(b >> shift)};
  return c;
}
inline int __popc(unsigned v) { return std::popcount(v); }
inline int __clz(int v) { return std::countl_zero(static_cast<unsigned>(v)); }
inline int __ffs(int v) { return v == 0 ? 0 : std::countr_zero(static_cast<unsigned>(v)) + 1; }

/// Four of the eight bytes of high:low, chosen by three bits of each of the four low nibbles of `selector`.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const std::uint64_t bytes = std::uint64_t{high} << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 32; i += 8) out |= static_cast<unsigned>(bytes >> 8 * (selector >> i / 2 & 7) & 255) << i;
  return out;
}

inline float __int_as_float(int v) { return std::bit_cast<float>(v); }
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
inline int __float_as_int(float v) { return std::bit_cast<int>(v); }
inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
/// To nearest, ties to even; too large numbers become the largest, NaN becomes 0.
inline int __float2int_rn(float v) {
  if (v != v) return 0;
  if (v >= 0x1p31f) return INT32_MAX;
  if (v <= -0x1p31f) return INT32_MIN;
  return static_cast<int>(std::nearbyint(v));
}

// ---------------------------------------------------------------- arithmetic with one rounding each, bit for bit the device's

inline float __fadd_rn(float a, float b) { return rounded(a) + rounded(b); }
inline float __fsub_rn(float a, float b) { return rounded(a) - rounded(b); }
inline float __fmul_rn(float a, float b) { return rounded(a * b); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float v) { return std::sqrt(v); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

}  // namespace outrider::cuda_emulation::cuda_names

using namespace outrider::cuda_emulation::cuda_names;
