// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Floats to blocks. The bytes are those of ggml's reference quantisers without an importance matrix, so a file made here is a file made there.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "outrider/core/blocks.hpp"
#include "outrider/core/scalar.hpp"

namespace outrider {

namespace detail {

/// a · b, rounded to float. Where a sum follows, the bytes of a block depend on both roundings, but compilers make one fused operation of a
/// plain a * b + c, with a single rounding: GCC by default, across statements, even behind a narrowing from double or a
/// __builtin_assoc_barrier. So the product, exact in double, is rounded to the 24 bits of a float, ties to even, as an integer; the plain
/// one is the same (but for subnormal results, which are rounded twice here), and faster, where the target has no fused operation.
inline float product(float a, float b) noexcept {
#if defined(__x86_64__) && !defined(__FMA__) && !defined(__FMA4__)
  return a * b;
#else
  const auto exact = std::bit_cast<std::uint64_t>(double{a} * double{b});
  const std::uint64_t rounded = (exact + 0x0fffffffu + (exact >> 29 & 1u)) & ~std::uint64_t{0x1fffffff};
  return static_cast<float>(std::bit_cast<double>(rounded));
#endif
}

/// v inside [lo, hi]; lo for a NaN.
constexpr float clamped(float v, float lo, float hi) noexcept { return v > lo ? (v < hi ? v : hi) : lo; }
/// The whole number nearest to v, ties to even, inside [lo, hi] (|lo|, |hi| < 2^22): the sum leaves it in the low bits of the significand.
constexpr int nearest(float v, int lo, int hi) noexcept {
  const float sum = clamped(v, static_cast<float>(lo), static_cast<float>(hi)) + 12582912.0f;
  return static_cast<int>(std::bit_cast<std::uint32_t>(sum) & 0x7fffffu) - 0x400000;
}
/// v without its fraction, inside [0, hi].
constexpr std::uint8_t truncated(float v, int hi) noexcept { return static_cast<std::uint8_t>(clamped(v, 0, static_cast<float>(hi))); }
constexpr float reciprocal(float d) noexcept { return d != 0 ? 1 / d : 0; }

/// The n inputs of a block, with 0 for what is no number, and whether all were numbers.
template <std::size_t N>
struct block_input {
  std::array<float, N> x;
  bool finite = true;

