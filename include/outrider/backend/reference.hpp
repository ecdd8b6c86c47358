// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The contract of ops.hpp in plain arithmetic: one element after the other, sums in double, rounded to float once at the end. Slow on
// purpose: it is what every other backend is compared with, and the page to read when a sentence of ops.hpp leaves a question.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

#include "outrider/backend/concepts.hpp"
#include "outrider/backend/ops.hpp"
#include "outrider/backend/traits.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/dequantize.hpp"
#include "outrider/core/grouped.hpp"
#include "outrider/core/int8.hpp"
#include "outrider/core/kv_view.hpp"
#include "outrider/core/quantize.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/space.hpp"
#include "outrider/core/view.hpp"

namespace outrider {

/// The scalar backend: the meaning of every op.
struct reference {};

/// Nothing to hold: the reference always runs on the calling thread. Safe to share between threads.
struct reference_context {
  explicit constexpr reference_context(execution = {}) noexcept {}
  [[nodiscard]] constexpr unsigned threads() const noexcept { return 1; }
};

template <>
struct backend_traits<reference> {
  using space = host_space;
  using context = reference_context;
  static constexpr std::string_view name() noexcept { return "reference"; }
  static constexpr std::string_view simd() noexcept { return "scalar"; }
};

template <listed_weight W>
struct linear_ops<reference, W> {
  using context = reference_context;

  static void matmul(context&, matrix_view<float> out, matrix_view<const float> x, weight_view<W> w) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r)
      for (std::size_t c = 0; c < out.cols; ++c) out(r, c) = dot(x.row(r), w.row(c), x.cols);
  }

  static void matmul_prompt(context& ctx, matrix_view<float> out, matrix_view<const float> x, weight_view<W> w) noexcept {
    matmul(ctx, out, x, w);
  }

  static void expert_matmul(context&, matrix_view<float> out, matrix_view<const float> x, weight_view<W> w,
                            const std::int32_t* experts) noexcept {
    for (std::size_t i = 0; i < out.rows; ++i) {  // i = r·s + j
      const std::size_t r = i * x.rows / out.rows, first = static_cast<std::size_t>(experts[i]) * out.cols;
      for (std::size_t c = 0; c < out.cols; ++c) out(i, c) = dot(x.row(r), w.row(first + c), x.cols);
    }
  }

  static void gathered_matmul(context&, matrix_view<float> out, matrix_view<const float> x, weight_view<W> w,
                              matrix_view<const token_id> ids) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r)
      for (std::size_t j = 0; j < out.cols; ++j) out(r, j) = dot(x.row(r), w.row(static_cast<std::size_t>(ids(r, j))), x.cols);
  }

  static void gather_rows(context&, matrix_view<float> out, weight_view<W> w, const token_id* ids, float factor) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r)
      for_each_weight(w.row(static_cast<std::size_t>(ids[r])), out.cols, [&](std::size_t c, float weight) { out(r, c) = weight * factor; });
  }

 private:
  static float dot(const float* x, const W* w, std::size_t k) noexcept {
    double sum = 0;
    for_each_weight(w, k, [&](std::size_t i, float weight) { sum += double{x[i]} * double{weight}; });  // the product is exact in double
    return static_cast<float>(sum);
  }
};

/// Products with int8 activations: the definition every backend meets bit for bit.
template <class W>
  requires listed_group<grouped<W>>
struct linear_ops<reference, grouped<W>> {
  using context = reference_context;

