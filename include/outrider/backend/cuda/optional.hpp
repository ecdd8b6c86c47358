// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The optional ops of backend/ops.hpp: ops that follow each other in every layer, as one kernel, so that there are fewer launches and what lies
// between them never goes to memory; and drawing.
#pragma once
#include "outrider/backend/cuda/launchers.hpp"
#include "outrider/core/rng.hpp"

namespace outrider::device {

// norm.cuh. A null weight means weightless; blocks with null data are not made, others have n / 32 columns, n a multiple of 32.

/// out = rms_norm(x) · weight; blocks = quantize(out). out may be x.
void norm_quantize(queue&, rows<float> out, rows<int8_block> blocks, rows<const float> x, const float* weight, float eps) noexcept;

/// h = (h + rms_norm(x) · weight) · factor, a norm and the residual it is added to; blocks = quantize(h). x may not overlap h.
void norm_add(queue&, rows<float> h, rows<int8_block> blocks, rows<const float> x, const float* weight, float eps, float factor) noexcept;

/// h = h + rms_norm(x) · weight; out = rms_norm(h) · next_weight; blocks = quantize(out). x and out may not overlap h; out may be x.
void norm_add_norm(queue&, rows<float> h, rows<float> out, rows<int8_block> blocks, rows<const float> x, const float* weight, float eps,
                   const float* next_weight, float next_eps) noexcept;

/// x [m·heads, 2h] = rope(rms_norm(x) · weight), in place; tables as in rope.
void norm_rope(queue&, rows<float> x, const float* weight, float eps, rows<const float> cos, rows<const float> sin) noexcept;

// pointwise.cuh

/// out = quantize(gelu_tanh(gate) · up), n a multiple of 32.
void gelu_mul_quantize(queue&, rows<int8_block> out, rows<const float> gate, rows<const float> up) noexcept;

// append.cuh: Kv of kv_types

/// Keys norm_rope(k) and values rms_norm(v), weightless, of positions from `first` on. v may be k.
template <class Kv>
void norm_append(queue&, kv_view<Kv, device_space> cache, rows<const float> k, rows<const float> v, const float* weight, float eps,
                 rows<const float> cos, rows<const float> sin, std::size_t first) noexcept;

// draw.cuh

/// out[r] = a token drawn from row r of x by `rule`, for position + r of the text; a null ids.data: column c is token c.
void draw(queue&, token_id* out, rows<const float> x, rows<const token_id> ids, std::size_t position, const draw_rule& rule) noexcept;

}  // namespace outrider::device
