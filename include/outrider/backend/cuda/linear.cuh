// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Products with stored weights on the CUDA cores: activations are floats and stay floats.
//
// One order of summation for every type, op and shape of a launch. An octet is eight neighbouring columns; zeros fill up the last one of a
// row. A warp takes on whole rows: lane l owns the octets l, l + 32, … and adds their products to one accumulator, by fmaf, column after
// column; then the warp adds its 32 accumulators (warp_sum). Nothing in this but k decides: how many rows and outputs a warp takes on, how
// octets are loaded, and which blocks run when, change no bit.
//
// A product of few rows is as fast as weights arrive. An H200 brings a multiprocessor some 21 bytes a cycle, in which it starts 4 warp
// instructions: a warp's octets of bf16 for one output are 512 bytes, 24 cycles, and cost a load, 8 conversions and 8 FMAs per row. All
// told, the sm_90 code of a turn of the main loop, copies of activations included, takes for 2 KB of weights (of q8_0, 1088 bytes)
//   rows x outputs    instructions    cycles to issue : to load
//     1 x 2                118               30 : 98
//     2 x 2                171               43 : 98
//     4 x 4                215               54 : 98
//     8 x 4                379               95 : 98
//     8 x 8                338               85 : 98
//     1 x 2, q8_0          240               60 : 52
//     8 x 2, q8_0          554              139 : 52
// Activations come through shared memory at 128 bytes a cycle: 8 x 8 takes 32 of its 98 cycles for them, 8 x 4 64. All warps of a block
// share them, so that the second-level cache sends a multiprocessor fewer activations than weights: for 8 rows x 48 outputs of bf16, a
// third. More than eight rows are tiles of eight, two to a block, the second of which finds its weights in the first-level cache.
//
// The way to memory takes some 1100 cycles, so 24 KB should be under way in a multiprocessor. A warp loads 4 or 8 KB ahead, and what it has
// used it replaces at once: a dozen warps have 48 KB under way while they multiply.
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/backend/cuda/launch.cuh"
#include "outrider/backend/cuda/launchers.hpp"
#include "outrider/backend/cuda/linear_octets.cuh"
#include "outrider/backend/cuda/warp.cuh"

namespace outrider::device {

namespace detail {

inline constexpr unsigned chunk_columns = 8 * warp_size;  // of a row, an octet a lane

/// How a product is cut for `Rows` rows of x and `Outputs` rows of w a warp.
template <class W, int Rows, int Outputs, bool Vectors>
struct product_shape {
  /// Chunks of each output that a warp loads ahead, as many as registers permit; formats of blocks are held as floats.
  static constexpr bool few_sums = Rows == 1 || (Rows < 8 && !block_format<W>);
  static constexpr unsigned registers_each = block_format<W> || sizeof(W) == 4 ? 8 : 4,
                            fitting = (few_sums ? 64 : 32) / registers_each / Outputs;
  static constexpr unsigned ahead = !Vectors || fitting < 1 ? 1 : fitting;
  /// Chunks between two barriers.
  static constexpr unsigned chunks = ahead < 2 && !block_format<W> ? 2 : ahead, turn_columns = chunks * chunk_columns;
  /// Warps of a block, at most. Two such blocks fit into a multiprocessor's registers.
  static constexpr unsigned warps = Rows == 8 && !block_format<W> ? 6 : 8;
};

/// Which row of w makes output j of row i.
struct row_choice {
  enum { every, of_expert, named } by = every;
  const std::int32_t* ids = nullptr;  // of_expert: the expert of each row i; named: [rows, outputs]
  std::size_t stride = 0;             // of_expert: rows of w per expert; named: between the rows of ids