  explicit block_input(const float* from) noexcept {
    for (std::size_t i = 0; i < N; ++i) {
      const bool number = std::isfinite(from[i]);
      finite = finite && number;
      x[i] = number ? from[i] : 0;
    }
  }
  /// The first value of the largest magnitude, with its sign.
  [[nodiscard]] float peak() const noexcept {
    float largest = 0, signed_value = 0;
    for (const float v : x)
      if (largest < std::fabs(v)) largest = std::fabs(v), signed_value = v;
    return signed_value;
  }
  [[nodiscard]] float lowest() const noexcept { return *std::min_element(x.begin(), x.end()); }
  [[nodiscard]] float highest() const noexcept { return *std::max_element(x.begin(), x.end()); }
};

inline bool finite(f16 value) noexcept { return (value.bits & 0x7c00u) != 0x7c00u; }

/// Two nibbles a byte: elements 0 … 15 low, 16 … 31 high.
inline void pack_nibbles(const std::array<std::uint8_t, 32>& q, std::uint8_t (&qs)[16]) noexcept {
  for (std::size_t j = 0; j < 16; ++j) qs[j] = static_cast<std::uint8_t>((q[j] & 15u) | (q[j + 16] & 15u) << 4);
}
/// The fifth bits, element j at bit j.
inline void pack_fifth_bits(const std::array<std::uint8_t, 32>& q, std::uint8_t (&qh)[4]) noexcept {
  std::fill(std::begin(qh), std::end(qh), std::uint8_t{0});
  for (std::size_t j = 0; j < 32; ++j) qh[j / 8] = static_cast<std::uint8_t>(qh[j / 8] | (q[j] >> 4 & 1u) << j % 8);
}

}  // namespace detail

// quantize(x, out): the block of the W::elements floats at x. False if one of them is no finite number, or so large that a scale of the block
// overflows; the block is defined all the same (what is no number counts as 0), but does not stand for its input.

inline bool quantize(const float* x, q8_0& out) noexcept {
  const detail::block_input<32> in(x);
  const float d = std::fabs(in.peak()) / 127, id = detail::reciprocal(d);
  out.d = f16(d);
  for (std::size_t j = 0; j < 32; ++j) {
    const double v = detail::clamped(detail::product(in.x[j], id), -127, 127);
    out.qs[j] = static_cast<std::int8_t>(v + (v < 0 ? -0.5 : 0.5));  // half away from zero: in double the sum is exact
  }
  return in.finite && detail::finite(out.d);
}

inline bool quantize(const float* x, q4_0& out) noexcept {
  const detail::block_input<32> in(x);
  const float d = in.peak() / -8, id = detail::reciprocal(d);
  out.d = f16(d);
  std::array<std::uint8_t, 32> q;
  for (std::size_t j = 0; j < 32; ++j) q[j] = detail::truncated(detail::product(in.x[j], id) + 8.5f, 15);
  detail::pack_nibbles(q, out.qs);
  return in.finite && detail::finite(out.d);
}

inline bool quantize(const float* x, q4_1& out) noexcept {
  const detail::block_input<32> in(x);
  const float low = in.lowest(), d = (in.highest() - low) / 15, id = detail::reciprocal(d);
  out.d = f16(d);
  out.m = f16(low);
  std::array<std::uint8_t, 32> q;
  for (std::size_t j = 0; j < 32; ++j) q[j] = detail::truncated(detail::product(in.x[j] - low, id) + 0.5f, 15);
  detail::pack_nibbles(q, out.qs);
  return in.finite && detail::finite(out.d) && detail::finite(out.m);
}

inline bool quantize(const float* x, q5_0& out) noexcept {
  const detail::block_input<32> in(x);
  const float d = in.peak() / -16, id = detail::reciprocal(d);
  out.d = f16(d);
  std::array<std::uint8_t, 32> q;
  for (std::size_t j = 0; j < 32; ++j) q[j] = detail::truncated(detail::product(in.x[j], id) + 16.5f, 31);
  detail::pack_nibbles(q, out.qs);
  detail::pack_fifth_bits(q, out.qh);
  return in.finite && detail::finite(out.d);
}

inline bool quantize(const float* x, q5_1& out) noexcept {
  const detail::block_input<32> in(x);
  const float low = in.lowest(), d = (in.highest() - low) / 31, id = detail::reciprocal(d);
  out.d = f16(d);
  out.m = f16(low);
  std::array<std::uint8_t, 32> q;
  for (std::size_t j = 0; j < 32; ++j) q[j] = detail::truncated(detail::product(in.x[j] - low, id) + 0.5f, 31);
  detail::pack_nibbles(q, out.qs);
  detail::pack_fifth_bits(q, out.qh);
  return in.finite && detail::finite(out.d) && detail::finite(out.m);
}

inline bool quantize(const float* x, mxfp4& out) noexcept {
  constexpr std::array<float, 16> values{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const detail::block_input<32> in(x);
  const float largest = std::fabs(in.peak());
  // The largest values, 12 and 8, are for the two binades at the top of the block.
  out.e = largest > 0 ? static_cast<std::uint8_t>(detail::clamped(std::floor(std::log2(largest)) - 2 + 127, 0, 254)) : std::uint8_t{0};
  const float d = out.e < 2 ? std::bit_cast<float>(0x00200000u << out.e) : std::bit_cast<float>((out.e - 1u) << 23);  // 2^(e - 128)
  std::array<std::uint8_t, 32> q{};
  for (std::size_t j = 0; j < 32; ++j)
    for (std::size_t i = 1; i < values.size(); ++i)
      if (std::fabs(detail::product(values[i], d) - in.x[j]) < std::fabs(detail::product(values[q[j]], d) - in.x[j]))
        q[j] = static_cast<std::uint8_t>(i);
  detail::pack_nibbles(q, out.qs);
  return in.finite;
}

namespace detail {

/// x ≈ scale · l − minus, with whole l.
struct affine_fit {
  float scale = 0, minus = 0;
};
/// The best of a few fits with l in 0 … most by weighted squared error, for 32 values whose offset may only be negative. Each step tries
/// slightly more or fewer steps across the range of the values, and solves for scale and offset.
inline affine_fit fit_affine(const float* x, int most, float first_step, int steps, std::uint8_t* l) noexcept {
  constexpr std::size_t n = 32;
  std::array<float, n> weight;
  float squares = 0;
  for (std::size_t i = 0; i < n; ++i) squares += product(x[i], x[i]);
  const float mean = std::sqrt(squares / n);
  for (std::size_t i = 0; i < n; ++i) weight[i] = mean + std::fabs(x[i]);

  float low = x[0], high = x[0], sum_w = 0, sum_x = 0;
  for (std::size_t i = 0; i < n; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    sum_w += weight[i];
    sum_x += product(weight[i], x[i]);
  }
  if (low > 0) low = 0;
  std::fill(l, l + n, std::uint8_t{0});
  if (high == low) return {0, -low};

  const auto round_all = [&](float inverse, std::uint8_t* to) {
    for (std::size_t i = 0; i < n; ++i) to[i] = static_cast<std::uint8_t>(nearest(product(inverse, x[i] - low), 0, most));
  };
  const auto error_of = [&](float scale, float offset, const std::uint8_t* of) {
    float error = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const float difference = product(scale, of[i]) + offset - x[i];
      error += product(weight[i], product(difference, difference));
    }
    return error;
  };
  float inverse = static_cast<float>(most) / (high - low), scale = 1 / inverse;
  round_all(inverse, l);
  float best = error_of(scale, low, l);
  std::array<std::uint8_t, n> tried;
  for (int step = 0; step <= steps; ++step) {
    inverse = (first_step + product(0.1f, static_cast<float>(step)) + static_cast<float>(most)) / (high - low);
    round_all(inverse, tried.data());
    float sum_l = 0, sum_ll = 0, sum_xl = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const float wl = product(weight[i], tried[i]);
      sum_l += wl;
      sum_ll += product(wl, tried[i]);
      sum_xl += product(wl, x[i]);
    }
    const float determinant = product(sum_w, sum_ll) - product(sum_l, sum_l);
    if (!(determinant > 0)) continue;
    float new_scale = (product(sum_w, sum_xl) - product(sum_x, sum_l)) / determinant;
    float offset = (product(sum_ll, sum_x) - product(sum_l, sum_xl)) / determinant;
    if (offset > 0) offset = 0, new_scale = sum_xl / sum_ll;
    const float error = error_of(new_scale, offset, tried.data());
    if (!(error < best)) continue;
    std::copy(tried.begin(), tried.end(), l);
    best = error, scale = new_scale, low = offset;
  }
  return {scale, -low};
}

/// Scales of eight sub-blocks of 32, quantised to six bits, and the values at these scales: what q4_k and q5_k have in common.
template <class Block>
void quantize_affine(const float* x, int most, float first_step, int steps, Block& out, std::array<std::uint8_t, 256>& l) noexcept {
  std::array<affine_fit, 8> fits;
  float top_scale = 0, top_minus = 0;
  for (std::size_t b = 0; b < 8; ++b) {
    fits[b] = fit_affine(x + 32 * b, most, first_step, steps, l.data() + 32 * b);
    top_scale = fits[b].scale > top_scale ? fits[b].scale : top_scale;
    top_minus = fits[b].minus > top_minus ? fits[b].minus : top_minus;
  }
  const float inverse_scale = top_scale > 0 ? 63 / top_scale : 0, inverse_minus = top_minus > 0 ? 63 / top_minus : 0;
  out.d = f16(top_scale / 63);
  out.dmin = f16(top_minus / 63);
  std::fill(std::begin(out.scales), std::end(out.scales), std::uint8_t{0});
  for (std::size_t b = 0; b < 8; ++b) {
    const auto s = static_cast<unsigned>(nearest(product(inverse_scale, fits[b].scale), 0, 63));
    const auto m = static_cast<unsigned>(nearest(product(inverse_minus, fits[b].minus), 0, 63));
    if (b < 4) {
      out.scales[b] = static_cast<std::uint8_t>(s);
      out.scales[b + 4] = static_cast<std::uint8_t>(m);
    } else {  // low four bits in a byte of their own, the upper two on top of the first four sub-blocks'
      out.scales[b + 4] = static_cast<std::uint8_t>((s & 15u) | (m & 15u) << 4);
      out.scales[b - 4] = static_cast<std::uint8_t>(out.scales[b - 4] | (s >> 4) << 6);
      out.scales[b] = static_cast<std::uint8_t>(out.scales[b] | (m >> 4) << 6);
    }
    const float d = product(to_float(out.d), static_cast<float>(s));
    if (d == 0) continue;
    const float minus = product(to_float(out.dmin), static_cast<float>(m));
    for (std::size_t i = 32 * b; i < 32 * (b + 1); ++i) l[i] = static_cast<std::uint8_t>(nearest((x[i] + minus) / d, 0, most));
  }
}

/// The scale of 16 values x ≈ scale · l with l in −32 … 31, and l + 32. Best by squared error weighted with x².
inline float fit_symmetric(const float* x, std::uint8_t* l) noexcept {
  constexpr std::size_t n = 16;
  float largest = 0, peak = 0;
  for (std::size_t i = 0; i < n; ++i)
    if (std::fabs(x[i]) > largest) largest = std::fabs(x[i]), peak = x[i];
  std::fill(l, l + n, std::uint8_t{0});
  if (largest < 1e-15f) return 0;

  std::array<float, n> w, wx;
  for (std::size_t i = 0; i < n; ++i) {
    w[i] = product(x[i], x[i]);
    wx[i] = product(w[i], x[i]);
  }
  float scale = 0, best = 0;
  std::array<int, n> tried;
  for (const int step : {0, -9, -8, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7, 8, 9}) {
    const float inverse = -(32 + product(0.1f, static_cast<float>(step))) / peak;
    float sum_xl = 0, sum_ll = 0;
    for (std::size_t i = 0; i < n; ++i) {
      tried[i] = nearest(product(inverse, x[i]), -32, 31);
      const auto value = static_cast<float>(tried[i]);
      sum_xl += product(wx[i], value);
      sum_ll += product(product(w[i], value), value);
    }
    if (step != 0 && !(sum_ll > 0 && product(sum_xl, sum_xl) > product(best, sum_ll))) continue;
    for (std::size_t i = 0; i < n; ++i) l[i] = static_cast<std::uint8_t>(tried[i] + 32);
    scale = sum_ll != 0 ? sum_xl / sum_ll : 0;
    best = product(scale, sum_xl);
  }
  return scale;
}

}  // namespace detail

