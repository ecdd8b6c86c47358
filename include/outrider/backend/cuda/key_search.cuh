// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A search for a key of choice.cuh among many, by a block: the k-th greatest, or the one at which weights add up to a share of all. What threads
// add up in no fixed order are integers, so that the same keys give the same result whoever comes first.
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/backend/cuda/choice.cuh"
#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/warp.cuh"

namespace outrider::device {

/// The value of a key.
__device__ inline float value_of(std::uint64_t key) {
  const auto order = static_cast<unsigned>(key >> 32);
  return __uint_as_float((order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order);
}
/// The least key of any index with the value of this one.
__device__ inline std::uint64_t without_index(std::uint64_t key) { return key & ~std::uint64_t{0xffffffffu}; }

/// Below every key of a number above −∞.
inline constexpr std::uint64_t least_number = std::uint64_t{0x00800000u} << 32;

/// (logit − largest) / temperature, as the host has it.
__device__ inline double score_of(float logit, float largest, double temperature) {
  return logit >= largest ? 0.0 : (double{logit} - double{largest}) / temperature;
}

inline constexpr int search_threads = 1024, search_keys = 512;

/// The values of a block combined, in every thread, in an order that is always the same.
template <class T, class Combine>
__device__ T over_block(T v, Combine combine) {
#pragma unroll
  for (int step = warp_size / 2; step > 0; step /= 2) v = combine(v, __shfl_xor_sync(all_lanes, v, step));
  return detail::across_warps<search_threads / warp_size>(v, combine);
}

struct running_sum {
  std::uint64_t through, total;  // of the threads up to and including this one, and of all
};
__device__ inline running_sum sums_of_block(std::uint64_t v) {
  __shared__ shared_array<std::uint64_t, search_threads / warp_size> of_warp;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int step = 1; step < warp_size; step *= 2) {
    const std::uint64_t below = __shfl_up_sync(all_lanes, v, static_cast<unsigned>(step));
    if (thread % warp_size >= step) v += below;
  }
  if (thread % warp_size == warp_size - 1) of_warp[thread / warp_size] = v;
  __syncthreads();
  std::uint64_t before = 0, total = 0;
  for (int warp = 0; warp < search_threads / warp_size; ++warp) {
    if (warp < thread / warp_size) before += of_warp[warp];
    total += of_warp[warp];
  }
  __syncthreads();  // before another call writes
  return {before + v, total};
}

/// What a key counts: one, or its weight exp(score) as an integer, all weights of the row together being 2^62.
struct key_measure {
  bool weighs = false;
  float largest = 0;
  double temperature = 1, scale = 1;
  __device__ std::uint64_t operator()(std::uint64_t key) const {
    return weighs ? static_cast<std::uint64_t>(exp(score_of(value_of(key), largest, temperature)) * scale + 0.5) : 1;
  }
};

struct search_room {
  unsigned long long bins[search_threads];
  shared_array<std::uint64_t, search_keys> keys, measures;
  unsigned count;  // of keys, also of those that found no room
  int bin;
  std::uint64_t above, found;
};

/// The first key, falling from `high` to `low`, at which the measure of those passed reaches `wanted` >= 1; 0 if it never does. visit(f) calls
/// f(key) for all keys there are, and others, each by one thread. The range is cut into a bin a thread, and the bin where the measure is
/// reached is the next range, until its keys fit into shared memory. Called by all threads of a block.
template <class Visit>
__device__ std::uint64_t find_key(search_room& room, Visit visit, std::uint64_t low, std::uint64_t high, key_measure measure,
                                  std::uint64_t wanted) {
  const int thread = static_cast<int>(threadIdx.x);
  std::uint64_t above = 0;  // the measure of keys above `high`
  for (;;) {
    __syncthreads();  // the room is no longer read
    if (thread == 0) {
      room.count = 0;
      room.bin = -1;
      room.found = 0;
    }
    room.bins[thread] = 0;
    __syncthreads();
    visit([&](std::uint64_t key) {
      if (key < low || key > high) return;
      const unsigned place = atomicAdd(&room.count, 1u);
      if (place < search_keys) room.keys[static_cast<int>(place)] = key;
    });
    __syncthreads();
    if (room.count <= search_keys) break;
    if (low == high) return high;

    int shift = 0;
    while (((high - low) >> shift) >= search_threads) ++shift;
    visit([&](std::uint64_t key) {
      if (key < low || key > high) return;
      const std::uint64_t own = measure(key);
      if (own != 0) atomicAdd(&room.bins[(high - key) >> shift], static_cast<unsigned long long>(own));
    });
    __syncthreads();
    const std::uint64_t own = room.bins[thread], through = above + sums_of_block(own).through;
    if (through >= wanted && through - own < wanted) {
      room.bin = thread;
      room.above = through - own;
    }
    __syncthreads();
    if (room.bin < 0) return 0;
    above = room.above;
    high -= static_cast<std::uint64_t>(room.bin) << shift;
    const std::uint64_t width = (std::uint64_t{1} << shift) - 1;
    if (high - low > width) low = high - width;
  }

  const int count = static_cast<int>(room.count);
  std::uint64_t key = 0, own = 0, before = above;
  if (thread < count) {
    key = room.keys[thread];
    own = measure(key);
    room.measures[thread] = own;
  }
  __syncthreads();
  if (thread < count) {
    for (int i = 0; i < count; ++i) {
      const std::uint64_t other = room.keys[i];
      if (other > key || (other == key && i < thread)) before += room.measures[i];
    }
    if (before < wanted && before + own >= wanted) room.found = key;
  }
  __syncthreads();
  return room.found;
}

}  // namespace outrider::device
