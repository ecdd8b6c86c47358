// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Device memory, pinned memory, and copies between them and the host. A part of runtime.hpp.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda_emulation/runtime_blocks.hpp"
#include "cuda_emulation/runtime_state.hpp"
#include "cuda_emulation/runtime_streams.hpp"

enum cudaMemcpyKind : int {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};
inline constexpr unsigned cudaHostAllocDefault = 0;

namespace outrider::cuda_emulation {

// ---------------------------------------------------------------- copies

/// Rows of bytes that a copy reads or writes.
struct copy_rows {
  std::byte* to;
  std::size_t to_pitch;
  const std::byte* from;
  std::size_t from_pitch, width, height;

  [[nodiscard]] std::size_t to_bytes() const { return (height - 1) * to_pitch + width; }
  [[nodiscard]] std::size_t from_bytes() const { return (height - 1) * from_pitch + width; }
  void run() const {
    for (std::size_t r = 0; r < height; ++r) std::memcpy(to + r * to_pitch, from + r * from_pitch, width);
  }
};

inline bool is_valid(const copy_rows& c, cudaMemcpyKind kind) {
  const bool any = kind == cudaMemcpyDefault;
  const auto fits = [any](const std::byte* p, std::size_t bytes, bool on_device) {
    if (on_device || (any && device_blocks.touches(p, bytes))) return device_blocks.contains(p, bytes);
    return !device_blocks.touches(p, bytes);
  };
  return fits(c.to, c.to_bytes(), kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) &&
         fits(c.from, c.from_bytes(), kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
}

inline copy_rows rows_of(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width, std::size_t height) {
  return {static_cast<std::byte*>(to), to_pitch, static_cast<const std::byte*>(from), from_pitch, width, height};
}

/// A copy on a stream. With pageable memory the host waits: what it gives is read before the call returns, what it gets has come.
inline cudaError_t copy(copy_rows c, cudaMemcpyKind kind, cudaStream_t stream) {
  if (!is_stream(stream)) return cudaErrorInvalidResourceHandle;
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
  if (c.width > c.to_pitch || c.width > c.from_pitch) return cudaErrorInvalidPitchValue;
  if (c.width == 0 || c.height == 0) return cudaSuccess;
  if (!is_valid(c, kind)) return cudaErrorInvalidValue;
  if (c.from < c.to + c.to_bytes() && c.to < c.from + c.from_bytes()) {
    runtime.fail("a copy whose source and target overlap");
    return cudaErrorLaunchFailure;
  }
  ++runtime.counters.copies;
  const auto pageable = [](const std::byte* p) { return !device_blocks.touches(p, 1) && !pinned_blocks.touches(p, 1); };
  const auto given = std::make_shared<std::vector<std::byte>>();
  if (stream && runtime.settings.late && pageable(c.from)) {
    given->assign(c.from, c.from + c.from_bytes());
    c.from = given->data();
  }
  const cudaError_t code = submit(stream, [c, given] { c.run(); });
  if (pageable(c.to)) finish(stream);
  return code;
}

/// A copy on the default stream that has been made on return, behind all it waits for.
inline cudaError_t copy_and_wait(const copy_rows& c, cudaMemcpyKind kind) {
  finish(which_streams::blocking);
  runtime.throw_failure();
  const cudaError_t code = copy(c, kind, nullptr);
  runtime.throw_failure();
  return code;
}

inline cudaError_t fill(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (!device_blocks.contains(memory, bytes)) return cudaErrorInvalidValue;
  return submit(stream, [=] { std::memset(memory, value, bytes); });
}

}  // namespace outrider::cuda_emulation

namespace outrider::cuda_emulation::cuda_names {

// ---------------------------------------------------------------- memory

inline cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  return call_working_device("cudaMalloc", [&] {
    *memory = nullptr;
    if (bytes == 0) return cudaSuccess;
    if (bytes > runtime.settings.total_memory - std::min(device_blocks.bytes(), runtime.settings.total_memory))
      return cudaErrorMemoryAllocation;
    const device_access access;  // ends with all blocks, the new one too, out of reach
    *memory = device_blocks.add(bytes);
    if (!*memory) return cudaErrorMemoryAllocation;
    ++runtime.counters.allocations;
    return cudaSuccess;
  });
}
/// Waits for the device.
inline cudaError_t cudaFree(void* memory) {
  return call_device("cudaFree", [&] {
    finish(which_streams::all);
    const device_access access;
    return !memory || device_blocks.remove(memory) ? cudaSuccess : cudaErrorInvalidValue;
  });
}
inline cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return call_device("cudaMemGetInfo", [&] {
    *total = runtime.settings.total_memory;
    *free = *total - std::min(*total, device_blocks.bytes());
    return cudaSuccess;
  });
}

inline cudaError_t allocate_pinned(const char* function, void** memory, std::size_t bytes) {
  return call_working_device(function, [&] {
    *memory = bytes == 0 ? nullptr : pinned_blocks.add(bytes);
    return bytes == 0 || *memory ? cudaSuccess : cudaErrorMemoryAllocation;
  });
}
inline cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned /*flags*/) {
  return allocate_pinned("cudaHostAlloc", memory, bytes);
}
inline cudaError_t cudaMallocHost(void** memory, std::size_t bytes) { return allocate_pinned("cudaMallocHost", memory, bytes); }
inline cudaError_t cudaFreeHost(void* memory) {
  return call_device("cudaFreeHost", [&] {
    finish(which_streams::all);
    return !memory || pinned_blocks.remove(memory) ? cudaSuccess : cudaErrorInvalidValue;
  });
}

template <class T>
cudaError_t cudaMalloc(T** memory, std::size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(memory), bytes);
}
template <class T>
cudaError_t cudaMallocHost(T** memory, std::size_t bytes) {
  return cudaMallocHost(reinterpret_cast<void**>(memory), bytes);
}
template <class T>
cudaError_t cudaHostAlloc(T** memory, std::size_t bytes, unsigned flags) {
  return cudaHostAlloc(reinterpret_cast<void**>(memory), bytes, flags);
}

// ---------------------------------------------------------------- copies

inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return call_device("cudaMemcpy", [&] { return copy_and_wait(rows_of(to, bytes, from, bytes, bytes, 1), kind); });
}
inline cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                                std::size_t height, cudaMemcpyKind kind) {
  return call_device("cudaMemcpy2D", [&] { return copy_and_wait(rows_of(to, to_pitch, from, from_pitch, width, height), kind); });
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream = nullptr) {
  return call_working_device("cudaMemcpyAsync", [&] { return copy(rows_of(to, bytes, from, bytes, bytes, 1), kind, stream); });
}
inline cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                                     std::size_t height, cudaMemcpyKind kind, cudaStream_t stream = nullptr) {
  return call_working_device("cudaMemcpy2DAsync",
                             [&] { return copy(rows_of(to, to_pitch, from, from_pitch, width, height), kind, stream); });
}
inline cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  return call_working_device("cudaMemset", [&] { return fill(memory, value, bytes, nullptr); });
}
inline cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream = nullptr) {
  return call_working_device("cudaMemsetAsync", [&] { return fill(memory, value, bytes, stream); });
}

}  // namespace outrider::cuda_emulation::cuda_names