inline bool quantize(const float* x, q4_k& out) noexcept {
  const detail::block_input<256> in(x);
  std::array<std::uint8_t, 256> l;
  detail::quantize_affine(in.x.data(), 15, -1.0f, 20, out, l);
  for (std::size_t i = 0; i < 128; ++i) {  // 64 elements share 32 bytes
    const std::size_t first = i / 32 * 64 + i % 32;
    out.qs[i] = static_cast<std::uint8_t>(l[first] | l[first + 32] << 4);
  }
  return in.finite && detail::finite(out.d) && detail::finite(out.dmin);
}

inline bool quantize(const float* x, q5_k& out) noexcept {
  const detail::block_input<256> in(x);
  std::array<std::uint8_t, 256> l;
  detail::quantize_affine(in.x.data(), 31, -0.5f, 15, out, l);
  for (std::size_t i = 0; i < 128; ++i) {
    const std::size_t first = i / 32 * 64 + i % 32;
    out.qs[i] = static_cast<std::uint8_t>((l[first] & 15u) | (l[first + 32] & 15u) << 4);
  }
  std::fill(std::begin(out.qh), std::end(out.qh), std::uint8_t{0});
  for (std::size_t i = 0; i < 256; ++i) out.qh[i % 32] = static_cast<std::uint8_t>(out.qh[i % 32] | (l[i] >> 4) << i / 32);
  return in.finite && detail::finite(out.d) && detail::finite(out.dmin);
}

