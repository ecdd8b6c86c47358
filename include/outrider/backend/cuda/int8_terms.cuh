// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What passes between the warps that share a group in int8_split.cuh: the terms of a part, which are all that its float steps take. For one
// output they are the exact sum of products, the scale and the block's d; in formats with minimums also the minimum and the block's sum.
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/int8_fragments.cuh"
#include "outrider/backend/cuda/int8_shape.cuh"
#include "outrider/core/int8.hpp"

namespace outrider::device {

/// The shared memory of a dot warp, in words, for m rows of x: the stages of its weights, those of the rows of x, and twice the terms of a
/// unit of 8 parts, which one round writes and the next one reads.
template <class W>
struct int8_split {
  using format = int8_format<W>;
  static constexpr int unit_parts = 8, stages = 3, x_stages = 2;
  static constexpr int stage_words = int8_shape<W, 1, 2>::stage_words;
  /// 4 words more than the blocks of a row, so that the lanes of a fragment read from different banks.
  static constexpr int block_words = static_cast<int>(sizeof(int8_block) / 4), row_words = unit_parts * block_words + 4;

  /// A chain warp has two rows of x: lane l has row l / 2 of the group and row l % 2 of the pair.
  OUTRIDER_HD static constexpr int pairs(int m) { return (m + 1) / 2; }

  /// The terms of a unit. First the scales of the group's rows and the minimums, of four parts together; then the sums, of which a lane of a
  /// fragment has the four for two rows and a pair, in an order in which neither those that write them nor those that read them meet in a
  /// bank; then d of the rows of x, and the sums where minimums want them.
  static constexpr int kinds = format::sums + has_minimum<W>, x_kinds = 1 + has_minimum<W>;
  OUTRIDER_HD static constexpr int scale_at(int half, int kind, int row) { return 4 * ((half * kinds + kind) * 16 + row); }
  OUTRIDER_HD static constexpr int sums_at(int pair, int part, int s) {
    return scale_at(2, 0, 0) + 32 * ((pair * unit_parts + part) * format::sums + s);
  }
  OUTRIDER_HD static constexpr int within_sums(int pair, int lane) { return (lane + 8 * pair) % 32; }
  OUTRIDER_HD static constexpr int x_at(int m, int x_row, int kind, int part) {
    return sums_at(pairs(m), 0, 0) + unit_parts * (x_row * x_kinds + kind) + part;
  }

  OUTRIDER_HD static constexpr int terms_words(int m) { return x_at(m, m, 0, 0); }
  OUTRIDER_HD static constexpr int terms_at(int m) { return stages * stage_words + x_stages * m * row_words; }
  OUTRIDER_HD static constexpr int warp_words(int m) { return terms_at(m) + 2 * terms_words(m); }

  [[nodiscard]] static constexpr std::size_t shared_bytes(int m, int dot_warps) noexcept {
    return 4 * static_cast<std::size_t>(dot_warps * warp_words(m));
  }

