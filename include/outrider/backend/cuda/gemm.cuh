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
void gemm(queue& q, float* out, const bf16* x, const bf16* w, const gemm_shape& shape, void* workspace,
          std::size_t workspace_bytes) noexcept;

}  // namespace outrider::device

#if !defined(OUTRIDER_CUDA_EMULATION)
#include <cublasLt.h>

#include <memory>
#include <utility>
#include <vector>

namespace outrider::device {

/// What cuBLASLt needs for products of one shape; made once a thread and shape.
class gemm_plan {
 public:
  gemm_plan(cublasLtHandle_t library, const gemm_shape& shape, std::size_t workspace_bytes) : shape_(shape) {
    // cuBLAS counts by columns: what it calls a [k, n] matrix is w, row by row.
    const auto transposed = CUBLAS_OP_T;
    status = cublasLtMatmulDescCreate(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    step([&] { return cublasLtMatmulDescSetAttribute(product_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed); });
    step([&] { return cublasLtMatrixLayoutCreate(&w_, CUDA_R_16BF, shape.k, shape.n, static_cast<std::int64_t>(shape.w_stride)); });
    step([&] { return cublasLtMatrixLayoutCreate(&x_, CUDA_R_16BF, shape.k, shape.m, static_cast<std::int64_t>(shape.x_stride)); });
    step([&] { return cublasLtMatrixLayoutCreate(&out_, CUDA_R_32F, shape.n, shape.m, static_cast<std::int64_t>(shape.out_stride)); });
    cublasLtMatmulPreference_t preference = nullptr;
    step([&] { return cublasLtMatmulPreferenceCreate(&preference); });
    step([&] {
      return cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                                  sizeof workspace_bytes);
    });
    for (const auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                 CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      step([&] {
        const std::uint32_t bytes = 16;
        return cublasLtMatmulPreferenceSetAttribute(preference, attribute, &bytes, sizeof bytes);
      });
    int found = 0;
    step([&] { return cublasLtMatmulAlgoGetHeuristic(library, product_, w_, x_, out_, out_, preference, 1, &choice_, &found); });
    if (status == CUBLAS_STATUS_SUCCESS && found == 0) status = CUBLAS_STATUS_NOT_SUPPORTED;
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
  cublasStatus_t run(cublasLtHandle_t library, float* out, const bf16* x, const bf16* w, void* workspace, std::size_t bytes,
                     cudaStream_t stream) const {
    const float one = 1, zero = 0;
    return status != CUBLAS_STATUS_SUCCESS ? status
                                           : cublasLtMatmul(library, product_, &one, w, w_, x, x_, &zero, out, out_, out, out_,
                                                            &choice_.algo, workspace, bytes, stream);
  }

  cublasStatus_t status;

 private:
  template <class Call>
  void step(Call call) {
    if (status == CUBLAS_STATUS_SUCCESS) status = call();
  }

  gemm_shape shape_;
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t w_ = nullptr, x_ = nullptr, out_ = nullptr;
  cublasLtMatmulHeuristicResult_t choice_{};
};

void gemm(queue& q, float* out, const bf16* x, const bf16* w, const gemm_shape& shape, void* workspace,
          std::size_t workspace_bytes) noexcept {
  static const std::pair<cublasStatus_t, cublasLtHandle_t> library = [] {
    cublasLtHandle_t handle = nullptr;
    const cublasStatus_t status = cublasLtCreate(&handle);
    return std::pair(status, handle);
  }();
  constexpr std::size_t most_plans = 64;
  static thread_local std::vector<std::unique_ptr<const gemm_plan>> plans;
  queue::state& own = q.own();
  cublasStatus_t status = library.first;
  if (status == CUBLAS_STATUS_SUCCESS) {
    own.send();  // cuBLASLt launches by itself, and what was asked for before has to come before
    const gemm_plan* plan = nullptr;
    for (const auto& known : plans)
      if (known->is_for(shape)) plan = known.get();
    if (!plan && plans.size() == most_plans) plans.clear();  // a prompt's last chunk may have any number of rows
    if (!plan) plan = plans.emplace_back(std::make_unique<const gemm_plan>(library.second, shape, workspace_bytes)).get();
    status = plan->run(library.second, out, x, w, workspace, workspace_bytes, own.stream);
  }
  if (status != CUBLAS_STATUS_SUCCESS) own.remember({cudaErrorUnknown, cublasLtGetStatusString(status), __FILE__, __LINE__});
}

}  // namespace outrider::device
#endif
