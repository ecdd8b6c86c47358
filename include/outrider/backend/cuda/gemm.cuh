// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The large products of a prompt, by cuBLASLt; tests put a scalar product of the same name in its place.
#pragma once
#include <cstddef>

#include "outrider/backend/cuda/queue.cuh"
#include "outrider/core/scalar.hpp"

namespace outrider::device {

/// A product for cuBLASLt: out [m, n] = x [m, k] · w [n, k]ᵀ, rows `…_stride` elements apart. Tensor cores want k, the strides and n to be
/// multiples of 8 and all pointers aligned to 16 bytes. Sums are taken in float, in an order of cuBLASLt's own.
struct gemm_shape {
  std::size_t m, n, k, x_stride, w_stride, out_stride;
  bool operator==(const gemm_shape&) const = default;
};
/// False if cuBLASLt has no way to do it, and then nothing is done.
[[nodiscard]] bool gemm(queue& q, float* out, const bf16* x, const bf16* w, const gemm_shape& shape, void* workspace,
                        std::size_t workspace_bytes) noexcept;

}  // namespace outrider::device

#if !defined(OUTRIDER_CUDA_EMULATION)
#include <cublasLt.h>

#include <algorithm>
#include <list>
#include <utility>

namespace outrider::device {

/// The outcome of a call of cuBLASLt, with its place.
inline failure cublas_outcome(cublasStatus_t status, const char* call, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return {cudaErrorUnknown, call, __FILE__, line, cublasLtGetStatusString(status)};
}
#define OUTRIDER_CUBLAS_OUTCOME(call) (::outrider::device::cublas_outcome((call), #call, __LINE__))

/// What cuBLASLt needs for products of one shape; made once a thread and shape.
class gemm_plan {
 public:
  gemm_plan(cublasLtHandle_t library, const gemm_shape& shape, std::size_t workspace_bytes) : shape_(shape) {
    // cuBLAS counts by columns: what it calls a [k, n] matrix is w, row by row.
    const auto transposed = CUBLAS_OP_T;
    const auto step = [&](auto call) {
      if (failed.code == cudaSuccess) failed = call();
    };
    const auto layout = [&](cublasLtMatrixLayout_t& of, cudaDataType type, std::size_t rows, std::size_t cols, std::size_t stride) {
      step([&] { return OUTRIDER_CUBLAS_OUTCOME(cublasLtMatrixLayoutCreate(&of, type, rows, cols, static_cast<std::int64_t>(stride))); });
    };
    step([&] { return OUTRIDER_CUBLAS_OUTCOME(cublasLtMatmulDescCreate(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F)); });
    step([&] {
      return OUTRIDER_CUBLAS_OUTCOME(cublasLtMatmulDescSetAttribute(product_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
    });
    layout(w_, CUDA_R_16BF, shape.k, shape.n, shape.w_stride);
    layout(x_, CUDA_R_16BF, shape.k, shape.m, shape.x_stride);
    layout(out_, CUDA_R_32F, shape.n, shape.m, shape.out_stride);

    cublasLtMatmulPreference_t preference = nullptr;
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      step([&] { return OUTRIDER_CUBLAS_OUTCOME(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value)); });
    };
    step([&] { return OUTRIDER_CUBLAS_OUTCOME(cublasLtMatmulPreferenceCreate(&preference)); });
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
    for (const auto alignment : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                 CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      prefer(alignment, std::uint32_t{16});
    if (failed.code == cudaSuccess) {
      int found = 0;
      const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(library, product_, w_, x_, out_, out_, preference, 1, &choice_, &found);
      exists = status == CUBLAS_STATUS_SUCCESS && found != 0;
      if (status != CUBLAS_STATUS_NOT_SUPPORTED) failed = cublas_outcome(status, "cublasLtMatmulAlgoGetHeuristic", __LINE__);
    }
    if (preference) static_cast<void>(cublasLtMatmulPreferenceDestroy(preference));
  }
  gemm_plan(const gemm_plan&) = delete;
  gemm_plan& operator=(const gemm_plan&) = delete;
  ~gemm_plan() {
    if (out_) static_cast<void>(cublasLtMatrixLayoutDestroy(out_));
    if (x_) static_cast<void>(cublasLtMatrixLayoutDestroy(x_));
    if (w_) static_cast<void>(cublasLtMatrixLayoutDestroy(w_));
    if (product_) static_cast<void>(cublasLtMatmulDescDestroy(product_));
  }

  [[nodiscard]] bool is_for(const gemm_shape& shape) const noexcept { return shape_ == shape; }
  failure run(cublasLtHandle_t library, float* out, const bf16* x, const bf16* w, void* workspace, std::size_t bytes,
              cudaStream_t stream) const {
    const float one = 1, zero = 0;
    return OUTRIDER_CUBLAS_OUTCOME(
        cublasLtMatmul(library, product_, &one, w, w_, x, x_, &zero, out, out_, out, out_, &choice_.algo, workspace, bytes, stream));
  }

  failure failed;
  bool exists = false;  // whether there is a way, if nothing failed

 private:
  gemm_shape shape_;
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t w_ = nullptr, x_ = nullptr, out_ = nullptr;
  cublasLtMatmulHeuristicResult_t choice_{};
};

bool gemm(queue& q, float* out, const bf16* x, const bf16* w, const gemm_shape& shape, void* workspace,
          std::size_t workspace_bytes) noexcept {
  static const std::pair<failure, cublasLtHandle_t> library = [] {
    cublasLtHandle_t handle = nullptr;
    const failure failed = OUTRIDER_CUBLAS_OUTCOME(cublasLtCreate(&handle));
    return std::pair(failed, handle);
  }();
  constexpr std::size_t most_plans = 64;
  static thread_local std::list<gemm_plan> plans;
  queue::state& own = q.own();
  own.remember(library.first);
  if (library.first.code != cudaSuccess) return true;
  bool exists = true;
  own.try_to([&] {
    auto plan = std::find_if(plans.begin(), plans.end(), [&](const gemm_plan& known) { return known.is_for(shape); });
    if (plan == plans.end()) {
      if (plans.size() == most_plans) plans.pop_back();  // a prompt's last chunk may have any number of rows
      plan = plans.emplace(plans.begin(), library.second, shape, workspace_bytes);
    }
    own.remember(plan->failed);
    if (plan->failed.code != cudaSuccess) return;
    exists = plan->exists;
    if (!exists) return;
    own.send();  // cuBLASLt launches by itself, and what was asked for before has to come before
    own.remember(plan->run(library.second, out, x, w, workspace, workspace_bytes, own.stream));
  });
  return exists;
}

}  // namespace outrider::device
#endif
