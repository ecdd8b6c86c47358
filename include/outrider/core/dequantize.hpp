// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What the blocks of blocks.hpp mean: one formula per format, in float. A scale has 11 significant bits, its integer scale at most 7 and a
// weight at most 7, in no format more than 24 together: every product d·scale·q is exact, the sum with a minimum rounds once, and so it makes
// no difference where a compiler fuses a multiplication with an addition.
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/config.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/scalar.hpp"

namespace outrider {

namespace detail {

OUTRIDER_HD constexpr int low_nibble(std::uint8_t byte) noexcept { return byte & 15; }
OUTRIDER_HD constexpr int high_nibble(std::uint8_t byte) noexcept { return byte >> 4; }
OUTRIDER_HD constexpr int either_nibble(std::uint8_t byte, std::size_t i) noexcept { return (byte >> 4 * i) & 15; }
/// Nibble i of 32: all low ones come before the high ones.
OUTRIDER_HD constexpr int nibble(const std::uint8_t (&bytes)[16], std::size_t i) noexcept { return either_nibble(bytes[i % 16], i / 16); }
OUTRIDER_HD constexpr int bit(std::uint8_t byte, std::size_t i) noexcept { return (byte >> i) & 1; }
OUTRIDER_HD constexpr int two_bits(std::uint8_t byte, std::size_t i) noexcept { return (byte >> 2 * i) & 3; }

/// The values of IQ4_NL's and IQ4_XS's codes, and twice those of MXFP4's.
inline constexpr std::int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline constexpr std::int8_t mxfp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/// The same for device code, which has no arrays of constants: the values as the bytes of two words.
struct packed_values {
  std::uint64_t low = 0, high = 0;
  consteval explicit packed_values(const std::int8_t (&values)[16]) {
    for (std::size_t i = 0; i < 8; ++i) {
      low |= static_cast<std::uint64_t>(static_cast<std::uint8_t>(values[i])) << 8 * i;
      high |= static_cast<std::uint64_t>(static_cast<std::uint8_t>(values[i + 8])) << 8 * i;
    }
  }
};
inline constexpr std::uint64_t iq4_low = packed_values(iq4_values).low, iq4_high = packed_values(iq4_values).high;
inline constexpr std::uint64_t mxfp4_low = packed_values(mxfp4_values).low, mxfp4_high = packed_values(mxfp4_values).high;
OUTRIDER_HD constexpr int packed_value(std::uint64_t low, std::uint64_t high, int code) noexcept {
  return static_cast<std::int8_t>((code < 8 ? low : high) >> 8 * (code & 7) & 255);
}
OUTRIDER_HD constexpr int iq4_value(int code) noexcept { return packed_value(iq4_low, iq4_high, code); }
OUTRIDER_HD constexpr int mxfp4_value(int code) noexcept { return packed_value(mxfp4_low, mxfp4_high, code); }

/// 2^(e - 128), half of what the exponent says, to make up for mxfp4_values. The two smallest are subnormal.
OUTRIDER_HD constexpr float half_power(std::uint8_t e) noexcept {
  return __builtin_bit_cast(float, e < 2 ? std::uint32_t{0x00200000} << e : (e - std::uint32_t{1}) << 23);
}

struct scale_and_minimum {
  int scale, minimum;
};
/// The 6-bit integers of the 32 weights b of a Q4_K or Q5_K: eight pairs in 12 bytes.
OUTRIDER_HD constexpr scale_and_minimum scales_of(const std::uint8_t (&s)[12], std::size_t b) noexcept {
  if (b < 4) return {s[b] & 63, s[b + 4] & 63};
  return {low_nibble(s[b + 4]) + 16 * (s[b - 4] >> 6), high_nibble(s[b + 4]) + 16 * (s[b] >> 6)};
}
/// The scale of the 16 weights k: 6 bits, biased by 32.
OUTRIDER_HD constexpr int scale_of(const q3_k& block, std::size_t k) noexcept {
  const auto& s = block.scales;
  return (k < 8 ? low_nibble(s[k]) : high_nibble(s[k - 8])) + 16 * two_bits(s[8 + k % 4], k / 4) - 32;
}
/// The scale of the 32 weights b: 6 bits, biased by 32.
OUTRIDER_HD constexpr int scale_of(const iq4_xs& block, std::size_t b) noexcept {
  const std::uint8_t pair = block.scales_l[b / 2];
  return (b % 2 ? high_nibble(pair) : low_nibble(pair)) + 16 * two_bits(block.scales_h[b / 4], b % 4) - 32;
}

}  // namespace detail

/// The scale of a block and, in formats that have one, its minimum or the scale of its minimums.
struct block_scales {
  float d = 0, m = 0;
};
template <block_format W>
OUTRIDER_HD constexpr block_scales block_scales_of(const W& block) noexcept {
  block_scales s;
  if constexpr (requires { block.d; }) s.d = to_float(block.d);
  if constexpr (requires { block.e; }) s.d = detail::half_power(block.e);
  if constexpr (requires { block.m; }) s.m = to_float(block.m);
  if constexpr (requires { block.dmin; }) s.m = to_float(block.dmin);
  return s;
}

// weight_at(block, i, scales): weight i of a block whose scales are these, the formula of its format.

OUTRIDER_HD constexpr float weight_at(const q4_0& block, std::size_t i, block_scales s) noexcept {
  return s.d * to_float(detail::nibble(block.qs, i) - 8);
}

OUTRIDER_HD constexpr float weight_at(const q4_1& block, std::size_t i, block_scales s) noexcept {
  return s.d * to_float(detail::nibble(block.qs, i)) + s.m;
}

OUTRIDER_HD constexpr float weight_at(const q5_0& block, std::size_t i, block_scales s) noexcept {
  return s.d * to_float(detail::nibble(block.qs, i) + 16 * detail::bit(block.qh[i / 8], i % 8) - 16);
}

OUTRIDER_HD constexpr float weight_at(const q5_1& block, std::size_t i, block_scales s) noexcept {
  return s.d * to_float(detail::nibble(block.qs, i) + 16 * detail::bit(block.qh[i / 8], i % 8)) + s.m;
}

OUTRIDER_HD constexpr float weight_at(const q8_0& block, std::size_t i, block_scales s) noexcept { return s.d * to_float(block.qs[i]); }

OUTRIDER_HD constexpr float weight_at(const iq4_nl& block, std::size_t i, block_scales s) noexcept {
  return s.d * to_float(detail::iq4_value(detail::nibble(block.qs, i)));
}

OUTRIDER_HD constexpr float weight_at(const mxfp4& block, std::size_t i, block_scales s) noexcept {
  return s.d * to_float(detail::mxfp4_value(detail::nibble(block.qs, i)));
}

// In a block of 256, weight i is number l = i mod 32 of the 32 weights b = i ÷ 32; these are number g = b mod 4 in half h = b ÷ 4.

OUTRIDER_HD constexpr float weight_at(const q2_k& block, std::size_t i, block_scales s) noexcept {
  const std::size_t h = i / 128, g = i % 128 / 32, l = i % 32;
  const std::uint8_t pair = block.scales[i / 16];
  const int q = detail::two_bits(block.qs[32 * h + l], g);
  return s.d * to_float(detail::low_nibble(pair)) * to_float(q) - s.m * to_float(detail::high_nibble(pair));
}

OUTRIDER_HD constexpr float weight_at(const q3_k& block, std::size_t i, block_scales s) noexcept {
  const std::size_t h = i / 128, g = i % 128 / 32, l = i % 32;
  const int q = detail::two_bits(block.qs[32 * h + l], g) + 4 * detail::bit(block.hmask[l], 4 * h + g) - 4;
  return s.d * to_float(detail::scale_of(block, i / 16)) * to_float(q);
}

OUTRIDER_HD constexpr float weight_at(const q4_k& block, std::size_t i, block_scales s) noexcept {
  const std::size_t b = i / 32, l = i % 32;
  const auto [scale, minimum] = detail::scales_of(block.scales, b);
  const int q = detail::either_nibble(block.qs[32 * (b / 2) + l], b % 2);
  return s.d * to_float(scale) * to_float(q) - s.m * to_float(minimum);
}

OUTRIDER_HD constexpr float weight_at(const q5_k& block, std::size_t i, block_scales s) noexcept {
  const std::size_t b = i / 32, l = i % 32;
  const auto [scale, minimum] = detail::scales_of(block.scales, b);
  const int q = detail::either_nibble(block.qs[32 * (b / 2) + l], b % 2) + 16 * detail::bit(block.qh[l], b);
  return s.d * to_float(scale) * to_float(q) - s.m * to_float(minimum);
}

OUTRIDER_HD constexpr float weight_at(const q6_k& block, std::size_t i, block_scales s) noexcept {
  const std::size_t h = i / 128, g = i % 128 / 32, l = i % 32;
  const int nibble = detail::either_nibble(block.ql[64 * h + 32 * (g % 2) + l], g / 2);
  const int q = nibble + 16 * detail::two_bits(block.qh[32 * h + l], g) - 32;
  return s.d * to_float(block.scales[i / 16]) * to_float(q);
}

OUTRIDER_HD constexpr float weight_at(const iq4_xs& block, std::size_t i, block_scales s) noexcept {
  const std::size_t b = i / 32, l = i % 32;
  const int code = detail::either_nibble(block.qs[16 * b + l % 16], l / 16);
  return s.d * to_float(detail::scale_of(block, b)) * to_float(detail::iq4_value(code));
}

/// Weight i of a block.
template <block_format W>
OUTRIDER_HD constexpr float weight_at(const W& block, std::size_t i) noexcept {
  return weight_at(block, i, block_scales_of(block));
}

/// The weights of a block, in order, to out [elements].
template <block_format W>
OUTRIDER_HD constexpr void dequantize(const W& block, float* out) noexcept {
  const block_scales scales = block_scales_of(block);
  for (std::size_t i = 0; i < W::elements; ++i) out[i] = weight_at(block, i, scales);
}

/// Calls body(i, weight) for the weights i = 0 … cols - 1 of a row stored as W, in order. cols is a multiple of elements_of<W>.
template <class W, class Body>
OUTRIDER_HD constexpr void for_each_weight(const W* row, std::size_t cols, Body&& body) noexcept {
  if constexpr (block_format<W>) {
    for (std::size_t first = 0; first < cols; first += W::elements) {
      float weights[W::elements];
      dequantize(row[first / W::elements], weights);
      for (std::size_t i = 0; i < W::elements; ++i) body(first + i, weights[i]);
    }
  } else {
    for (std::size_t i = 0; i < cols; ++i) body(i, to_float(row[i]));
  }
}

}  // namespace outrider
