// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>

#include "outrider/core/kv_view.hpp"
#include "outrider/layers/linear.hpp"
#include "outrider/layers/norm.hpp"
#include "outrider/layers/rope.hpp"
#include "outrider/layers/scratch.hpp"

namespace outrider {

/// Intermediate rows of an attention layer, shared by all layers of a model.
template <class B>
struct attention_scratch {
  scratch<float, B> q, k, v, mixed;
  product_scratch<B> products;

  attention_scratch() = default;
  /// q_cols, kv_cols: the widest heads · head_dim of any layer.
  attention_scratch(std::size_t max_rows, std::size_t q_cols, std::size_t kv_cols)
      : q(max_rows, q_cols), k(max_rows, kv_cols), v(max_rows, kv_cols), mixed(max_rows, q_cols), products(max_rows, q_cols) {}
};

/// Grouped-query attention with normed heads:  out = Wo · attend(rope(norm(Wq x)), keys, values).
/// Keys and values live in a cache: this layer's own (append first), or the one of an earlier layer that it shares.
template <class B>
struct attention {
  linear<B> q_proj;          // [heads · head_dim, H]
  linear<B> k_proj, v_proj;  // [kv_heads · head_dim, H]; unused in layers that share keys and values
  linear<B> o_proj;          // [H, heads · head_dim]
  norm<B> q_norm, k_norm;    // over head_dim, weighted
  std::size_t heads = 0, kv_heads = 0, head_dim = 0;
  bool k_eq_v = false;  // values start from the raw key projection; v_proj is unused

  /// Projects x [m, H] (normed) to keys and values and writes them to `cache` at positions first … first + m - 1:
  /// k = rope(norm(Wk x) · k_norm), v = norm(Wv x) without weight or rotation.
  template <class Kv>
  void append(context_of<B>& ctx, attention_scratch<B>& s, kv_view<Kv, space_of<B>> cache, product_rows<B>& x, const rope_rows<B>& rope,
              std::size_t first, row_kind kind) const noexcept {
    const auto k = s.k.view(x.count(), kv_heads * head_dim), v = s.v.view(x.count(), kv_heads * head_dim);
    k_proj.forward(ctx, k, x, kind);
    if (k_eq_v)
      pointwise_ops<B>::copy(ctx, v, k);  // before k's norm and rotation
    else
      v_proj.forward(ctx, v, x, kind);
    k_norm.forward(ctx, k.split_cols(head_dim), k.split_cols(head_dim));
    rope.apply(ctx, k.split_cols(head_dim));
    norm<B>{nullptr, k_norm.eps}.forward(ctx, v.split_cols(head_dim), v.split_cols(head_dim));
    attention_ops<B, Kv>::append(ctx, cache, k, v, first);
  }

  /// out [m, H] from x [m, H] (normed), over the keys of `cache` that `window` lets each row see.
  template <class Kv>
  void attend(context_of<B>& ctx, attention_scratch<B>& s, matrix_for<float, B> out, product_rows<B>& x, const rope_rows<B>& rope,
              kv_view<const Kv, space_of<B>> cache, key_window window, row_kind kind) const noexcept {
    const auto q = s.q.view(x.count(), heads * head_dim), mixed = s.mixed.view(x.count(), heads * head_dim);
    q_proj.forward(ctx, q, x, kind);
    q_norm.forward(ctx, q.split_cols(head_dim), q.split_cols(head_dim));
    rope.apply(ctx, q.split_cols(head_dim));
    attention_ops<B, Kv>::attend(ctx, mixed, q, cache, window);
    product_rows<B> mixed_rows = s.products.rows(mixed);
    o_proj.forward(ctx, out, mixed_rows, kind);
  }
};

}  // namespace outrider
