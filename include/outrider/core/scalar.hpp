// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>

#include "outrider/config.hpp"

namespace outrider {

using token_id = std::int32_t;

// __builtin_bit_cast is what std::bit_cast calls; unlike that one it may be called by device code.

/// bfloat16, the upper half of a float. Storage and conversion only: arithmetic is done in float.
struct bf16 {
  std::uint16_t bits = 0;

  constexpr bf16() = default;
  /// Rounds to nearest, ties to even; a NaN stays a (quiet) NaN.
  OUTRIDER_HD explicit constexpr bf16(float value) noexcept {
    const auto word = __builtin_bit_cast(std::uint32_t, value);
    const bool nan = (word & 0x7fffffffu) > 0x7f800000u;
    bits = static_cast<std::uint16_t>(nan ? (word >> 16) | 0x40u : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
  OUTRIDER_HD explicit constexpr operator float() const noexcept {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
  }
  OUTRIDER_HD explicit constexpr operator double() const noexcept { return double{static_cast<float>(*this)}; }
};

/// IEEE binary16. Storage and conversion only.
struct f16 {
  std::uint16_t bits = 0;

  constexpr f16() = default;
  /// Rounds to nearest, ties to even; overflow gives infinity, small values subnormals, a NaN stays a (quiet) NaN.
  OUTRIDER_HD explicit constexpr f16(float value) noexcept {
    const auto word = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t sign = (word >> 16) & 0x8000u, magnitude = word & 0x7fffffffu;
    std::uint32_t half = 0;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
      half = 0x7c00u;
    } else if (magnitude >= 0x38800000u) {  // normal: rebias the exponent by 127 - 15, round the 13 lost bits
      half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    } else if (magnitude >= 0x33000000u) {  // subnormal: shift the explicit significand to units of 2^-24
      const std::uint32_t shift = 126u - (magnitude >> 23), significand = (magnitude & 0x7fffffu) | 0x800000u;
      const std::uint32_t kept = significand >> shift, lost = significand & ((1u << shift) - 1u), tie = 1u << (shift - 1u);
      half = kept + (lost > tie || (lost == tie && (kept & 1u)) ? 1u : 0u);
    }
    bits = static_cast<std::uint16_t>(sign | half);
  }
  OUTRIDER_HD explicit constexpr operator float() const noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16, exponent = (bits >> 10) & 0x1fu, fraction = bits & 0x3ffu;
    if (exponent == 0x1fu) return __builtin_bit_cast(float, sign | 0x7f800000u | (fraction << 13));
    if (exponent != 0) return __builtin_bit_cast(float, sign | ((exponent + 112u) << 23) | (fraction << 13));
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  OUTRIDER_HD explicit constexpr operator double() const noexcept { return double{static_cast<float>(*this)}; }
};

/// The value of any storage scalar as float.
template <class T>
OUTRIDER_HD constexpr float to_float(T value) noexcept {
  return static_cast<float>(value);
}

}  // namespace outrider
