// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Products of grouped weights over a kernel table: how the work is cut. See ops.hpp of this folder.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>

#include "outrider/backend/highway/kernel_table.hpp"
#include "outrider/backend/highway/ops.hpp"
#include "outrider/core/grouped.hpp"
#include "outrider/core/int8.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/view.hpp"

namespace outrider::detail {

/// linear_ops over int8_kernels<G>, G = grouped<W>. Threads take whole groups.
template <class Context, class G>
struct simd_int8 {
  using context = Context;

  static void matmul(context& ctx, matrix_view<float> out, matrix_view<const int8_block> x, weight_view<G> w) noexcept {
    ctx.team().for_ranges(w.groups(), grain_of(group_bytes(w) * divide_up(x.rows, 4)), [&](std::size_t begin, std::size_t end) {
      row_list rows(ctx, w, begin, end);
      for (std::size_t r = 0; r < x.rows; ++r) rows.push(out.row(r), x.row(r));
    });
  }

  static void expert_matmul(context& ctx, matrix_view<float> out, matrix_view<const int8_block> x, weight_view<G> w,
                            const std::int32_t* experts) noexcept {
    if (out.rows == 0 || out.cols == 0) return;
    const std::size_t all = w.rows / out.cols, active = out.rows / x.rows, groups = divide_up(out.cols, group_rows);
    ctx.team().for_ranges(groups, grain_of(group_bytes(w) * (std::min)(out.rows, all)), [&](std::size_t begin, std::size_t end) {
      for (std::size_t e = 0; e < all; ++e) {  // the rows that share an expert read its weights together
        row_list rows(ctx, w.slice_rows(e * out.cols, out.cols), begin, end);
        for (std::size_t i = 0; i < out.rows; ++i)
          if (static_cast<std::size_t>(experts[i]) == e) rows.push(out.row(i), x.row(i / active));
      }
    });
  }

  static void gather_rows(context& ctx, matrix_view<float> out, weight_view<G> w, const token_id* ids, float factor) noexcept {
    for (std::size_t r = 0; r < out.rows; ++r) kernels(ctx).widen(out.row(r), w, static_cast<std::size_t>(ids[r]), factor);
  }

 private:
  static const int8_kernels<G>& kernels(context& ctx) noexcept { return std::get<int8_kernels<G>>(ctx.kernels().int8); }
  static constexpr std::size_t group_bytes(weight_view<G> w) noexcept { return w.stride * sizeof(G); }

  /// Rows of a product that go over the same groups together: no more than stay in a core's second-level cache while weights pass by, and
  /// never so few that a verification is cut.
  class row_list {
   public:
    row_list(context& ctx, weight_view<G> w, std::size_t begin, std::size_t end) noexcept
        : ctx_(ctx), w_(w), begin_(begin), end_(end), most_(rows_in_cache(w.cols)) {}
    row_list(const row_list&) = delete;
    row_list& operator=(const row_list&) = delete;
    ~row_list() { run(); }

    void push(float* out_row, const int8_block* x_row) noexcept {
      out_[count_] = out_row;
      x_[count_++] = x_row;
      if (count_ == most_) run();
    }

   private:
    static constexpr std::size_t capacity = 256;

    static constexpr std::size_t rows_in_cache(std::size_t cols) noexcept {
      constexpr std::size_t share = 512 * 1024, tile = 8;
      return std::clamp<std::size_t>(share / (cols / 32 * sizeof(int8_block) + 1) / tile * tile,
                                     divide_up(max_draft_length + 1, tile) * tile, capacity);
    }
    void run() noexcept {
      if (count_ != 0) kernels(ctx_).matmul(out_, x_, count_, w_, begin_, end_);
      count_ = 0;
    }

    context& ctx_;
    weight_view<G> w_;
    std::size_t begin_, end_, most_, count_ = 0;
    float* out_[capacity];
    const int8_block* x_[capacity];
  };
};

}  // namespace outrider::detail
