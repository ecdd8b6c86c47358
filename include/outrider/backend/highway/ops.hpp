// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The ops of a backend over a kernel table: how the work is cut, for every op once. A backend that uses them has a context with kernels(),
// team(), a policy of backend/parallel.hpp, and attention(), room for attention_ops.hpp.
#pragma once
#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>

#include "outrider/backend/highway/kernel_table.hpp"
#include "outrider/backend/ops.hpp"
#include "outrider/backend/parallel.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/backend/traits.hpp"
#include "outrider/config.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/extents.hpp"
#include "outrider/core/int8.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/view.hpp"
#include "outrider/error.hpp"

namespace outrider::detail {

/// What a range of work must read or write to be worth handing to another thread, which costs the caller about a microsecond.
inline constexpr std::size_t bytes_per_range = 64 * 1024;

/// How many items of `bytes` each make a range.
[[nodiscard]] constexpr std::size_t grain_of(std::size_t bytes) noexcept { return bytes_per_range / (bytes + 1) + 1; }

/// How many threads a context with the policy Parallel uses. error_code::argument_invalid for more than anybody means: OpenMP's runtime
/// ends the program where it cannot start them.
template <class Parallel>
[[nodiscard]] unsigned threads_for(execution how) {
  constexpr unsigned most_threads = 1024;
  if (how.threads > most_threads)
    throw error(error_code::argument_invalid, "outrider: " + std::to_string(how.threads) + " threads asked for; allowed: 1 to " +
                                                  std::to_string(most_threads) + ", or 0 for one per core");
  return how.threads == 0 ? Parallel::default_threads() : how.threads;
}

/// linear_ops over linear_kernels<W>.
template <class Context, class W>
struct simd_linear {
  using context = Context;

  static void matmul(context& ctx, matrix_view<float> out, matrix_view<const float> x, weight_view<W> w) noexcept {
    const std::size_t most = most_rows(w.cols),
                      passes = divide_up(x.rows, 4);  // rows that compute about as long as the weights of one take to read
    ctx.team().for_ranges(w.rows, grain_of(row_bytes(w) * passes), [&](std::size_t begin, std::size_t end) {
      row_list rows;
      for (std::size_t r = 0; r < x.rows; ++r) {
        rows.push(out.row(r), x.row(r));
        if (rows.count == most || r + 1 == x.rows) rows.run(ctx, w, begin, end);
      }
    });
  }

  static void matmul_prompt(context& ctx, matrix_view<float> out, matrix_view<const float> x, weight_view<W> w) noexcept {
    matmul(ctx, out, x, w);
  }

  static void expert_matmul(context& ctx, matrix_view<float> out, matrix_view<const float> x, weight_view<W> w,
                            const std::int32_t* experts) noexcept {
    if (out.rows == 0 || out.cols == 0) return;
    const std::size_t all = w.rows / out.cols, active = out.rows / x.rows, most = most_rows(w.cols);
    ctx.team().for_ranges(out.cols, grain_of(row_bytes(w) * (std::min)(out.rows, all)), [&](std::size_t begin, std::size_t end) {
      for (std::size_t e = 0; e < all; ++e) {  // the rows that share an expert read its weights together
        row_list rows;
        for (std::size_t i = 0; i < out.rows; ++i) {
          if (static_cast<std::size_t>(experts[i]) == e) rows.push(out.row(i), x.row(i / active));
          if (rows.count == most || (i + 1 == out.rows && rows.count != 0)) rows.run(ctx, w.slice_rows(e * out.cols, out.cols), begin, end);
        }
      }
    });
  }

  static void gathered_matmul(context& ctx, matrix_view<float> out, matrix_view<const float> x, weight_view<W> w,
                              matrix_view<const token_id> ids) noexcept {
    ctx.team().for_ranges(out.cols, grain_of(row_bytes(w) * out.rows), [&](std::size_t begin, std::size_t end) {
      for (std::size_t r = 0; r < out.rows; ++r) linear(ctx).gathered(out.row(r), x.row(r), w, ids.row(r), begin, end);
    });
  }

