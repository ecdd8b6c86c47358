// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <type_traits>

#include "outrider/backend/cuda/launch.cuh"
#include "outrider/backend/cuda/launchers.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/dequantize.hpp"
#include "outrider/core/extents.hpp"

namespace outrider::device {

/// The weight in a column of a row, as a float.
template <class W>
__device__ float weight_in(const W* row, std::size_t column) {
  if constexpr (block_format<W>)
    return weight_at(row[column / W::elements], column % W::elements);
  else if constexpr (std::is_same_v<W, f16>)
    return widen(row[column]);
  else
    return to_float(row[column]);
}

/// A thread per weight; `blocks_per_row` blocks of the grid share a row.
template <class W, int Threads>
__global__ void __launch_bounds__(Threads)
    gather(rows<float> out, weights<W> w, const token_id* __restrict__ ids, float factor, std::size_t blocks_per_row) {
  const std::size_t row = blockIdx.x / blocks_per_row, column = blockIdx.x % blocks_per_row * Threads + threadIdx.x;
  if (column >= out.cols) return;
  out.row(row)[column] = __fmul_rn(weight_in(w.row(static_cast<std::size_t>(ids[row])), column), factor);
}

template <class W>
void gather_rows(queue& q, rows<float> out, weights<W> w, const token_id* ids, float factor) noexcept {
  constexpr int threads = 256;
  const std::size_t blocks_per_row = divide_up(out.cols, threads);
  launch(q, &gather<W, threads>, static_cast<unsigned>(out.rows * blocks_per_row), threads, 0, out, w, ids, factor, blocks_per_row);
}

}  // namespace outrider::device
