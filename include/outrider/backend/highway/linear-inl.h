// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Products with rows of a weight matrix. One routine, `dots`, computes them all: MR rows of x against dot_streams rows of w. An output has one
// vector accumulator, lane i of it sums the products of the columns i, i + lanes, … in that order by fused multiply-adds, and the lanes are
// added at the end: the order depends on the number of columns and the target alone, so a tile of any shape gives the same bits.
// Blocks are unpacked to floats a strip of columns at a time and then summed in the same order, the accumulators waiting in memory meanwhile.
#if defined(OUTRIDER_BACKEND_HIGHWAY_LINEAR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUTRIDER_BACKEND_HIGHWAY_LINEAR_INL_H_
#undef OUTRIDER_BACKEND_HIGHWAY_LINEAR_INL_H_
#else
#define OUTRIDER_BACKEND_HIGHWAY_LINEAR_INL_H_
#endif

#include "outrider/backend/highway/blocks-inl.h"
#include "outrider/backend/highway/compat-inl.h"
#include "outrider/core/view.hpp"

HWY_BEFORE_NAMESPACE();
namespace outrider {
namespace HWY_NAMESPACE {

// 4 × 4 accumulators want 24 of AVX-512's 32 registers; 16 registers hold 4 × 3 with the operands.
constexpr std::size_t dot_streams = HWY_CAP_GE512 ? 4 : 3, dot_rows = 4;
// Columns unpacked at a time, a multiple of every block length: a strip of each stream stays in the first-level cache.
constexpr std::size_t strip_columns = 256;

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

/// sums[i][j] += the products of x[i] and w[j] in the columns first … first + count - 1; w holds just these, and count is a multiple of lanes.
template <std::size_t MR>
HWY_NOINLINE void add_dots(const float* const* x, const float (*w)[strip_columns], std::size_t first, std::size_t count,
                           float (*sums)[dot_streams][lanes]) noexcept {
  vec sum[MR][dot_streams];
  OUTRIDER_UNROLL
  for (std::size_t i = 0; i < MR; ++i) {
    OUTRIDER_UNROLL
    for (std::size_t j = 0; j < dot_streams; ++j) sum[i][j] = load(sums[i][j]);
  }
  for (std::size_t c = 0; c < count; c += lanes) {
    vec b[dot_streams];
    OUTRIDER_UNROLL
    for (std::size_t j = 0; j < dot_streams; ++j) b[j] = load(w[j] + c);
    OUTRIDER_UNROLL
    for (std::size_t i = 0; i < MR; ++i) {
      const vec a = load(x[i] + first + c);
      OUTRIDER_UNROLL
      for (std::size_t j = 0; j < dot_streams; ++j) sum[i][j] = hn::MulAdd(a, b[j], sum[i][j]);
    }
  }
  OUTRIDER_UNROLL
  for (std::size_t i = 0; i < MR; ++i) {
    OUTRIDER_UNROLL
    for (std::size_t j = 0; j < dot_streams; ++j) store(sum[i][j], sums[i][j]);
  }
}

/// The same for 1 <= rows <= dot_rows.
HWY_INLINE void add_dots_of(std::size_t rows, const float* const* x, const float (*w)[strip_columns], std::size_t first, std::size_t count,
                            float (*sums)[dot_streams][lanes]) noexcept {
  switch (rows) {
    case 1:
      return add_dots<1>(x, w, first, count, sums);
    case 2:
      return add_dots<2>(x, w, first, count, sums);
    case 3:
      return add_dots<3>(x, w, first, count, sums);
    default:
      return add_dots<4>(x, w, first, count, sums);
  }
}

/// How many rows of x go over weights read once.
template <class W>
constexpr std::size_t tile_rows = block_format<W> ? 16 : dot_rows;

/// result[i][j] = x[i] · w[j] for 1 <= rows <= tile_rows<W>.
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
template <block_format W>
HWY_NOINLINE void dots_of(std::size_t rows, const float* const* x, const W* const* w, std::size_t k,
                          float (*result)[dot_streams]) noexcept {
  HWY_ALIGN float sums[tile_rows<W>][dot_streams][lanes];
  std::memset(sums, 0, rows * sizeof(sums[0]));
  HWY_ALIGN float strips[dot_streams][strip_columns];
  for (std::size_t first = 0; first < k; first += strip_columns) {
    const std::size_t count = HWY_MIN(strip_columns, k - first);
    for (std::size_t j = 0; j < dot_streams; ++j) unpack(w[j] + first / W::elements, count, strips[j]);
    for (std::size_t r = 0; r < rows; r += dot_rows) add_dots_of(HWY_MIN(dot_rows, rows - r), x + r, strips, first, count, sums + r);
  }
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t j = 0; j < dot_streams; ++j) result[i][j] = sum_of_lanes(load(sums[i][j]));
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
    for (std::size_t r = 0; r < rows; r += tile_rows<W>) {
      const std::size_t count = HWY_MIN(tile_rows<W>, rows - r);
      float result[tile_rows<W>][dot_streams];
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
    float result[1][dot_streams];
    dots_of(1, &x, weights, w.cols, result);
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
template <block_format W>
void widen(float* out, const W* w, std::size_t n, float factor) noexcept {
  unpack(w, n, out);
  widen(out, out, n, factor);
}

}  // namespace HWY_NAMESPACE
}  // namespace outrider
HWY_AFTER_NAMESPACE();

#endif
