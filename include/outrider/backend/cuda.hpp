// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend as programs see it. No header of CUDA is included here: the kernels are compiled by nvcc in one translation unit that
// includes outrider/cuda_impl.cuh, ready made as CMake's outrider::cuda_backend.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "outrider/backend/concepts.hpp"
#include "outrider/backend/cuda/launchers.hpp"
#include "outrider/backend/cuda/memory.hpp"
#include "outrider/backend/cuda/optional.hpp"
#include "outrider/backend/cuda/queue.hpp"
#include "outrider/backend/ops.hpp"
#include "outrider/backend/traits.hpp"
#include "outrider/core/space.hpp"

namespace outrider {

/// Ops on an NVIDIA device, compute capability 8.0 and later. Products with matrices in groups have the bits of every other backend; other ops,
/// those of this one, the same for every number of rows.
struct cuda {};

/// A stream of the device, and what ops need besides. Errors of the constructor: device_unavailable with a sentence, out_of_memory. One thread
/// at a time; it may go to another one after wait().
class cuda_context {
 public:
  explicit cuda_context(execution = {}) {}
  [[nodiscard]] unsigned threads() const noexcept { return 1; }
  [[nodiscard]] device::queue& queue() noexcept { return queue_; }
  void wait() { queue_.wait(); }
  [[nodiscard]] std::span<token_id> exchange() noexcept { return {queue_.exchange(), device::queue::exchange_count}; }

 private:
  device::queue queue_;
};

template <>
struct backend_traits<cuda> {
  using space = device_space;
  using context = cuda_context;
  static constexpr bool int8_products = true;
  static constexpr std::string_view name() noexcept { return "cuda"; }
  static std::string_view simd() noexcept { return device::title(); }
};

template <listed_weight W>
struct linear_ops<cuda, W> {
  static void matmul(cuda_context& ctx, device::rows<float> out, device::rows<const float> x, device::weights<W> w) noexcept {
    device::matmul(ctx.queue(), out, x, w);
  }
  static void matmul_prompt(cuda_context& ctx, device::rows<float> out, device::rows<const float> x, device::weights<W> w) noexcept {
    device::matmul(ctx.queue(), out, x, w);
  }
  static void expert_matmul(cuda_context& ctx, device::rows<float> out, device::rows<const float> x, device::weights<W> w,
                            const std::int32_t* experts) noexcept {
    device::expert_matmul(ctx.queue(), out, x, w, experts);
  }
  static void gathered_matmul(cuda_context& ctx, device::rows<float> out, device::rows<const float> x, device::weights<W> w,
                              device::rows<const token_id> ids) noexcept {
    device::gathered_matmul(ctx.queue(), out, x, w, ids);
  }
  static void gather_rows(cuda_context& ctx, device::rows<float> out, device::weights<W> w, const token_id* ids, float factor) noexcept {
    device::gather_rows(ctx.queue(), out, w, ids, factor);
  }
};

template <class W>
  requires listed_group<grouped<W>>
struct linear_ops<cuda, grouped<W>> {
  static void matmul(cuda_context& ctx, device::rows<float> out, device::rows<const int8_block> x, device::weights<grouped<W>> w) noexcept {
    device::int8_matmul(ctx.queue(), out, x, w);
  }
  static void expert_matmul(cuda_context& ctx, device::rows<float> out, device::rows<const int8_block> x, device::weights<grouped<W>> w,
                            const std::int32_t* experts) noexcept {
    device::int8_expert_matmul(ctx.queue(), out, x, w, experts);
  }
  static void gather_rows(cuda_context& ctx, device::rows<float> out, device::weights<grouped<W>> w, const token_id* ids,
                          float factor) noexcept {
    device::int8_gather_rows(ctx.queue(), out, w, ids, factor);
  }
};

template <>
struct pointwise_ops<cuda> {
  template <class T>
  using rows = device::rows<T>;

