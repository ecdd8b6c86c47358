// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Keys and values as they are stored: read by vectors, widened to floats, and made of floats.
#pragma once
#include <cstdint>
#include <type_traits>

#include "outrider/backend/cuda/warp.cuh"
#include "outrider/core/blocks.hpp"
#include "outrider/core/scalar.hpp"

namespace outrider::device {

/// The V at `from`, aligned as a V is.
template <class V>
__device__ V load_vector(const void* from) {
  return __ldg(static_cast<const V*>(from));
}

/// Count = 1, 2 or 8 neighbouring elements of a key or a value as they are stored, so that many can be on their way before the first is
/// widened. read(row, first): elements first … first + Count - 1, with `first` a multiple of Count; the row is aligned for vectors of so many.
template <class Kv, int Count>
struct stored_elements;

template <int Count>
struct stored_elements<float, Count> {
  float values[Count];

  __device__ void read(const float* row, int first) {
    if constexpr (Count == 8) {
      const auto a = load_vector<float4>(row + first), b = load_vector<float4>(row + first + 4);
      values[0] = a.x, values[1] = a.y, values[2] = a.z, values[3] = a.w;
      values[4] = b.x, values[5] = b.y, values[6] = b.z, values[7] = b.w;
    } else if constexpr (Count == 2) {
      const auto a = load_vector<float2>(row + first);
      values[0] = a.x, values[1] = a.y;
    } else {
      values[0] = row[first];
    }
  }
  __device__ void widen(float (&out)[Count]) const {
#pragma unroll
    for (int i = 0; i < Count; ++i) out[i] = values[i];
  }
};

/// Types of 16 bits, two in a word.
template <class Kv, int Count>
  requires(sizeof(Kv) == 2)
struct stored_elements<Kv, Count> {
  std::uint32_t words[(Count + 1) / 2];

  __device__ void read(const Kv* row, int first) {
    if constexpr (Count == 8) {
      const auto a = load_vector<uint4>(row + first);
      words[0] = a.x, words[1] = a.y, words[2] = a.z, words[3] = a.w;
    } else if constexpr (Count == 2) {
      words[0] = load_vector<unsigned>(row + first);
    } else {
      words[0] = row[first].bits;
    }
  }
  __device__ void widen(float (&out)[Count]) const {
#pragma unroll
    for (int i = 0; i < Count; ++i) out[i] = number(words[i / 2] >> 16 * (i % 2) & 0xffffu);
  }

 private:
  static __device__ float number(std::uint32_t bits) {
    if constexpr (std::is_same_v<Kv, bf16>) return __uint_as_float(bits << 16);
    f16 half;
    half.bits = static_cast<std::uint16_t>(bits);
    return device::widen(half);
  }
};

/// The codes by twos, for a block is aligned no better; each times the scale, exactly.
template <int Count>
struct stored_elements<q8_0, Count> {
  f16 scale;
  std::uint16_t codes[(Count + 1) / 2];

  __device__ void read(const q8_0* row, int first) {
    const q8_0& block = row[first / 32];
    scale = block.d;
    const std::int8_t* const from = block.qs + first % 32;
    if constexpr (Count == 1)
      codes[0] = static_cast<std::uint8_t>(*from);
    else
#pragma unroll
      for (int i = 0; i < Count / 2; ++i) codes[i] = load_vector<unsigned short>(from + 2 * i);
  }
  __device__ void widen(float (&out)[Count]) const {
    const float factor = device::widen(scale);
#pragma unroll
    for (int i = 0; i < Count; ++i)
      out[i] = __fmul_rn(factor, static_cast<float>(static_cast<std::int8_t>(codes[i / 2] >> 8 * (i % 2) & 255)));
  }
};

/// One float, or two at an even place, as a vector.
template <int Width>
__device__ void read_floats(float (&to)[Width], const float* from) {
  if constexpr (Width == 2) {
    const float2 pair = *reinterpret_cast<const float2*>(from);
    to[0] = pair.x, to[1] = pair.y;
  } else {
    to[0] = *from;
  }
}
template <int Width>
__device__ void write_floats(float* to, const float (&from)[Width]) {
  if constexpr (Width == 2)
    *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
  else
    *to = from[0];
}

/// to = the block that quantize() of core/quantize.hpp makes of 32 numbers, lane i having number i; its scale is NaN where that returns false.
__device__ inline void store_block(q8_0& to, float x, int lane) {
  static_assert(q8_0::elements == warp_size);
  const bool number = fabsf(x) < INFINITY, finite = __all_sync(all_lanes, number) != 0;
  if (!number) x = 0;
  const float scale = __fdiv_rn(warp_max(fabsf(x)), 127), inverse = scale != 0 ? __fdiv_rn(1, scale) : 0.0f;
  const float code = __fmul_rn(x, inverse);
  to.qs[lane] = static_cast<std::int8_t>(roundf(code > -127 ? (code < 127 ? code : 127.0f) : -127.0f));  // a NaN, 0 · ∞, is -127 as well
  if (lane != 0) return;
  const f16 stored(scale);
  const bool representable = finite && (stored.bits & 0x7c00u) != 0x7c00u;
  to.d.bits = representable ? stored.bits : std::uint16_t{0x7e00};
}

}  // namespace outrider::device
