// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Products with stored weights on the CUDA cores: activations are floats and stay floats.
//
// One order of summation for every type, op and shape of a launch. A quad is four neighbouring columns. The 128 threads of a block share
// the quads of a row: thread t owns quad t of every 128 and adds its products to one accumulator, by fmaf, column after column. Then each
// warp adds its 32 accumulators (warp_sum), and the sums of the four warps are added in their order. Nothing in this but k decides: how
// many rows and outputs a block takes on, whether quads are loaded as vectors, and which blocks run when, change no bit. Why quads, where a
// vector holds eight 16-bit weights: the activations of eight columns would be 32 bytes apart from lane to lane, and a load of 16 of them
// would use half of what the cache delivers.
//
// A product of few rows is as fast as weights arrive. An H200 brings a multiprocessor 21 bytes a cycle, in which it starts 4 warp
// instructions: a warp's quads of bf16 for one output are 256 bytes, 12 cycles, and cost a load, 4 conversions and 4 FMAs per row; the
// loops below, counted in sm_90 code for all that a warp loads at once, take
//   rows x outputs x quads    weights    instructions    cycles to issue : to load
//     1 x 4 x 4               4 KB           191               48 : 195
//     4 x 4 x 2               2 KB           207               52 : 98
//     8 x 8 x 1               2 KB           345               86 : 98
// Activations come through the first-level cache at 128 bytes a cycle: 8 x 8 takes 4 KB of them for its 2 KB of weights, 48 of those 98
// cycles together, while 8 x 4 would take 4 KB for 1 KB. Weights are marked as read once, so that they do not drive activations out of that
// cache. The way to memory takes some 1100 cycles, so 24 KB should be under way in a multiprocessor: the fewer the rows, the more quads a
// thread loads ahead. Splitting a row over four warps is for small models: 2048 outputs of 1536 columns then are work for the whole device.
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/backend/cuda/gather.cuh"
#include "outrider/backend/cuda/launch.cuh"
#include "outrider/backend/cuda/launchers.hpp"
#include "outrider/backend/cuda/warp.cuh"

