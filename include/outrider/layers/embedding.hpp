// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <variant>

#include "outrider/backend/reference.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/space_copy.hpp"
#include "outrider/layers/linear.hpp"

namespace outrider {

/// A table of rows, looked up by token id and multiplied by a constant factor. Borrows its table; only the rows asked for are touched.
template <class B>
struct embedding {
  weight<B> table;  // [vocabulary, n]
  float factor = 1;
  /// The table, where it is too large for B's own memory: its rows are then looked up on the host.
  std::optional<stored_weight<reference>> host_table = {};

  /// out [m, n] from ids [m]. Not for a table on the host.
  void forward(context_of<B>& ctx, matrix_for<float, B> out, const token_id* ids) const noexcept {
    OUTRIDER_ASSERT(!host_table);
    std::visit([&]<class W>(const weight_view<W, space_of<B>>& view) { linear_ops<B, W>::gather_rows(ctx, out, view, ids, factor); },
               table);
  }

  /// The same for a table on the host: the ids have to be known there, and the rows pass through `staging` [m, n]. Errors: those of the copy.
  void forward_from_host(matrix_for<float, B> out, std::span<const token_id> ids, matrix_view<float> staging) const {
    reference_context ctx;
    std::visit([&]<class W>(const weight_view<W>& view) { linear_ops<reference, W>::gather_rows(ctx, staging, view, ids.data(), factor); },
               *host_table);
    copy_across(out, matrix_view<const float>(staging));
  }

  /// The table with Gemma's factor √width: the root is rounded to bf16, as in training, unless the table is stored as f32.
  static embedding scaled_by_root(weight<B> table, std::size_t width) noexcept { return {table, root_for(table, width)}; }
  static embedding on_host(stored_weight<reference> host_table, std::size_t width) noexcept {
    return {{}, root_for(host_table, width), host_table};
  }

 private:
  template <class... View>
  static float root_for(const std::variant<View...>& table, std::size_t width) noexcept {
    const float root = std::sqrt(static_cast<float>(width));
    const bool full_precision =
        std::visit([]<class W, class Space>(const weight_view<W, Space>&) { return std::same_as<W, float>; }, table);
    return full_precision ? root : to_float(bf16(root));
  }
};

}  // namespace outrider
