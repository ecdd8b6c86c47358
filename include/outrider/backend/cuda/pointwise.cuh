// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Row-wise arithmetic and rows put together from others.
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/backend/cuda/columns.cuh"
#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/launch.cuh"
#include "outrider/backend/cuda/launchers.hpp"
#include "outrider/backend/cuda/optional.hpp"
#include "outrider/backend/cuda/warp.cuh"
#include "outrider/core/int8.hpp"

namespace outrider::device {

/// Threads of a block.
inline constexpr int map_threads = 256, quantize_threads = 128;

// ------------------------------------------------------------------------------------------------ element by element

struct identity {
  __device__ float operator()(float x) const { return x; }
};
struct sum_of_two {
  __device__ float operator()(float x, float y) const { return __fadd_rn(x, y); }
};
struct product_with {
  float factor;
  __device__ float operator()(float x) const { return __fmul_rn(x, factor); }
};
struct soft_cap {
  float cap;
  __device__ float operator()(float x) const { return __fmul_rn(cap, tanhf(__fdiv_rn(x, cap))); }
};
/// ½·z·(1 + tanh(√(2/π)·(z + 0.044715·z³))) · up
struct gelu_product {
  __device__ float operator()(float z, float up) const {
    const float inner = __fmul_rn(0.7978845608f, fmaf(0.044715f, __fmul_rn(__fmul_rn(z, z), z), z));
    return __fmul_rn(__fmul_rn(__fmul_rn(0.5f, z), __fadd_rn(1.0f, tanhf(inner))), up);
  }
};

template <class Function, int Threads>
__global__ void __launch_bounds__(Threads) map_rows(rows<float> out, rows<const float> x, rows<const float> y, Function f, bool vectors) {
  const std::size_t c = 4 * (std::size_t{blockIdx.x} * Threads + threadIdx.x);
  if (c >= out.cols) return;
  for (std::size_t r = blockIdx.y; r < out.rows; r += gridDim.y)
    store_four(out.row(r), c, out.cols, vectors, apply_four(f, x, y, r, c, vectors));
}

template <class Function>
void map(queue& q, rows<float> out, rows<const float> x, rows<const float> y, Function f) noexcept {
  if (out.stride == out.cols && x.stride == x.cols && y.stride == y.cols) {  // one long row: no threads idle at the ends of short ones
    const std::size_t n = out.rows * out.cols;
    out = {out.data, 1, n, n}, x = {x.data, 1, n, n}, y = {y.data, 1, n, n};
  }
  const bool vectors = holds_fours(out) && holds_fours(x) && holds_fours(y);
  launch(q, &map_rows<Function, map_threads>, grid_over(out.rows, out.cols, 4 * map_threads), map_threads, 0, out, x, y, f, vectors);
}

void gelu_mul(queue& q, rows<float> out, rows<const float> gate, rows<const float> up) noexcept { map(q, out, gate, up, gelu_product{}); }
void add(queue& q, rows<float> out, rows<const float> x, rows<const float> y) noexcept { map(q, out, x, y, sum_of_two{}); }
void scale(queue& q, rows<float> out, rows<const float> x, float factor) noexcept { map(q, out, x, x, product_with{factor}); }
void copy(queue& q, rows<float> out, rows<const float> x) noexcept { map(q, out, x, x, identity{}); }
void softcap(queue& q, rows<float> out, rows<const float> x, float cap) noexcept { map(q, out, x, x, soft_cap{cap}); }

// ------------------------------------------------------------------------------------------------ quantize

/// The int8 blocks of f(x, y).
template <class Function, int Threads>
__global__ void __launch_bounds__(Threads)
    quantize_rows(rows<int8_block> out, rows<const float> x, rows<const float> y, Function f, bool vectors) {
  const std::size_t c = 4 * (std::size_t{blockIdx.x} * Threads + threadIdx.x);
  const bool mine = c / 32 < out.cols;  // lanes without columns still meet the others
  for (std::size_t r = blockIdx.y; r < out.rows; r += gridDim.y) {
    const float4 v = mine ? apply_four(f, x, y, r, c, vectors) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    store_as_blocks(out.row(r), c, v, mine);
  }
}

template <class Function>
void launch_quantize(queue& q, rows<int8_block> out, rows<const float> x, rows<const float> y, Function f) noexcept {
  launch(q, &quantize_rows<Function, quantize_threads>, grid_over(out.rows, 32 * out.cols, 4 * quantize_threads), quantize_threads, 0, out,
         x, y, f, holds_fours(x) && holds_fours(y));
}
void quantize(queue& q, rows<int8_block> out, rows<const float> x) noexcept { launch_quantize(q, out, x, x, identity{}); }
void gelu_mul_quantize(queue& q, rows<int8_block> out, rows<const float> gate, rows<const float> up) noexcept {
  launch_quantize(q, out, gate, up, gelu_product{});
}

// ------------------------------------------------------------------------------------------------ sums and rows of others

/// out(r) = Σ_j weights(r, j) · x(r·s + j), j ascending.
template <int Threads>
__global__ void __launch_bounds__(Threads) weighted_sum_rows(rows<float> out, rows<const float> x, rows<const float> weight, bool vectors) {
  const std::size_t c = 4 * (std::size_t{blockIdx.x} * Threads + threadIdx.x), n = out.cols;
  if (c >= n) return;
  for (std::size_t r = blockIdx.y; r < out.rows; r += gridDim.y) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (std::size_t j = 0; j < weight.cols; ++j) {
      const float w = weight.row(r)[j];
      const float4 v = load_four(x.row(r * weight.cols + j), c, n, vectors);
      sum = make_float4(fmaf(w, v.x, sum.x), fmaf(w, v.y, sum.y), fmaf(w, v.z, sum.z), fmaf(w, v.w, sum.w));
    }
    store_four(out.row(r), c, n, vectors, sum);
  }
}

