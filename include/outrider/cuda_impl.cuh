// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The kernels of the CUDA backend, for exactly one .cu of a program. CMake's outrider::cuda_backend has it.
#pragma once
#include "outrider/backend/concepts.hpp"
#include "outrider/backend/cuda/append.cuh"
#include "outrider/backend/cuda/attention.cuh"
#include "outrider/backend/cuda/choice.cuh"
#include "outrider/backend/cuda/draw.cuh"
#include "outrider/backend/cuda/int8.cuh"
#include "outrider/backend/cuda/linear.cuh"
#include "outrider/backend/cuda/memory.cuh"
#include "outrider/backend/cuda/norm.cuh"
#include "outrider/backend/cuda/pointwise.cuh"
#include "outrider/backend/cuda/prompt.cuh"
#include "outrider/backend/cuda/queue.cuh"

namespace outrider::device {

// The host sees declarations alone: their definitions for all storage types are made here, one line a type of backend/concepts.hpp.

#define OUTRIDER_CUDA_LINEAR(W)                                                                                     \
  template void matmul(queue&, rows<float>, rows<const float>, weights<W>) noexcept;                                \
  template void expert_matmul(queue&, rows<float>, rows<const float>, weights<W>, const std::int32_t*) noexcept;    \
  template void gathered_matmul(queue&, rows<float>, rows<const float>, weights<W>, rows<const token_id>) noexcept; \
  template void gather_rows(queue&, rows<float>, weights<W>, const token_id*, float) noexcept;
OUTRIDER_CUDA_LINEAR(float)
OUTRIDER_CUDA_LINEAR(bf16)
OUTRIDER_CUDA_LINEAR(f16)
OUTRIDER_CUDA_LINEAR(q4_0)
OUTRIDER_CUDA_LINEAR(q4_1)
OUTRIDER_CUDA_LINEAR(q5_0)
OUTRIDER_CUDA_LINEAR(q5_1)
OUTRIDER_CUDA_LINEAR(q8_0)
OUTRIDER_CUDA_LINEAR(q2_k)
OUTRIDER_CUDA_LINEAR(q3_k)
OUTRIDER_CUDA_LINEAR(q4_k)
OUTRIDER_CUDA_LINEAR(q5_k)
OUTRIDER_CUDA_LINEAR(q6_k)
OUTRIDER_CUDA_LINEAR(iq4_nl)
OUTRIDER_CUDA_LINEAR(iq4_xs)
OUTRIDER_CUDA_LINEAR(mxfp4)
#undef OUTRIDER_CUDA_LINEAR

#define OUTRIDER_CUDA_INT8(W)                                                                                                       \
  template void int8_matmul(queue&, rows<float>, rows<const int8_block>, weights<grouped<W>>) noexcept;                             \
  template void int8_expert_matmul(queue&, rows<float>, rows<const int8_block>, weights<grouped<W>>, const std::int32_t*) noexcept; \
  template void int8_gather_rows(queue&, rows<float>, weights<grouped<W>>, const token_id*, float) noexcept;
OUTRIDER_CUDA_INT8(q4_0)
OUTRIDER_CUDA_INT8(q8_0)
OUTRIDER_CUDA_INT8(q4_k)
OUTRIDER_CUDA_INT8(q5_k)
OUTRIDER_CUDA_INT8(q6_k)
OUTRIDER_CUDA_INT8(iq4_nl)
OUTRIDER_CUDA_INT8(iq4_xs)
#undef OUTRIDER_CUDA_INT8

#define OUTRIDER_CUDA_ATTENTION(Kv)                                                                                       \
  template void append(queue&, kv_view<Kv, device_space>, rows<const float>, rows<const float>, std::size_t) noexcept;    \
  template void norm_append(queue&, kv_view<Kv, device_space>, rows<const float>, rows<const float>, const float*, float, \
                            rows<const float>, rows<const float>, std::size_t) noexcept;                                  \
  template void attend(queue&, rows<float>, rows<const float>, kv_view<const Kv, device_space>, key_window) noexcept;
OUTRIDER_CUDA_ATTENTION(float)
OUTRIDER_CUDA_ATTENTION(bf16)
OUTRIDER_CUDA_ATTENTION(f16)
OUTRIDER_CUDA_ATTENTION(q8_0)
#undef OUTRIDER_CUDA_ATTENTION

}  // namespace outrider::device
