// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The optional ops of backend/ops.hpp: pairs that follow each other in every layer, as one kernel, so that there are fewer launches and what
// lies between the two never goes to memory; and drawing.
#pragma once
#include "outrider/backend/cuda/launchers.hpp"
#include "outrider/core/rng.hpp"

namespace outrider::device {

/// h = h + rms_norm(x) · weight, a norm and the residual it is added to. A null weight means weightless. x may not overlap h.
void norm_add(queue&, rows<float> h, rows<const float> x, const float* weight, float eps) noexcept;

/// x [m·heads, 2h] = rope(rms_norm(x) · weight), in place; tables as in rope. A null weight means weightless.
void norm_rope(queue&, rows<float> x, const float* weight, float eps, rows<const float> cos, rows<const float> sin) noexcept;

/// out = quantize(gelu_tanh(gate) · up), n a multiple of 32.
void gelu_mul_quantize(queue&, rows<int8_block> out, rows<const float> gate, rows<const float> up) noexcept;

/// out[r] = a token drawn from row r of x by `rule`, for position + r of the text; a null ids.data: column c is token c.
void draw(queue&, token_id* out, rows<const float> x, rows<const token_id> ids, std::size_t position, const draw_rule& rule) noexcept;

}  // namespace outrider::device
