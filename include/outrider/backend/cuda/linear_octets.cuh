// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Eight neighbouring weights of a row, an octet: how they are loaded, in as few instructions as the alignment of a type permits, and what
// floats they are.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "outrider/backend/cuda/gather.cuh"

namespace outrider::device {

namespace detail {

/// What every object of type W is aligned to where its rows may be loaded as octets: 16 bytes, of a block as much as divides its size.
template <class W>
inline constexpr std::size_t octet_alignment = block_format<W> ? (sizeof(W) & -sizeof(W)) < 8 ? sizeof(W) & -sizeof(W) : 8 : 16;

/// to[0 … 7] = the eight bytes of a block of type W from p on, whose lowest bits come from bit `shift` on. Those above may be of any value.
/// The distance from the block to p is a multiple of the block's alignment as well.
template <class W, class Byte>
__device__ void move_codes(Byte* to, const Byte* p, unsigned shift) {
  constexpr unsigned step = octet_alignment<W> < 4 ? octet_alignment<W> : 4;  // of bytes that are loaded at once
  std::uint32_t part[8 / step];
  if constexpr (octet_alignment<W> == 8) {
    const uint2 both = __ldg(reinterpret_cast<const uint2*>(p));
    part[0] = both.x, part[1] = both.y;
  } else {
    using word = std::conditional_t<step == 4, std::uint32_t, std::conditional_t<step == 2, std::uint16_t, std::uint8_t>>;
#pragma unroll
    for (unsigned i = 0; i < 8 / step; ++i) part[i] = __ldg(reinterpret_cast<const word*>(p) + i);
  }
#pragma unroll
  for (unsigned i = 0; i < 8; ++i) to[i] = static_cast<Byte>(part[i / step] >> shift >> 8 * (i % step) & 255);
}

// front(block, i): a block whose weights 0 … 7 are the weights i … i + 7 of this one, i a multiple of 8. Where they lie is written in
// core/dequantize.hpp, whose formula then reads them at constant places, in registers. What scales_in() reads stays behind.

template <class W>
  requires(W::elements == 32)
__device__ W front(const W& block, unsigned i) {
  W to;
  if constexpr (requires { block.qh; }) to.qh[0] = __ldg(&block.qh[i / 8]);
  if constexpr (sizeof(block.qs) == 32)
    move_codes<W>(to.qs, block.qs + i, 0);
  else
    move_codes<W>(to.qs, block.qs + i % 16, i / 16 * 4);
  return to;
}

__device__ inline q2_k front(const q2_k& block, unsigned i) {
  q2_k to;
  move_codes<q2_k>(to.qs, block.qs + i / 128 * 32 + i % 32, i % 128 / 32 * 2);
  to.scales[0] = block.scales[i / 16];
  return to;
}

__device__ inline q3_k front(const q3_k& block, unsigned i) {
  q3_k to;
  move_codes<q3_k>(to.qs, block.qs + i / 128 * 32 + i % 32, i % 128 / 32 * 2);
  move_codes<q3_k>(to.hmask, block.hmask + i % 32, i / 32);
  const int scale = outrider::detail::scale_of(block, i / 16) + 32;
  to.scales[0] = static_cast<std::uint8_t>(scale & 15), to.scales[8] = static_cast<std::uint8_t>(scale >> 4);
  return to;
}

template <class W>
  requires requires(const W& block) { block.dmin, block.scales[11], block.qs[127]; }
__device__ W front(const W& block, unsigned i) {  // q4_k, q5_k
  W to;
  move_codes<W>(to.qs, block.qs + i / 64 * 32 + i % 32, i / 32 % 2 * 4);
  if constexpr (requires { block.qh; }) move_codes<W>(to.qh, block.qh + i % 32, i / 32);
  const auto both = outrider::detail::scales_of(block.scales, i / 32);
  to.scales[0] = static_cast<std::uint8_t>(both.scale), to.scales[4] = static_cast<std::uint8_t>(both.minimum);
  return to;
}

__device__ inline q6_k front(const q6_k& block, unsigned i) {
  q6_k to;
  move_codes<q6_k>(to.ql, block.ql + i / 128 * 64 + i % 64, i % 128 / 64 * 4);
  move_codes<q6_k>(to.qh, block.qh + i / 128 * 32 + i % 32, i % 128 / 32 * 2);
  to.scales[0] = block.scales[i / 16];
  return to;
}

__device__ inline iq4_xs front(const iq4_xs& block, unsigned i) {
  iq4_xs to;
  move_codes<iq4_xs>(to.qs, block.qs + i / 32 * 16 + i % 16, i % 32 / 16 * 4);
  const int scale = outrider::detail::scale_of(block, i / 32) + 32;
  to.scales_l[0] = static_cast<std::uint8_t>(scale & 15), to.scales_h[0] = static_cast<std::uint8_t>(scale >> 4);
  return to;
}

/// block_scales_of, but that the hardware widens halves.
template <class W>
__device__ block_scales scales_in(const W& block) {
  block_scales s;
  if constexpr (requires { block.d; }) s.d = widen(block.d);
  if constexpr (requires { block.e; }) s.d = outrider::detail::half_power(block.e);
  if constexpr (requires { block.m; }) s.m = widen(block.m);
  if constexpr (requires { block.dmin; }) s.m = widen(block.dmin);
  return s;
}

/// An octet as floats, four by four.
struct float_octet {
  float4 half[2];
};

/// The weights from column i of a row of k on, i a multiple of 8: as they are stored where that is possible, else as floats. Beyond the end
/// of the row they are zeros, or the last eight again if only whole octets are loaded.
template <bool Vectors, class W>
__device__ auto load_octet(const W* row, unsigned i, unsigned k) {
  if constexpr (!Vectors) {
    const auto at = [&](unsigned j) { return j < k ? weight_in(row, j) : 0.0f; };
    return float_octet{{make_float4(at(i), at(i + 1), at(i + 2), at(i + 3)), make_float4(at(i + 4), at(i + 5), at(i + 6), at(i + 7))}};
  } else {
    if (i >= k) i = k - 8;
    if constexpr (block_format<W>) {
      const W& block = row[i / W::elements];
      const block_scales s = scales_in(block);
      const W to = front(block, i % W::elements);
      return float_octet{{make_float4(weight_at(to, 0, s), weight_at(to, 1, s), weight_at(to, 2, s), weight_at(to, 3, s)),
                          make_float4(weight_at(to, 4, s), weight_at(to, 5, s), weight_at(to, 6, s), weight_at(to, 7, s))}};
    } else if constexpr (sizeof(W) == 4) {
      const auto* p = reinterpret_cast<const float4*>(row + i);
      return float_octet{{__ldg(p), __ldg(p + 1)}};
    } else {
      return __ldg(reinterpret_cast<const uint4*>(row + i));
    }
  }
}

template <class W>
__device__ float low_half(unsigned word) {
  W value;
  value.bits = static_cast<std::uint16_t>(word);
  return weight_in(&value, 0);
}
/// The first four weights of an octet, or the last four.
template <class W>
__device__ float4 half_of(const uint4& octet, unsigned half) {
  const unsigned first = half == 0 ? octet.x : octet.z, second = half == 0 ? octet.y : octet.w;
  return make_float4(low_half<W>(first), low_half<W>(first >> 16), low_half<W>(second), low_half<W>(second >> 16));
}
template <class W>
__device__ float4 half_of(const float_octet& octet, unsigned half) {
  return octet.half[half];
}

}  // namespace detail

}  // namespace outrider::device
