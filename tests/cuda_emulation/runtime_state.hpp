// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The state of the emulated runtime: what tests set, count and make fail. A part of runtime.hpp.
#pragma once
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "cuda_emulation/machine.hpp"
#include "cuda_emulation/vocabulary.hpp"

enum cudaError : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInitializationError = 3,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidPitchValue = 12,
  cudaErrorInvalidMemcpyDirection = 21,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
  cudaErrorUnknown = 999,
};
using cudaError_t = cudaError;

namespace outrider::cuda_emulation {

struct error_text {
  cudaError code;
  const char *name, *text;
};
inline constexpr error_text error_texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidPitchValue, "cudaErrorInvalidPitchValue", "invalid pitch argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};
inline error_text error_text_of(cudaError code) {
  for (const error_text& t : error_texts)
    if (t.code == code) return t;
  return {code, "unrecognized error code", "unrecognized error code"};
}

struct runtime_settings {
  int devices = 1;
  int driver_version = 13000;  // 0: no driver; of another thousand below runtime_version: too old
  int runtime_version = 13000;
  const char* name = "emulated device";
  int major = 8, minor = 0;  // compute capability; kernels are compiled for 8.0 and above
  int multiprocessors = 4;
  std::size_t total_memory = std::size_t{8} << 30;            // cudaMalloc fails beyond it
  std::size_t most_dynamic_shared = std::size_t{227} * 1024;  // bytes of a block, for kernels that ask for more than 48 KiB
  bool late = false;                                          // do work of streams when somebody waits for it
};
struct runtime_counters {
  std::size_t launches = 0, graph_launches = 0, graphs_instantiated = 0, node_updates = 0;  // launches: outside graphs
  std::size_t copies = 0, synchronisations = 0, allocations = 0;
};
/// A call that shall fail: `code` once, after that many successes.
struct planned_fault {
  std::string_view function = "";  // "cudaMalloc"
  cudaError_t code = cudaErrorUnknown;
  int after = 0;
};

inline struct runtime_type {
  runtime_settings settings;
  runtime_counters counters;
  planned_fault fault;
  int device = 0;
  cudaError_t last_error = cudaSuccess;
  std::string failure;      // of a kernel, until it is thrown; while there is one, the device does nothing
  std::size_t objects = 0;  // streams, events, graphs, blocks of memory, ... that nobody has destroyed yet

  /// As at the beginning of the program, but for objects and a failure.
  void reset() {
    settings = {}, counters = {}, fault = {};
    device = 0, last_error = cudaSuccess;
    for (auto& kernel : kernels) kernel.second.most_dynamic_shared = kernel_type{}.most_dynamic_shared;
  }
  void fail(const std::string& text) {
    if (failure.empty()) failure = text;
  }
  void throw_failure() {
    if (failure.empty()) return;
    last_error = cudaSuccess;
    throw error(std::exchange(failure, {}));
  }

  runtime_type() = default;
  runtime_type(const runtime_type&) = delete;
  runtime_type& operator=(const runtime_type&) = delete;
  ~runtime_type() {
    if (failure.empty()) return;
    std::fprintf(stderr, "cuda_emulation: a kernel failed and nobody waited for it: %s\n", failure.c_str());
    std::_Exit(1);
  }
} runtime;

// ---------------------------------------------------------------- what every call begins and ends with

inline cudaError_t outcome(cudaError_t code) {
  if (code != cudaSuccess) runtime.last_error = code;
  return code;
}
template <class Body>
cudaError_t call_without_device(std::string_view function, Body body) {
  const std::lock_guard lock(turn);
  if (function == runtime.fault.function && runtime.fault.after-- == 0) return outcome(std::exchange(runtime.fault, {}).code);
  return outcome(body());
}
/// For what also works, or is pointless to refuse, after a kernel has failed.
template <class Body>
cudaError_t call_device(std::string_view function, Body body) {
  return call_without_device(function, [&]() -> cudaError_t {
    if (runtime.settings.driver_version / 1000 < runtime.settings.runtime_version / 1000) return cudaErrorInsufficientDriver;
    if (runtime.settings.devices == 0) return cudaErrorNoDevice;
    return body();
  });
}
template <class Body>
cudaError_t call_working_device(std::string_view function, Body body) {
  return call_device(function, [&]() -> cudaError_t {
    if (runtime.failure.empty())
      if (const cudaError_t code = body(); code != cudaSuccess) return code;
    return runtime.failure.empty() ? cudaSuccess : cudaErrorLaunchFailure;
  });
}

}  // namespace outrider::cuda_emulation

namespace outrider::cuda_emulation::cuda_names {

inline const char* cudaGetErrorName(cudaError_t code) { return error_text_of(code).name; }
inline const char* cudaGetErrorString(cudaError_t code) { return error_text_of(code).text; }
inline cudaError_t cudaPeekAtLastError() {
  const std::lock_guard lock(turn);
  return runtime.failure.empty() ? runtime.last_error : cudaErrorLaunchFailure;
}
inline cudaError_t cudaGetLastError() {
  const cudaError_t code = cudaPeekAtLastError();
  const std::lock_guard lock(turn);
  runtime.last_error = cudaSuccess;
  return code;
}

}  // namespace outrider::cuda_emulation::cuda_names
