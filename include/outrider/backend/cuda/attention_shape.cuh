// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// How attention is cut into blocks. A row's keys are cut into spans, by the positions it sees and the model's shape alone: that decides its
// bits. Which rows share a block, and what goes through the queue's memory at a time, decides none.
#pragma once
#include <cstddef>

#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/queue.hpp"
#include "outrider/core/extents.hpp"
#include "outrider/core/kv_view.hpp"

namespace outrider::device {

inline constexpr std::size_t block_queries = 8;  // that a block takes at most: heads that read one KV head, of neighbouring rows

/// The query heads that read a KV head, in `parts` parts of up to `each`, one a block. Query head h reads KV head h · kv_heads / q_heads; up to
/// 2^16 of either.
struct head_parts {
  unsigned q_heads, kv_heads, parts, each;
  struct range {
    unsigned kv_head, first, count;  // query heads first … first + count - 1
  };

  head_parts(std::size_t queries, std::size_t keys) noexcept
      : q_heads(static_cast<unsigned>(queries)),
        kv_heads(static_cast<unsigned>(keys)),
        parts(static_cast<unsigned>(divide_up(divide_up(queries, keys), block_queries))),
        each(static_cast<unsigned>(divide_up(divide_up(queries, keys), parts))) {}
  /// Parts of all KV heads.
  [[nodiscard]] std::size_t count() const noexcept { return std::size_t{kv_heads} * parts; }
  [[nodiscard]] OUTRIDER_HD range operator[](unsigned part) const noexcept {
    const unsigned kv_head = part / parts, first = first_of(kv_head) + part % parts * each;
    const unsigned end = kv_head + 1 < kv_heads ? first_of(kv_head + 1) : q_heads;
    return {kv_head, first, end > first ? (end - first < each ? end - first : each) : 0};
  }

 private:
  [[nodiscard]] OUTRIDER_HD unsigned first_of(unsigned kv_head) const noexcept { return (kv_head * q_heads + kv_heads - 1) / kv_heads; }
};

/// How long the spans of a row are, by the number of keys it sees: a multiple of 16. Short spans let many blocks read at once, but each writes
/// 4 bytes an element and query head, and the join reads them, where it reads 4 an element and key of 16 bits: of 16 query heads on one KV
/// head a span of 16 keys writes as much as it reads, one of 64 a quarter. So spans are of 16 keys until they fill a device, then there are as
/// many until they have 64 keys, then more of these, and from 126 on they grow again. Eight KV heads of 256 fill it with 32 spans, and have
/// spans of 32 for the 1024 keys of a window; one KV head of 512 and 16 query heads with 64, and has spans of 64 from 3073 keys on.
struct span_lengths {
  static constexpr std::size_t step = 16, long_enough = 64;
  std::size_t most;    // spans of a row, but for one that uneven ends add, and for another where a block's rows begin unevenly: 128 in all
  std::size_t enough;  // for 1024 warps that have 64 elements of a head each: eight a multiprocessor of a large device

  span_lengths(const head_parts& heads, std::size_t head_dim) noexcept : most(126), enough(65536 / (heads.count() * head_dim)) {
    // Fewer for heads of 2^14 elements and more, so that the sums of a block's queries fit into the queue's memory whatever the shape.
    while (most > 2 && (most + 2) * block_queries * (head_dim + 2) * sizeof(float) > queue::scratch_bytes) most = (most + 2) / 2 - 2;
    if (enough > most) enough = most;
    if (enough == 0) enough = 1;
  }
  [[nodiscard]] std::size_t operator()(std::size_t keys) const noexcept {
    const std::size_t least = divide_up(divide_up(keys, most), step), wanted = divide_up(divide_up(keys, enough), step);
    const std::size_t steps = wanted < long_enough / step ? wanted : long_enough / step;
    return step * (steps < least ? least : steps < 1 ? 1 : steps);
  }
};

/// What goes through the queue's memory at a time: neighbouring rows of a pass whose spans have one length, for some parts of the heads. Span i
/// of a row holds those of the positions i · length … (i + 1) · length - 1 that the row sees. Positions fit into 32 bits.
struct attention_piece {
  key_window window;                // of its rows
  unsigned rows, group;             // of the piece, of a block
  unsigned length, spans;           // of a span; that a group of rows may have, a power of two
  unsigned first_part, part_count;  // of `heads`
  head_parts heads;

