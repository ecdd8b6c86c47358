// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What kernels over rows share. A thread takes four neighbouring columns at a time: as one vector where the views allow it, else one by one.
// Which thread has a column does not depend on that, so neither do the bits.
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/launchers.hpp"

namespace outrider::device {

/// Whether all rows of a view can be taken by aligned vectors of four.
template <class T>
bool holds_fours(rows<T> x) noexcept {
  return reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 && x.cols % 4 == 0 && x.stride % 4 == 0;
}
inline bool holds_fours(const float* weight) noexcept { return reinterpret_cast<std::uintptr_t>(weight) % 16 == 0; }

/// Columns c … c + 3 of a row of n, c < n; what would lie beyond its end is zero.
__device__ inline float4 load_four(const float* row, std::size_t c, std::size_t n, bool vectors) {
  if (vectors) return *reinterpret_cast<const float4*>(row + c);
  return make_float4(row[c], c + 1 < n ? row[c + 1] : 0.0f, c + 2 < n ? row[c + 2] : 0.0f, c + 3 < n ? row[c + 3] : 0.0f);
}
__device__ inline void store_four(float* row, std::size_t c, std::size_t n, bool vectors, float4 v) {
  if (vectors) {
    *reinterpret_cast<float4*>(row + c) = v;
    return;
  }
  row[c] = v.x;
  if (c + 1 < n) row[c + 1] = v.y;
  if (c + 2 < n) row[c + 2] = v.z;
  if (c + 3 < n) row[c + 3] = v.w;
}

/// f(x(r, c)), or f(x(r, c), y(r, c)) where f takes two, for four columns.
template <class Function>
__device__ float4 apply_four(Function f, rows<const float> x, rows<const float> y, std::size_t r, std::size_t c, bool vectors) {
  const float4 a = load_four(x.row(r), c, x.cols, vectors);
  if constexpr (requires { f(a.x, a.x); }) {
    const float4 b = load_four(y.row(r), c, x.cols, vectors);
    return make_float4(f(a.x, b.x), f(a.y, b.y), f(a.z, b.z), f(a.w, b.w));
  } else {
    return make_float4(f(a.x), f(a.y), f(a.z), f(a.w));
  }
}

inline unsigned blocks_for(std::size_t count, std::size_t per_block) noexcept {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

/// A block per `columns` columns and row; as grid.y has an end, block y takes the rows y, y + grid.y, … .
inline dim3 grid_over(std::size_t m, std::size_t n, std::size_t columns) noexcept {
  return dim3(blocks_for(n, columns), static_cast<unsigned>(m < 65535 ? m : 65535));
}

}  // namespace outrider::device
