// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <variant>

#include "outrider/backend/concepts.hpp"

namespace outrider {

namespace detail {
template <class List, class B>
struct weight_variant;
template <class... W, class B>
struct weight_variant<type_list<W...>, B> {
  using type = std::variant<weight_for<W, B>...>;
};
}  // namespace detail

/// A stored matrix of one of the formats of weight_types. Formats differ per tensor inside one file, so the choice is made once per
/// product: one predictable branch per weight.
template <class B>
using weight = typename detail::weight_variant<weight_types, B>::type;

/// What the rows of a pass are. Prompt rows may take a product that rounds differently (the backend's matmul_prompt); rows that are decoded
/// or verified never do. The caller knows which it has; it is never guessed from the number of rows.
enum class row_kind : std::uint8_t { decode, prompt };

/// A bias-free linear map y = x · wᵀ. Borrows its weight.
template <class B>
struct linear {
  weight<B> w;  // [out, in]

  /// y [m, out] from x [m, in].
  void forward(context_of<B>& ctx, matrix_for<float, B> y, matrix_for<const float, B> x, row_kind kind) const noexcept {
    std::visit(
        [&]<class W>(const weight_view<W, space_of<B>>& view) {
          if (kind == row_kind::prompt)
            linear_ops<B, W>::matmul_prompt(ctx, y, x, view);
          else
            linear_ops<B, W>::matmul(ctx, y, x, view);
        },
        w);
  }

  /// y [m, c]: the products with rows ids(r, ·) of the weight alone.
  void forward_at(context_of<B>& ctx, matrix_for<float, B> y, matrix_for<const float, B> x,
                  matrix_for<const token_id, B> ids) const noexcept {
    std::visit([&]<class W>(const weight_view<W, space_of<B>>& view) { linear_ops<B, W>::gathered_matmul(ctx, y, x, view, ids); }, w);
  }
};

}  // namespace outrider
