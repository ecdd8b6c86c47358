// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Products of grouped weights with int8 activations. A warp multiplies the rows of one group by up to 8, 16 or 32 rows of x: the tensor cores
// sum the bytes of a part exactly, and what is left in a lane's registers is a few outputs, each of which takes its float steps part by part
// in the order of the contract. Nothing is added across lanes or warps, and one row of x costs what eight do.
//
// A group's records are one stream of bytes, of which every warp copies its own through shared memory, several stages ahead; the rows of x
// are copied likewise, once for all warps of a block. Where groups are few, int8_split.cuh puts several warps on one.
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/backend/cuda/columns.cuh"
#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/int8_fragments.cuh"
#include "outrider/backend/cuda/int8_shape.cuh"
#include "outrider/backend/cuda/int8_split.cuh"
#include "outrider/backend/cuda/launch.cuh"
#include "outrider/backend/cuda/launchers.hpp"
#include "outrider/core/extents.hpp"

namespace outrider::device {

/// out [m, n] = x · wᵀ in tiles of 8 · Tiles rows of x. With experts every row of out is a tile, whose weights begin at row experts[tile] · n.
/// Block b has tile b % tiles, so that blocks which read the same weights run at about the same time.
template <class W, int Tiles, int Rows>
__global__ void __launch_bounds__(32 * int8_shape<W, Tiles, Rows>::warps, 2)
    int8_product(rows<float> out, rows<const int8_block> x, weights<grouped<W>> w, const std::int32_t* experts, unsigned tiles) {
  using format = int8_format<W>;
  using shape = int8_shape<W, Tiles, Rows>;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, g = lane / 4, t = lane % 4;
  const int warps = static_cast<int>(blockDim.x) / 32;

  const std::size_t tile = blockIdx.x % tiles, groups = divide_up(out.cols, group_rows);
  const std::size_t first_out = experts ? tile : tile * (8 * Tiles), first_x = experts ? tile * x.rows / out.rows : first_out;
  const std::size_t rows_left = out.rows - first_out;
  const int count = experts ? 1 : rows_left < 8 * Tiles ? static_cast<int>(rows_left) : 8 * Tiles;  // rows of the tile

  // A warp beyond the last group computes that one again, since the barriers want it.
  const std::size_t warp = blockIdx.x / tiles * static_cast<unsigned>(warps) + static_cast<unsigned>(thread / 32);
  const bool owner = warp * Rows / 2 < groups;
  const std::size_t group = owner ? warp * Rows / 2 : groups - 1;
  const int half = Rows == 1 ? static_cast<int>(warp % 2) : 0, row = Rows == 1 ? 8 * half + g : 2 * g;  // the lane's first row of the group

  const int parts = static_cast<int>(x.cols);
  constexpr int chunk_words = 4, block_chunks = shape::block_words / chunk_words;
  const auto shared = dynamic_shared<std::uint32_t>(0, count * shape::row_words + warps * shape::warp_words);
  const int fifo = count * shape::row_words + thread / 32 * shape::warp_words;  // this warp's stages, and behind them its scales
  const int scales_at = fifo + shape::stages * shape::stage_words + g * shape::scales_words;

  const int8_copies<W, Tiles, Rows> copies(lane, half);
  const std::size_t first_group = group + (experts ? static_cast<std::size_t>(experts[tile]) * groups : 0);
  const auto* stream = reinterpret_cast<const uint4*>(w.group(first_group)) + lane;
  int chunks_left = parts / format::parts * (format::record_words / chunk_words);

  const auto copy_weights = [&](int slot) {  // the next stage
    constexpr int chunks = shape::stage_words / chunk_words;
    const int to = fifo + slot * shape::stage_words;
    if (chunks_left >= chunks) {
#pragma unroll
      for (int i = 0; i < copies.count; ++i)
        if (i < copies.count - 1 || copies.last) copy_async(shared, to + chunk_words * copies.to[i], stream + copies.from[i]);
    } else {
#pragma unroll
      for (int i = 0; i < copies.count; ++i)
        if (lane + copies.from[i] < chunks_left) copy_async(shared, to + chunk_words * copies.to[i], stream + copies.from[i]);
    }
    stream += chunks, chunks_left -= chunks;
  };

  const bool aligned = reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0;
  const std::ptrdiff_t x_step = static_cast<std::ptrdiff_t>(x.stride) * warps * shape::block_words;
  const auto* x_stream = reinterpret_cast<const std::uint32_t*>(x.row(first_x) + static_cast<std::size_t>(thread / 32) * x.stride);
  const auto copy_x = [&](int slot, int first) {  // the parts `first` on: a warp a row
    constexpr int chunks = block_chunks * shape::stage_parts;
    if (lane < chunks && block_chunks * first + lane < block_chunks * parts) {
      const auto* from = x_stream + chunk_words * lane;
      for (int r = thread / 32; r < count; r += warps, from += x_step) {
        const int to = r * shape::row_words + chunk_words * (slot * chunks + lane);
        if (aligned)
          copy_async(shared, to, reinterpret_cast<const uint4*>(from));
        else
          for (int word = 0; word < chunk_words; ++word) copy_async(shared, to + word, from + word);
      }
    }
    x_stream += chunk_words * chunks;
  };

  // Rows that a tile lacks are read as its last one; nobody takes their results.
  const auto row_at = [&](int r) { return (r < count ? r : count - 1) * shape::row_words; };
  int x_at[Tiles], d_at[Tiles][2];
  for (int i = 0; i < Tiles; ++i) {
    x_at[i] = row_at(8 * i + g) + t;
    for (int c = 0; c < 2; ++c) d_at[i][c] = row_at(8 * i + 2 * t + c) + static_cast<int>(offsetof(int8_block, d) / 4);
  }

  float acc[Tiles][Rows][2] = {};
  const int code_at = 16 * t + (row ^ (t & 2) << 2);
  const auto add_part = [&](int part, int scales_of_part, int x_part) {  // the words at which they begin, x_part within a row of x
    int8_columns columns[Rows];
    read_columns<W, Rows>(columns, shared, part, code_at, row, t);
    const auto scales = shared.template load<int8_scales<W, Rows>>(scales_of_part);
    const std::uint32_t a[4] = {columns[0].low, Rows == 2 ? columns[Rows - 1].low : 0, columns[0].high,
                                Rows == 2 ? columns[Rows - 1].high : 0};
#pragma unroll
    for (int i = 0; i < Tiles; ++i) {
      const std::uint32_t b[2] = {shared[x_at[i] + x_part], shared[x_at[i] + x_part + 4]};
      float d[2], sum[2] = {};
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if constexpr (has_minimum<W>) {
          const uint2 both = shared.template load<uint2>(d_at[i][c] + x_part);
          d[c] = __uint_as_float(both.x), sum[c] = __uint_as_float(both.y);
        } else {
          d[c] = __uint_as_float(shared[d_at[i][c] + x_part]);
        }
#pragma unroll
      for (int s = 0; s < format::sums; ++s) {
        // The sums start from the bits of 1.5 · 2²³, in whose neighbourhood floats are the integers: conversion is a subtraction. Exact,
        // since |sum| <= 32 · 128 · 127 < 2²².
        constexpr float origin = 12582912.0f, unit = format::unit;
        constexpr int bits = 0x4b400000;
        int c[4] = {bits, bits, bits, bits};
        if constexpr (format::sums == 1)
          mma_s8(c, a, b);
        else
          mma_s8(c, a, {s == 0 ? b[0] : 0, s == 1 ? b[1] : 0});
#pragma unroll
        for (int r = 0; r < Rows; ++r)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float products = fmaf(__int_as_float(c[2 * r + j]), 1 / unit, -origin / unit);
            acc[i][r][j] = fmaf(products, __fmul_rn(scales.of[s][r], d[j]), acc[i][r][j]);
          }
      }
      if constexpr (has_minimum<W>)
#pragma unroll
        for (int r = 0; r < Rows; ++r)
#pragma unroll
          for (int j = 0; j < 2; ++j) acc[i][r][j] = fmaf(scales.of[format::sums][r], sum[j], acc[i][r][j]);
    }
  };

