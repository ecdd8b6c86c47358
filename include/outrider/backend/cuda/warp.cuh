// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Reductions over a warp and over a block. Their order is fixed and the same for every lane, so all lanes get the same bits.
#pragma once
#include "outrider/backend/cuda/device.cuh"

namespace outrider::device {

inline constexpr int warp_size = 32;
inline constexpr unsigned all_lanes = 0xffffffffu;

/// Sum over the warp, in every lane. A butterfly: addition commutes, so partners agree bit for bit.
__device__ inline float warp_sum(float v) {
#pragma unroll
  for (int step = warp_size / 2; step > 0; step /= 2) v = __fadd_rn(v, __shfl_xor_sync(all_lanes, v, step));
  return v;
}

namespace detail {

/// One level of warp_sums for lanes that hold Held values each, and the levels below it.
template <int Held, int Step>
__device__ void warp_sums_from(float* v) {
  if constexpr (Held == 1) {
    v[0] = __fadd_rn(v[0], __shfl_xor_sync(all_lanes, v[0], Step));
  } else {
    const bool upper = (threadIdx.x & Step) != 0;
#pragma unroll
    for (int i = 0; i < Held / 2; ++i) {
      const float kept = upper ? v[i + Held / 2] : v[i], given = upper ? v[i] : v[i + Held / 2];
      v[i] = __fadd_rn(kept, __shfl_xor_sync(all_lanes, given, Step));
    }
  }
  if constexpr (Step > 1) warp_sums_from<(Held > 1 ? Held / 2 : 1), Step / 2>(v);
}

}  // namespace detail

/// Count sums over the warp at once, a power of two up to 64, each with the bits of warp_sum: as long as a lane holds several values, it
/// adds up one half of them and its partner the other, so that 32 sums take 31 shuffles. In the end lane l holds, from v[0] on, the Count /
/// 32 sums from number l * Count / 32 on, or just that one.
template <int Count>
__device__ void warp_sums(float (&v)[Count]) {
  static_assert(Count >= 1 && Count <= 2 * warp_size && (Count & (Count - 1)) == 0);
  detail::warp_sums_from<Count, warp_size / 2>(v);
}

/// Largest over the warp, in every lane; NaNs are passed over, unless there is nothing else.
__device__ inline float warp_max(float v) {
#pragma unroll
  for (int step = warp_size / 2; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(all_lanes, v, step));
  return v;
}

namespace detail {

/// The warps' values, one each, combined in the order of the warps, in every thread. All threads of a one-dimensional block take part.
template <int Warps, class T, class Combine>
__device__ T across_warps(T of_warp, Combine combine) {
  if constexpr (Warps == 1) return of_warp;
  __shared__ shared_array<T, Warps> values;
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();  // values of an earlier call may still be read
  if (thread % warp_size == 0) values[thread / warp_size] = of_warp;
  __syncthreads();
  T result = values[0];
#pragma unroll
  for (int warp = 1; warp < Warps; ++warp) result = combine(result, static_cast<T>(values[warp]));
  return result;
}

}  // namespace detail

/// Sum over a block of Threads threads, a multiple of 32, in every thread. Every thread of the block calls it.
template <int Threads>
__device__ float block_sum(float v) {
  static_assert(Threads % warp_size == 0);
  return detail::across_warps<Threads / warp_size>(warp_sum(v), [](float a, float b) { return __fadd_rn(a, b); });
}

/// Largest over a block, as block_sum.
template <int Threads>
__device__ float block_max(float v) {
  static_assert(Threads % warp_size == 0);
  return detail::across_warps<Threads / warp_size>(warp_max(v), [](float a, float b) { return fmaxf(a, b); });
}

}  // namespace outrider::device
