// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The CUDA language and its runtime library on the CPU, for tests.
//
// Include it before a .cuh file, and a host compiler takes the kernels as they are. A block's threads are fibers on one OS thread; they change
// only where CUDA lets threads meet (barriers, shuffles, votes), in an order drawn from settings.seed. Blocks run one after another, in an
// order drawn likewise. What CUDA leaves undefined becomes a message (cuda_emulation::error):
//   - a barrier that some thread does not reach, or that threads meet at different lines;
//   - a shuffle or vote whose mask omits the caller, differs between lanes, or reads a lane that takes no part;
//   - on shared_array and dynamic_shared: index out of range, misaligned vector access, reading what nobody wrote,
//     two threads touching an element, one of them writing, with no barrier between (the race check);
//   - an asynchronous copy that nobody waited for: the data arrive as late as CUDA permits.
// Plain `__shared__ T a[n]` works too, unchecked but for AddressSanitizer; global memory is AddressSanitizer's alone. Not for several OS
// threads at once.
//
//   machine.hpp        threads, warps, blocks: who runs, who waits for whom      (on fiber.hpp)
//   shared_memory.hpp  shared memory that remembers who touched it
//   vocabulary.hpp     the twin of backend/cuda/device.cuh
//   intrinsics.hpp     what device code calls: __syncthreads, shuffles, votes, atomics; math.hpp: vector types and arithmetic
//   runtime.hpp        what host code calls: memory, streams, launches, graphs
#pragma once
#if defined(__CUDACC__)
#error "outrider: emulation.hpp replaces nvcc; nvcc itself must not see it"
#endif
#define OUTRIDER_CUDA_EMULATION 1

#include "cuda_emulation/intrinsics.hpp"
#include "cuda_emulation/machine.hpp"
#include "cuda_emulation/math.hpp"
#include "cuda_emulation/runtime.hpp"
#include "cuda_emulation/shared_memory.hpp"
#include "cuda_emulation/vocabulary.hpp"