  __device__ std::size_t operator()(std::size_t i, std::size_t j) const {
    if (by == every) return j;
    if (by == of_expert) return static_cast<std::size_t>(ids[i]) * stride + j;
    return static_cast<std::size_t>(ids[i * stride + j]);
  }
};

/// What a block takes on: `tiles` tiles of rows, 1 or 2, each by warps of its own. `row_blocks` neighbours in the grid have the same
/// outputs.
struct product_cut {
  unsigned tiles, row_blocks;
  unsigned slots;       // for the activations of a turn: 2, or 1 if there is but one turn
  unsigned rows_per_x;  // rows of out that share a row of x
};

}  // namespace detail

/// out(i, j) = x(i / rows_per_x) · w(choice(i, j)). A warp computes Rows x Outputs of them: for Rows > 1, where all rows share their choice
/// and rows_per_x is 1, with rows of w that follow each other, out.cols >= Outputs.
template <class W, int Rows, int Outputs, bool Vectors>
__global__ void __launch_bounds__(warp_size* detail::product_shape<W, Rows, Outputs, Vectors>::warps, 2)
    product(rows<float> out, rows<const float> x, weights<W> w, detail::row_choice choice, detail::product_cut cut) {
  using shape = detail::product_shape<W, Rows, Outputs, Vectors>;
  constexpr unsigned chunk = detail::chunk_columns, chunks = shape::chunks, turn = shape::turn_columns, ahead = shape::ahead;
  constexpr int sums = Rows * Outputs;
  const unsigned lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size, warps = blockDim.x / warp_size;
  const bool two_tiles = cut.tiles == 2;
  const unsigned tile = two_tiles ? warp % 2 : 0, group = two_tiles ? warp / 2 : warp, groups = two_tiles ? warps / 2 : warps;
  const unsigned block_rows = cut.tiles * Rows, first_row = blockIdx.x % cut.row_blocks * block_rows;
  const unsigned k = static_cast<unsigned>(x.cols), outputs = static_cast<unsigned>(out.cols);
  unsigned first_output = (blockIdx.x / cut.row_blocks * groups + group) * Outputs;
  if (Rows > 1 && first_output + Outputs > outputs) first_output = outputs - Outputs;  // some are computed twice

  // The activations of a turn, row after row; those that a tile lacks are zeros. Of a chunk the first quads of all octets come before the
  // second ones, so that neighbouring lanes read neighbouring quads.
  const unsigned rows_left = static_cast<unsigned>(out.rows) - first_row, copied_rows = rows_left < block_rows ? rows_left : block_rows;
  const auto shared = dynamic_shared<float>(0, static_cast<int>(cut.slots * block_rows * turn));
  const auto place = [](unsigned column) {
    return column / chunk * chunk + column % 8 / 4 * (chunk / 2) + column % chunk / 8 * 4 + column % 4;
  };
  constexpr unsigned width = Vectors ? 4 : 1;  // of a copy, in floats
  // Copies the columns first …, a warp a row; beyond the end the last ones again, or zeros.
  const auto copy_x = [&](unsigned first, unsigned slot) {
    for (unsigned r = warp; r < copied_rows; r += warps) {
      const float* const from = x.row(Rows == 1 ? first_row / cut.rows_per_x : first_row + r);
      const int to = static_cast<int>((slot * block_rows + r) * turn + place(width * lane));
#pragma unroll(Vectors ? turn / (width * warp_size) : 1)
      for (unsigned c = 0; c < turn; c += width * warp_size) {
        const unsigned column = first + width * lane + c;
        const int at = to + static_cast<int>(place(c));
        if constexpr (Vectors)
          copy_async(shared, at, reinterpret_cast<const float4*>(from + (column < k ? column : k - 4)));
        else if (column < k)
          copy_async(shared, at, from + column);
        else
          shared[at] = 0;
      }
    }
  };
  for (unsigned slot = 0; slot < cut.slots; ++slot)
    for (unsigned i = copied_rows * turn + threadIdx.x; i < block_rows * turn; i += blockDim.x)
      shared[static_cast<int>(slot * block_rows * turn + i)] = 0;

  constexpr int choices = Rows == 1 ? Outputs : 1;
  const W* w_at[choices];
#pragma unroll
  for (unsigned o = 0; o < choices; ++o) {  // beyond the last output that one is computed again, and dropped
    const unsigned output = first_output + o < outputs ? first_output + o : outputs - 1;
    w_at[o] = w.row(Rows == 1 ? choice(first_row, output) : output);
  }
  using octet_type = decltype(detail::load_octet<Vectors>(w.data, 0, 0));
  const auto load = [&](octet_type(&to)[Outputs], unsigned column) {  // of all outputs
    if constexpr (Rows == 1) {
#pragma unroll
      for (int o = 0; o < Outputs; ++o) to[o] = detail::load_octet<Vectors>(w_at[o], column, k);
    } else {
#pragma unroll
      for (int o = 0; o < Outputs; ++o, w_at[0] += w.stride) to[o] = detail::load_octet<Vectors>(w_at[0], column, k);
      w_at[0] -= Outputs * w.stride;
    }
  };

  octet_type octet[ahead][Outputs];
  if (k != 0) {
#pragma unroll
    for (unsigned c = 0; c < ahead; ++c) load(octet[c], c * chunk + 8 * lane);
    copy_x(0, 0);
    copy_async_commit();
  }
  float sum[sums] = {};
  for (unsigned first = 0, slot = 0; first < k; first += turn, slot ^= 1) {
    copy_async_wait<0>();
    __syncthreads();  // the slot is full, and nobody reads the other one any more
    if (first + turn < k) {
      copy_x(first + turn, slot ^ 1);
      copy_async_commit();
    }
    const int x_at = static_cast<int>((slot * block_rows + tile * Rows) * turn + 4 * lane);
#pragma unroll
    for (unsigned c = 0; c < chunks; ++c) {
      const unsigned column = first + c * chunk + 8 * lane;
      if (column < k) {
#pragma unroll
        for (unsigned half = 0; half < 2; ++half) {
          float4 activation[Rows];
#pragma unroll
          for (unsigned r = 0; r < Rows; ++r)
            activation[r] = shared.template load<float4>(x_at + static_cast<int>(r * turn + c * chunk + half * (chunk / 2)));
#pragma unroll
          for (int o = 0; o < Outputs; ++o) {
            const float4 weight = detail::half_of<W>(octet[c % ahead][o], half);
#pragma unroll
            for (int r = 0; r < Rows; ++r) {
              const float4 v = activation[r];
              float& acc = sum[r * Outputs + o];
              acc = fmaf(weight.w, v.w, fmaf(weight.z, v.z, fmaf(weight.y, v.y, fmaf(weight.x, v.x, acc))));
            }
          }
        }
      }
      if constexpr (!block_format<W>) load(octet[c % ahead], column + ahead * chunk);
    }
    if (block_format<W> && first + turn < k) {  // blocks are unpacked when they arrive: all loads of a turn should be under way by then
#pragma unroll
      for (unsigned c = 0; c < ahead; ++c) load(octet[c], first + turn + c * chunk + 8 * lane);
    }
  }

  warp_sums(sum);
  constexpr unsigned kept = sums > warp_size ? sums / warp_size : 1, copies = sums < warp_size ? warp_size / sums : 1;
  if (lane % copies != 0) return;
#pragma unroll
  for (unsigned i = 0; i < kept; ++i) {
    const unsigned j = lane / copies * kept + i, row = first_row + tile * Rows + j / Outputs, output = first_output + j % Outputs;
    if (row < out.rows && output < outputs) out.row(row)[output] = sum[i];
  }
}

namespace detail {

/// Whether rows are whole octets, and every quad of x and every octet of w lie where they can be loaded at once.
template <class W>
bool has_whole_octets(rows<const float> x, weights<W> w) noexcept {
  const auto aligned = [](const void* data, std::size_t stride, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(data) % bytes == 0 && stride % bytes == 0;
  };
  return x.cols % 8 == 0 && aligned(x.data, x.stride * sizeof(float), sizeof(float4)) &&
         aligned(w.data, w.stride * sizeof(W), octet_alignment<W>);
}

template <int Rows, int Outputs, bool Vectors, class W>
void launch_product(queue& q, rows<float> out, rows<const float> x, weights<W> w, row_choice choice) noexcept {
  using shape = product_shape<W, Rows, Outputs, Vectors>;
  const unsigned tiles = Rows > 1 && out.rows > Rows ? 2 : 1, slots = x.cols > shape::turn_columns ? 2 : 1;
  const std::size_t row_blocks = divide_up(out.rows, tiles * Rows), groups = divide_up(out.cols, Outputs);

  // Blocks as large as leaves the busiest multiprocessor of a large device the fewest warps: the warps of a block share activations.
  const auto blocks_of = [&](std::size_t size) { return divide_up(groups, size) * row_blocks; };
  std::size_t per_block = 1, fewest = static_cast<std::size_t>(-1);
  for (std::size_t size = 1; size * tiles <= shape::warps && size <= groups; ++size)
    if (const std::size_t busiest = divide_up(blocks_of(size), wide_device) * size; busiest <= fewest) per_block = size, fewest = busiest;
  launch(q, &product<W, Rows, Outputs, Vectors>, static_cast<unsigned>(blocks_of(per_block)),
         static_cast<unsigned>(warp_size * tiles * per_block), sizeof(float) * slots * tiles * Rows * shape::turn_columns, out, x, w,
         choice, product_cut{tiles, static_cast<unsigned>(row_blocks), slots, static_cast<unsigned>(out.rows / x.rows)});
}

template <class W>
void launch_single_rows(queue& q, rows<float> out, rows<const float> x, weights<W> w, row_choice choice) noexcept {
  if (out.rows == 0 || out.cols == 0) return;
  if (has_whole_octets(x, w))
    launch_product<1, 2, true>(q, out, x, w, choice);
  else
    launch_product<1, 2, false>(q, out, x, w, choice);
}

}  // namespace detail

template <class W>
void matmul(queue& q, rows<float> out, rows<const float> x, weights<W> w) noexcept {
  constexpr std::size_t most_outputs = 8, many = 4096;  // with fewer outputs, warps of eight would be too few
  if (out.rows <= 1 || out.cols < most_outputs || !detail::has_whole_octets(x, w)) return detail::launch_single_rows(q, out, x, w, {});
  if constexpr (block_format<W>) {
    if (out.rows <= 4)
      detail::launch_product<4, 2, true>(q, out, x, w, {});
    else
      detail::launch_product<8, 2, true>(q, out, x, w, {});
  } else if (out.rows <= 2) {
    detail::launch_product<2, 2, true>(q, out, x, w, {});
  } else if (out.rows <= 4) {
    detail::launch_product<4, 4, true>(q, out, x, w, {});
  } else if (sizeof(W) == 4 || out.cols < many) {
    detail::launch_product<8, 4, true>(q, out, x, w, {});
  } else {
    if constexpr (sizeof(W) < 4) detail::launch_product<8, 8, true>(q, out, x, w, {});
  }
}

/// Experts that several rows chose are read once per row, but for the first time from the second-level cache.
template <class W>
void expert_matmul(queue& q, rows<float> out, rows<const float> x, weights<W> w, const std::int32_t* experts) noexcept {
  detail::launch_single_rows(q, out, x, w, {detail::row_choice::of_expert, experts, out.cols});
}

template <class W>
void gathered_matmul(queue& q, rows<float> out, rows<const float> x, weights<W> w, rows<const token_id> ids) noexcept {
  detail::launch_single_rows(q, out, x, w, {detail::row_choice::named, ids.data, ids.stride});
}

}  // namespace outrider::device