  static void gather_rows(context& ctx, matrix_view<float> out, weight_view<W> w, const token_id* ids, float factor) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r) linear(ctx).widen(out.row(r), w.row(static_cast<std::size_t>(ids[r])), out.cols, factor);
  }

 private:
  static const linear_kernels<W>& linear(context& ctx) noexcept { return std::get<linear_kernels<W>>(ctx.kernels().linear); }
  static constexpr std::size_t row_bytes(weight_view<W> w) noexcept { return w.cols / elements_of<W> * sizeof(W); }

  /// Rows of a product that go over the same weights together.
  struct row_list {
    static constexpr std::size_t capacity = 64;
    float* out[capacity];
    const float* x[capacity];
    std::size_t count = 0;

    void push(float* out_row, const float* x_row) noexcept {
      out[count] = out_row;
      x[count++] = x_row;
    }
    void run(context& ctx, weight_view<W> w, std::size_t begin, std::size_t end) noexcept {
      linear(ctx).matmul(out, x, count, w, begin, end);
      count = 0;
    }
  };

  /// How many rows of x go over weights together. Panels see to it themselves that these stay in the caches; blocks leave it to the caller: as
  /// many as the second-level cache holds, and never so few that a verification, of up to max_draft_length + 1 rows, is cut.
  static constexpr std::size_t most_rows([[maybe_unused]] std::size_t k) noexcept {
    if constexpr (block_format<W>) {
      constexpr std::size_t share = 512 * 1024;
      return std::clamp<std::size_t>(share / (k * sizeof(float) + 1) / 4 * 4, divide_up(max_draft_length + 1, 4) * 4, row_list::capacity);
    } else {
      return row_list::capacity;
    }
  }
};

/// pointwise_ops over pointwise_kernels. Work is cut into rows; what is small even for a large vocabulary is taken from `reference`.
template <class Context>
struct simd_pointwise {
  using context = Context;

