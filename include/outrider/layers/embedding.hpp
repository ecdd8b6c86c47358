// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cmath>
#include <cstddef>
#include <variant>

#include "outrider/core/scalar.hpp"
#include "outrider/layers/linear.hpp"

namespace outrider {

/// A table of rows, looked up by token id and multiplied by a constant factor. Borrows its table; only the rows asked for are touched.
template <class B>
struct embedding {
  weight<B> table;  // [vocabulary, n]
  float factor = 1;

  /// out [m, n] from ids [m].
  void forward(context_of<B>& ctx, matrix_for<float, B> out, const token_id* ids) const noexcept {
    std::visit([&]<class W>(const weight_view<W, space_of<B>>& view) { linear_ops<B, W>::gather_rows(ctx, out, view, ids, factor); },
               table);
  }

  /// The table with Gemma's factor √width: the root is rounded to bf16, as in training, unless the table is stored as f32.
  static embedding scaled_by_root(weight<B> table, std::size_t width) noexcept {
    const float root = std::sqrt(static_cast<float>(width));
    const bool full_precision = std::holds_alternative<weight_for<float, B>>(table);
    return {table, full_precision ? root : to_float(bf16(root))};
  }
};

}  // namespace outrider
