// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What the host asks of the device: one function per op of backend/ops.hpp, with its meaning. They queue their kernels and return. Declared
// here for every compiler, defined in cuda/*.cuh, instantiated by cuda_impl.cuh for the types of backend/concepts.hpp.
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/backend/cuda/queue.hpp"
#include "outrider/core/grouped.hpp"
#include "outrider/core/int8.hpp"
#include "outrider/core/kv_view.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/space.hpp"
#include "outrider/core/view.hpp"

namespace outrider::device {

template <class T>
using rows = matrix_view<T, device_space>;
template <class W>
using weights = weight_view<W, device_space>;

// linear.cuh, gather.cuh: W of weight_types
template <class W>
void matmul(queue&, rows<float> out, rows<const float> x, weights<W> w) noexcept;
template <class W>
void expert_matmul(queue&, rows<float> out, rows<const float> x, weights<W> w, const std::int32_t* experts) noexcept;
template <class W>
void gathered_matmul(queue&, rows<float> out, rows<const float> x, weights<W> w, rows<const token_id> ids) noexcept;
template <class W>
void gather_rows(queue&, rows<float> out, weights<W> w, const token_id* ids, float factor) noexcept;

// prompt.cuh
void gemm_matmul(queue&, rows<float> out, rows<const float> x, weights<bf16> w) noexcept;

// int8.cuh: W such that grouped<W> is of grouped_types
template <class W>
void int8_matmul(queue&, rows<float> out, rows<const int8_block> x, weights<grouped<W>> w) noexcept;
template <class W>
void int8_expert_matmul(queue&, rows<float> out, rows<const int8_block> x, weights<grouped<W>> w, const std::int32_t* experts) noexcept;
template <class W>
void int8_gather_rows(queue&, rows<float> out, weights<grouped<W>> w, const token_id* ids, float factor) noexcept;

// pointwise.cuh, norm.cuh
void rms_norm(queue&, rows<float> out, rows<const float> x, const float* weight, float eps) noexcept;
void rope_table(queue&, rows<float> cos, rows<float> sin, const std::int32_t* host_positions, const float* frequencies) noexcept;
void rope(queue&, rows<float> x, rows<const float> cos, rows<const float> sin) noexcept;
void gelu_mul(queue&, rows<float> out, rows<const float> gate, rows<const float> up) noexcept;
void add(queue&, rows<float> out, rows<const float> x, rows<const float> y) noexcept;
void scale(queue&, rows<float> out, rows<const float> x, float factor) noexcept;
void copy(queue&, rows<float> out, rows<const float> x) noexcept;
void softcap(queue&, rows<float> out, rows<const float> x, float cap) noexcept;
void quantize(queue&, rows<int8_block> out, rows<const float> x) noexcept;
void scatter_logits(queue&, rows<float> out, rows<const float> x, rows<const token_id> ids) noexcept;
void weighted_sum(queue&, rows<float> out, rows<const float> x, rows<const float> weights) noexcept;
void gather_ids(queue&, rows<token_id> out, rows<const token_id> table, rows<const std::int32_t> from) noexcept;

// choice.cuh
void top_k(queue&, rows<std::int32_t> ids, rows<const float> x) noexcept;
void argmax(queue&, token_id* out, rows<const float> x, rows<const token_id> ids) noexcept;
void mask(queue&, rows<float> x, rows<const token_id> ids, const token_id* host_banned, std::size_t count) noexcept;
void route_experts(queue&, rows<std::int32_t> experts, rows<float> weights, rows<float> logits, const float* scales) noexcept;

// attention.cuh: Kv of kv_types
template <class Kv>
void append(queue&, kv_view<Kv, device_space> cache, rows<const float> k, rows<const float> v, std::size_t first) noexcept;
template <class Kv>
void attend(queue&, rows<float> out, rows<const float> q, kv_view<const Kv, device_space> cache, key_window window) noexcept;

}  // namespace outrider::device