inline bool quantize(const float* x, q6_k& out) noexcept {
  const detail::block_input<256> in(x);
  std::array<std::uint8_t, 256> l;
  std::array<float, 16> scales;
  float largest = 0, peak = 0;
  for (std::size_t b = 0; b < 16; ++b) {
    scales[b] = detail::fit_symmetric(in.x.data() + 16 * b, l.data() + 16 * b);
    if (std::fabs(scales[b]) > largest) largest = std::fabs(scales[b]), peak = scales[b];
  }
  out = {};
  if (largest < 1e-15f) return in.finite;
  const float inverse = -128 / peak;
  out.d = f16(1 / inverse);
  for (std::size_t b = 0; b < 16; ++b) {
    out.scales[b] = static_cast<std::int8_t>(detail::nearest(detail::product(inverse, scales[b]), -128, 127));
    const float d = detail::product(to_float(out.d), out.scales[b]);
    if (d == 0) continue;
    for (std::size_t i = 16 * b; i < 16 * (b + 1); ++i) l[i] = static_cast<std::uint8_t>(detail::nearest(in.x[i] / d, -32, 31) + 32);
  }
  for (std::size_t half = 0; half < 2; ++half)
    for (std::size_t i = 0; i < 32; ++i) {
      const std::uint8_t* const q = l.data() + 128 * half + i;
      out.ql[64 * half + i] = static_cast<std::uint8_t>((q[0] & 15u) | (q[64] & 15u) << 4);
      out.ql[64 * half + i + 32] = static_cast<std::uint8_t>((q[32] & 15u) | (q[96] & 15u) << 4);
      out.qh[32 * half + i] = static_cast<std::uint8_t>(q[0] >> 4 | q[32] >> 4 << 2 | q[64] >> 4 << 4 | q[96] >> 4 << 6);
    }
  return in.finite && detail::finite(out.d);
}

}  // namespace outrider