  constexpr int ahead = shape::stages - 1;
  for (int slot = 0; slot < ahead; ++slot) {
    copy_x(slot, slot * shape::stage_parts);
    copy_weights(slot);
    copy_async_commit();
  }
  for (int first = 0, slot = 0; first < parts; first += shape::stage_parts) {
    copy_async_wait<ahead - 1>();
    __syncthreads();  // this stage has arrived, and nobody reads the one before it any more: the next copies may take its place
    const int free = slot == 0 ? ahead : slot - 1;
    copy_x(free, first + ahead * shape::stage_parts);
    copy_weights(free);
    copy_async_commit();

    const int head = fifo + slot * shape::stage_words, x_part = slot * shape::stage_parts * shape::block_words;
    const int end = parts - first < shape::stage_parts ? parts - first : shape::stage_parts;
    const auto part_at = [&](int i) { return head + format::head_words + i * format::part_words; };
#pragma unroll
    for (int i = 0; i < shape::stage_parts; i += 4)  // a lane two parts
      if (i + t < end) shared.store(scales_at + (i + t) * shape::part_scales, read_scales<W, Rows>(shared, head, part_at(i + t), row));
    __syncwarp();
    const auto add = [&](int i) { add_part(part_at(i), scales_at + i * shape::part_scales, x_part + i * shape::block_words); };
    for (int i = 0; i < end;) {
      if (end - i >= 4) {
#pragma unroll
        for (int j = 0; j < 4; ++j) add(i + j);
        i += 4;
      } else {
        add(i++);
      }
    }
    slot = slot == ahead ? 0 : slot + 1;
  }
  copy_async_wait<0>();

