// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The subset of the CUDA runtime API that the library calls, on the CPU, with CUDA's signatures and numbers. A part of emulation.hpp.
//
// Work is done when it is asked for, or with runtime.settings.late when somebody waits for it, which is as late as CUDA permits: a buffer that
// is used again too early then shows. Device memory is host memory that AddressSanitizer forbids the host to touch; copies check that
// pointers lie where the direction says. What the emulation finds in a kernel makes the launch fail with cudaErrorLaunchFailure, and
// cudaStreamSynchronize, cudaEventSynchronize, cudaDeviceSynchronize, cudaMemcpy and cudaMemcpy2D then throw it (cuda_emulation::error).
// A program in which nobody waited for such a failure says so at its end, and fails.
//
//   runtime_state.hpp    error codes; what tests set, count and make fail
//   runtime_memory.hpp   allocation and copies
//   runtime_streams.hpp  streams, events, launches
//   runtime_graphs.hpp   graphs of kernels
#pragma once
#include <cstddef>
#include <cstdio>

#include "cuda_emulation/runtime_graphs.hpp"
#include "cuda_emulation/runtime_memory.hpp"
#include "cuda_emulation/runtime_state.hpp"
#include "cuda_emulation/runtime_streams.hpp"

enum cudaDeviceAttr : int {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
struct cudaDeviceProp {
  char name[256];
  std::size_t totalGlobalMem;
  int major, minor;
  int multiProcessorCount;
  std::size_t sharedMemPerBlockOptin;
};

namespace outrider::cuda_emulation {
inline bool is_device(int number) { return number >= 0 && number < runtime.settings.devices; }
}  // namespace outrider::cuda_emulation

namespace outrider::cuda_emulation::cuda_names {

inline cudaError_t cudaDriverGetVersion(int* version) {
  return call_without_device("cudaDriverGetVersion", [&] {
    *version = runtime.settings.driver_version;
    return cudaSuccess;
  });
}
inline cudaError_t cudaRuntimeGetVersion(int* version) {
  return call_without_device("cudaRuntimeGetVersion", [&] {
    *version = runtime.settings.runtime_version;
    return cudaSuccess;
  });
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  return call_device("cudaGetDeviceCount", [&] {
    *count = runtime.settings.devices;
    return cudaSuccess;
  });
}
inline cudaError_t cudaGetDevice(int* device) {
  return call_device("cudaGetDevice", [&] {
    *device = runtime.device;
    return cudaSuccess;
  });
}
inline cudaError_t cudaSetDevice(int device) {
  return call_device("cudaSetDevice", [&] {
    if (!is_device(device)) return cudaErrorInvalidDevice;
    runtime.device = device;
    return cudaSuccess;
  });
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return call_device("cudaDeviceGetAttribute", [&] {
    const auto& settings = runtime.settings;
    if (!is_device(device)) return cudaErrorInvalidDevice;
    switch (attribute) {
      case cudaDevAttrMultiProcessorCount:
        *value = settings.multiprocessors;
        return cudaSuccess;
      case cudaDevAttrComputeCapabilityMajor:
        *value = settings.major;
        return cudaSuccess;
      case cudaDevAttrComputeCapabilityMinor:
        *value = settings.minor;
        return cudaSuccess;
      case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = static_cast<int>(settings.most_dynamic_shared);
        return cudaSuccess;
    }
    return cudaErrorInvalidValue;
  });
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call_device("cudaGetDeviceProperties", [&] {
    const auto& settings = runtime.settings;
    if (!is_device(device)) return cudaErrorInvalidDevice;
    *properties = {};
    std::snprintf(properties->name, sizeof properties->name, "%s", settings.name);
    properties->totalGlobalMem = settings.total_memory;
    properties->major = settings.major, properties->minor = settings.minor;
    properties->multiProcessorCount = settings.multiprocessors;
    properties->sharedMemPerBlockOptin = settings.most_dynamic_shared;
    return cudaSuccess;
  });
}

}  // namespace outrider::cuda_emulation::cuda_names
