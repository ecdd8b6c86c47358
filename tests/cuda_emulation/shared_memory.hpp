// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Shared memory that remembers who touched it. A part of emulation.hpp.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cuda_emulation/machine.hpp"

namespace outrider::cuda_emulation {

/// Who touched an element, and after how many barriers.
struct access {
  std::uint64_t number : 11 = 0;  // of the thread, from 1; 0: nobody
  std::uint64_t epoch : 26 = 0;
  std::uint64_t warp_epoch : 27 = 0;
  [[nodiscard]] bool in(const access& now) const { return number != 0 && epoch == now.epoch; }
  [[nodiscard]] unsigned thread() const { return static_cast<unsigned>(number) - 1; }
  [[nodiscard]] unsigned warp() const { return thread() / 32; }
};

/// Of one element of shared memory, in the block `serial`.
struct shadow {
  unsigned serial = 0;
  access write;
  access read[2];  // since the write
};

inline std::vector<shadow> dynamic_cells;  // of dynamic shared memory

/// Keeps two reads, enough to see that any write conflicts with one of all reads since the barrier: two of different warps, or two of
/// different threads since the last __syncwarp of a warp that is alone.
inline void remember_read(access (&read)[2], const access& now) {
  if (!read[0].in(now)) {
    read[0] = now, read[1] = {};
    return;
  }
  const bool two_warps = read[1].in(now) && read[0].warp() != read[1].warp();
  if (two_warps) return;
  if (read[0].warp() == now.warp() && read[0].warp_epoch != now.warp_epoch)
    read[0] = now, read[1] = {};
  else if (read[0].number != now.number)
    read[1] = now;
}

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_race(const char* text, const access& before, int element) {
  fail(*machine.running, "race: " + std::string(text) + name(machine.threads[before.thread()]) + " on shared element " +
                             std::to_string(element) + ", no barrier since " + machine.last_barrier.text());
}
[[noreturn, gnu::cold, gnu::noinline]] inline void fail_unwritten(int element) {
  fail(*machine.running, "reads shared element " + std::to_string(element) + ", which no thread has written");
}

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_range(int element, int count) {
  fail(*machine.running, "shared element " + std::to_string(element) + " of " + std::to_string(count) + " is out of range");
}
[[noreturn, gnu::cold, gnu::noinline]] inline void fail_alignment(int element, int n) {
  fail(*machine.running, "shared element " + std::to_string(element) + " is not aligned for a vector of " + std::to_string(n));
}

/// Records an access of the running thread; reports the other thread if no barrier orders the two.
inline void touch(shadow& s, bool write, int element) {
  if (!settings.check_races) return;
  const thread& t = *machine.running;
  access now;
  now.number = (t.linear + 1) & 2047u, now.epoch = machine.epoch & 0x3ffffffu, now.warp_epoch = machine.warps[t.warp].epoch & 0x7ffffffu;
  if (s.serial != machine.serial) s = {machine.serial, {}, {}};
  const auto check = [&](const access& before, const char* text) {
    if (!before.in(now) || before.number == now.number) return;
    if (before.warp() != t.warp || before.warp_epoch == now.warp_epoch) fail_race(text, before, element);
  };
  if (!write && s.write.number == 0) fail_unwritten(element);
  check(s.write, write ? "writes after the write of " : "reads after the write of ");
  if (!write) return remember_read(s.read, now);
  for (const access& r : s.read) check(r, "writes after the read of ");
  s = {machine.serial, now, {}};
}

inline void touch(const copy_under_way& copy) {
  for (int i = 0; i < copy.count; ++i) touch(copy.cells[std::ptrdiff_t{i} * copy.stride], true, copy.element + i);
}

/// What a[i] is: reads and writes of a T, recorded. Copy a struct out before naming its members.
template <class T>
class shared_reference {
 public:
  shared_reference(T* value, shadow* cell, int index) : value_(value), cell_(cell), index_(index) {}
  operator T() const {
    touch(*cell_, false, index_);
    return *value_;
  }
  const shared_reference& operator=(const T& v) const {
    touch(*cell_, true, index_);
    *value_ = v;
    return *this;
  }
  const shared_reference& operator=(const shared_reference& other) const { return *this = static_cast<T>(other); }
  const shared_reference& operator+=(const T& v) const { return *this = static_cast<T>(*this) + v; }

 private:
  T* value_;
  shadow* cell_;
  int index_;
};

/// An array in shared memory. Two views of different types over the same bytes do not know of each other's accesses, but where elements
/// begin at the same byte.
template <class T>
struct shared_view {
  T* data;
  shadow* cells;  // of element i: cells[i * stride]
  int count, stride;

  void check(int i, int n) const {
    if (i < 0 || i > count - n) fail_range(i < 0 ? i : i + n - 1, count);
    if (i % n != 0) fail_alignment(i, n);
  }
  shared_reference<T> operator[](int i) const {
    check(i, 1);
    return shared_reference<T>(data + i, cells + std::ptrdiff_t{i} * stride, i);
  }
  /// A V, read as one vector, from the elements i, i + 1, ...
  template <class V>
  V load(int i) const {
    touch_vector<V>(i, false);
    V v;
    std::memcpy(&v, data + i, sizeof v);
    return v;
  }
  template <class V>
  void store(int i, const V& v) const {
    touch_vector<V>(i, true);
    std::memcpy(static_cast<void*>(data + i), &v, sizeof v);
  }

 private:
  template <class V>
  void touch_vector(int i, bool write) const {
    static_assert(sizeof(V) % sizeof(T) == 0 && alignof(V) <= 16);
    constexpr int n = sizeof(V) / sizeof(T);
    check(i, n);
    for (int e = i; e < i + n; ++e) touch(cells[std::ptrdiff_t{e} * stride], write, e);
  }
};

}  // namespace outrider::cuda_emulation