  if (!owner) return;
  for (int i = 0; i < Tiles; ++i)
    for (int r = 0; r < Rows; ++r)
      for (int c = 0; c < 2; ++c) {
        const int x_row = 8 * i + 2 * t + c;
        const std::size_t column = group * group_rows + static_cast<std::size_t>(row + r);
        if (x_row < count && column < out.cols) out.row(first_out + static_cast<std::size_t>(x_row))[column] = acc[i][r][c];
      }
}

/// out(r) = w(ids[r]) · factor, a thread a column.
template <class W, int Threads = 256>
__global__ void __launch_bounds__(Threads)
    int8_gather(rows<float> out, weights<grouped<W>> w, const token_id* __restrict__ ids, float factor) {
  using format = int8_format<W>;
  const std::size_t column = std::size_t{blockIdx.x} * Threads + threadIdx.x;
  if (column >= out.cols) return;
  const int k = static_cast<int>(column % 32), t = k % 16 / 4, part = static_cast<int>(column / 32 % format::parts);
  for (std::size_t r = blockIdx.y; r < out.rows; r += gridDim.y) {
    const std::size_t id = static_cast<std::size_t>(ids[r]);
    const int row = static_cast<int>(id % group_rows), part_at = format::head_words + part * format::part_words;
    const auto* record = reinterpret_cast<const std::uint32_t*>(w.group(id / group_rows) + column / (32 * format::parts));
    int8_columns columns[1];
    read_columns<W, 1>(columns, record, part_at, 16 * t + row, row, t);
    const int8_scales<W, 1> scales = read_scales<W, 1>(record, 0, part_at, row);
    const auto byte = static_cast<std::int8_t>((k < 16 ? columns[0].low : columns[0].high) >> 8 * (k % 4));
    const float weight = __fmul_rn(scales.of[k / 16 % format::sums][0], static_cast<float>(byte / format::unit));
    out.row(r)[column] = __fmul_rn(has_minimum<W> ? __fadd_rn(weight, scales.of[format::sums][0]) : weight, factor);
  }
}

