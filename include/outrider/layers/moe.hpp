// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <variant>

#include "outrider/layers/linear.hpp"
#include "outrider/layers/norm.hpp"
#include "outrider/layers/scratch.hpp"

namespace outrider {

/// The experts chosen for the rows of a pass, by falling probability, and the weights of their outputs.
template <class B>
struct expert_choice {
  matrix_for<std::int32_t, B> experts;  // [m, s]
  matrix_for<float, B> weights;         // [m, s]
};

template <class B>
struct moe_scratch {
  scratch<float, B> normed, logits, weights, gate_up, out;
  scratch<std::int32_t, B> experts;
  product_scratch<B> products;  // of the router's rows, then of the experts' hidden ones

  moe_scratch() = default;
  moe_scratch(std::size_t max_rows, std::size_t hidden, std::size_t expert_count, std::size_t per_token, std::size_t width)
      : normed(max_rows, hidden),
        logits(max_rows, expert_count),
        weights(max_rows, per_token),
        gate_up(max_rows * per_token, 2 * width),
        out(max_rows * per_token, hidden),
        experts(max_rows, per_token),
        products(max_rows, (std::max)(hidden, per_token * width)) {}
};

/// A mixture of gated MLPs. The router reads the un-normed residual r, the experts its norm u:
///   z = norm(r) ⊙ scale · H^(−1/2);  p = softmax(Wrouter z);  w = p / Σp over the s largest, then · per_expert_scale
///   out = Σ_j w_j · Wdown[e_j] (gelu_tanh(g) ⊙ u'),  [g; u'] = Wgate_up[e_j] u, gate rows first.
/// Some files have Wgate and Wup in two tensors.
template <class B>
struct mixture_of_experts {
  norm<B> router_norm;                      // its weight is router.scale
  float router_factor = 1;                  // H^(−1/2)
  linear<B> router;                         // [experts, H]
  const float* per_expert_scale = nullptr;  // [experts]
  weight<B> gate_up;                        // [experts · 2I, H]; where `up` is there, the gate alone, [experts · I, H]
  std::optional<weight<B>> up;              // [experts · I, H]
  weight<B> down;                           // [experts · H, I]
  std::size_t experts = 0, per_token = 0, width = 0;

  /// Whether any of the experts' products with u reads int8 blocks.
  [[nodiscard]] bool reads_blocks() const noexcept { return outrider::reads_blocks<B>(gate_up) || (up && outrider::reads_blocks<B>(*up)); }

  /// Which experts the rows of r [m, H] go to. The views point into the scratch.
  expert_choice<B> route(context_of<B>& ctx, moe_scratch<B>& s, matrix_for<const float, B> r, row_kind kind) const noexcept {
    const auto z = s.normed.view(r.rows, r.cols), logits = s.logits.view(r.rows, experts);
    router_norm.forward(ctx, z, r);
    pointwise_ops<B>::scale(ctx, z, z, router_factor);
    product_rows<B> rows = s.products.rows(z);
    router.forward(ctx, logits, rows, kind);
    const expert_choice<B> choice{s.experts.view(r.rows, per_token), s.weights.view(r.rows, per_token)};
    pointwise_ops<B>::route_experts(ctx, choice.experts, choice.weights, logits, per_expert_scale);
    return choice;
  }

  /// out [m, H] from u [m, H] through the chosen experts.
  void forward(context_of<B>& ctx, moe_scratch<B>& s, matrix_for<float, B> out, product_rows<B>& u,
               const expert_choice<B>& choice) const noexcept {
    const std::size_t slots = u.count() * per_token;
    const auto both = s.gate_up.view(slots, 2 * width), y = s.out.view(slots, u.width());
    const auto gate = both.slice_cols(0, width), up_rows = both.slice_cols(width, width);
    expert_products(ctx, up ? gate : both, u, gate_up, choice);
    if (up) expert_products(ctx, up_rows, u, *up, choice);
    product_rows<B> hidden = s.products.gated(ctx, gate, up_rows, outrider::reads_blocks<B>(down));
    expert_products(ctx, y, hidden, down, choice);
    pointwise_ops<B>::weighted_sum(ctx, out, y, choice.weights);
  }

 private:
  static void expert_products(context_of<B>& ctx, matrix_for<float, B> y, product_rows<B>& x, const weight<B>& w,
                              const expert_choice<B>& choice) noexcept {
    std::visit(
        [&]<class W>(const weight_view<W, space_of<B>>& view) {
          linear_ops<B, W>::expert_matmul(ctx, y, x.template for_weight<W>(ctx), view, choice.experts.data);
        },
        w);
  }
};

}  // namespace outrider
