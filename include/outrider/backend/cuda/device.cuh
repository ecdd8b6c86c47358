// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The few things a kernel needs that CUDA spells differently for nvcc and for the emulation of tests/cuda_emulation. Kernels use these names
// and otherwise plain CUDA, so that a host compiler can run the same text. Under nvcc each is the obvious line; the emulation gives each its
// checked twin.
//
// Sums that must be reproducible are written with fmaf where they are fused and with __fmul_rn, __fadd_rn where they are not: nvcc fuses
// a * b + c by default and host compilers differ.
#pragma once
#if !defined(OUTRIDER_CUDA_EMULATION)
#if !defined(__CUDACC__)
#error "outrider: device code is for nvcc: include this file from a .cu"
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "outrider: the CUDA backend needs compute capability 8.0 or later: nvcc -arch=sm_80, CMake: CMAKE_CUDA_ARCHITECTURES"
#endif
#if defined(CUDA_API_PER_THREAD_DEFAULT_STREAM)
#error "outrider: copies rely on the default stream that all streams wait for: compile without --default-stream per-thread"
#endif
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>
#if CUDART_VERSION < 12040
#error "outrider: the CUDA backend needs the CUDA Toolkit 12.4 or later"
#endif

#include <cstddef>
#include <cstdint>

#include "outrider/core/scalar.hpp"

namespace outrider::device {

/// A shared array, `__shared__ shared_array<T, N> a;`. a[i], or a.load<float4>(i) and a.store(i, v) for the elements from i on as one vector.
template <class T, int N>
struct shared_array {
  alignas(16) T values[N];
  __device__ T& operator[](int i) { return values[i]; }
  template <class V>
  __device__ V load(int i) const {
    return *reinterpret_cast<const V*>(values + i);
  }
  template <class V>
  __device__ void store(int i, const V& v) {
    *reinterpret_cast<V*>(values + i) = v;
  }
};

/// The same over dynamic shared memory: `const auto a = dynamic_shared<T>(offset_bytes, count);`, the offset a multiple of 16.
template <class T>
struct shared_view {
  T* data;
  __device__ T& operator[](int i) const { return data[i]; }
  template <class V>
  __device__ V load(int i) const {
    return *reinterpret_cast<const V*>(data + i);
  }
  template <class V>
  __device__ void store(int i, const V& v) const {
    *reinterpret_cast<V*>(data + i) = v;
  }
};
template <class T>
__device__ shared_view<T> dynamic_shared(int offset_bytes, int /*count*/) {
  extern __shared__ __align__(16) unsigned char outrider_dynamic_shared[];
  return {reinterpret_cast<T*>(outrider_dynamic_shared + offset_bytes)};
}

/// to[i] = *from, later: 4, 8 or 16 bytes by cp.async. Committed copies form groups; wait<n> waits until at most n groups are under way.
template <class Shared, class T>
__device__ void copy_async(Shared& to, int i, const T* from) {
  __pipeline_memcpy_async(&to[i], from, sizeof(T));
}
__device__ inline void copy_async_commit() { __pipeline_commit(); }
template <int Groups>
__device__ void copy_async_wait() {
  __pipeline_wait_prior(Groups);
}

/// c += a · b for a [16, 32] and b [32, 8] of signed bytes, by one instruction of the tensor cores; integers, so exact. With g = lane / 4 and
/// t = lane % 4 a lane holds, four bytes a word:  a[0] (g, 4t…)  a[1] (g + 8, 4t…)  a[2] (g, 16 + 4t…)  a[3] (g + 8, 16 + 4t…)
///   b[0] (4t…, g)  b[1] (16 + 4t…, g)      c[0], c[1] (g, 2t), (g, 2t + 1)      c[2], c[3] (g + 8, 2t), (g + 8, 2t + 1)
__device__ inline void mma_s8(int (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// The value of a half, by the hardware's own conversion.
__device__ inline float widen(f16 value) { return __half2float(__ushort_as_half(value.bits)); }

/// A kernel as the launch calls take it, and its address in that form.
using kernel_handle = const void*;
template <class... Parameters>
kernel_handle handle_of(void (*kernel)(Parameters...)) {
  return reinterpret_cast<const void*>(kernel);
}

}  // namespace outrider::device
#endif
