// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What device code calls to meet other threads, and what it does to memory that others share. A part of emulation.hpp.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "cuda_emulation/machine.hpp"

namespace outrider::cuda_emulation {

// ---------------------------------------------------------------- operations of a warp, for all lanes at once

inline void synchronise(thread* lanes, unsigned part) {
  warp_state& w = machine.warps[lanes[0].warp];
  if (part == w.live) ++w.epoch;  // one of only some lanes orders nothing for the race check
}

inline void shuffle(thread* lanes, unsigned part) {
  for_each_lane(lanes, part, [&](thread& t) {
    if (!(part >> t.source & 1)) fail_waiting(t, " reads lane " + std::to_string(t.source) + ", which takes no part");
    t.result = lanes[t.source].value;
  });
}

template <class Combine>
void reduce(thread* lanes, unsigned part, std::uint64_t first, Combine combine) {
  for_each_lane(lanes, part, [&](const thread& t) { first = combine(first, t); });
  for_each_lane(lanes, part, [&](thread& t) { t.result = first; });
}
inline void ballot(thread* lanes, unsigned part) {
  reduce(lanes, part, 0, [](std::uint64_t all, const thread& t) { return all | std::uint64_t{t.value != 0} << t.lane; });
}
inline void any(thread* lanes, unsigned part) {
  reduce(lanes, part, 0, [](std::uint64_t all, const thread& t) { return std::uint64_t{all != 0 || t.value != 0}; });
}
inline void all_of(thread* lanes, unsigned part) {
  reduce(lanes, part, 1, [](std::uint64_t all, const thread& t) { return std::uint64_t{all != 0 && t.value != 0}; });
}
inline void sum(thread* lanes, unsigned part) {
  reduce(lanes, part, 0, [](std::uint64_t all, const thread& t) { return all + t.value; });
}
inline void smallest(thread* lanes, unsigned part) {
  reduce(lanes, part, ~std::uint64_t{0}, [](std::uint64_t all, const thread& t) { return std::min(all, t.value); });
}
inline void largest(thread* lanes, unsigned part) {
  reduce(lanes, part, 0, [](std::uint64_t all, const thread& t) { return std::max(all, t.value); });
}

template <class T>
T shuffle_from(int source, unsigned mask, const T& value, const char* what, site where) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = meet_warp(&shuffle, mask, bits, static_cast<unsigned>(source), what, where);
  T result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
inline int own_lane() { return static_cast<int>(machine.running->lane); }

}  // namespace outrider::cuda_emulation

namespace outrider::cuda_emulation::cuda_names {

inline void __syncthreads(site where = site::here()) { meet_block(where); }
inline void __syncwarp(unsigned mask = ~0u, site where = site::here()) { meet_warp(&synchronise, mask, 0, 0, "__syncwarp", where); }
inline void __threadfence() {}
inline void __threadfence_block() {}

// Lanes lie in groups of `width`; who would read beyond its group reads itself.
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, site where = site::here()) {
  return shuffle_from((own_lane() & -width) + (lane & (width - 1)), mask, value, "__shfl_sync", where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, site where = site::here()) {
  const int own = own_lane(), other = own ^ lanes;
  return shuffle_from(other < (own & -width) + width ? other : own, mask, value, "__shfl_xor_sync", where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32, site where = site::here()) {
  const int own = own_lane(), other = own + static_cast<int>(lanes);
  return shuffle_from(other < (own & -width) + width ? other : own, mask, value, "__shfl_down_sync", where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32, site where = site::here()) {
  const int own = own_lane(), other = own - static_cast<int>(lanes);
  return shuffle_from(other >= (own & -width) ? other : own, mask, value, "__shfl_up_sync", where);
}

inline unsigned __ballot_sync(unsigned mask, int value, site where = site::here()) {
  return static_cast<unsigned>(meet_warp(&ballot, mask, value != 0, 0, "__ballot_sync", where));
}
inline int __any_sync(unsigned mask, int value, site where = site::here()) {
  return static_cast<int>(meet_warp(&any, mask, value != 0, 0, "__any_sync", where));
}
inline int __all_sync(unsigned mask, int value, site where = site::here()) {
  return static_cast<int>(meet_warp(&all_of, mask, value != 0, 0, "__all_sync", where));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, site where = site::here()) {
  return static_cast<unsigned>(meet_warp(&sum, mask, value, 0, "__reduce_add_sync", where));
}
inline int __reduce_add_sync(unsigned mask, int value, site where = site::here()) {
  return static_cast<int>(__reduce_add_sync(mask, static_cast<unsigned>(value), where));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value, site where = site::here()) {
  return static_cast<unsigned>(meet_warp(&smallest, mask, value, 0, "__reduce_min_sync", where));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, site where = site::here()) {
  return static_cast<unsigned>(meet_warp(&largest, mask, value, 0, "__reduce_max_sync", where));
}

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
// Threads change only where they meet, so these are atomic.
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  return std::exchange(*p, static_cast<T>(*p + v));
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> v) {
  return std::exchange(*p, *p < v ? v : *p);
}
template <class T>
T atomicMin(T* p, std::type_identity_t<T> v) {
  return std::exchange(*p, v < *p ? v : *p);
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> v) {
  return std::exchange(*p, v);
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
  return std::exchange(*p, *p == expected ? v : *p);
}

}  // namespace outrider::cuda_emulation::cuda_names