  static void matmul(context&, matrix_view<float> out, matrix_view<const int8_block> x, weight_view<grouped<W>> w) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r)
      for (std::size_t c = 0; c < out.cols; ++c) out(r, c) = dot(x.row(r), w, c);
  }

  static void expert_matmul(context&, matrix_view<float> out, matrix_view<const int8_block> x, weight_view<grouped<W>> w,
                            const std::int32_t* experts) noexcept {
    OUTRIDER_ASSERT(out.cols % group_rows == 0);
    for (std::size_t i = 0; i < out.rows; ++i) {  // i = r·s + j
      const std::size_t r = i * x.rows / out.rows, first = static_cast<std::size_t>(experts[i]) * out.cols;
      for (std::size_t c = 0; c < out.cols; ++c) out(i, c) = dot(x.row(r), w, first + c);
    }
  }

  static void gather_rows(context&, matrix_view<float> out, weight_view<grouped<W>> w, const token_id* ids, float factor) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r)
      for_each_part(w, static_cast<std::size_t>(ids[r]), [&](std::size_t p, const int8_weights& part) {
        for (std::size_t k = 0; k < 32; ++k) {
          const float product = part.scale[k / 16] * to_float(part.q[k]);
          out(r, 32 * p + k) = (has_minimum<W> ? product + part.minimum : product) * factor;
        }
      });
  }

 private:
  static float dot(const int8_block* x, weight_view<grouped<W>> w, std::size_t row) noexcept {
    float acc = 0;
    for_each_part(w, row, [&](std::size_t p, const int8_weights& part) {
      const auto sum = [&](std::size_t first, std::size_t count) {
        int products = 0;
        for (std::size_t k = first; k < first + count; ++k) products += part.q[k] * x[p].q[k];
        return static_cast<float>(products);
      };
      for (std::size_t k = 0; k < 32; k += scale_columns<W>) acc = std::fma(sum(k, scale_columns<W>), part.scale[k / 16] * x[p].d, acc);
      if constexpr (has_minimum<W>) acc = std::fma(part.minimum, x[p].sum, acc);
    });
    return acc;
  }

  /// body(p, part) for the parts of a row, p counted from its beginning.
  template <class Body>
  static void for_each_part(weight_view<grouped<W>> w, std::size_t row, Body&& body) noexcept {
    constexpr std::size_t parts = grouped<W>::parts;
    const grouped<W>* group = w.group(row / group_rows);
    for (std::size_t p = 0; p < w.cols / 32; ++p) body(p, part_of(group[p / parts], row % group_rows, p % parts));
  }
};

template <>
struct pointwise_ops<reference> {
  using context = reference_context;

