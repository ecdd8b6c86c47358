// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "device_read.hpp"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace {

constexpr int threads = 512, loads = 4;  // of a thread, under way at once

__global__ void __launch_bounds__(threads) fill_words(uint4* words, std::size_t count) {
  const std::size_t step = std::size_t{gridDim.x} * threads;
  for (std::size_t i = std::size_t{blockIdx.x} * threads + threadIdx.x; i < count; i += step) {
    unsigned x = static_cast<unsigned>(i) * 0x9e3779b9u + 0x85ebca6bu;  // steps of an xorshift from a seed of its own
    uint4 word;
    for (unsigned* part : {&word.x, &word.y, &word.z, &word.w}) {
      x ^= x << 13;
      x ^= x >> 17;
      x ^= x << 5;
      *part = x;
    }
    words[i] = word;
  }
}

__global__ void __launch_bounds__(threads) read_words(const uint4* words, std::size_t count, unsigned* sink) {
  const std::size_t step = std::size_t{gridDim.x} * threads;
  std::size_t i = std::size_t{blockIdx.x} * threads + threadIdx.x;
  unsigned sum = 0;
  const auto add = [&](const uint4& word) { sum += (word.x ^ word.y) + (word.z ^ word.w); };
  for (; i + (loads - 1) * step < count; i += loads * step) {
    uint4 read[loads];
#pragma unroll
    for (int l = 0; l < loads; ++l) read[l] = __ldg(words + i + l * step);
#pragma unroll
    for (int l = 0; l < loads; ++l) add(read[l]);
  }
  for (; i < count; i += step) add(__ldg(words + i));
  if (sum == 0x12345678u) *sink = sum;  // hardly ever; the compiler cannot know
}

void require(cudaError_t outcome, const char* what) {
  if (outcome != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(outcome));
}

int multiprocessors() {
  int device = 0, count = 0;
  require(cudaGetDevice(&device), "asking for the device");
  require(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "asking how many multiprocessors there are");
  return count;
}

struct event {
  cudaEvent_t handle = nullptr;
  event() { require(cudaEventCreate(&handle), "an event"); }
  event(const event&) = delete;
  event& operator=(const event&) = delete;
  ~event() { static_cast<void>(cudaEventDestroy(handle)); }
};

}  // namespace

namespace bench {

void fill_on_device(void* memory, std::size_t bytes) {
  fill_words<<<static_cast<unsigned>(multiprocessors() * 4), threads>>>(static_cast<uint4*>(memory), bytes / sizeof(uint4));
  require(cudaGetLastError(), "filling device memory");
  require(cudaDeviceSynchronize(), "filling device memory");
}

double read_on_device(const void* memory, std::size_t bytes, int blocks) {
  static unsigned* const sink = [] {
    void* place = nullptr;
    require(cudaMalloc(&place, sizeof(unsigned)), "device memory");
    return static_cast<unsigned*>(place);
  }();
  const event begin, end;
  require(cudaEventRecord(begin.handle), "an event");
  read_words<<<static_cast<unsigned>(multiprocessors() * blocks), threads>>>(static_cast<const uint4*>(memory), bytes / sizeof(uint4),
                                                                             sink);
  require(cudaGetLastError(), "reading device memory");
  require(cudaEventRecord(end.handle), "an event");
  require(cudaEventSynchronize(end.handle), "reading device memory");
  float ms = 0;
  require(cudaEventElapsedTime(&ms, begin.handle, end.handle), "an event");
  return static_cast<double>(ms);
}

}  // namespace bench