  [[nodiscard]] OUTRIDER_HD unsigned begin(std::size_t row) const noexcept { return static_cast<unsigned>(window.begin(row)); }
  [[nodiscard]] OUTRIDER_HD unsigned end(std::size_t row) const noexcept { return static_cast<unsigned>(window.end(row)); }
  [[nodiscard]] OUTRIDER_HD unsigned first_span(std::size_t row) const noexcept { return begin(row) / length; }
  /// Of rows first … last, which lie in one group.
  [[nodiscard]] OUTRIDER_HD unsigned span_count(std::size_t first, std::size_t last) const noexcept {
    return begin(first) < end(last) ? (end(last) - 1) / length - first_span(first) + 1 : 0;
  }

  [[nodiscard]] OUTRIDER_HD unsigned groups() const noexcept { return (rows + group - 1) / group; }
  [[nodiscard]] OUTRIDER_HD unsigned queries() const noexcept { return group * heads.each; }  // of a block
  /// Sums that are kept, each of head_dim elements, its weights and its peak.
  [[nodiscard]] std::size_t sums() const noexcept { return std::size_t{groups()} * spans * part_count * queries(); }
};

/// What the spans of a piece's rows come to, in device memory: [groups of rows, spans, parts, queries of a block].
struct span_sums {
  float* sums;    // […, head_dim], of exp(score - peak) · value
  float* peaks;   // the largest score
  float* totals;  // of exp(score - peak)

  span_sums(void* memory, const attention_piece& piece, std::size_t head_dim) noexcept
      : sums(static_cast<float*>(memory)), peaks(sums + piece.sums() * head_dim), totals(peaks + piece.sums()) {}
  /// Of a block's first query; the next span's is `stride` further.
  [[nodiscard]] static __device__ std::size_t index(const attention_piece& piece, std::size_t group, unsigned span,
                                                    unsigned part) noexcept {
    return (group * piece.spans + span) * stride(piece) + part * piece.queries();
  }
  [[nodiscard]] static __device__ unsigned stride(const attention_piece& piece) noexcept { return piece.part_count * piece.queries(); }
};

/// body(first row, piece) for all rows of a pass and all heads. `bytes` hold the sums of the queries of a block at least.
template <class Body>
void for_each_piece(std::size_t bytes, std::size_t rows, const key_window& window, const head_parts& heads, std::size_t head_dim,
                    Body body) {
  const span_lengths lengths(heads, head_dim);
  const auto length_at = [&](std::size_t row) { return lengths(window.end(row) - window.begin(row)); };
  for (std::size_t first = 0, count = 0; first < rows; first += count) {
    count = rows - first;
    while (length_at(first + count - 1) != length_at(first)) --count;
    // As few blocks read a key as can, and all of them have as many rows.
    const std::size_t groups = divide_up(count, block_queries / heads.each), group = divide_up(count, groups);
    attention_piece piece{.window = {window.first_end + first, window.width},
                          .rows = static_cast<unsigned>(count),
                          .group = static_cast<unsigned>(group),
                          .length = static_cast<unsigned>(length_at(first)),
                          .spans = 1,
                          .first_part = 0,
                          .part_count = 0,
                          .heads = heads};
    // A power of two, so that the grid stays the same while a context grows; spans that no row has cost next to nothing.
    for (std::size_t row = 0; row < count; row += group)
      while (piece.spans < piece.span_count(row, (row + group < count ? row + group : count) - 1)) piece.spans *= 2;

    const std::size_t fit = bytes / sizeof(float) / (piece.spans * piece.queries() * (head_dim + 2));  // blocks of a span each
    OUTRIDER_ASSERT(fit != 0);
    const std::size_t all = heads.count(), in_grid = 65535 / heads.each, most = fit < in_grid ? fit : in_grid;
    const std::size_t part_step = all < most ? all : most, row_step = fit / part_step * group;
    for (std::size_t row = 0; row < count; row += row_step)
      for (std::size_t part = 0; part < all; part += part_step) {
        piece.window.first_end = window.first_end + first + row;
        piece.rows = static_cast<unsigned>(count - row < row_step ? count - row : row_step);
        piece.first_part = static_cast<unsigned>(part);
        piece.part_count = static_cast<unsigned>(all - part < part_step ? all - part : part_step);
        body(first + row, piece);
      }
  }
}

}  // namespace outrider::device
