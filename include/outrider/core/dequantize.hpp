// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What the blocks of blocks.hpp mean: one formula per format, in float. A scale has 11 significant bits, its integer scale at most 7 and a
// weight at most 7, in no format more than 24 together: every product d·scale·q is exact, the sum with a minimum rounds once, and so it makes
// no difference where a compiler fuses a multiplication with an addition.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "outrider/config.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/scalar.hpp"

namespace outrider {

namespace detail {

OUTRIDER_HD constexpr int low_nibble(std::uint8_t byte) noexcept { return byte & 15; }
OUTRIDER_HD constexpr int high_nibble(std::uint8_t byte) noexcept { return byte >> 4; }
OUTRIDER_HD constexpr int bit(std::uint8_t byte, std::size_t i) noexcept { return (byte >> i) & 1; }
OUTRIDER_HD constexpr int two_bits(std::uint8_t byte, std::size_t i) noexcept { return (byte >> 2 * i) & 3; }

/// The values of IQ4_NL's and IQ4_XS's codes, and twice those of MXFP4's.
inline constexpr std::int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline constexpr std::int8_t mxfp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/// 2^(e - 128), half of what the exponent says, to make up for mxfp4_values. The two smallest are subnormal.
OUTRIDER_HD constexpr float half_power(std::uint8_t e) noexcept {
  return std::bit_cast<float>(e < 2 ? std::uint32_t{0x00200000} << e : (e - std::uint32_t{1}) << 23);
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

// dequantize(block, out): the weights of a block, in order, to out [elements].

OUTRIDER_HD constexpr void dequantize(const q4_0& block, float* out) noexcept {
  const float d = to_float(block.d);
  for (std::size_t j = 0; j < 16; ++j) {
    out[j] = d * to_float(detail::low_nibble(block.qs[j]) - 8);
    out[j + 16] = d * to_float(detail::high_nibble(block.qs[j]) - 8);
  }
}

OUTRIDER_HD constexpr void dequantize(const q4_1& block, float* out) noexcept {
  const float d = to_float(block.d), m = to_float(block.m);
  for (std::size_t j = 0; j < 16; ++j) {
    out[j] = d * to_float(detail::low_nibble(block.qs[j])) + m;
    out[j + 16] = d * to_float(detail::high_nibble(block.qs[j])) + m;
  }
}

OUTRIDER_HD constexpr void dequantize(const q5_0& block, float* out) noexcept {
  const float d = to_float(block.d);
  for (std::size_t j = 0; j < 32; ++j) {
    const int nibble = j < 16 ? detail::low_nibble(block.qs[j]) : detail::high_nibble(block.qs[j - 16]);
    out[j] = d * to_float(nibble + 16 * detail::bit(block.qh[j / 8], j % 8) - 16);
  }
}

OUTRIDER_HD constexpr void dequantize(const q5_1& block, float* out) noexcept {
  const float d = to_float(block.d), m = to_float(block.m);
  for (std::size_t j = 0; j < 32; ++j) {
    const int nibble = j < 16 ? detail::low_nibble(block.qs[j]) : detail::high_nibble(block.qs[j - 16]);
    out[j] = d * to_float(nibble + 16 * detail::bit(block.qh[j / 8], j % 8)) + m;
  }
}

OUTRIDER_HD constexpr void dequantize(const q8_0& block, float* out) noexcept {
  const float d = to_float(block.d);
  for (std::size_t j = 0; j < 32; ++j) out[j] = d * to_float(block.qs[j]);
}

OUTRIDER_HD constexpr void dequantize(const iq4_nl& block, float* out) noexcept {
  const float d = to_float(block.d);
  for (std::size_t j = 0; j < 16; ++j) {
    out[j] = d * to_float(detail::iq4_values[detail::low_nibble(block.qs[j])]);
    out[j + 16] = d * to_float(detail::iq4_values[detail::high_nibble(block.qs[j])]);
  }
}

OUTRIDER_HD constexpr void dequantize(const mxfp4& block, float* out) noexcept {
  const float h = detail::half_power(block.e);
  for (std::size_t j = 0; j < 16; ++j) {
    out[j] = h * to_float(detail::mxfp4_values[detail::low_nibble(block.qs[j])]);
    out[j + 16] = h * to_float(detail::mxfp4_values[detail::high_nibble(block.qs[j])]);
  }
}

// In a block of 256, weight i is number l = i mod 32 of the 32 weights g = (i mod 128) ÷ 32 in half h = i ÷ 128.

OUTRIDER_HD constexpr void dequantize(const q2_k& block, float* out) noexcept {
  const float d = to_float(block.d), dmin = to_float(block.dmin);
  for (std::size_t i = 0; i < 256; ++i) {
    const std::size_t h = i / 128, g = i % 128 / 32, l = i % 32;
    const std::uint8_t s = block.scales[i / 16];
    const int q = detail::two_bits(block.qs[32 * h + l], g);
    out[i] = d * to_float(detail::low_nibble(s)) * to_float(q) - dmin * to_float(detail::high_nibble(s));
  }
}

OUTRIDER_HD constexpr void dequantize(const q3_k& block, float* out) noexcept {
  const float d = to_float(block.d);
  for (std::size_t i = 0; i < 256; ++i) {
    const std::size_t h = i / 128, g = i % 128 / 32, l = i % 32;
    const int q = detail::two_bits(block.qs[32 * h + l], g) + 4 * detail::bit(block.hmask[l], 4 * h + g) - 4;
    out[i] = d * to_float(detail::scale_of(block, i / 16)) * to_float(q);
  }
}

OUTRIDER_HD constexpr void dequantize(const q4_k& block, float* out) noexcept {
  const float d = to_float(block.d), dmin = to_float(block.dmin);
  for (std::size_t i = 0; i < 256; ++i) {
    const std::size_t b = i / 32, l = i % 32;
    const auto [scale, minimum] = detail::scales_of(block.scales, b);
    const std::uint8_t byte = block.qs[32 * (b / 2) + l];
    const int q = b % 2 ? detail::high_nibble(byte) : detail::low_nibble(byte);
    out[i] = d * to_float(scale) * to_float(q) - dmin * to_float(minimum);
  }
}

OUTRIDER_HD constexpr void dequantize(const q5_k& block, float* out) noexcept {
  const float d = to_float(block.d), dmin = to_float(block.dmin);
  for (std::size_t i = 0; i < 256; ++i) {
    const std::size_t b = i / 32, l = i % 32;
    const auto [scale, minimum] = detail::scales_of(block.scales, b);
    const std::uint8_t byte = block.qs[32 * (b / 2) + l];
    const int q = (b % 2 ? detail::high_nibble(byte) : detail::low_nibble(byte)) + 16 * detail::bit(block.qh[l], b);
    out[i] = d * to_float(scale) * to_float(q) - dmin * to_float(minimum);
  }
}

OUTRIDER_HD constexpr void dequantize(const q6_k& block, float* out) noexcept {
  const float d = to_float(block.d);
  for (std::size_t i = 0; i < 256; ++i) {
    const std::size_t h = i / 128, g = i % 128 / 32, l = i % 32;
    const std::uint8_t byte = block.ql[64 * h + 32 * (g % 2) + l];
    const int nibble = g < 2 ? detail::low_nibble(byte) : detail::high_nibble(byte);
    const int q = nibble + 16 * detail::two_bits(block.qh[32 * h + l], g) - 32;
    out[i] = d * to_float(block.scales[i / 16]) * to_float(q);
  }
}

OUTRIDER_HD constexpr void dequantize(const iq4_xs& block, float* out) noexcept {
  const float d = to_float(block.d);
  for (std::size_t i = 0; i < 256; ++i) {
    const std::size_t b = i / 32, l = i % 32;
    const std::uint8_t byte = block.qs[16 * b + l % 16];
    const int code = l < 16 ? detail::low_nibble(byte) : detail::high_nibble(byte);
    out[i] = d * to_float(detail::scale_of(block, b)) * to_float(detail::iq4_values[code]);
  }
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
