// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The twin of backend/cuda/device.cuh: the same names, checked. A part of emulation.hpp.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda_emulation/machine.hpp"
#include "cuda_emulation/shared_memory.hpp"
#include "outrider/core/scalar.hpp"

namespace outrider::cuda_emulation {

/// What nvcc would know of a kernel: how to call it with the addresses of its arguments, and their sizes.
struct kernel_type {
  void (*apply)(const void* address, void* const* arguments) = nullptr;
  std::vector<std::size_t> argument_sizes = {};
  std::size_t most_dynamic_shared = 48 * 1024;  // until cudaFuncSetAttribute allows more
};
inline std::unordered_map<const void*, kernel_type> kernels;

/// Held while a thread is in the emulation: threads take turns.
inline std::mutex turn;

// ---------------------------------------------------------------- mma_s8

struct fragments_s8 {  // of one lane
  int* c;
  const std::uint32_t* a;
  const std::uint32_t* b;
};

/// Computes the tile for all lanes at once, from the fragments they show.
inline void multiply_tiles_s8(thread* lanes, unsigned part) {
  if (part != ~0u) fail_waiting(lanes[std::countr_zero(part)], " takes all 32 lanes of a warp");
  std::int16_t a[16][32], b[8][32];  // b by columns
  const auto unpack = [](std::int16_t* to, std::uint32_t word) {
    for (int i = 0; i < 4; ++i) to[i] = static_cast<std::int8_t>(word >> 8 * i & 255);
  };
  const auto of = [&](unsigned lane) { return *reinterpret_cast<const fragments_s8*>(static_cast<std::uintptr_t>(lanes[lane].value)); };
  for (unsigned lane = 0; lane < 32; ++lane) {
    const unsigned g = lane / 4, t = lane % 4;
    const fragments_s8 own = of(lane);
    unpack(&a[g][4 * t], own.a[0]), unpack(&a[g][16 + 4 * t], own.a[2]);
    unpack(&a[g + 8][4 * t], own.a[1]), unpack(&a[g + 8][16 + 4 * t], own.a[3]);
    unpack(&b[g][4 * t], own.b[0]), unpack(&b[g][16 + 4 * t], own.b[1]);
  }
  const auto add_dot = [](int& c, const std::int16_t(&row)[32], const std::int16_t(&column)[32]) {
    int dot = 0;
    for (int k = 0; k < 32; ++k) dot += row[k] * column[k];
    c = static_cast<int>(static_cast<unsigned>(c) + static_cast<unsigned>(dot));  // wraps, as the device does
  };
  for (unsigned lane = 0; lane < 32; ++lane) {
    const unsigned g = lane / 4, t = lane % 4;
    int* const c = of(lane).c;
    add_dot(c[0], a[g], b[2 * t]), add_dot(c[1], a[g], b[2 * t + 1]);
    add_dot(c[2], a[g + 8], b[2 * t]), add_dot(c[3], a[g + 8], b[2 * t + 1]);
  }
}

}  // namespace outrider::cuda_emulation

namespace outrider::device {

namespace emu = cuda_emulation;

// ---------------------------------------------------------------- shared memory

template <class T, int N>
class shared_array {
 public:
  emu::shared_view<T> view() { return {values_, cells_, N, 1}; }
  emu::shared_reference<T> operator[](int i) { return view()[i]; }
  template <class V>
  V load(int i) {
    return view().template load<V>(i);
  }
  template <class V>
  void store(int i, const V& v) {
    view().store(i, v);
  }

 private:
  alignas(16) T values_[std::size_t{N}];
  emu::shadow cells_[std::size_t{N}];
};

template <class T>
emu::shared_view<T> dynamic_shared(int offset_bytes, int count) {
  auto& m = emu::machine;
  if (offset_bytes % 16 != 0) emu::fail(*m.running, "dynamic_shared: the offset is not a multiple of 16");
  if (offset_bytes < 0 || count < 0 ||
      static_cast<std::size_t>(offset_bytes) + static_cast<std::size_t>(count) * sizeof(T) > m.dynamic_bytes.size())
    emu::fail(*m.running, "dynamic_shared: more than the launch gave");
  auto& cells = emu::dynamic_cells;  // of bytes: element i of a view begins sizeof(T) * i bytes on
  if (cells.size() < m.dynamic_bytes.size()) cells.resize(m.dynamic_bytes.size());
  return {reinterpret_cast<T*>(m.dynamic_bytes.data() + offset_bytes), cells.data() + offset_bytes, count, sizeof(T)};
}

// ---------------------------------------------------------------- asynchronous copies, as late as CUDA permits

template <class Shared, class T>
void copy_async(Shared& to, int i, const T* from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  emu::thread& t = *emu::machine.running;
  if (reinterpret_cast<std::uintptr_t>(from) % sizeof(T) != 0) emu::fail(t, "copy_async: the source is not aligned");
  const auto view = [&] {
    if constexpr (requires { to.view(); })
      return to.view();
    else
      return to;
  }();
  static_assert(sizeof(T) % sizeof(*view.data) == 0);
  const emu::copy_under_way copy{
      view.data + i, from, sizeof(T), t.copy_group, view.cells + std::ptrdiff_t{i} * view.stride, i, sizeof(T) / sizeof(*view.data),
      view.stride};
  view.check(i, copy.count);
  emu::touch(copy);
  std::memset(copy.to, 0xff, copy.bytes);  // until it is waited for
  t.copies.push_back(copy);
}
inline void copy_async_commit() { ++emu::machine.running->copy_group; }
template <int Groups>
void copy_async_wait() {
  emu::thread& t = *emu::machine.running;
  std::erase_if(t.copies, [&](const emu::copy_under_way& copy) {
    if (copy.group + Groups >= t.copy_group) return false;
    emu::touch(copy);
    std::memcpy(copy.to, copy.from, copy.bytes);
    return true;
  });
}

// ---------------------------------------------------------------- the rest

inline void mma_s8(int (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], emu::site where = emu::site::here()) {
  const emu::fragments_s8 own{c, a, b};  // stays in place while this lane waits
  emu::meet_warp(&emu::multiply_tiles_s8, ~0u, reinterpret_cast<std::uintptr_t>(&own), 0, "mma_s8", where);
}

inline float widen(f16 value) { return to_float(value); }

using kernel_handle = const void*;
template <class... Parameters>
kernel_handle handle_of(void (*kernel)(Parameters...)) {
  static_assert((std::is_trivially_copyable_v<Parameters> && ...));
  const auto address = reinterpret_cast<const void*>(kernel);
  const std::lock_guard lock(emu::turn);
  if (!emu::kernels.contains(address)) {
    const auto apply = [](const void* called, [[maybe_unused]] void* const* arguments) {
      [&]<std::size_t... i>(std::index_sequence<i...>) {
        reinterpret_cast<void (*)(Parameters...)>(const_cast<void*>(called))(*static_cast<const Parameters*>(arguments[i])...);
      }
      (std::index_sequence_for<Parameters...>{});
    };
    emu::kernels.emplace(address, emu::kernel_type{apply, {sizeof(Parameters)...}});
  }
  return address;
}

}  // namespace outrider::device
