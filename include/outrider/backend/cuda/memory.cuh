// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// memory.hpp, carried out. Queues live on streams that wait for the default stream and it for them, so a plain cudaMemcpy comes after
// everything that was sent before it and before everything that is sent after it.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "outrider/backend/cuda/check.cuh"
#include "outrider/backend/cuda/memory.hpp"

namespace outrider {

std::vector<cuda_device> cuda_devices() {
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  int driver = 0, runtime = 0, count = 0;
  OUTRIDER_CUDA_CHECK(cudaDriverGetVersion(&driver));
  OUTRIDER_CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  if (driver == 0) throw error(error_code::device_unavailable, "outrider: no CUDA device: no NVIDIA driver is installed");
  const cudaError_t outcome = cudaGetDeviceCount(&count);
  if (outcome == cudaErrorInsufficientDriver)
    throw error(error_code::device_unavailable, "outrider: the NVIDIA driver supports CUDA " + version(driver) +
                                                    ", this program was built with CUDA " + version(runtime) +
                                                    ": a newer driver is needed");
  if (outcome == cudaErrorNoDevice || (outcome == cudaSuccess && count == 0)) {
    static_cast<void>(cudaGetLastError());
    throw error(error_code::device_unavailable,
                "outrider: no CUDA device: the driver is there (CUDA " + version(driver) + "), but it shows none");
  }
  device::check({outcome, "cudaGetDeviceCount(&count)", __FILE__, __LINE__});
  std::vector<cuda_device> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p{};
    OUTRIDER_CUDA_CHECK(cudaGetDeviceProperties(&p, i));
    devices.push_back({p.name, p.major, p.minor, p.multiProcessorCount, p.totalGlobalMem});
  }
  return devices;
}

namespace device {

/// Sends what the thread's last queue keeps; throws what went wrong with it. Defined in queue.cuh.
void send_kept() noexcept;
void check_kept();

/// Errors: device_unavailable. Memory, streams and launches belong to the device that the thread is set to.
void require_first_device() {
  int device = 0;
  OUTRIDER_CUDA_CHECK(cudaGetDevice(&device));
  if (device != 0)
    throw error(error_code::device_unavailable, "outrider: this thread was set to CUDA device " + std::to_string(device) +
                                                    ", and ops run on device 0; CUDA_VISIBLE_DEVICES says which one that is");
}

void* allocate(std::size_t bytes) {
  require_first_device();
  void* memory = nullptr;
  const failure f = OUTRIDER_CUDA_OUTCOME(cudaMalloc(&memory, bytes));
  if (f.code == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    throw error(error_code::out_of_memory,
                "outrider: out of device memory: " + mebibytes(bytes) + " needed, " + mebibytes(free_bytes()) + " free");
  }
  check(f);
  return memory;
}

void* allocate_zeros(std::size_t bytes) {
  void* const memory = allocate(bytes);
  const failure f = OUTRIDER_CUDA_OUTCOME(cudaMemset(memory, 0, bytes));
  if (f.code != cudaSuccess) {
    static_cast<void>(cudaFree(memory));
    check(f);
  }
  return memory;
}

void release(void* memory) noexcept {
  send_kept();  // kernels that are kept may still use it; cudaFree waits for those that were sent
  static_cast<void>(cudaFree(memory));
}

std::size_t free_bytes() {
  std::size_t free = 0, total = 0;
  OUTRIDER_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return free;
}

std::string_view title() noexcept {
  static const std::string text = [] {
    try {
      const cuda_device d = cuda_devices().front();
      return d.name + ", compute capability " + std::to_string(d.major) + "." + std::to_string(d.minor);
    } catch (const std::exception&) {
      return std::string("CUDA");
    }
  }();
  return text;
}

inline cudaMemcpyKind kind_of(direction way) {
  return way == direction::in ? cudaMemcpyHostToDevice : way == direction::out ? cudaMemcpyDeviceToHost : cudaMemcpyDeviceToDevice;
}

void copy_bytes(void* to, const void* from, std::size_t bytes, direction way) {
  if (bytes == 0) return;
  send_kept();
  check_kept();
  OUTRIDER_CUDA_CHECK(cudaMemcpy(to, from, bytes, kind_of(way)));
}

void copy_byte_rows(void* to, std::size_t to_stride, const void* from, std::size_t from_stride, std::size_t width, std::size_t rows,
                    direction way) {
  if (width == 0 || rows == 0) return;
  if (rows == 1 || (to_stride == width && from_stride == width)) return copy_bytes(to, from, width * rows, way);
  send_kept();
  check_kept();
  OUTRIDER_CUDA_CHECK(cudaMemcpy2D(to, to_stride, from, from_stride, width, rows, kind_of(way)));
}

}  // namespace device
}  // namespace outrider