  /// How many dot warps a block has if `together` blocks are to have room on a multiprocessor: of its registers, and of 216 KiB; 99 KiB are
  /// what every device gives a block.
  static constexpr int dot_warps(int m, std::size_t parts, std::size_t together) noexcept {
    const int bytes = 1024 * (together <= 2 ? 99 : 71);
    int warps = together <= 2 ? 8 : 5;
    while (warps > 1 && (4 * warps * warp_words(m) > bytes || static_cast<std::size_t>(unit_parts * (warps - 1)) >= parts)) --warps;
    return warps;
  }
  /// The warps of the largest block.
  static constexpr int most_warps() noexcept {
    int most = 0;
    for (int m = 1; m <= 8; ++m)
      if (const int warps = dot_warps(m, 64, 1) + pairs(m); warps > most) most = warps;
    return most;
  }
};

/// The terms of the unit whose weights and rows of x have arrived at words[head] and words[x_at], for m <= 8 rows of x, from words[terms] on.
template <class W, class Words>
__device__ void compute_terms(const Words& words, int head, int x_at, int terms, int m) {
  using format = int8_format<W>;
  using shape = int8_split<W>;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int code_at = 16 * t + (2 * g ^ (t & 2) << 2);
  // Rows that are missing are read as the last one; nobody takes their sums.
  const int x_row = x_at + (g < m ? g : m - 1) * shape::row_words;
  const int sums_to = terms + shape::sums_at(t, 0, 0) + shape::within_sums(t, 4 * g), scales_to = terms + 8 * g + t;
  const auto part_at = [&](int i) { return head + format::head_words + i * format::part_words; };

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int c[4][format::sums][4] = {};  // four parts at a time, since none is done for long
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int part = 4 * half + i, block = x_row + part * shape::block_words + t;
      int8_columns columns[2];
      read_columns<W, 2>(columns, words, part_at(part), code_at, 2 * g, t);
      const std::uint32_t a[4] = {columns[0].low, columns[1].low, columns[0].high, columns[1].high};
      const std::uint32_t b[2] = {words[block], words[block + 4]};
#pragma unroll
      for (int s = 0; s < format::sums; ++s)
        if constexpr (format::sums == 1)
          mma_s8(c[i][s], a, b);
        else
          mma_s8(c[i][s], a, {s == 0 ? b[0] : 0, s == 1 ? b[1] : 0});
    }
    if (2 * t < m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int s = 0; s < format::sums; ++s)
          words.store(sums_to + 32 * ((4 * half + i) * format::sums + s), make_int4(c[i][s][0], c[i][s][1], c[i][s][2], c[i][s][3]));
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int part = 4 * half + t;
    const int8_scales<W, 2> scales = read_scales<W, 2>(words, head, part_at(part), 2 * g);
#pragma unroll
    for (int kind = 0; kind < shape::kinds; ++kind)
#pragma unroll
      for (int r = 0; r < 2; ++r) words[scales_to + shape::scale_at(half, kind, r)] = __float_as_uint(scales.of[kind][r]);
    if (g < m)
#pragma unroll
      for (int kind = 0; kind < shape::x_kinds; ++kind)
        words[terms + shape::x_at(m, g, kind, part)] =
            words[x_row + part * shape::block_words + static_cast<int>(offsetof(int8_block, d) / 4) + kind];
  }
}

/// acc after the step of one sum.
template <class W>
__device__ float product_step(int sum, float scale, float d, float acc) {
  constexpr float unit = int8_format<W>::unit;
  return fmaf(__fmul_rn(static_cast<float>(sum), 1 / unit), __fmul_rn(scale, d), acc);  // the first product is exact: |sum| < 2²²
}

/// The terms of a unit for one output.
template <class W>
struct int8_terms {
  using shape = int8_split<W>;
  static constexpr int sums = int8_format<W>::sums;
  int sum[8][sums];
  float4 scale[2][shape::kinds], x[2][shape::x_kinds];

  template <class Words>
  __device__ void load(const Words& words, int sums_at, int scales_at, int x_at) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int s = 0; s < sums; ++s) sum[i][s] = static_cast<int>(words[sums_at + 32 * (i * sums + s)]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int kind = 0; kind < shape::kinds; ++kind)
        scale[half][kind] = words.template load<float4>(scales_at + shape::scale_at(half, kind, 0));
#pragma unroll
      for (int kind = 0; kind < shape::x_kinds; ++kind)
        x[half][kind] = words.template load<float4>(x_at + shape::unit_parts * kind + 4 * half);
    }
  }

  /// acc after the steps of all 8 parts.
  __device__ float added_to(float acc) const {
    const auto part = [](const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; };
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int s = 0; s < sums; ++s) acc = product_step<W>(sum[i][s], part(scale[i / 4][s], i % 4), part(x[i / 4][0], i % 4), acc);
      if constexpr (has_minimum<W>) acc = fmaf(part(scale[i / 4][sums], i % 4), part(x[i / 4][1], i % 4), acc);
    }
    return acc;
  }
};

}  // namespace outrider::device