  static void rms_norm(context&, matrix_view<float> out, matrix_view<const float> x, const float* weight, float eps) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r) {
      double squares = 0;
      for (std::size_t c = 0; c < x.cols; ++c) squares += double{x(r, c)} * double{x(r, c)};
      const double root = std::sqrt(squares / static_cast<double>(x.cols) + double{eps});
      for (std::size_t c = 0; c < x.cols; ++c) out(r, c) = static_cast<float>(double{x(r, c)} / root * (weight ? double{weight[c]} : 1.0));
    }
  }

  static void rope_table(context&, matrix_view<float> cos, matrix_view<float> sin, const std::int32_t* positions,
                         const float* frequencies) noexcept {
    for (std::size_t r = 0; r < cos.rows; ++r)
      for (std::size_t i = 0; i < cos.cols; ++i) {
        const float angle = static_cast<float>(double{frequencies[i]} * positions[r]);
        cos(r, i) = static_cast<float>(std::cos(double{angle}));
        sin(r, i) = static_cast<float>(std::sin(double{angle}));
      }
  }

  static void rope(context&, matrix_view<float> x, matrix_view<const float> cos, matrix_view<const float> sin) noexcept {
    const std::size_t h = cos.cols;
    for (std::size_t r = 0; r < x.rows; ++r) {
      const std::size_t t = r * cos.rows / x.rows;  // r / heads
      for (std::size_t i = 0; i < h; ++i) {
        const double a = x(r, i), b = x(r, i + h), c = cos(t, i), s = sin(t, i);
        x(r, i) = static_cast<float>(a * c - b * s);
        x(r, i + h) = static_cast<float>(b * c + a * s);
      }
    }
  }

  static void gelu_mul(context&, matrix_view<float> out, matrix_view<const float> gate, matrix_view<const float> up) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r)
      for (std::size_t c = 0; c < out.cols; ++c) out(r, c) = static_cast<float>(gelu_tanh(gate(r, c)) * double{up(r, c)});
  }

  static void add(context&, matrix_view<float> out, matrix_view<const float> x, matrix_view<const float> y) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r)
      for (std::size_t c = 0; c < out.cols; ++c) out(r, c) = x(r, c) + y(r, c);
  }

  static void scale(context&, matrix_view<float> out, matrix_view<const float> x, float factor) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r)
      for (std::size_t c = 0; c < out.cols; ++c) out(r, c) = x(r, c) * factor;
  }

  static void copy(context&, matrix_view<float> out, matrix_view<const float> x) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r) std::copy_n(x.row(r), x.cols, out.row(r));
  }

  static void softcap(context&, matrix_view<float> out, matrix_view<const float> x, float cap) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r)
      for (std::size_t c = 0; c < out.cols; ++c) out(r, c) = static_cast<float>(double{cap} * std::tanh(double{x(r, c)} / double{cap}));
  }

  static void quantize(context&, matrix_view<int8_block> out, matrix_view<const float> x) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r)
      for (std::size_t b = 0; b < out.cols; ++b) outrider::quantize(out(r, b), x.row(r) + 32 * b);
  }

  static void top_k(context&, matrix_view<std::int32_t> ids, matrix_view<const float> x) noexcept {
    for (std::size_t r = 0; r < ids.rows; ++r)
      for (std::size_t j = 0; j < ids.cols; ++j) {
        std::size_t best = x.cols;  // the first column in order that comes behind the one chosen before
        for (std::size_t c = 0; c < x.cols; ++c) {
          const bool open = j == 0 || before(x.row(r), static_cast<std::size_t>(ids(r, j - 1)), c);
          if (open && (best == x.cols || before(x.row(r), c, best))) best = c;
        }
        ids(r, j) = static_cast<std::int32_t>(best);
      }
  }

  static void argmax(context&, token_id* out, matrix_view<const float> x, matrix_view<const token_id> ids) noexcept {
    for (std::size_t r = 0; r < x.rows; ++r) {
      float largest = std::numeric_limits<float>::quiet_NaN();
      for (std::size_t c = 0; c < x.cols; ++c) {
        const float value = x(r, c);
        const token_id id = id_of(ids, r, c);
        const bool better = value > largest || (std::isnan(largest) && !std::isnan(value)) || (value == largest && id < out[r]);
        if (c == 0 || better) {
          out[r] = id;
          largest = value;
        }
      }
    }
  }

  static void mask(context&, matrix_view<float> x, matrix_view<const token_id> ids, const token_id* banned, std::size_t count) noexcept {
    for (std::size_t r = 0; r < x.rows; ++r)
      for (std::size_t c = 0; c < x.cols; ++c)
        if (std::find(banned, banned + count, id_of(ids, r, c)) != banned + count) x(r, c) = -std::numeric_limits<float>::infinity();
  }

  static void gather_ids(context&, matrix_view<token_id> out, matrix_view<const token_id> table,
                         matrix_view<const std::int32_t> rows) noexcept {
    for (std::size_t r = 0; r < rows.rows; ++r)
      for (std::size_t j = 0; j < rows.cols; ++j)
        std::copy_n(table.row(static_cast<std::size_t>(rows(r, j))), table.cols, out.row(r) + j * table.cols);
  }

  static void scatter_logits(context&, matrix_view<float> out, matrix_view<const float> x, matrix_view<const token_id> ids) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r) {
      std::fill_n(out.row(r), out.cols, *std::min_element(x.row(r), x.row(r) + x.cols) - 1);
      for (std::size_t j = 0; j < x.cols; ++j) out(r, static_cast<std::size_t>(ids(r, j))) = x(r, j);
    }
  }

  static void route_experts(context& ctx, matrix_view<std::int32_t> experts, matrix_view<float> weights, matrix_view<float> logits,
                            const float* scales) noexcept {
    top_k(ctx, experts, logits);  // softmax keeps the order, and its denominator cancels below
    for (std::size_t r = 0; r < experts.rows; ++r) {
      const auto p = [&](std::size_t j) { return std::exp(double{logits(r, expert(experts, r, j))} - logits(r, expert(experts, r, 0))); };
      double sum = 0;
      for (std::size_t j = 0; j < experts.cols; ++j) sum += p(j);
      for (std::size_t j = 0; j < experts.cols; ++j) weights(r, j) = static_cast<float>(p(j) / sum * double{scales[expert(experts, r, j)]});
    }
  }

  static void weighted_sum(context&, matrix_view<float> out, matrix_view<const float> x, matrix_view<const float> weights) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r)
      for (std::size_t c = 0; c < out.cols; ++c) {
        double sum = 0;
        for (std::size_t j = 0; j < weights.cols; ++j) sum += double{weights(r, j)} * double{x(r * weights.cols + j, c)};
        out(r, c) = static_cast<float>(sum);
      }
  }

 private:
  static double gelu_tanh(double z) noexcept {
    constexpr double root_of_2_over_pi = 0.79788456080286535588;
    return 0.5 * z * (1 + std::tanh(root_of_2_over_pi * (z + 0.044715 * z * z * z)));
  }

  /// Whether column a comes before column b: larger first, equals by column, NaN behind every number.
  static bool before(const float* x, std::size_t a, std::size_t b) noexcept {
    if (std::isnan(x[a]) != std::isnan(x[b])) return std::isnan(x[b]);
    return x[a] > x[b] || (!(x[a] < x[b]) && a < b);
  }

  static token_id id_of(matrix_view<const token_id> ids, std::size_t r, std::size_t c) noexcept {
    return ids.data ? ids(r, c) : static_cast<token_id>(c);
  }

  static std::size_t expert(matrix_view<const std::int32_t> experts, std::size_t r, std::size_t j) noexcept {
    return static_cast<std::size_t>(experts(r, j));
  }
};