void weighted_sum(queue& q, rows<float> out, rows<const float> x, rows<const float> weights) noexcept {
  launch(q, &weighted_sum_rows<map_threads>, grid_over(out.rows, out.cols, 4 * map_threads), map_threads, 0, out, x, weights,
         holds_fours(out) && holds_fours(x));
}

/// out(r, j·w + i) = table(from(r, j), i).
template <int Threads>
__global__ void __launch_bounds__(Threads) gather_id_rows(rows<token_id> out, rows<const token_id> table, rows<const std::int32_t> from) {
  const std::size_t c = std::size_t{blockIdx.x} * Threads + threadIdx.x;
  if (c >= out.cols) return;
  const std::size_t j = c / table.cols, i = c % table.cols;
  for (std::size_t r = blockIdx.y; r < out.rows; r += gridDim.y) out.row(r)[c] = table.row(static_cast<std::size_t>(from.row(r)[j]))[i];
}

void gather_ids(queue& q, rows<token_id> out, rows<const token_id> table, rows<const std::int32_t> from) noexcept {
  launch(q, &gather_id_rows<map_threads>, grid_over(out.rows, out.cols, map_threads), map_threads, 0, out, table, from);
}

/// Every block finds the least of x(r) for itself, fills its columns and puts what belongs there: one kernel, as blocks cannot wait for others.
template <int Threads, int Columns>
__global__ void __launch_bounds__(Threads)
    scatter_logit_rows(rows<float> out, rows<const float> x, rows<const token_id> ids, bool vectors) {
  const std::size_t first = std::size_t{blockIdx.x} * Columns, end = first + Columns < out.cols ? first + Columns : out.cols;
  for (std::size_t r = blockIdx.y; r < out.rows; r += gridDim.y) {
    float least = x.row(r)[0];
    for (std::size_t j = threadIdx.x; j < x.cols; j += Threads) least = fminf(least, x.row(r)[j]);
    const float rest = __fadd_rn(-block_max<Threads>(-least), -1.0f);
    for (std::size_t c = first + 4 * threadIdx.x; c < end; c += 4 * Threads)
      store_four(out.row(r), c, out.cols, vectors, make_float4(rest, rest, rest, rest));
    __syncthreads();  // the columns are filled
    for (std::size_t j = threadIdx.x; j < x.cols; j += Threads) {
      const auto c = static_cast<std::size_t>(ids.row(r)[j]);
      if (c >= first && c < end) out.row(r)[c] = x.row(r)[j];
    }
  }
}

void scatter_logits(queue& q, rows<float> out, rows<const float> x, rows<const token_id> ids) noexcept {
  constexpr int columns = 4096;  // of a block
  launch(q, &scatter_logit_rows<map_threads, columns>, grid_over(out.rows, out.cols, columns), map_threads, 0, out, x, ids,
         holds_fours(out));
}

}  // namespace outrider::device
