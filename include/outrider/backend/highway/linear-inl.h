// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Products with rows of a weight matrix. One routine, `dots`, computes them all: MR rows of x against dot_streams rows of w. An output has one
// vector accumulator, lane i of it sums the products of the columns i, i + lanes, … in that order by fused multiply-adds, and the lanes are
// added at the end: the order depends on the number of columns and the target alone, so a tile of any shape gives the same bits.
#if defined(OUTRIDER_BACKEND_HIGHWAY_LINEAR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUTRIDER_BACKEND_HIGHWAY_LINEAR_INL_H_
#undef OUTRIDER_BACKEND_HIGHWAY_LINEAR_INL_H_
#else
#define OUTRIDER_BACKEND_HIGHWAY_LINEAR_INL_H_
#endif

#include "outrider/backend/highway/compat-inl.h"
#include "outrider/core/view.hpp"

HWY_BEFORE_NAMESPACE();
namespace outrider {
namespace HWY_NAMESPACE {

// 4 × 4 accumulators want 24 of AVX-512's 32 registers; 16 registers hold 4 × 3 with the operands.
constexpr std::size_t dot_streams = HWY_CAP_GE512 ? 4 : 3, dot_rows = 4;

/// result[i][j] = x[i] · w[j] over k columns, for MR <= dot_rows rows. Prefetches each row of w beyond its end: what follows it in memory is
/// mostly its stream's next row, and a prefetch never faults.
template <std::size_t MR, class W>
HWY_NOINLINE void dots(const float* const* x, const W* const* w, std::size_t k, float (*result)[dot_streams]) noexcept {
  constexpr std::size_t ahead =
      (MR <= 2 ? 512 : 2048) / sizeof(W);  // measured: few rows run at the speed of memory, many at that of the FMAs
  vec sum[MR][dot_streams];
  OUTRIDER_UNROLL
  for (std::size_t i = 0; i < MR; ++i) {
    OUTRIDER_UNROLL
    for (std::size_t j = 0; j < dot_streams; ++j) sum[i][j] = zero();
  }

  std::size_t c = 0;
  for (; c + lanes <= k; c += lanes) {
    vec b[dot_streams];
    OUTRIDER_UNROLL
    for (std::size_t j = 0; j < dot_streams; ++j) {
      b[j] = load(w[j] + c);
      prefetch(w[j] + c + ahead);
    }
    OUTRIDER_UNROLL
    for (std::size_t i = 0; i < MR; ++i) {
      const vec a = load(x[i] + c);
      OUTRIDER_UNROLL
      for (std::size_t j = 0; j < dot_streams; ++j) sum[i][j] = hn::MulAdd(a, b[j], sum[i][j]);
    }
  }
  if (c < k) {
    OUTRIDER_UNROLL
    for (std::size_t i = 0; i < MR; ++i) {
      const vec a = load_first(x[i] + c, k - c);
      OUTRIDER_UNROLL
      for (std::size_t j = 0; j < dot_streams; ++j) sum[i][j] = hn::MulAdd(a, load_first(w[j] + c, k - c), sum[i][j]);
    }
  }

  OUTRIDER_UNROLL
  for (std::size_t i = 0; i < MR; ++i) {
    OUTRIDER_UNROLL
    for (std::size_t j = 0; j < dot_streams; ++j) result[i][j] = sum_of_lanes(sum[i][j]);
  }
}

/// The same for 1 <= rows <= dot_rows.
template <class W>
HWY_INLINE void dots_of(std::size_t rows, const float* const* x, const W* const* w, std::size_t k, float (*result)[dot_streams]) noexcept {
  switch (rows) {
    case 1:
      return dots<1>(x, w, k, result);
    case 2:
      return dots<2>(x, w, k, result);
    case 3:
      return dots<3>(x, w, k, result);
    default:
      return dots<4>(x, w, k, result);
  }
}

/// A range of weight rows is walked in dot_streams runs at a time, each one linear: one stream leaves half of the memory's bandwidth unused.
template <class W>
void matmul(float* const* out, const float* const* x, std::size_t rows, weight_view<W> w, std::size_t begin, std::size_t end) noexcept {
  const std::size_t groups = (end - begin + dot_streams - 1) / dot_streams;
  for (std::size_t g = 0; g < groups; ++g) {
    const W* weights[dot_streams];
    std::size_t column[dot_streams];
    for (std::size_t j = 0; j < dot_streams; ++j) {
      column[j] = HWY_MIN(begin + j * groups + g, end - 1);  // where the runs do not come out even, the last column is computed again
      weights[j] = w.row(column[j]);
    }
    for (std::size_t r = 0; r < rows; r += dot_rows) {
      const std::size_t count = HWY_MIN(dot_rows, rows - r);
      float result[dot_rows][dot_streams];
      dots_of(count, x + r, weights, w.cols, result);
      for (std::size_t i = 0; i < count; ++i)
        for (std::size_t j = 0; j < dot_streams; ++j) out[r + i][column[j]] = result[i][j];
    }
  }
}

template <class W>
void gathered(float* out, const float* x, weight_view<W> w, const token_id* ids, std::size_t begin, std::size_t end) noexcept {
  for (std::size_t first = begin; first < end; first += dot_streams) {
    const W* weights[dot_streams];
    for (std::size_t j = 0; j < dot_streams; ++j) weights[j] = w.row(static_cast<std::size_t>(ids[HWY_MIN(first + j, end - 1)]));
    float result[dot_rows][dot_streams];
    dots<1>(&x, weights, w.cols, result);
    for (std::size_t j = 0; j < dot_streams && first + j < end; ++j) out[first + j] = result[0][j];
  }
}

template <class W>
void widen(float* out, const W* w, std::size_t n, float factor) noexcept {
  const vec f = set(factor);
  std::size_t c = 0;
  for (; c + lanes <= n; c += lanes) store(hn::Mul(load(w + c), f), out + c);
  if (c < n) store_first(hn::Mul(load_first(w + c, n - c), f), out + c, n - c);
}

}  // namespace HWY_NAMESPACE
}  // namespace outrider
HWY_AFTER_NAMESPACE();

#endif
