// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// For tests of kernels: the emulation, and a queue that launches at once. To be included before the kernels under test.
#pragma once
#include "emulation.hpp"

#include <cstdio>
#include <cstdlib>

#include "outrider/backend/cuda/launch.cuh"

namespace outrider::device {

struct queue::state {
  void* scratch = std::malloc(scratch_bytes);
  state() = default;
  state(const state&) = delete;
  state& operator=(const state&) = delete;
  ~state() { std::free(scratch); }
};
inline queue::queue() : state_(std::make_shared<state>()) {}
inline queue::~queue() = default;
inline void queue::wait() {}
inline void* queue::scratch() const noexcept { return state_->scratch; }

/// What the emulation or the launch itself finds wrong ends the program with a message.
inline void push(queue&, const call& c) noexcept {
  if (c.shared_bytes > 48 * 1024)
    cudaFuncSetAttribute(c.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(c.shared_bytes));
  const cudaError_t outcome = cudaLaunchKernel(c.kernel, c.grid, c.block, c.arguments, c.shared_bytes, nullptr);
  cudaDeviceSynchronize();
  if (outcome == cudaSuccess) return;
  std::fprintf(stderr, "a launch was refused: %s\n", cudaGetErrorString(outcome));
  std::abort();
}

}  // namespace outrider::device
