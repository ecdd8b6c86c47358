// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Grouped weights as operand A of the tensor cores' 16 × 32 × 8 product of bytes: a part of a group is exactly one such operand. Of a warp's
// lane, g = lane / 4 names the rows it holds and t = lane % 4 the columns, 4t … 4t + 3 and 16 + 4t … 16 + 4t + 3.
#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "outrider/backend/cuda/device.cuh"
#include "outrider/core/blocks.hpp"
#include "outrider/core/dequantize.hpp"
#include "outrider/core/grouped.hpp"
#include "outrider/core/scalar.hpp"

namespace outrider::device {

/// How a record of core/grouped.hpp lies in 32-bit words: a head with the scales of 256 columns, in formats that have such, and the parts. A
/// part begins with its lines of codes, then of high bits; the scales of 32 or 16 columns and minimums follow.
template <class W>
struct int8_format {
  static constexpr int code_lines = std::same_as<W, q8_0> ? 8 : 4;
  static constexpr int high_lines = std::same_as<W, q5_k> ? 1 : std::same_as<W, q6_k> ? 2 : 0;
  static constexpr int scales_at = 16 * (code_lines + high_lines);  // within a part
  static constexpr int parts = static_cast<int>(grouped<W>::parts);
  static constexpr int head_words = parts == 1 ? 0 : has_minimum<W> ? 16 : 8;
  static constexpr int record_words = static_cast<int>(sizeof(grouped<W>) / 4);
  static constexpr int part_words = (record_words - head_words) / parts;

  /// Sums that a product keeps apart, each with its own scale.
  static constexpr int sums = static_cast<int>(32 / scale_columns<W>);
  /// The bytes of a fragment are `unit` times the integers of the definition: codes that are meant to be negative are shifted to the top of
  /// their byte, where flipping its sign bit subtracts half their range.
  static constexpr int unit = std::same_as<W, q4_0> ? 16 : std::same_as<W, q6_k> ? 4 : 1;
};

/// Eight columns of a row, four bytes a word: 4t … and 16 + 4t ….
struct int8_columns {
  std::uint32_t low, high;
};

/// The values of IQ4's eight codes in a word. A byte permutation looks four of them up in half of the table; a third one picks the half.
__device__ inline int8_columns iq4_columns(std::uint32_t codes) {
  constexpr auto word = [](std::uint64_t values, int i) { return static_cast<std::uint32_t>(values >> 32 * i); };
  const std::uint32_t index = codes & 0x77777777u, half = (codes >> 1 & 0x44444444u) | 0x32103210u;
  std::uint32_t four[2];  // in the order of the nibbles
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t lower = __byte_perm(word(outrider::detail::iq4_low, 0), word(outrider::detail::iq4_low, 1), index >> 16 * i);
    const std::uint32_t upper = __byte_perm(word(outrider::detail::iq4_high, 0), word(outrider::detail::iq4_high, 1), index >> 16 * i);
    four[i] = __byte_perm(lower, upper, half >> 16 * i);
  }
  return {__byte_perm(four[0], four[1], 0x6420), __byte_perm(four[0], four[1], 0x7531)};
}

/// What the words of one row make of columns t. Beside the word of codes there is, in some formats, `more`: high bits, or the second codes.
template <class W>
__device__ int8_columns columns_of(std::uint32_t codes, const std::uint32_t (&more)[2], int t) {
  if constexpr (std::same_as<W, q4_0>) return {(codes ^ 0x88888888u) << 4 & 0xf0f0f0f0u, (codes ^ 0x88888888u) & 0xf0f0f0f0u};
  if constexpr (std::same_as<W, q8_0>) return {codes, more[0]};
  if constexpr (std::same_as<W, q4_k>) return {codes & 0x0f0f0f0fu, codes >> 4 & 0x0f0f0f0fu};
  if constexpr (std::same_as<W, q5_k>)
    return {(codes & 0x0f0f0f0fu) | (more[0] << (4 - t) & 0x10101010u), (codes >> 4 & 0x0f0f0f0fu) | (more[0] >> t & 0x10101010u)};
  if constexpr (std::same_as<W, q6_k>)
    return {((codes << 2 & 0x3c3c3c3cu) | (more[0] << (6 - 2 * t) & 0xc0c0c0c0u)) ^ 0x80808080u,
            ((codes >> 2 & 0x3c3c3c3cu) | (more[1] << (6 - 2 * t) & 0xc0c0c0c0u)) ^ 0x80808080u};
  if constexpr (std::same_as<W, iq4_nl> || std::same_as<W, iq4_xs>) return iq4_columns(codes);
}