  static void rms_norm(context& ctx, matrix_view<float> out, matrix_view<const float> x, const float* weight, float eps) noexcept {
    for_rows(ctx, x, [&](std::size_t first, std::size_t count) {
      ctx.kernels().pointwise.rms_norm(out.slice_rows(first, count), x.slice_rows(first, count), weight, eps);
    });
  }
  static void rope_table(context&, matrix_view<float> cos, matrix_view<float> sin, const std::int32_t* positions,
                         const float* frequencies) noexcept {
    reference_context scalar;
    pointwise_ops<reference>::rope_table(scalar, cos, sin, positions, frequencies);
  }
  static void rope(context& ctx, matrix_view<float> x, matrix_view<const float> cos, matrix_view<const float> sin) noexcept {
    for_rows(ctx, x, [&](std::size_t first, std::size_t count) {
      ctx.kernels().pointwise.rope(x.slice_rows(first, count), cos, sin, first, x.rows / cos.rows);
    });
  }
  static void gelu_mul(context& ctx, matrix_view<float> out, matrix_view<const float> gate, matrix_view<const float> up) noexcept {
    for_rows(ctx, out, [&](std::size_t first, std::size_t count) {
      ctx.kernels().pointwise.gelu_mul(out.slice_rows(first, count), gate.slice_rows(first, count), up.slice_rows(first, count));
    });
  }
  static void add(context& ctx, matrix_view<float> out, matrix_view<const float> x, matrix_view<const float> y) noexcept {
    for_rows(ctx, out, [&](std::size_t first, std::size_t count) {
      ctx.kernels().pointwise.add(out.slice_rows(first, count), x.slice_rows(first, count), y.slice_rows(first, count));
    });
  }
  static void scale(context& ctx, matrix_view<float> out, matrix_view<const float> x, float factor) noexcept {
    for_rows(ctx, out, [&](std::size_t first, std::size_t count) {
      ctx.kernels().pointwise.scale(out.slice_rows(first, count), x.slice_rows(first, count), factor);
    });
  }
  static void copy(context&, matrix_view<float> out, matrix_view<const float> x) noexcept {
    reference_context scalar;
    pointwise_ops<reference>::copy(scalar, out, x);
  }
  static void quantize(context& ctx, matrix_view<int8_block> out, matrix_view<const float> x) noexcept {
    for_rows(ctx, x, [&](std::size_t first, std::size_t count) {
      for (std::size_t r = first; r < first + count; ++r) ctx.kernels().pointwise.quantize(out.row(r), x.row(r), out.cols);
    });
  }
  static void softcap(context& ctx, matrix_view<float> out, matrix_view<const float> x, float cap) noexcept {
    for_rows(ctx, out, [&](std::size_t first, std::size_t count) {
      ctx.kernels().pointwise.softcap(out.slice_rows(first, count), x.slice_rows(first, count), cap);
    });
  }
  /// One pass over a row with the best so far in order: most values are below all of them, and cost a comparison.
  static void top_k(context&, matrix_view<std::int32_t> ids, matrix_view<const float> x) noexcept {
    for (std::size_t r = 0; r < ids.rows; ++r) {
      const float* const values = x.row(r);
      std::int32_t* const best = ids.row(r);
      const auto above = [&](float value, std::int32_t column) {
        return value > values[column] || (values[column] != values[column] && value == value);
      };
      std::size_t held = 0;
      for (std::size_t c = 0; c < x.cols; ++c) {
        if (held == ids.cols && (held == 0 || !above(values[c], best[held - 1]))) continue;
        std::size_t place = held < ids.cols ? held++ : held - 1;
        for (; place > 0 && above(values[c], best[place - 1]); --place) best[place] = best[place - 1];
        best[place] = static_cast<std::int32_t>(c);
      }
    }
  }
  static void argmax(context& ctx, token_id* out, matrix_view<const float> x, matrix_view<const token_id> ids) noexcept {
    for_rows(ctx, x, [&](std::size_t first, std::size_t count) {
      ctx.kernels().pointwise.argmax(out + first, x.slice_rows(first, count), ids.data ? ids.slice_rows(first, count) : ids);
    });
  }
  static void mask(context&, matrix_view<float> x, matrix_view<const token_id> ids, const token_id* banned, std::size_t count) noexcept {
    if (ids.data) {
      reference_context scalar;
      return pointwise_ops<reference>::mask(scalar, x, ids, banned, count);
    }
    for (std::size_t r = 0; r < x.rows; ++r)  // columns are ids: no search through the vocabulary
      for (std::size_t i = 0; i < count; ++i)
        if (static_cast<std::size_t>(banned[i]) < x.cols) x.row(r)[banned[i]] = -std::numeric_limits<float>::infinity();
  }
  static void gather_ids(context&, matrix_view<token_id> out, matrix_view<const token_id> table,
                         matrix_view<const std::int32_t> rows) noexcept {
    reference_context scalar;
    pointwise_ops<reference>::gather_ids(scalar, out, table, rows);
  }
  static void scatter_logits(context&, matrix_view<float> out, matrix_view<const float> x, matrix_view<const token_id> ids) noexcept {
    reference_context scalar;
    pointwise_ops<reference>::scatter_logits(scalar, out, x, ids);
  }
  static void route_experts(context&, matrix_view<std::int32_t> experts, matrix_view<float> weights, matrix_view<float> logits,
                            const float* scales) noexcept {
    reference_context scalar;
    pointwise_ops<reference>::route_experts(scalar, experts, weights, logits, scales);
  }
  static void weighted_sum(context& ctx, matrix_view<float> out, matrix_view<const float> x, matrix_view<const float> weights) noexcept {
    for_rows(ctx, out, [&](std::size_t first, std::size_t count) {
      ctx.kernels().pointwise.weighted_sum(out.slice_rows(first, count), x.slice_rows(first * weights.cols, count * weights.cols),
                                           weights.slice_rows(first, count));
    });
  }

 private:
  template <class T, class Body>
  static void for_rows(context& ctx, matrix_view<T> x, Body&& body) noexcept {
    ctx.team().for_ranges(x.rows, grain_of(x.cols * sizeof(float)), [&](std::size_t begin, std::size_t end) { body(begin, end - begin); });
  }
};

}  // namespace outrider::detail