/// Queues int8_product for so many tiles.
template <class W, int Tiles, int Rows>
void launch_int8_product(queue& q, rows<float> out, rows<const int8_block> x, weights<grouped<W>> w, const std::int32_t* experts,
                         std::size_t tiles) noexcept {
  using shape = int8_shape<W, Tiles, Rows>;
  const std::size_t warps = divide_up(out.cols, group_rows) * (2 / Rows);
  const auto blocks_of = [&](std::size_t size) { return divide_up(warps, size) * tiles; };
  // Blocks of the size that leaves the busiest multiprocessor the fewest warps; of several the smallest, as more blocks are spread more evenly,
  // but of four warps at least where it can be, as the warps of a block copy rows of x but once.
  constexpr std::size_t most = shape::warps, enough = most < 4 ? most : 4;
  std::size_t per_block = warps < enough ? warps : enough, fewest = static_cast<std::size_t>(-1);
  for (std::size_t size = per_block; size <= most && size <= warps; ++size)
    if (const std::size_t busiest = divide_up(blocks_of(size), wide_device) * size; busiest < fewest) per_block = size, fewest = busiest;
  const std::size_t x_rows = experts ? 1 : out.rows < 8 * Tiles ? out.rows : 8 * Tiles;
  launch(q, &int8_product<W, Tiles, Rows>, static_cast<unsigned>(blocks_of(per_block)), static_cast<unsigned>(32 * per_block),
         shape::shared_bytes(x_rows, per_block), out, x, w, experts, static_cast<unsigned>(tiles));
}

/// Queues int8_split_product.
template <class W>
void launch_int8_split(queue& q, rows<float> out, rows<const int8_block> x, weights<grouped<W>> w, const std::int32_t* experts) noexcept {
  using shape = int8_split<W>;
  const int x_rows = experts ? 1 : static_cast<int>(out.rows);
  const std::size_t blocks = divide_up(out.cols, group_rows) * (experts ? out.rows : 1);
  const int dot_warps = shape::dot_warps(x_rows, x.cols, divide_up(blocks, wide_device));
  launch(q, &int8_split_product<W>, static_cast<unsigned>(blocks), static_cast<unsigned>(32 * (dot_warps + shape::pairs(x_rows))),
         shape::shared_bytes(x_rows, dot_warps), out, x, w, experts);
}

/// Whether a product of so many groups, each with `x_rows` <= 8 rows of x, is one for int8_split_product: whether a warp a group would be too
/// few warps for the schedulers of a wide device. Blocks that copy more rows of x for one group each had better be few.
constexpr bool splits_groups(std::size_t groups, std::size_t x_rows) noexcept { return groups < (x_rows <= 2 ? 8 : 3) * wide_device; }

template <class W>
void int8_matmul(queue& q, rows<float> out, rows<const int8_block> x, weights<grouped<W>> w) noexcept {
  if (out.rows == 0 || out.cols == 0) return;
  const std::size_t groups = w.groups(), m = out.rows;
  if (m <= 8) {
    if (splits_groups(groups, m))
      launch_int8_split<W>(q, out, x, w, nullptr);
    else
      launch_int8_product<W, 1, 2>(q, out, x, w, nullptr, 1);
  } else if (m <= 16 && groups < 3 * wide_device) {  // two warps share a group
    launch_int8_product<W, 2, 1>(q, out, x, w, nullptr, 1);
  } else if (m <= 16 || groups * divide_up(m, 32) < 2 * wide_device) {
    launch_int8_product<W, 2, 2>(q, out, x, w, nullptr, divide_up(m, 16));
  } else {
    launch_int8_product<W, 4, 2>(q, out, x, w, nullptr, divide_up(m, 32));
  }
}

template <class W>
void int8_expert_matmul(queue& q, rows<float> out, rows<const int8_block> x, weights<grouped<W>> w, const std::int32_t* experts) noexcept {
  if (out.rows == 0 || out.cols == 0) return;
  if (splits_groups(out.rows * (out.cols / group_rows), 1))
    launch_int8_split<W>(q, out, x, w, experts);
  else
    launch_int8_product<W, 1, 2>(q, out, x, w, experts, out.rows);
}

template <class W>
void int8_gather_rows(queue& q, rows<float> out, weights<grouped<W>> w, const token_id* ids, float factor) noexcept {
  constexpr int threads = 256;
  launch(q, &int8_gather<W, threads>, grid_over(out.rows, out.cols, threads), threads, 0, out, w, ids, factor);
}

}  // namespace outrider::device
