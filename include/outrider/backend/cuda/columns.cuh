// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What kernels over rows share. A thread takes four neighbouring columns at a time: as one vector where the views allow it, else one by one.
// Which thread has a column does not depend on that, so neither do the bits.
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/launchers.hpp"
#include "outrider/backend/cuda/warp.cuh"
#include "outrider/core/extents.hpp"
#include "outrider/core/int8.hpp"

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

/// Columns c … c + 3 of a row as int8 blocks, as core/int8.hpp defines them. Eight neighbouring lanes make a block, the first four its first
/// half. All lanes of a warp call it, those without columns with numbers that count for nothing: `mine` says whose are stored.
__device__ inline void store_as_blocks(int8_block* row, std::size_t c, float4 v, bool mine) {
  const unsigned lane = threadIdx.x % 8;
  unsigned largest = 0;  // magnitudes order like their bits, NaN above all
  for (const float value : {v.x, v.y, v.z, v.w}) {
    const unsigned magnitude = __float_as_uint(value) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  for (int step = 1; step < 8; step *= 2) {
    const unsigned other = __shfl_xor_sync(all_lanes, largest, step);
    largest = other > largest ? other : largest;
  }

  const bool finite = largest < 0x7f800000u;
  const float m = __uint_as_float(largest), factor = m > outrider::detail::least_magnitude ? __fdiv_rn(127.0f, m) : 0.0f;
  const auto integer = [&](float value) { return finite ? __float2int_rn(__fmul_rn(value, factor)) : 0; };
  const int q0 = integer(v.x), q1 = integer(v.y), q2 = integer(v.z), q3 = integer(v.w);
  int half = q0 + q1 + q2 + q3;
  half += __shfl_xor_sync(all_lanes, half, 1);
  half += __shfl_xor_sync(all_lanes, half, 2);
  const int other_half = __shfl_xor_sync(all_lanes, half, 4), sum = half + other_half;
  if (!mine) return;

  const float d = finite ? __fdiv_rn(m, 127.0f) : __uint_as_float(0x7fc00000u);
  int8_block& block = row[c / 32];
  const auto code = [](int value) { return static_cast<signed char>(value); };
  *reinterpret_cast<char4*>(block.q + 4 * lane) = make_char4(code(q0), code(q1), code(q2), code(q3));
  // A lane for each word of the rest, so that all stores are neighbours.
  if (lane == 0) *reinterpret_cast<short2*>(block.half_sum) = make_short2(static_cast<short>(half), static_cast<short>(other_half));
  if (lane == 1) block.offset = -8 * sum;
  if (lane == 2) block.d = d;
  if (lane == 3) block.sum = finite ? __fmul_rn(d, static_cast<float>(sum)) : d;
}

inline unsigned blocks_for(std::size_t count, std::size_t per_block) noexcept { return static_cast<unsigned>(divide_up(count, per_block)); }

/// A block per `columns` columns and row; as grid.y has an end, block y takes the rows y, y + grid.y, … .
inline dim3 grid_over(std::size_t m, std::size_t n, std::size_t columns) noexcept {
  return dim3(blocks_for(n, columns), static_cast<unsigned>(m < 65535 ? m : 65535));
}

}  // namespace outrider::device
