// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "outrider/backend/ops.hpp"
#include "outrider/backend/traits.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/grouped.hpp"
#include "outrider/core/int8.hpp"
#include "outrider/core/kv_view.hpp"
#include "outrider/core/rng.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/view.hpp"

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error \
    "outrider: -ffast-math lets the compiler reorder sums and forget NaN and infinity, so that speculation would not be exact: compile without it"
#endif

namespace outrider {

/// A list of types; `weight_types` below is the one place that names the storage formats of a model.
template <class... T>
struct type_list {};

namespace detail {
template <class T, class List>
inline constexpr bool is_listed = false;
template <class T, class... Types>
inline constexpr bool is_listed<T, type_list<Types...>> = (std::same_as<T, Types> || ...);
}  // namespace detail

/// The storage types a weight file may hold. Every backend supplies linear_ops for each of them.
using weight_types = type_list<float, bf16, f16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4>;
/// The formats whose matrices may be rearranged in groups at load, for products with int8 activations. Every backend supplies linear_ops for
/// each of them, too.
using grouped_types =
    type_list<grouped<q4_0>, grouped<q8_0>, grouped<q4_k>, grouped<q5_k>, grouped<q6_k>, grouped<iq4_nl>, grouped<iq4_xs>>;
/// How a KV cache may store keys and values. Every backend supplies attention_ops for each of them.
using kv_types = type_list<float, bf16, f16, q8_0>;

/// Whether a type is one of these.
template <class W>
concept listed_weight = detail::is_listed<W, weight_types>;
template <class G>
concept listed_group = detail::is_listed<G, grouped_types>;
template <class Kv>
concept listed_kv = detail::is_listed<Kv, kv_types>;

/// Whether backend B has products with W at all: what a backend that forwards to B asks, so that a missing type stays missing instead of
/// becoming an error inside the library.
template <class B, class W>
concept has_linear_ops = requires {
  sizeof(linear_ops<B, W>);
};

// One concept per op. Op results are void, so checking one never instantiates its body.

template <class B, class W>
concept has_matmul = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const float, B> x, weight_for<W, B> w) {
  { linear_ops<B, W>::matmul(ctx, out, x, w) }
  noexcept->std::same_as<void>;
};
template <class B, class W>
concept has_matmul_prompt = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const float, B> x, weight_for<W, B> w) {
  { linear_ops<B, W>::matmul_prompt(ctx, out, x, w) }
  noexcept->std::same_as<void>;
};
template <class B, class W>
concept has_expert_matmul = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const float, B> x, weight_for<W, B> w,
                                     const std::int32_t* experts) {
  { linear_ops<B, W>::expert_matmul(ctx, out, x, w, experts) }
  noexcept->std::same_as<void>;
};
template <class B, class W>
concept has_gathered_matmul = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const float, B> x, weight_for<W, B> w,
                                       matrix_for<const token_id, B> ids) {
  { linear_ops<B, W>::gathered_matmul(ctx, out, x, w, ids) }
  noexcept->std::same_as<void>;
};
template <class B, class W>
concept has_gather_rows = requires(context_of<B>& ctx, matrix_for<float, B> out, weight_for<W, B> w, const token_id* ids, float factor) {
  { linear_ops<B, W>::gather_rows(ctx, out, w, ids, factor) }
  noexcept->std::same_as<void>;
};

template <class B, class G>
concept has_int8_matmul = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const int8_block, B> x, weight_for<G, B> w) {
  { linear_ops<B, G>::matmul(ctx, out, x, w) }
  noexcept->std::same_as<void>;
};
template <class B, class G>
concept has_int8_expert_matmul = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const int8_block, B> x,
                                          weight_for<G, B> w, const std::int32_t* experts) {
  { linear_ops<B, G>::expert_matmul(ctx, out, x, w, experts) }
  noexcept->std::same_as<void>;
};

