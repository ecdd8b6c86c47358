// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Grouped weights and int8 activations: reading codes and scales, and making activations. The products are in int8_tiles-inl.h.
#if defined(OUTRIDER_BACKEND_HIGHWAY_INT8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUTRIDER_BACKEND_HIGHWAY_INT8_INL_H_
#undef OUTRIDER_BACKEND_HIGHWAY_INT8_INL_H_
#else
#define OUTRIDER_BACKEND_HIGHWAY_INT8_INL_H_
#endif

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "outrider/backend/highway/compat-inl.h"
#include "outrider/core/grouped.hpp"
#include "outrider/core/int8.hpp"

HWY_BEFORE_NAMESPACE();
namespace outrider {
namespace HWY_NAMESPACE {

using words = hn::ScalableTag<std::int32_t>;
using shorts = hn::Repartition<std::int16_t, words>;
using code_bytes = hn::Repartition<std::uint8_t, words>;
using word_vec = hn::Vec<words>;
using short_vec = hn::Vec<shorts>;
using code_vec = hn::Vec<code_bytes>;

// Vectors of a line of codes.
constexpr std::size_t line_vectors = group_rows / lanes;

HWY_INLINE word_vec broadcast(const void* four_bytes) {
  std::int32_t word;
  std::memcpy(&word, four_bytes, 4);
  return hn::Set(words(), word);
}

// What a format's codes are.
template <class W>
constexpr bool signed_codes = std::same_as<W, q8_0> || std::same_as<W, iq4_nl> || std::same_as<W, iq4_xs>;
// Codes from 0 on: the largest.
template <class W>
constexpr int largest_code = std::same_as<W, q6_k>   ? 63
                             : std::same_as<W, q5_k> ? 31
                                                     : 15;
/// Part p of a record.
template <class W>
HWY_INLINE const auto& part_at(const grouped<W>& record, [[maybe_unused]] std::size_t p) {
  if constexpr (grouped<W>::parts == 1) {
    return record;
  } else {
    return record.part[p];
  }
}

HWY_INLINE code_vec load_line(const detail::code_line& line, std::size_t v) {
  return hn::BitCast(code_bytes(), hn::LoadU(hn::Repartition<std::uint32_t, words>(), line + v * lanes));
}
template <int Bits>
HWY_INLINE code_vec bits_down(code_vec codes, std::uint8_t mask) {
  const hn::Repartition<std::uint16_t, words> pairs;
  return hn::And(hn::BitCast(code_bytes(), hn::ShiftRight<Bits>(hn::BitCast(pairs, codes))), hn::Set(code_bytes(), mask));
}
template <int Bits>
HWY_INLINE code_vec bits_up(code_vec codes, std::uint8_t mask) {
  const hn::Repartition<std::uint16_t, words> pairs;
  return hn::And(hn::BitCast(code_bytes(), hn::ShiftLeft<Bits>(hn::BitCast(pairs, codes))), hn::Set(code_bytes(), mask));
}

/// The codes of quad F (columns 4F … 4F + 3), vector v of the line: numbers from 0 on, or signed bytes.
template <class W, std::size_t F, class Part>
HWY_INLINE code_vec quad_of(const Part& part, std::size_t v) {
  if constexpr (std::same_as<W, q8_0>) {
    return load_line(part.codes[F], v);
  } else {
    const code_vec line = load_line(part.codes[F % 4], v);
    code_vec codes = F < 4 ? hn::And(line, hn::Set(code_bytes(), 15)) : bits_down<4>(line, 15);
    if constexpr (std::same_as<W, q5_k>) {
      const code_vec high = load_line(part.high, v);
      if constexpr (F <= 4) {
        codes = hn::Or(codes, bits_up<4 - F>(high, 16));
      } else {
        codes = hn::Or(codes, bits_down<F - 4>(high, 16));
      }
    } else if constexpr (std::same_as<W, q6_k>) {
      const code_vec high = load_line(part.high[F / 4], v);
      if constexpr (F % 4 < 2) {
        codes = hn::Or(codes, bits_up<4 - 2 * static_cast<int>(F % 4)>(high, 48));
      } else {
        codes = hn::Or(codes, bits_down<2 * static_cast<int>(F % 4) - 4>(high, 48));
      }
    } else if constexpr (signed_codes<W>) {
      const auto table = hn::LoadDup128(hn::Repartition<std::int8_t, words>(), detail::iq4_values);
      codes = hn::BitCast(code_bytes(), hn::TableLookupBytes(table, codes));
    }
    return codes;
  }
}

/// The scales of a part, or of its half `half`, for vector v of the group's rows.
template <class W, class Part>
HWY_INLINE vec scales_of(const grouped<W>& w, [[maybe_unused]] const Part& part, [[maybe_unused]] std::size_t half, std::size_t v) {
  vec d = load(w.d + v * lanes);
  if constexpr (std::same_as<W, q6_k>) {
    d = hn::Mul(d, load(part.scale[half] + v * lanes));
  } else if constexpr (grouped<W>::parts != 1) {
    d = hn::Mul(d, load(part.scale + v * lanes));
  }
  return d;
}

/// out = the row `row` of w · factor.
template <class W>
void widen_row(float* out, weight_view<grouped<W>> w, std::size_t row, float factor) noexcept {
  constexpr std::size_t parts = grouped<W>::parts;
  const grouped<W>* group = w.group(row / group_rows);
  for (std::size_t p = 0; p < w.cols / 32; ++p) {
    const int8_weights part = part_of(group[p / parts], row % group_rows, p % parts);
    for (std::size_t k = 0; k < 32; k += lanes) {
      vec weights = hn::Mul(set(part.scale[k / 16]), load(part.q + k));  // exact, so that a compiler may fuse it with the sum
      if constexpr (has_minimum<W>) weights = hn::Add(weights, set(part.minimum));
      store(hn::Mul(weights, set(factor)), out + 32 * p + k);
    }
  }
}

/// The int8 blocks of x [32 · blocks], as core/int8.hpp defines them.
inline void quantize_row(int8_block* out, const float* x, std::size_t blocks) noexcept {
  const auto magnitude = [](vec v) HWY_ATTR { return hn::And(hn::BitCast(words(), v), hn::Set(words(), 0x7fffffff)); };
  constexpr std::size_t vectors = 32 / lanes;
  for (std::size_t b = 0; b < blocks; ++b, x += 32) {
    vec v[vectors];
    word_vec largest = hn::Zero(words());
    OUTRIDER_UNROLL
    for (std::size_t i = 0; i < vectors; ++i) {
      v[i] = load(x + i * lanes);
      largest = hn::Max(largest, magnitude(v[i]));
    }
    const auto bits = static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(words(), largest)));
    if (bits >= 0x7f800000u) {  // not finite
      quantize(out[b], x);
      continue;
    }
    float m;
    std::memcpy(&m, &bits, sizeof(m));
    const vec factor = set(m > detail::least_magnitude ? 127.0f / m : 0.0f);
    const hn::Rebind<std::int8_t, floats> narrow;
    std::int32_t half[2] = {};
    for (std::size_t h = 0; h < 2; ++h) {
      word_vec sum = hn::Zero(words());
      OUTRIDER_UNROLL
      for (std::size_t i = h * vectors / 2; i < (h + 1) * vectors / 2; ++i) {
        const word_vec q = hn::NearestInt(hn::Mul(v[i], factor));
        sum = hn::Add(sum, q);
        hn::StoreU(hn::DemoteTo(narrow, q), narrow, out[b].q + i * lanes);
      }
      half[h] = hn::GetLane(hn::SumOfLanes(words(), sum));
      out[b].half_sum[h] = static_cast<std::int16_t>(half[h]);
    }
    out[b].offset = -8 * (half[0] + half[1]);
    out[b].d = m / 127.0f;
    out[b].sum = out[b].d * static_cast<float>(half[0] + half[1]);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace outrider
HWY_AFTER_NAMESPACE();

#endif