template <listed_kv Kv>
struct attention_ops<reference, Kv> {
  using context = reference_context;

  static void append(context&, kv_view<Kv> cache, matrix_view<const float> k, matrix_view<const float> v, std::size_t first) noexcept {
    for (std::size_t r = 0; r < k.rows; ++r)
      for (std::size_t h = 0; h < cache.heads; ++h) {
        store(cache.key(first + r, h), k.row(r) + h * cache.head_dim, cache.head_dim);
        store(cache.value(first + r, h), v.row(r) + h * cache.head_dim, cache.head_dim);
      }
  }

  static void attend(context&, matrix_view<float> out, matrix_view<const float> q, kv_view<const Kv> cache, key_window window) noexcept {
    const std::size_t d = cache.head_dim, q_heads = q.cols / d;
    for (std::size_t r = 0; r < q.rows; ++r)
      for (std::size_t h = 0; h < q_heads; ++h)
        attend_head(out.row(r) + h * d, q.row(r) + h * d, cache, h * cache.heads / q_heads, window.begin(r), window.end(r));
  }

 private:
  /// to = the d numbers at x, rounded to Kv.
  static void store(Kv* to, const float* x, std::size_t d) noexcept {
    for (std::size_t i = 0; i < d; i += elements_of<Kv>, ++to)
      if constexpr (block_format<Kv>) {
        if (!quantize(x + i, *to)) to->d = f16(std::numeric_limits<float>::quiet_NaN());
      } else {
        *to = static_cast<Kv>(x[i]);
      }
  }

  /// One query head over the positions begin … end - 1: the largest score first, then the weighted values, a strip of coordinates at a
  /// time so that their sums fit on the stack. A strip computes its scores anew.
  static void attend_head(float* out, const float* q, kv_view<const Kv> cache, std::size_t head, std::size_t begin,
                          std::size_t end) noexcept {
    const auto score = [&](std::size_t position) {
      double sum = 0;
      for_each_weight(cache.key(position, head), cache.head_dim, [&](std::size_t i, float key) { sum += double{q[i]} * double{key}; });
      return sum;
    };
    double largest = -std::numeric_limits<double>::infinity();
    for (std::size_t p = begin; p < end; ++p) largest = (std::max)(largest, score(p));

    constexpr std::size_t strip = 256;
    static_assert(strip % elements_of<Kv> == 0);
    for (std::size_t first = 0; first < cache.head_dim; first += strip) {
      const std::size_t count = (std::min)(strip, cache.head_dim - first);
      double total = 0, sums[strip] = {};
      for (std::size_t p = begin; p < end; ++p) {
        const double weight = std::exp(score(p) - largest);
        total += weight;
        for_each_weight(cache.value(p, head) + first / elements_of<Kv>, count,
                        [&](std::size_t i, float value) { sums[i] += weight * double{value}; });
      }
      for (std::size_t i = 0; i < count; ++i) out[first + i] = begin < end ? static_cast<float>(sums[i] / total) : 0.0f;
    }
  }
};

static_assert(check_backend<reference>());

}  // namespace outrider
