// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The shared memory of products with int8 activations: how much of what, and how groups of weights get there.
#pragma once
#include <cstddef>

#include "outrider/backend/cuda/int8_fragments.cuh"
#include "outrider/core/int8.hpp"

namespace outrider::device {

/// How a product is cut for `Tiles` times 8 rows of x and `Rows` rows of weights a lane: 2, a group a warp, or 1, where two warps share a
/// group because there are few.
template <class W, int Tiles, int Rows>
struct int8_shape {
  using format = int8_format<W>;

  /// A stage is 8 parts, of a warp's group and of the rows of x: a record, or eight.
  static constexpr int stage_parts = 8, stage_words = format::head_words + stage_parts * format::part_words;
  /// Few warps want more bytes under way each; a prompt finds its weights in the second-level cache.
  static constexpr int wanted = Tiles == 4 ? 3 : (Rows == 1 ? 16384 : 10240) / (4 * stage_words), stages = wanted < 3 ? 3 : wanted;

  /// Stages of a row of x, and 4 words, so that the lanes of a fragment read from different banks.
  static constexpr int block_words = static_cast<int>(sizeof(int8_block) / 4), row_words = stages * stage_parts * block_words + 4;

  /// The scales of a stage as floats, part by part: those of eight g, and in between as much as lets lanes write to different banks.
  static constexpr int scales_words = static_cast<int>(sizeof(int8_scales<W, Rows>) / 4);
  static constexpr int part_scales = 8 * scales_words + (scales_words > 1 ? 8 : 0);
  static constexpr int warp_words = stages * stage_words + stage_parts * part_scales;

  /// Warps of a block, at most: 99 KiB of shared memory are to be enough, what every device has.
  static constexpr int fitting = (99 * 256 - 8 * Tiles * row_words) / warp_words, warps_for = Rows == 1 ? 4 : 8;
  static constexpr int warps = fitting < warps_for ? fitting : warps_for;

  [[nodiscard]] static constexpr std::size_t shared_bytes(std::size_t x_rows, std::size_t warps_of_block) noexcept {
    return 4 * (x_rows * row_words + warps_of_block * warp_words);
  }
};

/// A lane's share of copying a stage of weights, in chunks of 16 bytes. In shared memory the bytes keep their order, but for the code lines 2,
/// 3, 6 and 7, whose halves change places: then the lanes of a fragment, four lines and eight rows or pairs of rows, read from different banks.
template <class W, int Tiles, int Rows>
struct int8_copies {
  using format = int8_format<W>;
  static constexpr int head = format::head_words / 4, part = format::part_words / 4, lines = format::code_lines + format::high_lines;
  // With one row a lane only half of each line is needed, and half of the scales behind the lines in formats without a head.
  static constexpr int line_chunks = 4 * Rows / 2, tail_chunks = format::parts == 1 ? Rows : part - 4 * lines;
  static constexpr int kept = lines * line_chunks + tail_chunks, all = head + int8_shape<W, Tiles, Rows>::stage_parts * kept;
  static constexpr int count = (all + 31) / 32;

  int from[count], to[count];  // from counts from the lane's own number on, so that it is a constant where every chunk is copied
  bool last;                   // whether the lane has a share in the last turn

  __device__ int8_copies(int lane, int half) : last(lane + 32 * (count - 1) < all) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int u = lane + 32 * i, p = (u - head) / kept, v = (u - head) % kept, line = v / line_chunks;
      const bool in_line = u >= head && line < lines;
      int shift = 0;  // from the number of a chunk among those copied to its number in the stage
      if (Rows == 1 && u >= head)
        shift = p * (part - kept) + (in_line ? 2 * line + 2 * half : (4 - line_chunks) * lines + (format::parts == 1 ? half : 0));
      from[i] = 32 * i + shift;
      const int chunk = u + shift, before = head + p * part;
      to[i] = in_line && (line & 2) != 0 ? ((chunk - before) ^ 2) + before : chunk;
    }
  }
};

}  // namespace outrider::device