namespace outrider::device {

namespace detail {

inline constexpr int product_threads = 128;

/// What a block takes on beside its rows: outputs, and the quads of each that a thread loads before it uses the first. `blocks` of them fit
/// into a multiprocessor's registers.
struct product_shape {
  unsigned outputs, quads, blocks;
};
template <class W, bool Vectors>
consteval product_shape shape_of(int rows) {
  if (block_format<W> || !Vectors) return {rows == 1 ? 4u : 2u, 1, 3};
  const unsigned pairs = sizeof(W) == 4 ? 2 : 1;  // of registers, to hold a quad
  if (rows == 8) return {8 / pairs, 1, 3};
  return {4, rows == 4 ? 2 / pairs : 4 / pairs, 5};
}

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

/// Four activations from here on.
template <bool Vectors>
__device__ float4 load_quad(const float* x) {
  if constexpr (Vectors)
    return __ldg(reinterpret_cast<const float4*>(x));
  else
    return make_float4(x[0], x[1], x[2], x[3]);
}

/// Weights i … i + 3 from here on: as they are stored if that can be loaded as one vector, else as floats. Those of a block format lie in
/// one block.
template <bool Vectors, class W>
__device__ auto load_weights(const W* w, unsigned i) {
  if constexpr (block_format<W>) {
    const block_scales scales = block_scales_of(*w);
    return make_float4(weight_at(*w, i, scales), weight_at(*w, i + 1, scales), weight_at(*w, i + 2, scales), weight_at(*w, i + 3, scales));
  } else if constexpr (!Vectors) {
    return make_float4(weight_in(w, i), weight_in(w, i + 1), weight_in(w, i + 2), weight_in(w, i + 3));
  } else if constexpr (sizeof(W) == 4) {
    return __ldcs(reinterpret_cast<const float4*>(w + i));
  } else {
    return __ldcs(reinterpret_cast<const uint2*>(w + i));
  }
}

template <class W>
__device__ float low_half(unsigned word) {
  W value;
  value.bits = static_cast<std::uint16_t>(word);
  return weight_in(&value, 0);
}
template <class W>
__device__ float4 widen_quad(uint2 v) {
  return make_float4(low_half<W>(v.x), low_half<W>(v.x >> 16), low_half<W>(v.y), low_half<W>(v.y >> 16));
}
template <class W>
__device__ float4 widen_quad(float4 v) {
  return v;
}

__device__ inline float add_products(float sum, float4 w, float4 x) {
  return fmaf(w.w, x.w, fmaf(w.z, x.z, fmaf(w.y, x.y, fmaf(w.x, x.x, sum))));
}

}  // namespace detail

/// out(i, j) = x(i / rows_per_x) · w(choice(i, j)). A block computes Rows x outputs of them with the rows of w that its first row chooses,
/// so Rows > 1 is for a choice that all rows share. Grid: tiles of rows, for each group of outputs: neighbours in time read the same
/// weights.
template <class W, int Rows, bool Vectors>
__global__ void __launch_bounds__(detail::product_threads, detail::shape_of<W, Vectors>(Rows).blocks)
    product(rows<float> out, rows<const float> x, weights<W> w, detail::row_choice choice, unsigned rows_per_x, unsigned tiles) {
  constexpr detail::product_shape shape = detail::shape_of<W, Vectors>(Rows);
  constexpr unsigned outputs = shape.outputs, quads = shape.quads;
  constexpr int sums = Rows * shape.outputs, warps = detail::product_threads / warp_size;
  constexpr unsigned slab = 4 * detail::product_threads;  // columns between the quads of a thread: whole blocks of every format
  const unsigned first_row = blockIdx.x % tiles * Rows, first_output = blockIdx.x / tiles * outputs;
  const unsigned first_column = 4 * threadIdx.x, in_block = first_column % elements_of<W>;
  const unsigned begin = x.cols == 0 ? 0 : first_column;  // rows without columns may lie nowhere

  // Where this thread reads next, advanced as it goes: addresses made afresh from row and column would cost as much as the products. Beyond
  // the last row or output the last one is computed again, and dropped.
  const float* x_at[Rows];
  const W* w_at[outputs];
#pragma unroll
  for (unsigned r = 0; r < Rows; ++r) {
    const unsigned row = first_row + r;
    x_at[r] = x.row(Rows == 1 ? row / rows_per_x : row < out.rows ? row : out.rows - 1) + begin;
  }
#pragma unroll
  for (unsigned o = 0; o < outputs; ++o) {
    const std::size_t output = first_output + o, existing = output < out.cols ? output : out.cols - 1;
    w_at[o] = w.row(Rows == 1 ? choice(first_row, existing) : existing) + begin / elements_of<W>;
  }

  float sum[sums] = {};
  const unsigned k = static_cast<unsigned>(x.cols), whole = k - k % 4;
  for (unsigned column = first_column; column < whole; column += quads * slab) {
    decltype(detail::load_weights<Vectors>(w.data, 0)) weight[quads][outputs];
    float4 activation[quads][Rows];
#pragma unroll
    for (unsigned s = 0; s < quads; ++s) {
      if (column + s * slab >= whole) break;
#pragma unroll
      for (unsigned o = 0; o < outputs; ++o) weight[s][o] = detail::load_weights<Vectors>(w_at[o] + s * slab / elements_of<W>, in_block);
#pragma unroll
      for (unsigned r = 0; r < Rows; ++r) activation[s][r] = detail::load_quad<Vectors>(x_at[r] + s * slab);
    }
#pragma unroll
    for (unsigned s = 0; s < quads; ++s) {
      if (column + s * slab >= whole) break;
#pragma unroll
      for (unsigned o = 0; o < outputs; ++o) {
        const float4 widened = detail::widen_quad<W>(weight[s][o]);
#pragma unroll
        for (unsigned r = 0; r < Rows; ++r) sum[r * outputs + o] = detail::add_products(sum[r * outputs + o], widened, activation[s][r]);
      }
    }
#pragma unroll
    for (unsigned o = 0; o < outputs; ++o) w_at[o] += quads * slab / elements_of<W>;
#pragma unroll
    for (unsigned r = 0; r < Rows; ++r) x_at[r] += quads * slab;
  }
  if constexpr (!Vectors && !block_format<W>) {
    if (whole % slab == first_column)  // this thread owns the last quad, which lacks columns
      for (unsigned i = 0; i < k % 4; ++i) {
#pragma unroll
        for (unsigned j = 0; j < sums; ++j) sum[j] = fmaf(weight_in(w_at[j % outputs], i), x_at[j / outputs][i], sum[j]);
      }
  }

  __shared__ shared_array<float, warps * sums> of_warp;
  warp_sums(sum);
  constexpr int held = sums > warp_size ? sums / warp_size : 1, copies = sums < warp_size ? warp_size / sums : 1;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_size;
  if (lane % copies == 0) {
#pragma unroll
    for (int i = 0; i < held; ++i) of_warp[thread / warp_size * sums + lane / copies * held + i] = sum[i];
  }
  __syncthreads();
  if (thread >= sums) return;
  float total = of_warp[thread];
#pragma unroll
  for (int warp = 1; warp < warps; ++warp) total = __fadd_rn(total, of_warp[warp * sums + thread]);
  const unsigned row = first_row + threadIdx.x / outputs, output = first_output + threadIdx.x % outputs;
  if (row < out.rows && output < out.cols) out.row(row)[output] = total;
}

namespace detail {

/// Whether rows are whole quads, and every quad of x, and of w unless it has blocks, may be loaded as one vector.
template <class W>
bool has_whole_vectors(rows<const float> x, weights<W> w) noexcept {
  const auto aligned = [](const void* data, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(data) % bytes == 0; };
  return x.cols % 4 == 0 && aligned(x.data, sizeof(float4)) && x.stride % 4 == 0 &&
         (block_format<W> || (aligned(w.data, 4 * sizeof(W)) && w.stride % 4 == 0));
}

template <int Rows, bool Vectors, class W>
void launch_product(queue& q, rows<float> out, rows<const float> x, weights<W> w, row_choice choice) noexcept {
  const std::size_t tiles = divide_up(out.rows, Rows), groups = divide_up(out.cols, shape_of<W, Vectors>(Rows).outputs);
  launch(q, &product<W, Rows, Vectors>, static_cast<unsigned>(tiles * groups), product_threads, 0, out, x, w, choice,
         static_cast<unsigned>(out.rows / x.rows), static_cast<unsigned>(tiles));
}

template <class W>
void launch_single_rows(queue& q, rows<float> out, rows<const float> x, weights<W> w, row_choice choice) noexcept {
  if (out.rows == 0 || out.cols == 0) return;
  if (has_whole_vectors(x, w))
    launch_product<1, true>(q, out, x, w, choice);
  else
    launch_product<1, false>(q, out, x, w, choice);
}

}  // namespace detail

template <class W>
void matmul(queue& q, rows<float> out, rows<const float> x, weights<W> w) noexcept {
  if (out.rows <= 1 || out.cols == 0 || !detail::has_whole_vectors(x, w)) return detail::launch_single_rows(q, out, x, w, {});
  if constexpr (block_format<W>) {
    detail::launch_product<4, true>(q, out, x, w, {});
  } else {
    if (out.rows <= 2)
      detail::launch_product<2, true>(q, out, x, w, {});
    else if (out.rows <= 4)
      detail::launch_product<4, true>(q, out, x, w, {});
    else
      detail::launch_product<8, true>(q, out, x, w, {});
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
