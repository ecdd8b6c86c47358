// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The emulated runtime library: devices, memory and copies work as CUDA documents, and fail where CUDA fails.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "cuda_emulation/runtime_fixture.hpp"

using namespace cuda_emulation_test;

// ---------------------------------------------------------------- errors and devices

TEST_CASE("error codes have CUDA's numbers, names and texts") {
  CHECK(cudaErrorMemoryAllocation == 2);
  CHECK(cudaErrorInsufficientDriver == 35);
  CHECK(cudaErrorNoDevice == 100);
  CHECK(cudaErrorLaunchFailure == 719);
  CHECK(std::string_view(cudaGetErrorName(cudaErrorNoDevice)) == "cudaErrorNoDevice");
  CHECK(std::string_view(cudaGetErrorString(cudaErrorNoDevice)) == "no CUDA-capable device is detected");
  CHECK(std::string_view(cudaGetErrorString(cudaSuccess)) == "no error");
  CHECK(std::string_view(cudaGetErrorName(static_cast<cudaError_t>(998))) == "unrecognized error code");
}

TEST_CASE_FIXTURE(fixture, "the last error stays until somebody asks for it") {
  CHECK(cudaSetDevice(5) == cudaErrorInvalidDevice);
  int device = -1;
  CHECK(cudaGetDevice(&device) == cudaSuccess);
  CHECK(device == 0);
  CHECK(cudaPeekAtLastError() == cudaErrorInvalidDevice);
  CHECK(cudaGetLastError() == cudaErrorInvalidDevice);
  CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE_FIXTURE(fixture, "devices and their properties") {
  runtime.settings.devices = 2;
  runtime.settings.name = "test device";
  runtime.settings.major = 9, runtime.settings.minor = 3, runtime.settings.multiprocessors = 7;
  runtime.settings.total_memory = 12345;
  int count = 0, value = 0;
  CHECK(cudaGetDeviceCount(&count) == cudaSuccess);
  CHECK(count == 2);
  CHECK(cudaSetDevice(1) == cudaSuccess);
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 1) == cudaSuccess);
  CHECK(std::string_view(properties.name) == "test device");
  CHECK(properties.totalGlobalMem == 12345);
  CHECK(properties.major == 9);
  CHECK(properties.minor == 3);
  CHECK(properties.multiProcessorCount == 7);
  CHECK(cudaGetDeviceProperties(&properties, 2) == cudaErrorInvalidDevice);
  CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess);
  CHECK(value == 9);
  CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMinor, 0) == cudaSuccess);
  CHECK(value == 3);
  CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess);
  CHECK(value == 7);
  CHECK(cudaDeviceGetAttribute(&value, static_cast<cudaDeviceAttr>(1000), 0) == cudaErrorInvalidValue);
  CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, -1) == cudaErrorInvalidDevice);
}

TEST_CASE_FIXTURE(fixture, "no device, no driver, an old driver") {
  int count = -1, version = -1;
  void* memory = nullptr;
  runtime.settings.devices = 0;
  CHECK(cudaGetDeviceCount(&count) == cudaErrorNoDevice);
  CHECK(count == 0);
  CHECK(cudaMalloc(&memory, 4) == cudaErrorNoDevice);
  CHECK(cudaDriverGetVersion(&version) == cudaSuccess);
  CHECK(version == 13000);
  for (const int driver : {0, 12080}) {
    runtime.settings = {};
    runtime.settings.driver_version = driver;
    CHECK(cudaDriverGetVersion(&version) == cudaSuccess);
    CHECK(version == driver);
    CHECK(cudaRuntimeGetVersion(&version) == cudaSuccess);
    CHECK(version == 13000);
    CHECK(cudaGetDeviceCount(&count) == cudaErrorInsufficientDriver);
    CHECK(cudaMalloc(&memory, 4) == cudaErrorInsufficientDriver);
  }
}

