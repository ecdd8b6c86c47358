// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/backend/concepts.hpp"
#include "outrider/layers/norm.hpp"
#include "outrider/layers/scratch.hpp"

namespace outrider {

/// Cosines and sines of one pass for one kind of attention; computed once, used by every layer of that kind.
template <class B>
struct rope_rows {
  matrix_for<const float, B> cos, sin;  // [m, head_dim / 2]

  [[nodiscard]] rope_rows last_rows(std::size_t count) const noexcept { return {cos.last_rows(count), sin.last_rows(count)}; }

  /// Norms and rotates every head of x [m · heads, head_dim] in place.
  void norm_and_rotate(context_of<B>& ctx, const norm<B>& head_norm, matrix_for<float, B> x) const noexcept {
    if constexpr (fuses_norm_rope<B>) {
      pointwise_ops<B>::norm_rope(ctx, x, head_norm.weight, head_norm.eps, cos, sin);
    } else {
      head_norm.forward(ctx, x, x);
      pointwise_ops<B>::rope(ctx, x, cos, sin);
    }
  }
};

/// Room for the table of up to max_rows rows.
template <class B>
class rope_table {
 public:
  rope_table() = default;
  rope_table(std::size_t max_rows, std::size_t head_dim)
      : cos_(max_rows, head_dim / 2), sin_(max_rows, head_dim / 2), half_(head_dim / 2) {}

  /// The table for positions [m] and frequencies [head_dim / 2] (radians per position); valid until the next call.
  rope_rows<B> fill(context_of<B>& ctx, const std::int32_t* positions, std::size_t m, const float* frequencies) noexcept {
    const auto cos = cos_.view(m, half_), sin = sin_.view(m, half_);
    pointwise_ops<B>::rope_table(ctx, cos, sin, positions, frequencies);
    return {cos, sin};
  }

 private:
  scratch<float, B> cos_, sin_;
  std::size_t half_ = 0;
};

}  // namespace outrider
