// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Products of many rows with bf16 weights by the tensor cores, for prompts. They multiply bf16 by bf16, so each activation is cut
// into three bf16 numbers whose sum it is, and the products are added again: three times the work of a plain product, and no less exact than
// float.
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/gemm.cuh"
#include "outrider/backend/cuda/launch.cuh"
#include "outrider/backend/cuda/launchers.hpp"
#include "outrider/backend/cuda/linear.cuh"
#include "outrider/core/extents.hpp"

namespace outrider::device {

/// A float as the sum of three bf16: the upper 8 bits of its significand, the next 8, and the rest. Exact, but for numbers so small that a part
/// would be subnormal. What is not finite has one part.
struct three_parts {
  bf16 part[3];
};
__device__ inline three_parts split(float value) {
  const auto upper = [](float v) {
    bf16 b;
    b.bits = static_cast<std::uint16_t>(__float_as_uint(v) >> 16);
    return b;
  };
  three_parts out;
  if (!(fabsf(value) <= 3.402823466e+38f)) {
    out.part[0] = bf16(value);
    return out;
  }
  out.part[0] = upper(value);
  const float rest = __fadd_rn(value, -to_float(out.part[0]));
  out.part[1] = upper(rest);
  out.part[2] = upper(__fadd_rn(rest, -to_float(out.part[1])));
  return out;
}

/// parts [3, m, k] of x [m, k]. Grid: (columns, rows).
template <int Threads = 256>
__global__ void __launch_bounds__(Threads) split_rows(bf16* parts, rows<const float> x) {
  const std::size_t c = std::size_t{blockIdx.x} * Threads + threadIdx.x, r = blockIdx.y;
  if (c >= x.cols) return;
  const three_parts cut = split(x.row(r)[c]);
  for (std::size_t p = 0; p < 3; ++p) parts[(p * x.rows + r) * x.cols + c] = cut.part[p];
}

/// out [m, n] = the sum of products [3, m, n], smallest part first. Grid: (columns, rows).
template <int Threads = 256>
__global__ void __launch_bounds__(Threads) join_products(rows<float> out, const float* products) {
  const std::size_t c = std::size_t{blockIdx.x} * Threads + threadIdx.x, r = blockIdx.y;
  if (c >= out.cols) return;
  const auto part = [&](std::size_t p) { return products[(p * out.rows + r) * out.cols + c]; };
  out.row(r)[c] = __fadd_rn(__fadd_rn(part(2), part(1)), part(0));
}

/// Below this many rows matmul is as fast, and reads the weights once as well.
inline constexpr std::size_t shortest_gemm = 17;

void gemm_matmul(queue& q, rows<float> out, rows<const float> x, weights<bf16> w) noexcept {
  const bool fits =
      x.cols != 0 && x.cols % 8 == 0 && w.rows % 8 == 0 && w.stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(w.data) % 16 == 0;
  if (x.rows < shortest_gemm || !fits) return matmul<bf16>(q, out, x, w);

  constexpr std::size_t workspace_bytes = std::size_t{16} << 20, most_rows = 128;
  auto* const workspace = static_cast<std::byte*>(q.scratch());
  auto* const parts = reinterpret_cast<bf16*>(workspace + workspace_bytes);
  constexpr std::size_t room = queue::scratch_bytes - workspace_bytes;
  const std::size_t part_bytes = divide_up(3 * most_rows * x.cols * sizeof(bf16), 256) * 256;
  if (part_bytes > room / 2) return matmul<bf16>(q, out, x, w);
  auto* const products = reinterpret_cast<float*>(workspace + workspace_bytes + part_bytes);
  const std::size_t most_cols = (room - part_bytes) / (3 * most_rows * sizeof(float)) / 64 * 64;

  constexpr unsigned threads = 256;
  for (std::size_t first = 0; first < x.rows; first += most_rows) {
    const std::size_t m = x.rows - first < most_rows ? x.rows - first : most_rows;
    launch(q, &split_rows<threads>, dim3(static_cast<unsigned>(divide_up(x.cols, threads)), static_cast<unsigned>(m)), threads, 0, parts,
           x.slice_rows(first, m));
    for (std::size_t column = 0; column < w.rows; column += most_cols) {
      const std::size_t n = w.rows - column < most_cols ? w.rows - column : most_cols;
      const rows<float> tile = out.slice_rows(first, m).slice_cols(column, n);
      if (gemm(q, products, parts, w.row(column), {3 * m, n, x.cols, x.cols, w.stride, n}, workspace, workspace_bytes))
        launch(q, &join_products<threads>, dim3(static_cast<unsigned>(divide_up(n, threads)), static_cast<unsigned>(m)), threads, 0, tile,
               products);
      else
        matmul<bf16>(q, tile, x.slice_rows(first, m), {w.row(column), n, w.cols, w.stride});
    }
  }
}

}  // namespace outrider::device
