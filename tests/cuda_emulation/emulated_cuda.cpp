// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend's one translation unit, as a host compiler takes it: programs that link this instead of outrider::cuda_backend run its
// kernels on the CPU, with every barrier and shuffle checked.
#include "cuda_emulation/emulation.hpp"

#include "outrider/cuda_impl.cuh"

namespace outrider::device {

/// In place of cuBLASLt: the same checks of what it is given, work of its own on the queue's stream, and sums whose order depends on the number
/// of rows. It has no way to multiply one row, which comes as three.
template <int Threads = 32>
__global__ void multiply(float* out, const bf16* x, const bf16* w, gemm_shape shape) {
  const std::size_t r = blockIdx.y, n = std::size_t{blockIdx.x} * Threads + threadIdx.x;
  if (n >= shape.n) return;
  float sum = 0;
  for (std::size_t i = 0; i < shape.k; ++i) {
    const std::size_t c = (i + shape.m) % shape.k;
    sum += to_float(x[r * shape.x_stride + c]) * to_float(w[n * shape.w_stride + c]);
  }
  out[r * shape.out_stride + n] = sum;
}

bool gemm(queue& q, float* out, const bf16* x, const bf16* w, const gemm_shape& shape, void* workspace,
          std::size_t workspace_bytes) noexcept {
  if (shape.m == 3) return false;
  const auto is_aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  const bool good = shape.n % 8 == 0 && shape.k % 8 == 0 && shape.x_stride >= shape.k && shape.x_stride % 8 == 0 &&
                    shape.w_stride >= shape.k && shape.w_stride % 8 == 0 && shape.out_stride >= shape.n && is_aligned(out) &&
                    is_aligned(x) && is_aligned(w) && is_aligned(workspace) && workspace_bytes != 0;
  queue::state& own = q.own();
  if (!good) own.remember({cudaErrorInvalidValue, "gemm", __FILE__, __LINE__});
  own.send();
  constexpr unsigned threads = 32;
  void* arguments[] = {&out, &x, &w, const_cast<gemm_shape*>(&shape)};
  const dim3 grid(static_cast<unsigned>((shape.n + threads - 1) / threads), static_cast<unsigned>(shape.m));
  own.remember(OUTRIDER_CUDA_OUTCOME(cudaLaunchKernel(handle_of(&multiply<threads>), grid, threads, arguments, 0, own.stream)));
  return true;
}

}  // namespace outrider::device