/// to = words[at …], one of each of a lane's rows, which are neighbours.
template <int Rows, class Words>
__device__ void read_rows(std::uint32_t (&to)[Rows], const Words& words, int at) {
  static_assert(Rows == 1 || Rows == 2);
  if constexpr (Rows == 2) {
    const uint2 both = words.template load<uint2>(at);
    to[0] = both.x, to[1] = both.y;
  } else {
    to[0] = words[at];
  }
}

/// The columns t of a lane's rows, from the part that begins at words[part]: row `row` on, whose word of the code line t is
/// words[part + code_at].
template <class W, int Rows, class Words>
__device__ void read_columns(int8_columns (&to)[Rows], const Words& words, int part, int code_at, int row, int t) {
  using format = int8_format<W>;
  std::uint32_t codes[Rows], more[2][Rows] = {};
  read_rows<Rows>(codes, words, part + code_at);
  if constexpr (std::same_as<W, q8_0>) read_rows<Rows>(more[0], words, part + 64 + code_at);
#pragma unroll
  for (int i = 0; i < format::high_lines; ++i) read_rows<Rows>(more[i], words, part + 64 + 16 * i + row);
#pragma unroll
  for (int r = 0; r < Rows; ++r) to[r] = columns_of<W>(codes[r], {more[0][r], more[1][r]}, t);
}

/// What a part's sums are multiplied by, for a lane's rows: its scales and, behind them in formats with one, the minimum.
template <class W, int Rows>
struct alignas(4 * Rows * (int8_format<W>::sums + has_minimum<W>)) int8_scales {
  float of[int8_format<W>::sums + has_minimum<W>][Rows];
};

/// Halves, or signed bytes, of the rows `row` on in an array that begins at words[at].
template <int Rows, class Words>
__device__ void read_halves(float (&to)[Rows], const Words& words, int at, int row) {
  const std::uint32_t word = words[at + row / 2];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    f16 half;
    half.bits = static_cast<std::uint16_t>(word >> 16 * (Rows == 2 ? r : row % 2));
    to[r] = widen(half);
  }
}
template <int Rows, class Words>
__device__ void read_bytes(float (&to)[Rows], const Words& words, int at, int row) {
  const std::uint32_t word = words[at + row / 4] >> 8 * (row % 4);
#pragma unroll
  for (int r = 0; r < Rows; ++r) to[r] = static_cast<float>(static_cast<std::int8_t>(word >> 8 * r));
}

/// What part_of() of core/grouped.hpp calls scale and minimum, of the rows `row` on of the part at words[part] in the record at words[head].
template <class W, int Rows, class Words>
__device__ int8_scales<W, Rows> read_scales(const Words& words, int head, int part, int row) {
  using format = int8_format<W>;
  int8_scales<W, Rows> out;
  float d[Rows];
  read_halves<Rows>(d, words, format::parts == 1 ? part + format::scales_at : head, row);
#pragma unroll
  for (int i = 0; i < format::sums; ++i) {
    if constexpr (format::parts > 1) read_bytes<Rows>(out.of[i], words, part + format::scales_at + 4 * i, row);
#pragma unroll
    for (int r = 0; r < Rows; ++r) out.of[i][r] = format::parts == 1 ? d[r] : __fmul_rn(d[r], out.of[i][r]);
  }
  if constexpr (has_minimum<W>) {
    constexpr int i = format::sums;
    read_halves<Rows>(d, words, head + 8, row);
    read_bytes<Rows>(out.of[i], words, part + format::scales_at + 4, row);
#pragma unroll
    for (int r = 0; r < Rows; ++r) out.of[i][r] = -__fmul_rn(d[r], out.of[i][r]);
  }
  return out;
}

}  // namespace outrider::device
