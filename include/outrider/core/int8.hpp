// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Activations as integers, what int8 products read: 32 neighbours of a row share one scale.
#pragma once
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace outrider {

/// 32 activations x ≈ d · q, with sums of q that spare the kernels work. A block of zeros is all zero bits.
struct int8_block {
  static constexpr std::size_t elements = 32;
  std::int8_t q[32];         // -127 … 127
  std::int16_t half_sum[2];  // Σ q[0 … 15], Σ q[16 … 31]
  std::int32_t offset;       // -8 · Σ q, what makes products with the codes 0 … 15 of weights -8 … 7 right
  float d;                   // max |x| / 127
  float sum;                 // d · Σ q
};
static_assert(sizeof(int8_block) == 48);

namespace detail {
/// Where the largest |x| of a block is below this, 127 / max |x| would come near overflow: the block counts as zero.
inline constexpr float least_magnitude = 1e-30f;
}  // namespace detail

/// out = x [32] as integers: with m = max |x|, d = m / 127 and q = x · (127 / m), rounded to the nearest integer, ties to even. A block with
/// a number that is not finite gets d = sum = NaN and q = 0, so that every product with it is NaN.
inline void quantize(int8_block& out, const float* x) noexcept {
  out = {};
  std::uint32_t largest = 0;  // magnitudes order like their bits, NaN above all
  for (std::size_t k = 0; k < 32; ++k) {
    const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(x[k]) & 0x7fffffffu;
    if (magnitude > largest) largest = magnitude;
  }
  if (largest >= 0x7f800000u) {
    out.d = out.sum = std::bit_cast<float>(0x7fc00000u);
    return;
  }
  const float m = std::bit_cast<float>(largest), factor = m > detail::least_magnitude ? 127.0f / m : 0.0f;
  out.d = m / 127.0f;
  int sum[2] = {};
  for (std::size_t k = 0; k < 32; ++k) {
    const int q = static_cast<int>(std::nearbyint(x[k] * factor));
    out.q[k] = static_cast<std::int8_t>(q);
    sum[k / 16] += q;
  }
  out.half_sum[0] = static_cast<std::int16_t>(sum[0]);
  out.half_sum[1] = static_cast<std::int16_t>(sum[1]);
  out.offset = -8 * (sum[0] + sum[1]);
  out.sum = out.d * static_cast<float>(sum[0] + sum[1]);
}

}  // namespace outrider
