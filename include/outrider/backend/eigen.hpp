// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Prompt rows through Eigen's float GEMM, everything else as another backend does it.
#pragma once

// Eigen's own threads would fight with ours. The macro is taken back, so that it stays a matter of this include.
#if !defined(EIGEN_DONT_PARALLELIZE)
#define EIGEN_DONT_PARALLELIZE
#include <Eigen/Core>
#undef EIGEN_DONT_PARALLELIZE
#else
#include <Eigen/Core>
#endif

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <numeric>
#include <string_view>

#include "outrider/backend/concepts.hpp"
#include "outrider/backend/parallel.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/backend/traits.hpp"
#include "outrider/core/view.hpp"

namespace outrider {

/// The backend Simd, but for matmul_prompt: panels of W, widened to float, go through Eigen's GEMM. Vectorised for the compiler's own target,
/// so worth a try only with -march flags. Rounds differently from matmul and depending on m; Eigen allocates its packing buffers (a few
/// hundred KiB per thread and call), which the decode loop never sees.
template <class Simd>
struct eigen_prompts {};

template <class Simd>
struct backend_traits<eigen_prompts<Simd>> : backend_traits<Simd> {
  static constexpr std::string_view name() noexcept { return "eigen_prompts"; }
};

namespace detail {

using eigen_rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using eigen_stride = Eigen::OuterStride<>;

/// out [m, n] += x [m, k] · wᵀ. The one place where Eigen's GEMM is instantiated.
inline void eigen_add_product(matrix_view<float> out, matrix_view<const float> x, matrix_view<const float> w) noexcept {
  const auto index = [](std::size_t i) { return static_cast<Eigen::Index>(i); };
  const auto map = [&](matrix_view<const float> v) {
    return Eigen::Map<const eigen_rows, 0, eigen_stride>(v.data, index(v.rows), index(v.cols), eigen_stride(index(v.stride)));
  };
  Eigen::Map<eigen_rows, 0, eigen_stride>(out.data, index(out.rows), index(out.cols), eigen_stride(index(out.stride))).noalias() +=
      map(x) * map(w).transpose();
}

}  // namespace detail

template <class Simd, class W>
  requires has_linear_ops<Simd, W>
struct linear_ops<eigen_prompts<Simd>, W> : linear_ops<Simd, W> {
};

template <class Simd, class W>
  requires has_linear_ops<Simd, W> && listed_weight<W>
struct linear_ops<eigen_prompts<Simd>, W> : linear_ops<Simd, W> {
  static void matmul_prompt(context_of<Simd>& ctx, matrix_view<float> out, matrix_view<const float> x, weight_view<W> w) noexcept {
    if (x.rows == 0) return;
    const auto panels = [&](std::size_t begin, std::size_t end) noexcept {
      for (std::size_t first = begin; first < end; first += panel_rows) {
        const std::size_t count = (std::min)(panel_rows, end - first);
        const matrix_view<float> part = out.slice_cols(first, count);
        for (std::size_t r = 0; r < part.rows; ++r) std::fill_n(part.row(r), count, 0.0f);
        for (std::size_t c = 0; c < w.cols; c += panel_cols)
          add_panel(ctx, part, x, w.slice_rows(first, count), c, (std::min)(panel_cols, w.cols - c));
      }
    };
    if constexpr (requires { ctx.team(); }) {
      ctx.team().for_ranges(w.rows, panel_rows, panels);
    } else {
      panels(0, w.rows);
    }
  }

 private:
  // 64 KiB of floats: a panel stays in the second-level cache. 256 columns are whole blocks of every format.
  static constexpr std::size_t panel_rows = 64, panel_cols = 256;
  static_assert(panel_cols % elements_of<W> == 0);

  /// out += x(:, first … first + count - 1) · w(:, the same)ᵀ for at most panel_rows rows of w.
  static void add_panel(context_of<Simd>& ctx, matrix_view<float> out, matrix_view<const float> x, weight_view<W> w, std::size_t first,
                        std::size_t count) noexcept {
    if constexpr (std::same_as<W, float>) {
      detail::eigen_add_product(out, x.slice_cols(first, count), {w.data + first, w.rows, count, w.stride});
    } else {
      static constexpr auto ids = [] {
        std::array<token_id, panel_rows> all{};
        std::iota(all.begin(), all.end(), token_id{0});
        return all;
      }();
      alignas(64) float widened[panel_rows * panel_cols];
      const matrix_view<float> panel{widened, w.rows, count, count};
      linear_ops<Simd, W>::gather_rows(ctx, panel, {w.data + first / elements_of<W>, w.rows, count, w.stride}, ids.data(), 1.0f);
      detail::eigen_add_product(out, x.slice_cols(first, count), panel);
    }
  }
};

template <class Simd>
struct pointwise_ops<eigen_prompts<Simd>> : pointwise_ops<Simd> {};
template <class Simd, class Kv>
struct attention_ops<eigen_prompts<Simd>, Kv> : attention_ops<Simd, Kv> {};

static_assert(check_backend<eigen_prompts<reference>>());

}  // namespace outrider