template <class B>
concept has_rms_norm = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const float, B> x, const float* weight,
                                float eps) {
  { pointwise_ops<B>::rms_norm(ctx, out, x, weight, eps) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_rope_table = requires(context_of<B>& ctx, matrix_for<float, B> out, const std::int32_t* positions, const float* frequencies) {
  { pointwise_ops<B>::rope_table(ctx, out, out, positions, frequencies) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_rope = requires(context_of<B>& ctx, matrix_for<float, B> x, matrix_for<const float, B> table) {
  { pointwise_ops<B>::rope(ctx, x, table, table) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_gelu_mul = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const float, B> x) {
  { pointwise_ops<B>::gelu_mul(ctx, out, x, x) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_add = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const float, B> x) {
  { pointwise_ops<B>::add(ctx, out, x, x) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_scale = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const float, B> x, float factor) {
  { pointwise_ops<B>::scale(ctx, out, x, factor) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_copy = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const float, B> x) {
  { pointwise_ops<B>::copy(ctx, out, x) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_softcap = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const float, B> x, float cap) {
  { pointwise_ops<B>::softcap(ctx, out, x, cap) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_quantize = requires(context_of<B>& ctx, matrix_for<int8_block, B> out, matrix_for<const float, B> x) {
  { pointwise_ops<B>::quantize(ctx, out, x) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_top_k = requires(context_of<B>& ctx, matrix_for<std::int32_t, B> ids, matrix_for<const float, B> x) {
  { pointwise_ops<B>::top_k(ctx, ids, x) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_argmax = requires(context_of<B>& ctx, token_id* out, matrix_for<const float, B> x, matrix_for<const token_id, B> ids) {
  { pointwise_ops<B>::argmax(ctx, out, x, ids) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_mask = requires(context_of<B>& ctx, matrix_for<float, B> x, matrix_for<const token_id, B> ids, const token_id* banned,
                            std::size_t count) {
  { pointwise_ops<B>::mask(ctx, x, ids, banned, count) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_gather_ids = requires(context_of<B>& ctx, matrix_for<token_id, B> out, matrix_for<const token_id, B> table,
                                  matrix_for<const std::int32_t, B> rows) {
  { pointwise_ops<B>::gather_ids(ctx, out, table, rows) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_scatter_logits = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const float, B> x,
                                      matrix_for<const token_id, B> ids) {
  { pointwise_ops<B>::scatter_logits(ctx, out, x, ids) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_route_experts = requires(context_of<B>& ctx, matrix_for<std::int32_t, B> experts, matrix_for<float, B> weights,
                                     matrix_for<float, B> logits, const float* scales) {
  { pointwise_ops<B>::route_experts(ctx, experts, weights, logits, scales) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_weighted_sum = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const float, B> x) {
  { pointwise_ops<B>::weighted_sum(ctx, out, x, x) }
  noexcept->std::same_as<void>;
};

// The optional ones.

template <class B>
concept fuses_norm_quantize = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<int8_block, B> blocks,
                                       matrix_for<const float, B> x, const float* weight, float eps) {
  { pointwise_ops<B>::norm_quantize(ctx, out, blocks, x, weight, eps) }
  noexcept->std::same_as<void>;
};
template <class B>
concept fuses_norm_add = requires(context_of<B>& ctx, matrix_for<float, B> h, matrix_for<int8_block, B> blocks,
                                  matrix_for<const float, B> x, const float* weight, float eps, float factor) {
  { pointwise_ops<B>::norm_add(ctx, h, blocks, x, weight, eps, factor) }
  noexcept->std::same_as<void>;
};
template <class B>
concept fuses_norm_add_norm = requires(context_of<B>& ctx, matrix_for<float, B> h, matrix_for<int8_block, B> blocks,
                                       matrix_for<const float, B> x, const float* weight, float eps) {
  { pointwise_ops<B>::norm_add_norm(ctx, h, h, blocks, x, weight, eps, weight, eps) }
  noexcept->std::same_as<void>;
};
template <class B>
concept fuses_norm_rope = requires(context_of<B>& ctx, matrix_for<float, B> x, const float* weight, float eps,
                                   matrix_for<const float, B> table) {
  { pointwise_ops<B>::norm_rope(ctx, x, weight, eps, table, table) }
  noexcept->std::same_as<void>;
};
template <class B>
concept fuses_gelu_mul_quantize = requires(context_of<B>& ctx, matrix_for<int8_block, B> out, matrix_for<const float, B> x) {
  { pointwise_ops<B>::gelu_mul_quantize(ctx, out, x, x) }
  noexcept->std::same_as<void>;
};
template <class B>
concept has_draw = requires(context_of<B>& ctx, token_id* out, matrix_for<const float, B> x, matrix_for<const token_id, B> ids,
                            std::size_t position, const draw_rule& rule) {
  { pointwise_ops<B>::draw(ctx, out, x, ids, position, rule) }
  noexcept->std::same_as<void>;
};

template <class B, class Kv>
concept has_append = requires(context_of<B>& ctx, kv_view<Kv, space_of<B>> cache, matrix_for<const float, B> rows, std::size_t first) {
  { attention_ops<B, Kv>::append(ctx, cache, rows, rows, first) }
  noexcept->std::same_as<void>;
};
template <class B, class Kv>
concept has_attend = requires(context_of<B>& ctx, matrix_for<float, B> out, matrix_for<const float, B> q,
                              kv_view<const Kv, space_of<B>> cache, key_window window) {
  { attention_ops<B, Kv>::attend(ctx, out, q, cache, window) }
  noexcept->std::same_as<void>;
};

// An optional one.
template <class B, class Kv>
concept fuses_norm_append = requires(context_of<B>& ctx, kv_view<Kv, space_of<B>> cache, matrix_for<const float, B> rows,
                                     const float* weight, float eps, std::size_t first) {
  { attention_ops<B, Kv>::norm_append(ctx, cache, rows, rows, weight, eps, rows, rows, first) }
  noexcept->std::same_as<void>;
};

/// Whether a backend has all ops of a struct, see ops.hpp; check_backend() names the first that is missing.
template <class B, class W>
concept linear_backend =
    has_matmul<B, W> && has_matmul_prompt<B, W> && has_expert_matmul<B, W> && has_gathered_matmul<B, W> && has_gather_rows<B, W>;
template <class B, class G>
concept int8_backend = has_int8_matmul<B, G> && has_int8_expert_matmul<B, G> && has_gather_rows<B, G>;
template <class B>
concept pointwise_backend = has_rms_norm<B> && has_rope_table<B> && has_rope<B> && has_gelu_mul<B> && has_add<B> && has_scale<B> &&
    has_copy<B> && has_softcap<B> && has_quantize<B> && has_top_k<B> && has_argmax<B> && has_mask<B> && has_gather_ids<B> &&
    has_scatter_logits<B> && has_route_experts<B> && has_weighted_sum<B>;
template <class B, class Kv>
concept attention_backend = has_append<B, Kv> && has_attend<B, Kv>;

namespace detail {

template <class B, class W>
consteval bool check_linear() {
  static_assert(has_matmul<B, W>,
                "outrider: this backend lacks linear_ops<B, W>::matmul(ctx, out, x, w) noexcept for a weight type of weight_types");
  static_assert(has_matmul_prompt<B, W>,
                "outrider: this backend lacks linear_ops<B, W>::matmul_prompt(ctx, out, x, w) noexcept for a weight type of weight_types");
  static_assert(
      has_expert_matmul<B, W>,
      "outrider: this backend lacks linear_ops<B, W>::expert_matmul(ctx, out, x, w, experts) noexcept for a weight type of weight_types");
  static_assert(
      has_gathered_matmul<B, W>,
      "outrider: this backend lacks linear_ops<B, W>::gathered_matmul(ctx, out, x, w, ids) noexcept for a weight type of weight_types");
  static_assert(
      has_gather_rows<B, W>,
      "outrider: this backend lacks linear_ops<B, W>::gather_rows(ctx, out, w, ids, factor) noexcept for a weight type of weight_types");
  return true;
}

template <class B, class G>
consteval bool check_int8() {
  static_assert(has_int8_matmul<B, G>,
                "outrider: this backend lacks linear_ops<B, grouped<W>>::matmul(ctx, out, x, w) noexcept for a type of grouped_types");
  static_assert(has_int8_expert_matmul<B, G>,
                "outrider: this backend lacks linear_ops<B, grouped<W>>::expert_matmul(ctx, out, x, w, experts) noexcept for a type of "
                "grouped_types");
  static_assert(has_gather_rows<B, G>,
                "outrider: this backend lacks linear_ops<B, grouped<W>>::gather_rows(ctx, out, w, ids, factor) noexcept for a type of "
                "grouped_types");
  return true;
}

template <class B>
consteval bool check_pointwise() {
  static_assert(has_rms_norm<B>, "outrider: this backend lacks pointwise_ops<B>::rms_norm(ctx, out, x, weight, eps) noexcept");
  static_assert(has_rope_table<B>,
                "outrider: this backend lacks pointwise_ops<B>::rope_table(ctx, cos, sin, positions, frequencies) noexcept");
  static_assert(has_rope<B>, "outrider: this backend lacks pointwise_ops<B>::rope(ctx, x, cos, sin) noexcept");
  static_assert(has_gelu_mul<B>, "outrider: this backend lacks pointwise_ops<B>::gelu_mul(ctx, out, gate, up) noexcept");
  static_assert(has_add<B>, "outrider: this backend lacks pointwise_ops<B>::add(ctx, out, x, y) noexcept");
  static_assert(has_scale<B>, "outrider: this backend lacks pointwise_ops<B>::scale(ctx, out, x, factor) noexcept");
  static_assert(has_copy<B>, "outrider: this backend lacks pointwise_ops<B>::copy(ctx, out, x) noexcept");
  static_assert(has_softcap<B>, "outrider: this backend lacks pointwise_ops<B>::softcap(ctx, out, x, cap) noexcept");
  static_assert(has_quantize<B>, "outrider: this backend lacks pointwise_ops<B>::quantize(ctx, out, x) noexcept");
  static_assert(has_top_k<B>, "outrider: this backend lacks pointwise_ops<B>::top_k(ctx, ids, x) noexcept");
  static_assert(has_argmax<B>, "outrider: this backend lacks pointwise_ops<B>::argmax(ctx, out, x, ids) noexcept");
  static_assert(has_mask<B>, "outrider: this backend lacks pointwise_ops<B>::mask(ctx, x, ids, banned, count) noexcept");
  static_assert(has_gather_ids<B>, "outrider: this backend lacks pointwise_ops<B>::gather_ids(ctx, out, table, rows) noexcept");
  static_assert(has_scatter_logits<B>, "outrider: this backend lacks pointwise_ops<B>::scatter_logits(ctx, out, x, ids) noexcept");
  static_assert(has_route_experts<B>,
                "outrider: this backend lacks pointwise_ops<B>::route_experts(ctx, experts, weights, logits, scales) noexcept");
  static_assert(has_weighted_sum<B>, "outrider: this backend lacks pointwise_ops<B>::weighted_sum(ctx, out, x, weights) noexcept");
  return true;
}

template <class B, class Kv>
consteval bool check_attention() {
  static_assert(
      has_append<B, Kv>,
      "outrider: this backend lacks attention_ops<B, Kv>::append(ctx, cache, k, v, first) noexcept for an element type of kv_types");
  static_assert(
      has_attend<B, Kv>,
      "outrider: this backend lacks attention_ops<B, Kv>::attend(ctx, out, q, cache, window) noexcept for an element type of kv_types");
  return true;
}

template <class B, class... W, class... G, class... Kv>
consteval bool check_all(type_list<W...>, type_list<G...>, type_list<Kv...>) {
  return (check_linear<B, W>() && ...) && (check_int8<B, G>() && ...) && check_pointwise<B>() && (check_attention<B, Kv>() && ...);
}

template <class B, class... W, class... G, class... Kv>
consteval bool satisfies_all(type_list<W...>, type_list<G...>, type_list<Kv...>) {
  return (linear_backend<B, W> && ...) && (int8_backend<B, G> && ...) && pointwise_backend<B> && (attention_backend<B, Kv> && ...);
}

}  // namespace detail

/// For a backend's author: one readable sentence per missing op. Put `static_assert(outrider::check_backend<my_backend>());` behind your
/// specialisations; every backend of the library ends with that line.
template <class B>
consteval bool check_backend() {
  static_assert(backend_tag<B>, "outrider: this type has no backend_traits<B> with space, context, name() and simd()");
  if constexpr (backend_tag<B>) return detail::check_all<B>(weight_types{}, grouped_types{}, kv_types{});
  return false;
}

/// A backend that can run a whole model, for a program's own constraints. The library's classes ask for a backend_tag and assert
/// check_backend, because a sentence that names the missing op helps more than an unsatisfied concept. Ask only after the specialisations:
/// the answer is remembered.
template <class B>
concept backend = backend_tag<B> && detail::satisfies_all<B>(weight_types{}, grouped_types{}, kv_types{});

}  // namespace outrider
