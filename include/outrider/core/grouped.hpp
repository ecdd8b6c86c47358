// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Quantised weights in the order in which products want them. 16 rows of a matrix form a group; a record holds one block of each of them. Its
// codes lie in lines of 64 bytes in which row r owns the 32-bit word r: four neighbouring columns, or a nibble of eight. A line is one, two or
// four vectors, whatever the machine has, and lane r of a result is row r: nothing is ever added across lanes. What the codes and scales
// stand for is what dequantize.hpp says of the blocks they come from, bit for bit; no format grows by more than 3 %.
#pragma once
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "outrider/core/blocks.hpp"
#include "outrider/core/dequantize.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/space.hpp"
#include "outrider/core/view.hpp"

namespace outrider {

static_assert(std::endian::native == std::endian::little, "outrider: the words of a record are used as bytes, lowest first");

/// Rows of a group.
inline constexpr std::size_t group_rows = 16;

namespace detail {
/// Row r's word of a line: for nibbles line c (0 … 3) has columns 4c … 4c + 3 in the low halves of its bytes and 16 more in the high ones,
/// for bytes line c (0 … 7) has columns 4c … 4c + 3.
using code_line = std::uint32_t[group_rows];
}  // namespace detail

/// A record: one block W of each row of a group. Its columns come in `parts` of 32.
template <class W>
struct grouped;

template <class W>
  requires std::same_as<W, q4_0> || std::same_as<W, iq4_nl>
struct grouped<W> {
  static constexpr std::size_t elements = 32, parts = 1;
  detail::code_line codes[4];
  f16 d[group_rows];
};
template <>
struct grouped<q8_0> {
  static constexpr std::size_t elements = 32, parts = 1;
  detail::code_line codes[8];
  f16 d[group_rows];
};
template <>
struct grouped<q4_k> {
  static constexpr std::size_t elements = 256, parts = 8;
  f16 d[group_rows], dmin[group_rows];
  struct part_type {
    detail::code_line codes[4];
    std::int8_t scale[group_rows], minimum[group_rows];
  } part[parts];
};
template <>
struct grouped<q5_k> {
  static constexpr std::size_t elements = 256, parts = 8;
  f16 d[group_rows], dmin[group_rows];
  struct part_type {
    detail::code_line codes[4], high;  // bit f of a byte of `high` belongs to columns 4f … 4f + 3
    std::int8_t scale[group_rows], minimum[group_rows];
  } part[parts];
};
template <>
struct grouped<q6_k> {
  static constexpr std::size_t elements = 256, parts = 8;
  f16 d[group_rows];
  struct part_type {
    detail::code_line codes[4], high[2];  // bits 2c and 2c + 1 of a byte of high[h] belong to columns 16h + 4c … 16h + 4c + 3
    std::int8_t scale[2][group_rows];     // of columns 0 … 15, 16 … 31
  } part[parts];
};
template <>
struct grouped<iq4_xs> {
  static constexpr std::size_t elements = 256, parts = 8;
  f16 d[group_rows];
  struct part_type {
    detail::code_line codes[4];
    std::int8_t scale[group_rows];
  } part[parts];
};

static_assert(sizeof(grouped<q4_0>) == 16 * sizeof(q4_0) && sizeof(grouped<q8_0>) == 16 * sizeof(q8_0));
static_assert(sizeof(grouped<q6_k>) == 16 * sizeof(q6_k) && sizeof(grouped<iq4_nl>) == 16 * sizeof(iq4_nl));
static_assert(sizeof(grouped<q4_k>) == 2368 && sizeof(grouped<q5_k>) == 2880 && sizeof(grouped<iq4_xs>) == 2208);

/// Columns under one scale, and whether a format has minimums.
template <class W>
inline constexpr std::size_t scale_columns = std::same_as<W, q6_k> ? 16 : 32;
template <class W>
inline constexpr bool has_minimum = std::same_as<W, q4_k> || std::same_as<W, q5_k>;

/// A matrix stored in groups: ⌈rows / 16⌉ of them, the last one filled up with rows of zeros. Group g starts at data + g * stride.
template <class W, class Space>
struct weight_view<grouped<W>, Space> {
  const grouped<W>* data = nullptr;
  std::size_t rows = 0, cols = 0, stride = 0;  // stride counts records, cols / elements of them or more

