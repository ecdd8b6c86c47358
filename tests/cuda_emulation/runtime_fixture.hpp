// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What the tests of the emulated runtime library share.
#pragma once
#include <doctest/doctest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda_emulation/emulation.hpp"
#include "outrider/backend/cuda/device.cuh"

#define REQUIRE_SUCCESS(call) REQUIRE((call) == cudaSuccess)

namespace cuda_emulation_test {

namespace emu = outrider::cuda_emulation;
using emu::runtime;
using outrider::device::handle_of;
using outrider::device::shared_array;

/// Each test begins with the defaults and ends with nothing left.
struct fixture {
  std::size_t objects = runtime.objects;
  fixture() { runtime.reset(); }
  fixture(const fixture&) = delete;
  fixture& operator=(const fixture&) = delete;
  ~fixture() {
    runtime.reset();
    emu::settings = {};
    CHECK(runtime.objects == objects);
    CHECK(runtime.failure == "");
  }
};

__global__ inline void add(int* to, int value, int n) {
  if (static_cast<int>(threadIdx.x) < n) to[threadIdx.x] += value;
}
__global__ inline void append(int* to, int value) {  // to[0]: how many there are
  if (threadIdx.x == 0) to[++to[0]] = value;
}
__global__ inline void race(int* to) {
  __shared__ shared_array<int, 1> a;
  a[0] = static_cast<int>(threadIdx.x);
  __syncthreads();
  to[0] = a[0];
}
template <class... Parameters>
cudaError_t launch(cudaStream_t stream, void (*kernel)(Parameters...), dim3 block, std::size_t shared_bytes,
                   std::type_identity_t<Parameters>... arguments) {
  void* addresses[] = {&arguments..., nullptr};
  return cudaLaunchKernel(handle_of(kernel), 1, block, addresses, shared_bytes, stream);
}

struct device_ints {
  int* data = nullptr;
  std::size_t size;
  explicit device_ints(std::size_t n) : size(n) {
    REQUIRE_SUCCESS(cudaMalloc(&data, n * sizeof(int)));
    REQUIRE_SUCCESS(cudaMemset(data, 0, n * sizeof(int)));
  }
  device_ints(const device_ints&) = delete;
  device_ints& operator=(const device_ints&) = delete;
  ~device_ints() { CHECK(cudaFree(data) == cudaSuccess); }
  [[nodiscard]] std::vector<int> values() const {
    std::vector<int> host(size);
    REQUIRE_SUCCESS(cudaMemcpy(host.data(), data, size * sizeof(int), cudaMemcpyDeviceToHost));
    return host;
  }
};
struct stream_holder {
  cudaStream_t stream = nullptr;
  explicit stream_holder(unsigned flags = cudaStreamDefault) { REQUIRE_SUCCESS(cudaStreamCreateWithFlags(&stream, flags)); }
  stream_holder(const stream_holder&) = delete;
  stream_holder& operator=(const stream_holder&) = delete;
  ~stream_holder() { CHECK(cudaStreamDestroy(stream) == cudaSuccess); }
};

inline std::string thrown_by(cudaError_t (*call)()) {
  try {
    static_cast<void>(call());
  } catch (const emu::error& e) {
    return e.what();
  }
  return "";
}

/// Exit status and output of a child that runs the body and returns from main.
template <class Body>
int status_of_child(Body body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    static_cast<void>(std::freopen("/dev/null", "w", stderr));
    static_cast<void>(std::freopen("/dev/null", "w", stdout));
    body();
    std::exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

}  // namespace cuda_emulation_test
