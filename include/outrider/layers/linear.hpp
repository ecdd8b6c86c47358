// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <variant>

#include "outrider/backend/concepts.hpp"
#include "outrider/core/int8.hpp"
#include "outrider/layers/norm.hpp"
#include "outrider/layers/scratch.hpp"

namespace outrider {

namespace detail {
template <class B, class... Lists>
struct weight_variant;
template <class B, class... W, class... G>
struct weight_variant<B, type_list<W...>, type_list<G...>> {
  using type = std::variant<weight_for<W, B>..., weight_for<G, B>...>;
};
}  // namespace detail

/// A matrix of one of the formats of weight_types, as a file has it. Formats differ per tensor inside one file, so the choice is made once per
/// product: one predictable branch per weight.
template <class B>
using stored_weight = typename detail::weight_variant<B, weight_types, type_list<>>::type;

/// The same, or rearranged in groups for products with int8 activations.
template <class B>
using weight = typename detail::weight_variant<B, weight_types, grouped_types>::type;

/// Whether products with w read int8 blocks. (In a weight's list of formats the groups come last.)
template <class B>
[[nodiscard]] bool reads_blocks(const weight<B>& w) noexcept {
  return w.index() >= std::variant_size_v<stored_weight<B>>;
}

/// Rows that products read: floats, and the int8 blocks that products with grouped weights want, made when the first of them asks. All products
/// of the same rows share one of these. Borrows both.
template <class B>
class product_rows {
 public:
  /// x [m, k]; blocks [m, k / 32] to write to, or made already.
  product_rows(matrix_for<const float, B> x, matrix_for<int8_block, B> blocks, bool made = false) noexcept
      : x_(x), blocks_(blocks), made_(made) {}

  [[nodiscard]] std::size_t count() const noexcept { return x_.rows; }
  [[nodiscard]] std::size_t width() const noexcept { return x_.cols; }
  [[nodiscard]] matrix_for<const float, B> floats() const noexcept { return x_; }
  [[nodiscard]] matrix_for<const int8_block, B> blocks(context_of<B>& ctx) noexcept {
    if (!made_) pointwise_ops<B>::quantize(ctx, blocks_, x_);
    made_ = true;
    return blocks_;
  }
  /// What a product with a weight stored as W reads.
  template <class W>
  [[nodiscard]] auto for_weight([[maybe_unused]] context_of<B>& ctx) noexcept {
    if constexpr (listed_group<W>) {
      return blocks(ctx);
    } else {
      return x_;
    }
  }

 private:
  matrix_for<const float, B> x_;
  matrix_for<int8_block, B> blocks_;
  bool made_;
};

/// What the rows of a pass are. Prompt rows may take a product that rounds differently (the backend's matmul_prompt); rows that are decoded
/// or verified never do. The caller knows which it has; it is never guessed from the number of rows.
enum class row_kind : std::uint8_t { decode, prompt };

/// A bias-free linear map y = x · wᵀ. Borrows its weight.
template <class B>
struct linear {
  weight<B> w;  // [out, in]

  [[nodiscard]] bool reads_blocks() const noexcept { return outrider::reads_blocks<B>(w); }

  /// y [m, out] from x [m, in].
  void forward(context_of<B>& ctx, matrix_for<float, B> y, product_rows<B>& x, row_kind kind) const noexcept {
    std::visit(
        [&]<class W>(const weight_view<W, space_of<B>>& view) {
          if constexpr (listed_group<W>) {
            linear_ops<B, W>::matmul(ctx, y, x.blocks(ctx), view);
          } else if (kind == row_kind::prompt) {
            linear_ops<B, W>::matmul_prompt(ctx, y, x.floats(), view);
          } else {
            linear_ops<B, W>::matmul(ctx, y, x.floats(), view);
          }
        },
        w);
  }
};

/// Room for the int8 blocks of rows that products read. Where a backend has ops for that, rows and their blocks are made in one: the caller says
/// by `with_blocks` whether any of the products reads blocks. All that is returned is ready for products until the next call.
template <class B>
class product_scratch {
 public:
  product_scratch() = default;
  product_scratch(std::size_t max_rows, std::size_t max_cols) : blocks_(max_rows, max_cols / int8_block::elements) {}

  /// x [m, k].
  [[nodiscard]] product_rows<B> rows(matrix_for<const float, B> x) noexcept { return {x, blocks_of(x)}; }

  /// x_norm(x) [m, k], written to out, which may be x.
  [[nodiscard]] product_rows<B> normed(context_of<B>& ctx, matrix_for<float, B> out, const norm<B>& x_norm, matrix_for<const float, B> x,
                                       [[maybe_unused]] bool with_blocks) noexcept {
    if constexpr (fuses_norm_quantize<B>) {
      if (with_blocks) {
        pointwise_ops<B>::norm_quantize(ctx, out, blocks_of(out), x, x_norm.weight, x_norm.eps);
        return {out, blocks_of(out), true};
      }
    }
    x_norm.forward(ctx, out, x);
    return rows(out);
  }

  /// h [m, k] = h + x_norm(x); x is used up.
  [[nodiscard]] product_rows<B> added(context_of<B>& ctx, matrix_for<float, B> h, const norm<B>& x_norm, matrix_for<float, B> x,
                                      [[maybe_unused]] bool with_blocks) noexcept {
    if constexpr (fuses_norm_add<B>) {
      if (with_blocks) {
        pointwise_ops<B>::norm_add(ctx, h, blocks_of(h), x, x_norm.weight, x_norm.eps, 1);
        return {h, blocks_of(h), true};
      }
    }
    x_norm.add_to(ctx, h, x);
    return rows(h);
  }

  /// h [m, k] = h + x_norm(x), then next_norm(h) [m, k], written to out, which may be x; x is used up.
  [[nodiscard]] product_rows<B> added_and_normed(context_of<B>& ctx, matrix_for<float, B> h, const norm<B>& x_norm, matrix_for<float, B> x,
                                                 matrix_for<float, B> out, const norm<B>& next_norm, bool with_blocks) noexcept {
    if constexpr (fuses_norm_add_norm<B>) {
      const auto blocks = with_blocks ? blocks_of(out) : matrix_for<int8_block, B>{};
      pointwise_ops<B>::norm_add_norm(ctx, h, out, blocks, x, x_norm.weight, x_norm.eps, next_norm.weight, next_norm.eps);
      return {out, blocks_of(out), with_blocks};
    } else {
      x_norm.add_to(ctx, h, x);
      return normed(ctx, out, next_norm, h, with_blocks);
    }
  }

  /// gelu_tanh(gate) ⊙ up [m, k]; gate is used up. Where it is made with blocks nobody may ask for the floats.
  [[nodiscard]] product_rows<B> gated(context_of<B>& ctx, matrix_for<float, B> gate, matrix_for<const float, B> up,
                                      [[maybe_unused]] bool with_blocks) noexcept {
    if constexpr (fuses_gelu_mul_quantize<B>) {
      if (with_blocks) {
        pointwise_ops<B>::gelu_mul_quantize(ctx, blocks_of(gate), gate, up);
        return {gate, blocks_of(gate), true};
      }
    }
    pointwise_ops<B>::gelu_mul(ctx, gate, gate, up);
    return rows(gate);
  }

 private:
  [[nodiscard]] matrix_for<int8_block, B> blocks_of(matrix_for<const float, B> x) noexcept {
    return blocks_.view(x.rows, x.cols / int8_block::elements);
  }

  scratch<int8_block, B> blocks_;
};

}  // namespace outrider
