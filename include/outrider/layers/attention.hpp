// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <type_traits>
#include <utility>

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

/// What some rows of a pass, those of one sequence, write and read in one layer. A pass over several sequences has several of these one after
/// the other; attention takes them as any list with size() and operator[], in the order of the rows.
template <class B, class Kv>
struct attention_part {
  using element_type = Kv;

  std::size_t rows = 0;
  std::size_t first = 0;                // position of the first of these rows
  kv_view<Kv, space_of<B>> own;         // written at first … ; not used by layers that share the keys of another
  kv_view<const Kv, space_of<B>> read;  // the layer's own, those it shares, or (drafter) the target's
  key_window window;                    // what these rows see, counted from the first of them
};

/// Grouped-query attention with normed heads:  out = Wo · attend(rope(norm(Wq x)), keys, values).
/// Keys and values live in caches, one a sequence: this layer's own (append first), or those of an earlier layer that it shares.
template <class B>
struct attention {
  linear<B> q_proj;          // [heads · head_dim, H]
  linear<B> k_proj, v_proj;  // [kv_heads · head_dim, H]; unused in layers that share keys and values
  linear<B> o_proj;          // [H, heads · head_dim]
  norm<B> q_norm, k_norm;    // over head_dim, weighted
  std::size_t heads = 0, kv_heads = 0, head_dim = 0;
  bool k_eq_v = false;  // values start from the raw key projection; v_proj is unused

  /// Whether any product of its input rows reads int8 blocks.
  [[nodiscard]] bool reads_blocks() const noexcept { return q_proj.reads_blocks() || k_proj.reads_blocks() || v_proj.reads_blocks(); }

  /// Projects x [m, H] (normed) to keys and values and writes them to the caches of `parts`, whose rows are those of x:
  /// k = rope(norm(Wk x) · k_norm), v = norm(Wv x) without weight or rotation.
  template <class Parts>
  void append(context_of<B>& ctx, attention_scratch<B>& s, const Parts& parts, product_rows<B>& x, const rope_rows<B>& rope,
              row_kind kind) const noexcept {
    using ops = attention_ops<B, element_of<Parts>>;
    constexpr bool fused = fuses_norm_append<B, element_of<Parts>>;
    const auto k = s.k.view(x.count(), kv_heads * head_dim), v = fused && k_eq_v ? k : s.v.view(x.count(), kv_heads * head_dim);
    k_proj.forward(ctx, k, x, kind);
    if (!k_eq_v) v_proj.forward(ctx, v, x, kind);
    if constexpr (!fused) {
      if (k_eq_v) pointwise_ops<B>::copy(ctx, v, k);  // before k's norm and rotation
      rope.norm_and_rotate(ctx, k_norm, k.split_cols(head_dim));
      norm<B>{nullptr, k_norm.eps}.forward(ctx, v.split_cols(head_dim), v.split_cols(head_dim));
    }
    std::size_t row = 0;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const auto& part = parts[p];
      const auto keys = k.slice_rows(row, part.rows), values = v.slice_rows(row, part.rows);
      if constexpr (fused)
        ops::norm_append(ctx, part.own, keys, values, k_norm.weight, k_norm.eps, rope.cos.slice_rows(row, part.rows),
                         rope.sin.slice_rows(row, part.rows), part.first);
      else
        ops::append(ctx, part.own, keys, values, part.first);
      row += part.rows;
    }
    OUTRIDER_ASSERT(row == x.count());
  }

  /// out [m, H] from x [m, H] (normed), over the keys of each part's `read` that its window lets its rows see.
  template <class Parts>
  void attend(context_of<B>& ctx, attention_scratch<B>& s, matrix_for<float, B> out, const Parts& parts, product_rows<B>& x,
              const rope_rows<B>& rope, row_kind kind) const noexcept {
    const auto q = s.q.view(x.count(), heads * head_dim), mixed = s.mixed.view(x.count(), heads * head_dim);
    q_proj.forward(ctx, q, x, kind);
    rope.norm_and_rotate(ctx, q_norm, q.split_cols(head_dim));
    std::size_t row = 0;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const auto& part = parts[p];
      attention_ops<B, element_of<Parts>>::attend(ctx, mixed.slice_rows(row, part.rows), q.slice_rows(row, part.rows), part.read,
                                                  part.window);
      row += part.rows;
    }
    OUTRIDER_ASSERT(row == x.count());
    product_rows<B> mixed_rows = s.products.rows(mixed);
    o_proj.forward(ctx, out, mixed_rows, kind);
  }

 private:
  template <class Parts>
  using element_of = typename std::remove_cvref_t<decltype(std::declval<const Parts&>()[0])>::element_type;
};

}  // namespace outrider