  [[nodiscard]] OUTRIDER_HD constexpr std::size_t groups() const noexcept { return (rows + group_rows - 1) / group_rows; }
  [[nodiscard]] OUTRIDER_HD constexpr const grouped<W>* group(std::size_t g) const noexcept { return data + g * stride; }
  /// Rows first … first + count - 1; first is a multiple of 16.
  [[nodiscard]] OUTRIDER_HD constexpr weight_view slice_rows(std::size_t first, std::size_t count) const noexcept {
    OUTRIDER_ASSERT(first % group_rows == 0 && first <= rows && count <= rows - first);
    return {data + first / group_rows * stride, count, cols, stride};
  }
};

namespace detail {

OUTRIDER_HD inline std::uint32_t word_at(const void* bytes, std::size_t i) noexcept {
  std::uint32_t word;
  std::memcpy(&word, static_cast<const std::uint8_t*>(bytes) + 4 * i, 4);
  return word;
}
/// Four codes of the low, or the high, nibbles of a word.
OUTRIDER_HD constexpr std::uint32_t nibbles(std::uint32_t word, bool high) noexcept { return (high ? word >> 4 : word) & 0x0f0f0f0fu; }

template <class W>
requires std::same_as<W, q4_0> || std::same_as<W, iq4_nl> OUTRIDER_HD void put_row(grouped<W>& out, std::size_t r,
                                                                                   const W& block) noexcept {
  for (std::size_t c = 0; c < 4; ++c) out.codes[c][r] = word_at(block.qs, c);
  out.d[r] = block.d;
}
OUTRIDER_HD inline void put_row(grouped<q8_0>& out, std::size_t r, const q8_0& block) noexcept {
  for (std::size_t c = 0; c < 8; ++c) out.codes[c][r] = word_at(block.qs, c);
  out.d[r] = block.d;
}
/// Columns of part p of a Q4_K or Q5_K: its bytes hold those of an even part low and those of the odd part behind it high.
template <class W>
OUTRIDER_HD void put_nibbles(code_line (&codes)[4], std::size_t r, const W& block, std::size_t p) noexcept {
  const std::uint8_t* bytes = block.qs + 32 * (p / 2);
  for (std::size_t c = 0; c < 4; ++c)
    codes[c][r] = nibbles(word_at(bytes, c), p % 2 != 0) | nibbles(word_at(bytes, c + 4), p % 2 != 0) << 4;
}
template <class W>
requires std::same_as<W, q4_k> || std::same_as<W, q5_k> OUTRIDER_HD void put_row(grouped<W>& out, std::size_t r, const W& block) noexcept {
  out.d[r] = block.d;
  out.dmin[r] = block.dmin;
  for (std::size_t p = 0; p < 8; ++p) {
    auto& part = out.part[p];
    put_nibbles(part.codes, r, block, p);
    if constexpr (std::same_as<W, q5_k>) {
      part.high[r] = 0;
      for (std::size_t f = 0; f < 8; ++f) part.high[r] |= (word_at(block.qh, f) >> p & 0x01010101u) << f;
    }
    const auto [scale, minimum] = scales_of(block.scales, p);
    part.scale[r] = static_cast<std::int8_t>(scale);
    part.minimum[r] = static_cast<std::int8_t>(minimum);
  }
}
OUTRIDER_HD inline void put_row(grouped<q6_k>& out, std::size_t r, const q6_k& block) noexcept {
  out.d[r] = block.d;
  for (std::size_t p = 0; p < 8; ++p) {
    auto& part = out.part[p];
    const std::size_t h = p / 4, g = p % 4;
    const std::uint8_t *low = block.ql + 64 * h + 32 * (g % 2), *high = block.qh + 32 * h;
    for (std::size_t c = 0; c < 4; ++c) part.codes[c][r] = nibbles(word_at(low, c), g >= 2) | nibbles(word_at(low, c + 4), g >= 2) << 4;
    for (std::size_t half = 0; half < 2; ++half) {
      part.high[half][r] = 0;
      for (std::size_t c = 0; c < 4; ++c) part.high[half][r] |= (word_at(high, 4 * half + c) >> 2 * g & 0x03030303u) << 2 * c;
      part.scale[half][r] = block.scales[2 * p + half];
    }
  }
}
OUTRIDER_HD inline void put_row(grouped<iq4_xs>& out, std::size_t r, const iq4_xs& block) noexcept {
  out.d[r] = block.d;
  for (std::size_t p = 0; p < 8; ++p) {
    for (std::size_t c = 0; c < 4; ++c) out.part[p].codes[c][r] = word_at(block.qs + 16 * p, c);
    out.part[p].scale[r] = static_cast<std::int8_t>(scale_of(block, p));
  }
}

}  // namespace detail

/// out [cols / elements] = the group of the `count` <= 16 rows of w that begin at row `first`; rows that are missing become zeros.
template <class W>
void group(grouped<W>* out, weight_view<W> w, std::size_t first, std::size_t count) noexcept {
  for (std::size_t b = 0; b < w.cols / W::elements; ++b) {
    if (count < group_rows) out[b] = {};
    for (std::size_t r = 0; r < count; ++r) detail::put_row(out[b], r, w.row(first + r)[b]);
  }
}

/// 32 weights of a row as an int8 product sees them: w(k) = scale[k / 16] · q[k], plus the minimum in formats with one.
struct int8_weights {
  std::int8_t q[32];
  float scale[2], minimum;
};

namespace detail {

/// The 32 codes of nibble lines, in order.
OUTRIDER_HD inline void read_nibbles(std::int8_t* q, const code_line (&codes)[4], std::size_t row) noexcept {
  for (std::size_t k = 0; k < 16; ++k) {
    const std::uint32_t byte = codes[k / 4][row] >> 8 * (k % 4) & 255;
    q[k] = static_cast<std::int8_t>(byte & 15);
    q[k + 16] = static_cast<std::int8_t>(byte >> 4);
  }
}

}  // namespace detail

/// Part p of row `row` of a record.
template <class W>
[[nodiscard]] OUTRIDER_HD int8_weights part_of(const grouped<W>& record, std::size_t row, [[maybe_unused]] std::size_t p) noexcept {
  using namespace detail;
  int8_weights out{};
  const float d = to_float(record.d[row]);
  out.scale[0] = out.scale[1] = d;
  if constexpr (std::same_as<W, q8_0>) {
    for (std::size_t c = 0; c < 8; ++c) std::memcpy(out.q + 4 * c, &record.codes[c][row], 4);
  } else if constexpr (grouped<W>::parts == 1) {
    read_nibbles(out.q, record.codes, row);
    for (std::int8_t& q : out.q) q = std::same_as<W, q4_0> ? static_cast<std::int8_t>(q - 8) : static_cast<std::int8_t>(iq4_value(q));
  } else {
    const auto& part = record.part[p];
    read_nibbles(out.q, part.codes, row);
    if constexpr (std::same_as<W, q5_k>)
      for (std::size_t k = 0; k < 32; ++k)
        out.q[k] = static_cast<std::int8_t>(out.q[k] + 16 * static_cast<int>(part.high[row] >> (8 * (k % 4) + k / 4) & 1));
    if constexpr (std::same_as<W, q6_k>) {
      for (std::size_t k = 0; k < 32; ++k) {
        const std::uint32_t high = part.high[k / 16][row] >> (8 * (k % 4) + 2 * (k % 16 / 4)) & 3;
        out.q[k] = static_cast<std::int8_t>(out.q[k] + 16 * static_cast<int>(high) - 32);
      }
      for (std::size_t h = 0; h < 2; ++h) out.scale[h] = d * to_float(part.scale[h][row]);
    } else {
      out.scale[0] = out.scale[1] = d * to_float(part.scale[row]);
    }
    if constexpr (std::same_as<W, iq4_xs>)
      for (std::int8_t& q : out.q) q = static_cast<std::int8_t>(iq4_value(q));
    if constexpr (has_minimum<W>) out.minimum = -(to_float(record.dmin[row]) * to_float(part.minimum[row]));
  }
  return out;
}

}  // namespace outrider
