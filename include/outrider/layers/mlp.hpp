// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>

#include "outrider/layers/linear.hpp"
#include "outrider/layers/scratch.hpp"

namespace outrider {

template <class B>
struct mlp_scratch {
  scratch<float, B> gate, up;
  product_scratch<B> products;

  mlp_scratch() = default;
  mlp_scratch(std::size_t max_rows, std::size_t max_width)
      : gate(max_rows, max_width), up(max_rows, max_width), products(max_rows, max_width) {}
};

/// out = Wdown · (gelu_tanh(Wgate x) ⊙ (Wup x)).
template <class B>
struct mlp {
  linear<B> gate_proj, up_proj;  // [I, H]
  linear<B> down_proj;           // [H, I]
  std::size_t width = 0;         // I

  /// out [m, H] from x [m, H].
  void forward(context_of<B>& ctx, mlp_scratch<B>& s, matrix_for<float, B> out, product_rows<B>& x, row_kind kind) const noexcept {
    const auto gate = s.gate.view(x.count(), width), up = s.up.view(x.count(), width);
    gate_proj.forward(ctx, gate, x, kind);
    up_proj.forward(ctx, up, x, kind);
    product_rows<B> hidden = s.products.gated(ctx, gate, up, down_proj);
    down_proj.forward(ctx, out, hidden, kind);
  }
};

}  // namespace outrider
