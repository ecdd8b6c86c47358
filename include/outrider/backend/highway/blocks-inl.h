// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Blocks of quantised weights to floats, bit for bit as core/dequantize.hpp has it. First the integers, sixteen bytes at a time whatever
// the width of the vectors; then, in `put`, their scale.
#if defined(OUTRIDER_BACKEND_HIGHWAY_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUTRIDER_BACKEND_HIGHWAY_BLOCKS_INL_H_
#undef OUTRIDER_BACKEND_HIGHWAY_BLOCKS_INL_H_
#else
#define OUTRIDER_BACKEND_HIGHWAY_BLOCKS_INL_H_
#endif

#include "outrider/backend/highway/compat-inl.h"
#include "outrider/core/blocks.hpp"
#include "outrider/core/dequantize.hpp"

HWY_BEFORE_NAMESPACE();
namespace outrider {
namespace HWY_NAMESPACE {

using bytes = hn::Full128<std::uint8_t>;
using byte_vec = hn::Vec<bytes>;

HWY_INLINE byte_vec load_bytes(const std::uint8_t* p) { return hn::LoadU(bytes(), p); }
HWY_INLINE byte_vec load_bytes(const std::int8_t* p) { return hn::BitCast(bytes(), hn::LoadU(hn::Full128<std::int8_t>(), p)); }

/// (byte >> shift) & mask. No instruction shifts bytes: pairs are shifted, and the mask drops what comes from the neighbour.
HWY_INLINE byte_vec field(byte_vec v, int shift, std::uint8_t mask) {
  const hn::Repartition<std::uint16_t, bytes> pairs;
  return hn::And(hn::BitCast(bytes(), hn::ShiftRightSame(hn::BitCast(pairs, v), shift)), hn::Set(bytes(), mask));
}
HWY_INLINE byte_vec low_nibbles(byte_vec v) { return hn::And(v, hn::Set(bytes(), 15)); }
HWY_INLINE byte_vec high_nibbles(byte_vec v) { return field(v, 4, 15); }
/// byte << Bits where that fits into a byte.
template <int Bits>
HWY_INLINE byte_vec shift_left(byte_vec v) {
  const hn::Repartition<std::uint16_t, bytes> pairs;
  return hn::BitCast(bytes(), hn::ShiftLeft<Bits>(hn::BitCast(pairs, v)));
}
HWY_INLINE byte_vec minus(byte_vec v, std::uint8_t bias) { return hn::Sub(v, hn::Set(bytes(), bias)); }
HWY_INLINE byte_vec look_up(const std::int8_t* table, byte_vec codes) { return hn::TableLookupBytes(load_bytes(table), codes); }
/// 16 in byte j where bit j of the two bytes at p is set, else 0.
HWY_INLINE byte_vec fifth_bits(const std::uint8_t* p) {
  HWY_ALIGN constexpr std::uint8_t source[16] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  HWY_ALIGN constexpr std::uint8_t bits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const hn::Repartition<std::uint16_t, bytes> pairs;
  const byte_vec both = hn::BitCast(bytes(), hn::Set(pairs, static_cast<std::uint16_t>(p[0] | p[1] << 8)));
  const byte_vec spread = hn::TableLookupBytes(both, hn::Load(bytes(), source)), bit = hn::Load(bytes(), bits);
  return hn::IfThenElseZero(hn::Eq(hn::And(spread, bit), bit), hn::Set(bytes(), 16));
}

/// out = scale · q for sixteen signed bytes.
HWY_INLINE void put(byte_vec q, float scale, float* out) {
  HWY_ALIGN std::int8_t lane[16];
  hn::Store(hn::BitCast(hn::Full128<std::int8_t>(), q), hn::Full128<std::int8_t>(), lane);
  OUTRIDER_UNROLL
  for (std::size_t i = 0; i < 16; i += lanes) store(hn::Mul(set(scale), load(lane + i)), out + i);
}
/// out = scale · q + offset. The product is exact, so that it may be fused.
HWY_INLINE void put(byte_vec q, float scale, float offset, float* out) {
  HWY_ALIGN std::int8_t lane[16];
  hn::Store(hn::BitCast(hn::Full128<std::int8_t>(), q), hn::Full128<std::int8_t>(), lane);
  OUTRIDER_UNROLL
  for (std::size_t i = 0; i < 16; i += lanes) store(hn::MulAdd(set(scale), load(lane + i), set(offset)), out + i);
}

HWY_INLINE void unpack_block(const q4_0& block, float* out) {
  const byte_vec v = load_bytes(block.qs);
  const float d = to_float(block.d);
  put(minus(low_nibbles(v), 8), d, out);
  put(minus(high_nibbles(v), 8), d, out + 16);
}

HWY_INLINE void unpack_block(const q4_1& block, float* out) {
  const byte_vec v = load_bytes(block.qs);
  const float d = to_float(block.d), m = to_float(block.m);
  put(low_nibbles(v), d, m, out);
  put(high_nibbles(v), d, m, out + 16);
}

HWY_INLINE void unpack_block(const q5_0& block, float* out) {
  const byte_vec v = load_bytes(block.qs);
  const float d = to_float(block.d);
  put(minus(hn::Or(low_nibbles(v), fifth_bits(block.qh)), 16), d, out);
  put(minus(hn::Or(high_nibbles(v), fifth_bits(block.qh + 2)), 16), d, out + 16);
}

HWY_INLINE void unpack_block(const q5_1& block, float* out) {
  const byte_vec v = load_bytes(block.qs);
  const float d = to_float(block.d), m = to_float(block.m);
  put(hn::Or(low_nibbles(v), fifth_bits(block.qh)), d, m, out);
  put(hn::Or(high_nibbles(v), fifth_bits(block.qh + 2)), d, m, out + 16);
}

HWY_INLINE void unpack_block(const q8_0& block, float* out) {
  const float d = to_float(block.d);
  put(load_bytes(block.qs), d, out);
  put(load_bytes(block.qs + 16), d, out + 16);
}

HWY_INLINE void unpack_block(const iq4_nl& block, float* out) {
  const byte_vec v = load_bytes(block.qs);
  const float d = to_float(block.d);
  put(look_up(detail::iq4_values, low_nibbles(v)), d, out);
  put(look_up(detail::iq4_values, high_nibbles(v)), d, out + 16);
}

HWY_INLINE void unpack_block(const mxfp4& block, float* out) {
  const byte_vec v = load_bytes(block.qs);
  const float h = detail::half_power(block.e);
  put(look_up(detail::mxfp4_values, low_nibbles(v)), h, out);
  put(look_up(detail::mxfp4_values, high_nibbles(v)), h, out + 16);
}

// Blocks of 256: sixteen weights from `first` on lie in half h, and there in the 32 weights g.

HWY_INLINE void unpack_block(const q2_k& block, float* out) {
  const float d = to_float(block.d), dmin = to_float(block.dmin);
  for (std::size_t first = 0; first < 256; first += 16) {
    const std::size_t h = first / 128, g = first % 128 / 32, l = first % 32;
    const std::uint8_t s = block.scales[first / 16];
    const byte_vec q = field(load_bytes(block.qs + 32 * h + l), static_cast<int>(2 * g), 3);
    put(q, d * to_float(detail::low_nibble(s)), -(dmin * to_float(detail::high_nibble(s))), out + first);
  }
}

HWY_INLINE void unpack_block(const q3_k& block, float* out) {
  const float d = to_float(block.d);
  for (std::size_t first = 0; first < 256; first += 16) {
    const std::size_t h = first / 128, g = first % 128 / 32, l = first % 32;
    const byte_vec low = field(load_bytes(block.qs + 32 * h + l), static_cast<int>(2 * g), 3);
    const byte_vec high = shift_left<2>(field(load_bytes(block.hmask + l), static_cast<int>(4 * h + g), 1));
    put(minus(hn::Or(low, high), 4), d * to_float(detail::scale_of(block, first / 16)), out + first);
  }
}

HWY_INLINE void unpack_block(const q4_k& block, float* out) {
  const float d = to_float(block.d), dmin = to_float(block.dmin);
  for (std::size_t b = 0; b < 8; ++b) {
    const auto s = detail::scales_of(block.scales, b);
    const float scale = d * to_float(s.scale), offset = -(dmin * to_float(s.minimum));
    for (std::size_t l = 0; l < 32; l += 16)
      put(field(load_bytes(block.qs + 32 * (b / 2) + l), static_cast<int>(4 * (b % 2)), 15), scale, offset, out + 32 * b + l);
  }
}

HWY_INLINE void unpack_block(const q5_k& block, float* out) {
  const float d = to_float(block.d), dmin = to_float(block.dmin);
  for (std::size_t b = 0; b < 8; ++b) {
    const auto s = detail::scales_of(block.scales, b);
    const float scale = d * to_float(s.scale), offset = -(dmin * to_float(s.minimum));
    for (std::size_t l = 0; l < 32; l += 16) {
      const byte_vec low = field(load_bytes(block.qs + 32 * (b / 2) + l), static_cast<int>(4 * (b % 2)), 15);
      const byte_vec high = shift_left<4>(field(load_bytes(block.qh + l), static_cast<int>(b), 1));
      put(hn::Or(low, high), scale, offset, out + 32 * b + l);
    }
  }
}

HWY_INLINE void unpack_block(const q6_k& block, float* out) {
  const float d = to_float(block.d);
  for (std::size_t first = 0; first < 256; first += 16) {
    const std::size_t h = first / 128, g = first % 128 / 32, l = first % 32;
    const byte_vec low = field(load_bytes(block.ql + 64 * h + 32 * (g % 2) + l), static_cast<int>(4 * (g / 2)), 15);
    const byte_vec high = shift_left<4>(field(load_bytes(block.qh + 32 * h + l), static_cast<int>(2 * g), 3));
    put(minus(hn::Or(low, high), 32), d * to_float(block.scales[first / 16]), out + first);
  }
}

HWY_INLINE void unpack_block(const iq4_xs& block, float* out) {
  const float d = to_float(block.d);
  for (std::size_t b = 0; b < 8; ++b) {
    const byte_vec v = load_bytes(block.qs + 16 * b);
    const float scale = d * to_float(detail::scale_of(block, b));
    put(look_up(detail::iq4_values, low_nibbles(v)), scale, out + 32 * b);
    put(look_up(detail::iq4_values, high_nibbles(v)), scale, out + 32 * b + 16);
  }
}

/// n weights, a multiple of the block length, to out.
template <block_format W>
HWY_NOINLINE void unpack(const W* blocks, std::size_t n, float* out) noexcept {
  for (std::size_t first = 0; first < n; first += W::elements) unpack_block(blocks[first / W::elements], out + first);
}

}  // namespace HWY_NAMESPACE
}  // namespace outrider
HWY_AFTER_NAMESPACE();

#endif