TEST_CASE_FIXTURE(fixture, "a planned fault comes once, after as many successes as asked") {
  runtime.fault = {"cudaMemGetInfo", cudaErrorUnknown, 2};
  std::size_t free = 0, total = 0;
  CHECK(cudaMemGetInfo(&free, &total) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(cudaMemGetInfo(&free, &total) == cudaSuccess);
  CHECK(cudaMemGetInfo(&free, &total) == cudaErrorUnknown);
  CHECK(cudaMemGetInfo(&free, &total) == cudaSuccess);
  CHECK(cudaGetLastError() == cudaErrorUnknown);
}

// ---------------------------------------------------------------- memory

TEST_CASE_FIXTURE(fixture, "device memory is limited, aligned, and full of NaNs") {
  runtime.settings.total_memory = 1000;
  std::byte *a = nullptr, *b = nullptr;
  REQUIRE_SUCCESS(cudaMalloc(&a, 600));
  CHECK(reinterpret_cast<std::uintptr_t>(a) % 256 == 0);
  std::array<unsigned char, 600> host{};
  CHECK(cudaMemcpy(host.data(), a, 600, cudaMemcpyDeviceToHost) == cudaSuccess);
  CHECK(std::all_of(host.begin(), host.end(), [](unsigned char c) { return c == 0xff; }));
  std::size_t free = 0, total = 0;
  CHECK(cudaMemGetInfo(&free, &total) == cudaSuccess);
  CHECK(free == 400);
  CHECK(total == 1000);
  CHECK(cudaMalloc(&b, 401) == cudaErrorMemoryAllocation);
  CHECK(b == nullptr);
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
  CHECK(cudaMalloc(&b, 400) == cudaSuccess);
  CHECK(cudaFree(a + 1) == cudaErrorInvalidValue);
  CHECK(cudaFree(a) == cudaSuccess);
  CHECK(cudaFree(a) == cudaErrorInvalidValue);
  CHECK(cudaFree(b) == cudaSuccess);
  CHECK(cudaFree(nullptr) == cudaSuccess);
  CHECK(cudaMalloc(&b, 0) == cudaSuccess);
  CHECK(b == nullptr);
  CHECK(runtime.counters.allocations == 2);
}

TEST_CASE_FIXTURE(fixture, "copies check the direction and both ends of device memory") {
  const device_ints a(8), b(8);
  std::vector<int> host{1, 2, 3, 4, 5, 6, 7, 8}, other(16);
  runtime.counters = {};
  CHECK(cudaMemcpy(a.data, host.data(), 32, cudaMemcpyHostToDevice) == cudaSuccess);
  CHECK(cudaMemcpy(b.data, a.data, 32, cudaMemcpyDeviceToDevice) == cudaSuccess);
  CHECK(b.values() == host);
  CHECK(cudaMemcpy(b.data + 4, a.data, 16, cudaMemcpyDefault) == cudaSuccess);
  CHECK(b.values() == std::vector<int>{1, 2, 3, 4, 1, 2, 3, 4});
  CHECK(cudaMemcpy(other.data(), host.data(), 32, cudaMemcpyHostToHost) == cudaSuccess);
  CHECK(runtime.counters.copies == 6);

  CHECK(cudaMemcpy(a.data, host.data(), 36, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(a.data + 1, host.data(), 32, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(a.data, host.data(), 32, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(host.data(), a.data, 32, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(a.data, host.data(), 32, cudaMemcpyDeviceToDevice) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(a.data, b.data, 32, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(other.data(), a.data, 36, cudaMemcpyDefault) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(a.data, host.data(), 4, static_cast<cudaMemcpyKind>(5)) == cudaErrorInvalidMemcpyDirection);
  CHECK(cudaMemcpy(nullptr, nullptr, 0, cudaMemcpyHostToDevice) == cudaSuccess);
  CHECK(a.values() == host);
  CHECK_THROWS_WITH_AS(cudaMemcpy(a.data + 1, a.data, 28, cudaMemcpyDeviceToDevice), "a copy whose source and target overlap", emu::error);

  CHECK(cudaMemset(a.data, 1, 36) == cudaErrorInvalidValue);
  CHECK(cudaMemset(host.data(), 1, 32) == cudaErrorInvalidValue);
  CHECK(cudaMemset(a.data + 7, 1, 4) == cudaSuccess);
  CHECK(a.values() == std::vector<int>{1, 2, 3, 4, 5, 6, 7, 0x01010101});
}

TEST_CASE_FIXTURE(fixture, "copies of rows") {
  const device_ints a(11);
  const std::vector<int> host{1, 2, 3, 4, 5, 6, 7, 8, 9};
  REQUIRE_SUCCESS(cudaMemcpy2D(a.data, 16, host.data(), 12, 12, 3, cudaMemcpyHostToDevice));  // the last row has no padding
  CHECK(a.values() == std::vector<int>{1, 2, 3, 0, 4, 5, 6, 0, 7, 8, 9});
  std::vector<int> back(6);
  REQUIRE_SUCCESS(cudaMemcpy2D(back.data(), 8, a.data, 16, 8, 3, cudaMemcpyDeviceToHost));
  CHECK(back == std::vector<int>{1, 2, 4, 5, 7, 8});
  CHECK(cudaMemcpy2D(back.data(), 8, a.data, 16, 12, 1, cudaMemcpyDeviceToHost) == cudaErrorInvalidPitchValue);
  CHECK(cudaMemcpy2D(a.data, 16, host.data(), 8, 8, 4, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy2D(a.data, 16, host.data(), 8, 8, 0, cudaMemcpyHostToDevice) == cudaSuccess);
}

TEST_CASE_FIXTURE(fixture, "pinned memory belongs to the host") {
  const device_ints a(4);
  int* pinned = nullptr;
  REQUIRE_SUCCESS(cudaMallocHost(&pinned, 16));
  std::fill(pinned, pinned + 4, 3);
  CHECK(cudaMemcpy(a.data, pinned, 16, cudaMemcpyHostToDevice) == cudaSuccess);
  CHECK(a.values() == std::vector<int>(4, 3));
  CHECK(cudaMemcpy(a.data, pinned, 16, cudaMemcpyDeviceToDevice) == cudaErrorInvalidValue);
  REQUIRE_SUCCESS(launch(nullptr, &add, 4, 0, pinned, 2, 4));
  CHECK(pinned[3] == 5);
  CHECK(cudaFree(pinned) == cudaErrorInvalidValue);
  CHECK(cudaFreeHost(pinned) == cudaSuccess);
  CHECK(cudaFreeHost(pinned) == cudaErrorInvalidValue);
}
