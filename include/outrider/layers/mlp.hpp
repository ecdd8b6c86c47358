// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <optional>

#include "outrider/layers/linear.hpp"
#include "outrider/layers/scratch.hpp"

namespace outrider {

template <class B>
struct mlp_scratch {
  scratch<float, B> both;  // gate and up side by side
  product_scratch<B> products;

  mlp_scratch() = default;
  mlp_scratch(std::size_t max_rows, std::size_t max_width) : both(max_rows, 2 * max_width), products(max_rows, max_width) {}
};

/// out = Wdown · (gelu_tanh(Wgate x) ⊙ (Wup x)).
template <class B>
struct mlp {
  linear<B> gate_up;            // [2I, H]: Wgate, then Wup; or Wgate [I, H] alone,
  std::optional<linear<B>> up;  // [I, H]   where the two do not lie one below the other
  linear<B> down;               // [H, I]
  std::size_t width = 0;        // I

  /// Whether any product of its input rows reads int8 blocks.
  [[nodiscard]] bool reads_blocks() const noexcept { return gate_up.reads_blocks() || (up && up->reads_blocks()); }

  /// out [m, H] from x [m, H].
  void forward(context_of<B>& ctx, mlp_scratch<B>& s, matrix_for<float, B> out, product_rows<B>& x, row_kind kind) const noexcept {
    const auto both = s.both.view(x.count(), 2 * width), gate = both.slice_cols(0, width), up_rows = both.slice_cols(width, width);
    gate_up.forward(ctx, up ? gate : both, x, kind);
    if (up) up->forward(ctx, up_rows, x, kind);
    product_rows<B> hidden = s.products.gated(ctx, gate, up_rows, down.reads_blocks());
    down.forward(ctx, out, hidden, kind);
  }
};

}  // namespace outrider
