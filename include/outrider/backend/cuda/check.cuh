// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/memory.hpp"
#include "outrider/error.hpp"

namespace outrider::device {

/// A call of CUDA that failed: what it was, where, and what CUDA calls it; or a library's call, with the library's own word for it.
struct failure {
  cudaError_t code = cudaSuccess;
  const char* call = "";
  const char* file = "";
  int line = 0;
  const char* word = nullptr;

  [[nodiscard]] std::string text() const {
    const std::string_view path = file;
    return "outrider: CUDA: " + std::string(call) + " at " + std::string(path.substr(path.find_last_of('/') + 1)) + ":" +
           std::to_string(line) + ": " + (word ? word : std::string(cudaGetErrorString(code)) + " (" + cudaGetErrorName(code) + ")");
  }
};

/// Throws what a failed call means: no usable device, no memory, or device_failed.
inline void check(const failure& f) {
  if (f.code == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // the runtime repeats what nobody has asked for
  switch (f.code) {
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
      static_cast<void>(cuda_devices());  // says it in a sentence
      [[fallthrough]];
    case cudaErrorNoKernelImageForDevice:  // built for other devices than this one
      throw error(error_code::device_unavailable, f.text());
    case cudaErrorMemoryAllocation: {
      std::size_t free = 0, total = 0;
      const bool known = cudaMemGetInfo(&free, &total) == cudaSuccess;
      throw error(error_code::out_of_memory, f.text() + (known ? "; " + mebibytes(free) + " of device memory are free" : ""));
    }
    default:
      throw error(error_code::device_failed, f.text());
  }
}

}  // namespace outrider::device

/// The outcome of a CUDA call, with its place.
#define OUTRIDER_CUDA_OUTCOME(call) (::outrider::device::failure{(call), #call, __FILE__, __LINE__})
/// Throws if the call fails.
#define OUTRIDER_CUDA_CHECK(call) (::outrider::device::check(OUTRIDER_CUDA_OUTCOME(call)))