  static void rms_norm(cuda_context& ctx, rows<float> out, rows<const float> x, const float* weight, float eps) noexcept {
    device::rms_norm(ctx.queue(), out, x, weight, eps);
  }
  static void rope_table(cuda_context& ctx, rows<float> cos, rows<float> sin, const std::int32_t* positions,
                         const float* frequencies) noexcept {
    device::rope_table(ctx.queue(), cos, sin, positions, frequencies);
  }
  static void rope(cuda_context& ctx, rows<float> x, rows<const float> cos, rows<const float> sin) noexcept {
    device::rope(ctx.queue(), x, cos, sin);
  }
  static void gelu_mul(cuda_context& ctx, rows<float> out, rows<const float> gate, rows<const float> up) noexcept {
    device::gelu_mul(ctx.queue(), out, gate, up);
  }
  static void add(cuda_context& ctx, rows<float> out, rows<const float> x, rows<const float> y) noexcept {
    device::add(ctx.queue(), out, x, y);
  }
  static void scale(cuda_context& ctx, rows<float> out, rows<const float> x, float factor) noexcept {
    device::scale(ctx.queue(), out, x, factor);
  }
  static void copy(cuda_context& ctx, rows<float> out, rows<const float> x) noexcept { device::copy(ctx.queue(), out, x); }
  static void softcap(cuda_context& ctx, rows<float> out, rows<const float> x, float cap) noexcept {
    device::softcap(ctx.queue(), out, x, cap);
  }
  static void quantize(cuda_context& ctx, rows<int8_block> out, rows<const float> x) noexcept { device::quantize(ctx.queue(), out, x); }
  static void top_k(cuda_context& ctx, rows<std::int32_t> ids, rows<const float> x) noexcept { device::top_k(ctx.queue(), ids, x); }
  static void argmax(cuda_context& ctx, token_id* out, rows<const float> x, rows<const token_id> ids) noexcept {
    device::argmax(ctx.queue(), out, x, ids);
  }
  static void draw(cuda_context& ctx, token_id* out, rows<const float> x, rows<const token_id> ids, std::size_t position,
                   const draw_rule& rule) noexcept {
    device::draw(ctx.queue(), out, x, ids, position, rule);
  }
  static void mask(cuda_context& ctx, rows<float> x, rows<const token_id> ids, const token_id* banned, std::size_t count) noexcept {
    device::mask(ctx.queue(), x, ids, banned, count);
  }
  static void gather_ids(cuda_context& ctx, rows<token_id> out, rows<const token_id> table, rows<const std::int32_t> from) noexcept {
    device::gather_ids(ctx.queue(), out, table, from);
  }
  static void scatter_logits(cuda_context& ctx, rows<float> out, rows<const float> x, rows<const token_id> ids) noexcept {
    device::scatter_logits(ctx.queue(), out, x, ids);
  }
  static void route_experts(cuda_context& ctx, rows<std::int32_t> experts, rows<float> weights, rows<float> logits,
                            const float* scales) noexcept {
    device::route_experts(ctx.queue(), experts, weights, logits, scales);
  }
  static void norm_quantize(cuda_context& ctx, rows<float> out, rows<int8_block> blocks, rows<const float> x, const float* weight,
                            float eps) noexcept {
    device::norm_quantize(ctx.queue(), out, blocks, x, weight, eps);
  }
  static void norm_add(cuda_context& ctx, rows<float> h, rows<int8_block> blocks, rows<const float> x, const float* weight, float eps,
                       float factor) noexcept {
    device::norm_add(ctx.queue(), h, blocks, x, weight, eps, factor);
  }
  static void norm_add_norm(cuda_context& ctx, rows<float> h, rows<float> out, rows<int8_block> blocks, rows<const float> x,
                            const float* weight, float eps, const float* next_weight, float next_eps) noexcept {
    device::norm_add_norm(ctx.queue(), h, out, blocks, x, weight, eps, next_weight, next_eps);
  }
  static void norm_rope(cuda_context& ctx, rows<float> x, const float* weight, float eps, rows<const float> cos,
                        rows<const float> sin) noexcept {
    device::norm_rope(ctx.queue(), x, weight, eps, cos, sin);
  }
  static void gelu_mul_quantize(cuda_context& ctx, rows<int8_block> out, rows<const float> gate, rows<const float> up) noexcept {
    device::gelu_mul_quantize(ctx.queue(), out, gate, up);
  }
  static void weighted_sum(cuda_context& ctx, rows<float> out, rows<const float> x, rows<const float> weights) noexcept {
    device::weighted_sum(ctx.queue(), out, x, weights);
  }
};

template <listed_kv Kv>
struct attention_ops<cuda, Kv> {
  static void append(cuda_context& ctx, kv_view<Kv, device_space> cache, device::rows<const float> k, device::rows<const float> v,
                     std::size_t first) noexcept {
    device::append(ctx.queue(), cache, k, v, first);
  }
  static void norm_append(cuda_context& ctx, kv_view<Kv, device_space> cache, device::rows<const float> k, device::rows<const float> v,
                          const float* weight, float eps, device::rows<const float> cos, device::rows<const float> sin,
                          std::size_t first) noexcept {
    device::norm_append(ctx.queue(), cache, k, v, weight, eps, cos, sin, first);
  }
  static void attend(cuda_context& ctx, device::rows<float> out, device::rows<const float> q, kv_view<const Kv, device_space> cache,
                     key_window window) noexcept {
    device::attend(ctx.queue(), out, q, cache, window);
  }
};

static_assert(check_backend<cuda>());

/// cuda with another product for the rows of prompts where weights are bf16: cuBLASLt's, several times as fast. It rounds differently, and by the
/// number of rows, so that a text depends on the chunks of its prompt, as with eigen_prompts.
struct cuda_gemm_prompts {};

template <>
struct backend_traits<cuda_gemm_prompts> : backend_traits<cuda> {
  static constexpr std::string_view name() noexcept { return "cuda_gemm_prompts"; }
};
template <class W>
struct linear_ops<cuda_gemm_prompts, W> : linear_ops<cuda, W> {};
template <>
struct linear_ops<cuda_gemm_prompts, bf16> : linear_ops<cuda, bf16> {
  static void matmul_prompt(cuda_context& ctx, device::rows<float> out, device::rows<const float> x, device::weights<bf16> w) noexcept {
    device::gemm_matmul(ctx.queue(), out, x, w);
  }
};
template <>
struct pointwise_ops<cuda_gemm_prompts> : pointwise_ops<cuda> {};
template <class Kv>
struct attention_ops<cuda_gemm_prompts, Kv> : attention_ops<cuda, Kv> {};

static_assert(check_backend<cuda_gemm_prompts>());

}  // namespace outrider
