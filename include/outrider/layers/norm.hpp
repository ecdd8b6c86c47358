// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include "outrider/backend/concepts.hpp"

namespace outrider {

/// RMSNorm with a plain weight (never 1 + weight), or without one. Borrows its weight.
template <class B>
struct norm {
  const float* weight = nullptr;  // [n], or null: weightless
  float eps = 1e-6f;

  /// out [m, n] from x [m, n]; out may be x.
  void forward(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const float, B> x) const noexcept {
    pointwise_ops<B>::rms_norm(ctx, out, x, weight, eps);
  }
  /// h [m, n] = (h + norm(x)) · factor; x [m, n] is used up.
  void add_to(context_of<B>& ctx, matrix_for<float, B> h, matrix_for<float, B> x, float factor = 1) const noexcept {
    if constexpr (fuses_norm_add<B>) {
      pointwise_ops<B>::norm_add(ctx, h, {}, x, weight, eps, factor);
    } else {
      forward(ctx, x, x);
      pointwise_ops<B>::add(ctx, h, h, x);
      if (factor != 1) pointwise_ops<B>::scale(ctx, h, h, factor);
    }
  }
};

}  // namespace outrider
