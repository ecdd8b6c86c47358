// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>

#include "outrider/backend/concepts.hpp"

namespace outrider {

/// A sampler chooses tokens from logit rows:
///   pick<B>(ctx, logits [m, V], first_position, out [m])       out[r] = the token at position first_position + r
/// The choice depends on the row and the position alone, never on how rows are grouped into passes: that makes speculation lossless.

template <class S, class B>
concept sampler_for = requires(const S& sampler, context_of<B>& ctx, matrix_for<const float, B> logits, std::size_t first, token_id* out) {
  sampler.template pick<B>(ctx, logits, first, out);
};

/// The largest logit; the lowest id on ties.
struct greedy {
  template <backend_tag B>
  void pick(context_of<B>& ctx, matrix_for<const float, B> logits, std::size_t /*first_position*/, token_id* out) const noexcept {
    pointwise_ops<B>::argmax(ctx, out, logits, {});
  }
};

}  // namespace outrider
