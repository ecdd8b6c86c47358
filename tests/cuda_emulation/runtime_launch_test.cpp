// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Launches and streams of the emulated runtime library.
#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "cuda_emulation/runtime_fixture.hpp"

using namespace cuda_emulation_test;
using outrider::device::dynamic_shared;

namespace {
__global__ void fill_shared(int* to, int n) {
  const auto a = dynamic_shared<int>(0, n);
  a[n - 1] = 7;
  *to = a[n - 1];
}
__global__ void nothing() {}
}  // namespace

// ---------------------------------------------------------------- launches

TEST_CASE_FIXTURE(fixture, "a launch runs its kernel with copies of the arguments") {
  const device_ints a(4);
  const stream_holder s;
  int* data = a.data;
  int value = 5, n = 3;
  void* arguments[] = {&data, &value, &n};
  CHECK(cudaLaunchKernel(handle_of(&add), 1, 4, arguments, 0, s.stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(s.stream) == cudaSuccess);
  CHECK(a.values() == std::vector<int>{5, 5, 5, 0});
  CHECK(runtime.counters.launches == 1);
  CHECK(runtime.counters.synchronisations == 1);
}

TEST_CASE_FIXTURE(fixture, "launches that CUDA refuses") {
  const device_ints a(1);
  int* data = a.data;
  void* arguments[] = {&data};
  const auto kernel = handle_of(&race);
  const auto with = [&](dim3 grid, dim3 block) { return cudaLaunchKernel(kernel, grid, block, arguments, 0, nullptr); };
  for (const dim3 grid : {dim3(0), dim3(1, 0), dim3(1, 1, 0), dim3(0x80000000u), dim3(1, 65536), dim3(1, 1, 65536)})
    CHECK(with(grid, 1) == cudaErrorInvalidConfiguration);
  for (const dim3 block : {dim3(0), dim3(1, 0), dim3(1, 1, 0), dim3(1025), dim3(33, 32), dim3(1, 1, 65)})
    CHECK(with(1, block) == cudaErrorInvalidConfiguration);
  CHECK(with(dim3(2, 2, 2), dim3(1, 1, 1)) == cudaSuccess);
  int local = 0;
  CHECK(cudaLaunchKernel(&local, 1, 1, arguments, 0, nullptr) == cudaErrorInvalidDeviceFunction);
  CHECK(cudaLaunchKernel(kernel, 1, 1, nullptr, 0, nullptr) == cudaErrorInvalidValue);
  CHECK(cudaLaunchKernel(handle_of(&nothing), 1, 1, nullptr, 0, nullptr) == cudaSuccess);
  const cudaStream_t no_stream = reinterpret_cast<cudaStream_t>(&local);
  CHECK(cudaLaunchKernel(kernel, 1, 1, arguments, 0, no_stream) == cudaErrorInvalidResourceHandle);
  runtime.settings.major = 7, runtime.settings.minor = 5;
  CHECK(with(1, 1) == cudaErrorNoKernelImageForDevice);
}

TEST_CASE_FIXTURE(fixture, "more dynamic shared memory than 48 KiB has to be allowed, and 227 KiB is the end") {
  const device_ints a(1);
  constexpr int kib = 1024;
  const stream_holder s;
  const auto with = [&](int bytes) { return launch(s.stream, &fill_shared, 1, static_cast<std::size_t>(bytes), a.data, bytes / 4); };
  const auto allow = [&](int bytes) {
    return cudaFuncSetAttribute(handle_of(&fill_shared), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  };
  CHECK(with(48 * kib) == cudaSuccess);
  CHECK(with(48 * kib + 4) == cudaErrorInvalidValue);
  CHECK(allow(100 * kib) == cudaSuccess);
  CHECK(with(100 * kib) == cudaSuccess);
  CHECK(with(100 * kib + 4) == cudaErrorInvalidValue);
  CHECK(allow(227 * kib + 1) == cudaErrorInvalidValue);
  CHECK(allow(227 * kib) == cudaSuccess);
  CHECK(with(227 * kib) == cudaSuccess);
  CHECK(with(227 * kib + 4) == cudaErrorInvalidValue);
  CHECK(a.values()[0] == 7);
  runtime.settings.most_dynamic_shared = 99 * kib;
  CHECK(with(100 * kib) == cudaErrorInvalidValue);
  runtime.reset();
  CHECK(with(48 * kib + 4) == cudaErrorInvalidValue);
  CHECK(launch(nullptr, &fill_shared, 1, 48 * kib, a.data, 10) == cudaSuccess);
  CHECK(launch(nullptr, &fill_shared, 1, 48 * kib + 4, a.data, 10) == cudaErrorInvalidValue);
  int local = 0;
  CHECK(cudaFuncSetAttribute(&local, cudaFuncAttributeMaxDynamicSharedMemorySize, 1) == cudaErrorInvalidDeviceFunction);
}

TEST_CASE_FIXTURE(fixture, "what the emulation finds in a kernel is thrown by whoever waits, and the device does nothing until then") {
  const device_ints a(4);
  const stream_holder s;
  static cudaStream_t stream;
  stream = s.stream;
  static int* memory;
  memory = a.data;
  const auto fail = [&] { return launch(s.stream, &race, 32, 0, a.data); };
  for (const auto wait : {+[] { return cudaStreamSynchronize(stream); }, +[] { return cudaDeviceSynchronize(); },
                          +[] {
                            int host = 0;
                            return cudaMemcpy(&host, memory, 4, cudaMemcpyDeviceToHost);
                          },
                          +[] {
                            int host = 0;
                            return cudaMemcpy2D(&host, 4, memory, 4, 4, 1, cudaMemcpyDeviceToHost);
                          }}) {
    CHECK(fail() == cudaErrorLaunchFailure);
    CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
    CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
    CHECK(launch(s.stream, &add, 4, 0, a.data, 1, 4) == cudaErrorLaunchFailure);
    CHECK(cudaMemsetAsync(a.data, 1, 16, s.stream) == cudaErrorLaunchFailure);
    CHECK(thrown_by(wait).find("race: ") != std::string::npos);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(thrown_by(wait) == "");
  }
  CHECK(launch(s.stream, &add, 4, 0, a.data, 1, 4) == cudaSuccess);
  CHECK(a.values()[3] == 1);
}

TEST_CASE("a program whose kernel failed, and which did not wait, fails") {
  const auto run = [](bool wait) {
    return status_of_child([&] {
      const device_ints a(1);
      static_cast<void>(launch(nullptr, &race, 32, 0, a.data));
      if (wait) thrown_by(&cudaDeviceSynchronize);
    });
  };
  CHECK(run(false) != 0);
  CHECK(run(true) == 0);
}

#if defined(__SANITIZE_ADDRESS__)
TEST_CASE("AddressSanitizer: the host does not reach device memory, kernels and copies do, within its bounds") {
  const auto dies = [](auto body) { return status_of_child(body) != 0; };
  CHECK(dies([] {
    const device_ints a(4);
    static_cast<void>(launch(nullptr, &add, 4, 0, a.data, 1, 4));
    a.data[0] = 1;
  }));
  CHECK(dies([] {
    const device_ints a(3);
    static_cast<void>(launch(nullptr, &add, 4, 0, a.data, 1, 4));
  }));
  CHECK(dies([] {
    const device_ints a(std::size_t{1} << 20);
    a.data[1000] = 1;
  }));
  CHECK_FALSE(dies([] {
    const device_ints a(3);
    static_cast<void>(launch(nullptr, &add, 4, 0, a.data, 1, 3));
    static_cast<void>(a.values());
  }));
}
#endif

// ---------------------------------------------------------------- streams, as late as CUDA permits

namespace {
/// Values of pinned memory or of device memory, as the host would see them if nothing more ran.
int peek(const int* p) {
  const emu::device_access access;
  return *p;
}
struct late_fixture : fixture {
  late_fixture() { runtime.settings.late = true; }
};
}  // namespace

TEST_CASE_FIXTURE(late_fixture, "late: nothing runs before somebody waits") {
  const device_ints a(1);
  const stream_holder s, other;
  CHECK(launch(s.stream, &add, 1, 0, a.data, 1, 1) == cudaSuccess);
  CHECK(peek(a.data) == 0);
  CHECK(cudaStreamSynchronize(other.stream) == cudaSuccess);
  CHECK(peek(a.data) == 0);
  CHECK(cudaStreamSynchronize(s.stream) == cudaSuccess);
  CHECK(peek(a.data) == 1);
  CHECK(launch(s.stream, &add, 1, 0, a.data, 1, 1) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(peek(a.data) == 2);
  CHECK(launch(s.stream, &race, 32, 0, a.data) == cudaSuccess);
  CHECK_THROWS_AS(cudaStreamSynchronize(s.stream), emu::error);
}

TEST_CASE_FIXTURE(late_fixture, "late: the default stream waits for blocking streams only") {
  const device_ints a(2);
  const stream_holder blocking, free(cudaStreamNonBlocking);
  CHECK(launch(blocking.stream, &add, 1, 0, a.data, 1, 1) == cudaSuccess);
  CHECK(launch(free.stream, &add, 1, 0, a.data + 1, 1, 1) == cudaSuccess);
  CHECK(a.values() == std::vector<int>{1, 0});
  CHECK(cudaStreamSynchronize(free.stream) == cudaSuccess);
  CHECK(a.values() == std::vector<int>{1, 1});
}

TEST_CASE_FIXTURE(late_fixture, "late: pinned memory is read and written when the copy is made, other memory at the call") {
  const device_ints a(1);
  const stream_holder s;
  int* pinned = nullptr;
  REQUIRE_SUCCESS(cudaMallocHost(&pinned, 4));
  int pageable = 1;
  CHECK(cudaMemcpyAsync(a.data, &pageable, 4, cudaMemcpyHostToDevice, s.stream) == cudaSuccess);
  pageable = 2;
  CHECK(peek(a.data) == 0);
  CHECK(a.values()[0] == 1);
  *pinned = 3;
  CHECK(cudaMemcpyAsync(a.data, pinned, 4, cudaMemcpyHostToDevice, s.stream) == cudaSuccess);
  *pinned = 4;
  CHECK(a.values()[0] == 4);  // the host was too quick
  CHECK(launch(s.stream, &add, 1, 0, a.data, 1, 1) == cudaSuccess);
  CHECK(cudaMemcpyAsync(pinned, a.data, 4, cudaMemcpyDeviceToHost, s.stream) == cudaSuccess);
  CHECK(*pinned == 4);
  CHECK(cudaMemcpyAsync(&pageable, a.data, 4, cudaMemcpyDeviceToHost, s.stream) == cudaSuccess);
  CHECK(pageable == 5);
  CHECK(*pinned == 5);
  CHECK(cudaFreeHost(pinned) == cudaSuccess);
}

TEST_CASE_FIXTURE(late_fixture, "late: a stream waits for what stood before an event, and for no more") {
  const device_ints a(8);
  const stream_holder one, two;
  cudaEvent_t event = nullptr;
  REQUIRE_SUCCESS(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  CHECK(launch(one.stream, &append, 1, 0, a.data, 1) == cudaSuccess);
  CHECK(cudaEventRecord(event, one.stream) == cudaSuccess);
  CHECK(launch(one.stream, &append, 1, 0, a.data, 2) == cudaSuccess);
  CHECK(cudaStreamWaitEvent(two.stream, event, 0) == cudaSuccess);
  CHECK(launch(two.stream, &append, 1, 0, a.data, 3) == cudaSuccess);
  CHECK(cudaStreamSynchronize(two.stream) == cudaSuccess);
  CHECK(peek(a.data) == 2);
  CHECK(a.values() == std::vector<int>{3, 1, 3, 2, 0, 0, 0, 0});
  CHECK(cudaEventSynchronize(event) == cudaSuccess);
  CHECK(cudaEventDestroy(event) == cudaSuccess);
  CHECK(cudaEventRecord(event, one.stream) == cudaErrorInvalidResourceHandle);
  CHECK(cudaStreamWaitEvent(two.stream, event, 0) == cudaErrorInvalidResourceHandle);
}

TEST_CASE_FIXTURE(late_fixture, "late: freeing memory and destroying a stream wait") {
  const device_ints a(1);
  for (const bool free : {true, false}) {
    void* other = nullptr;
    REQUIRE_SUCCESS(cudaMalloc(&other, 4));
    const int before = peek(a.data);
    cudaStream_t stream = nullptr;
    REQUIRE_SUCCESS(cudaStreamCreate(&stream));
    CHECK(launch(stream, &add, 1, 0, a.data, 1, 1) == cudaSuccess);
    if (free) CHECK(cudaFree(other) == cudaSuccess);
    CHECK(peek(a.data) == before + (free ? 1 : 0));
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    CHECK(peek(a.data) == before + 1);
    CHECK(cudaStreamSynchronize(stream) == cudaErrorInvalidResourceHandle);
    if (!free) CHECK(cudaFree(other) == cudaSuccess);
  }
}
