// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Products with rows of a weight matrix: tiles of MR rows of x and a few rows of w, over whole rows (`dots`), over blocks unpacked a strip of
// columns at a time (`block_dots`), or over panels for many rows of x (`multiply_panel`). An output always has one vector accumulator, lane i
// of it sums the products of the columns i, i + lanes, … in that order by fused multiply-adds, and the lanes are added at the end: the order
// depends on the number of columns and the target alone, so a tile of any shape gives the same bits.
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

// Blocks: 4 × 4 accumulators want 24 of AVX-512's 32 registers; 16 registers hold 4 × 3 with the operands.
constexpr std::size_t dot_streams = HWY_CAP_GE512 ? 4 : 3, dot_rows = 4;
// Plain elements: 4 × 6 accumulators for few rows, 8 × 3 for many fill 32 registers. A vector of w is converted once for all rows of a tile.
constexpr std::size_t few_rows = 4, many_rows = HWY_CAP_GE512 ? 8 : 4;
constexpr std::size_t few_streams = HWY_CAP_GE512 ? 6 : 3, many_streams = 3;
// Columns unpacked at a time, a multiple of every block length: a strip of each stream stays in the first-level cache.
constexpr std::size_t strip_columns = 256;

// Sums over the lanes of several vectors at once: each step halves the number of vectors, where one by one each sum takes as many steps. Lane
// sums pair up the same way whatever place a vector has, so a sum's bits do not depend on its neighbours.
HWY_INLINE vec sum_pairs(vec a, vec b) { return hn::Add(hn::InterleaveLower(floats(), a, b), hn::InterleaveUpper(floats(), a, b)); }
/// Block by block, lane i = the sum of the four lanes of v[i].
HWY_INLINE vec sums_in_blocks(vec v0, vec v1, vec v2, vec v3) {
  const hn::Repartition<std::uint64_t, floats> wide;
  const auto a = hn::BitCast(wide, sum_pairs(v0, v1)), b = hn::BitCast(wide, sum_pairs(v2, v3));
  return hn::Add(hn::BitCast(floats(), hn::InterleaveLower(wide, a, b)), hn::BitCast(floats(), hn::InterleaveUpper(wide, a, b)));
}
/// Lane i = the sum of all lanes of v[i], i < lanes.
HWY_INLINE vec sums_of_lanes(const vec* v) {
#if HWY_MAX_BYTES == 16
  return sums_in_blocks(v[0], v[1], v[2], v[3]);
#else
  const auto sum_halves = [](vec a, vec b)
                              HWY_ATTR { return hn::Add(hn::ConcatLowerLower(floats(), b, a), hn::ConcatUpperUpper(floats(), b, a)); };
#if HWY_MAX_BYTES == 32
  return sum_halves(sums_in_blocks(v[0], v[1], v[2], v[3]), sums_in_blocks(v[4], v[5], v[6], v[7]));
#else
  const vec a = sum_halves(sums_in_blocks(v[0], v[1], v[2], v[3]), sums_in_blocks(v[8], v[9], v[10], v[11]));
  const vec b = sum_halves(sums_in_blocks(v[4], v[5], v[6], v[7]), sums_in_blocks(v[12], v[13], v[14], v[15]));
  return hn::Add(hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b), a), hn::OddEvenBlocks(b, hn::SwapAdjacentBlocks(a)));
#endif
#endif
}

/// The results of a tile, row by row, with room for whole vectors.
template <std::size_t MR, std::size_t streams>
constexpr std::size_t result_room = (MR * streams + lanes - 1) / lanes* lanes;

/// result[i · streams + j] = sum of the lanes of sum[i][j]; writes result_room<MR, streams> floats.
template <std::size_t MR, std::size_t streams>
HWY_INLINE void store_sums(const vec (&sum)[MR][streams], float* result) {
  OUTRIDER_UNROLL
  for (std::size_t first = 0; first < MR * streams; first += lanes) {
    vec v[lanes];
    OUTRIDER_UNROLL
    for (std::size_t l = 0; l < lanes; ++l) {
      const std::size_t at = first + l;
      v[l] = at < MR * streams ? sum[at / streams % MR][at % streams] : zero();
    }
    store(sums_of_lanes(v), result + first);
  }
}

/// result[i · streams + j] = x[i] · w[j] over k columns; writes result_room<MR, streams> floats. Asks for what lies `ahead` bytes from the
/// elements of w it reads: a prefetch never faults.
template <std::size_t MR, std::size_t streams, class W>
HWY_NOINLINE void dots(const float* const* x, const W* const* w, std::size_t k, std::ptrdiff_t ahead, float* result) noexcept {
  vec sum[MR][streams];
  OUTRIDER_UNROLL
  for (std::size_t i = 0; i < MR; ++i) {
    OUTRIDER_UNROLL
    for (std::size_t j = 0; j < streams; ++j) sum[i][j] = zero();
  }

  std::size_t c = 0;
  for (; c + lanes <= k; c += lanes) {
    vec b[streams];
    OUTRIDER_UNROLL
    for (std::size_t j = 0; j < streams; ++j) {
      b[j] = load(w[j] + c);
      const std::byte* const later = reinterpret_cast<const std::byte*>(w[j] + c) + ahead;
      if constexpr (MR == 1)
        prefetch(later);
      else
        prefetch_second_level(later);
    }
    OUTRIDER_UNROLL
    for (std::size_t i = 0; i < MR; ++i) {
      vec a = load(x[i] + c);
      hold(a);
      OUTRIDER_UNROLL
      for (std::size_t j = 0; j < streams; ++j) sum[i][j] = hn::MulAdd(a, b[j], sum[i][j]);
    }
  }
  if (c < k) {
    OUTRIDER_UNROLL
    for (std::size_t i = 0; i < MR; ++i) {
      const vec a = load_first(x[i] + c, k - c);
      OUTRIDER_UNROLL
      for (std::size_t j = 0; j < streams; ++j) sum[i][j] = hn::MulAdd(a, load_first(w[j] + c, k - c), sum[i][j]);
    }
  }
  store_sums(sum, result);
}

/// The same for 1 <= rows <= MR.
template <std::size_t MR, std::size_t streams, class W>
HWY_INLINE void dots_of(std::size_t rows, const float* const* x, const W* const* w, std::size_t k, std::ptrdiff_t ahead,
                        float* result) noexcept {
  if constexpr (MR > 1) {
    if (rows < MR) return dots_of<MR - 1, streams>(rows, x, w, k, ahead, result);
  }
  dots<MR, streams>(x, w, k, ahead, result);
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
      vec a = load(x[i] + first + c);
      hold(a);
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

/// How many rows of x go over blocks unpacked once.
constexpr std::size_t block_rows = 16;

/// result[i · dot_streams + j] = x[i] · w[j] for 1 <= rows <= block_rows.
template <block_format W>
HWY_NOINLINE void block_dots(std::size_t rows, const float* const* x, const W* const* w, std::size_t k, float* result) noexcept {
  HWY_ALIGN float sums[block_rows][dot_streams][lanes];
  std::memset(sums, 0, rows * sizeof(sums[0]));
  HWY_ALIGN float strips[dot_streams][strip_columns];
  for (std::size_t first = 0; first < k; first += strip_columns) {
    const std::size_t count = HWY_MIN(strip_columns, k - first);
    for (std::size_t j = 0; j < dot_streams; ++j) unpack(w[j] + first / W::elements, count, strips[j]);
    for (std::size_t r = 0; r < rows; r += dot_rows) add_dots_of(HWY_MIN(dot_rows, rows - r), x + r, strips, first, count, sums + r);
  }
  for (std::size_t r = 0; r < rows; ++r) {
    vec sum[1][dot_streams];
    HWY_ALIGN float row[result_room<1, dot_streams>];
    for (std::size_t j = 0; j < dot_streams; ++j) sum[0][j] = load(sums[r][j]);
    store_sums(sum, row);
    std::memcpy(result + r * dot_streams, row, sizeof(float) * dot_streams);
  }
}

/// How many bytes `to` lies behind `from`.
template <class T>
std::ptrdiff_t distance(const T* from, const T* to) noexcept {
  return reinterpret_cast<std::intptr_t>(to) - reinterpret_cast<std::intptr_t>(from);
}

// How far ahead a product asks for its weights, in bytes; mostly its stream's next row lies there. Measured on Zen 4, for float
// products: one row runs best with requests to the first-level cache shortly before the use, more rows with requests to the second-level one.
constexpr std::ptrdiff_t ahead_of_one = 512, ahead_of_many = 4096;

/// Tiles of up to MR rows of x and `streams` rows of w. A range of weight rows is walked in that many runs at a time, each one linear: one
/// stream leaves half of the memory's bandwidth unused.
template <std::size_t MR, std::size_t streams, class W>
HWY_INLINE void multiply(float* const* out, const float* const* x, std::size_t rows, weight_view<W> w, std::size_t begin,
                         std::size_t end) noexcept {
  const std::size_t groups = (end - begin + streams - 1) / streams;
  const std::size_t tiles = (rows + MR - 1) / MR, tile = (rows + tiles - 1) / tiles;  // of even heights
  for (std::size_t g = 0; g < groups; ++g) {
    const W* weights[streams];
    std::size_t column[streams];
    for (std::size_t j = 0; j < streams; ++j) {
      column[j] = HWY_MIN(begin + j * groups + g, end - 1);  // where the runs do not come out even, the last column is computed again
      weights[j] = w.row(column[j]);
    }
    for (std::size_t r = 0; r < rows; r += tile) {
      const std::size_t count = HWY_MIN(tile, rows - r);
      HWY_ALIGN float result[result_room<MR, streams>];
      if constexpr (block_format<W>)
        block_dots(count, x + r, weights, w.cols, result);
      else
        dots_of<MR, streams>(count, x + r, weights, w.cols, count == 1 ? ahead_of_one : ahead_of_many, result);
      for (std::size_t i = 0; i < count; ++i)
        for (std::size_t j = 0; j < streams; ++j) out[r + i][column[j]] = result[i * streams + j];
    }
  }
}

// Many rows compute: a panel of weights goes over all of them a block of columns at a time. A tile's part of x is copied to where it is read in
// one stream, and stays in the first-level cache meanwhile, the panel's part in the second-level one; the accumulators wait in memory.
constexpr std::size_t panel_groups = 16, panel_columns = 512, panel_rows = 16;  // 48 KiB of accumulators, on the stack
static_assert(panel_columns % lanes == 0 && panel_rows % many_rows == 0);

/// Accumulators of the tiles of a group of weight rows: row by row, in each one vector a weight row.
using panel_sums = float[panel_rows][many_streams][lanes];

/// sums[i][j] += the products of row i of a tile with w[j] over `count` columns, a multiple of lanes; x [count / lanes][MR][lanes].
template <std::size_t MR, class W>
HWY_NOINLINE void add_tile_products(const float* x, const W* const* w, std::size_t count, std::ptrdiff_t ahead,
                                    float (*sums)[many_streams][lanes]) noexcept {
  vec sum[MR][many_streams];
  OUTRIDER_UNROLL
  for (std::size_t i = 0; i < MR; ++i) {
    OUTRIDER_UNROLL
    for (std::size_t j = 0; j < many_streams; ++j) sum[i][j] = load(sums[i][j]);
  }
  for (std::size_t c = 0; c < count; c += lanes, x += MR * lanes) {
    vec b[many_streams];
    OUTRIDER_UNROLL
    for (std::size_t j = 0; j < many_streams; ++j) {
      b[j] = load(w[j] + c);
      prefetch_second_level(reinterpret_cast<const std::byte*>(w[j] + c) + ahead);
    }
    OUTRIDER_UNROLL
    for (std::size_t i = 0; i < MR; ++i) {
      vec a = load(x + i * lanes);
      hold(a);
      OUTRIDER_UNROLL
      for (std::size_t j = 0; j < many_streams; ++j) sum[i][j] = hn::MulAdd(a, b[j], sum[i][j]);
    }
  }
  OUTRIDER_UNROLL
  for (std::size_t i = 0; i < MR; ++i) {
    OUTRIDER_UNROLL
    for (std::size_t j = 0; j < many_streams; ++j) store(sum[i][j], sums[i][j]);
  }
}

/// The columns first … first + count - 1 of up to MR rows with the rows of a panel.
template <std::size_t MR, class W>
HWY_INLINE void add_tile(const float* const* x, std::size_t rows, std::size_t first, std::size_t count, weight_view<W> w, std::size_t begin,
                         std::size_t end, std::ptrdiff_t ahead, panel_sums* sums, std::size_t row) noexcept {
  HWY_ALIGN float tile[panel_columns * MR];
  for (std::size_t i = 0; i < MR; ++i) {
    const float* from = x[HWY_MIN(i, rows - 1)] + first;  // rows that are missing compute another one again
    for (std::size_t c = 0; c < count; c += lanes) store(load(from + c), tile + c * MR + i * lanes);
  }
  for (std::size_t g = 0; begin + g * many_streams < end; ++g) {
    const W* weights[many_streams];
    for (std::size_t j = 0; j < many_streams; ++j) weights[j] = w.row(HWY_MIN(begin + g * many_streams + j, end - 1)) + first;
    add_tile_products<MR>(tile, weights, count, ahead, sums[g] + row);
  }
}

/// out[i][c] = x[i] · w(c) for rows <= panel_rows and begin <= c < end <= begin + panel_groups · many_streams.
template <class W>
HWY_NOINLINE void multiply_panel(float* const* out, const float* const* x, std::size_t rows, weight_view<W> w, std::size_t begin,
                                 std::size_t end) noexcept {
  HWY_ALIGN panel_sums sums[panel_groups];
  const std::size_t groups = (end - begin + many_streams - 1) / many_streams, whole = w.cols / lanes * lanes;
  for (std::size_t g = 0; g < groups; ++g) std::memset(sums[g], 0, (rows + many_rows - 1) / many_rows * many_rows * sizeof(sums[g][0]));
  for (std::size_t first = 0; first < whole; first += panel_columns) {
    const std::size_t count = HWY_MIN(panel_columns, whole - first);
    const W* const here = w.row(begin) + first;  // the first tile asks for the columns behind, or for those of the next panel
    const std::ptrdiff_t behind =
        first + count < whole ? distance(here, here + count) : distance(here, w.row(begin) + (end - begin) * w.stride);
    for (std::size_t r = 0; r < rows; r += many_rows) {
      const std::ptrdiff_t ahead = r == 0 ? behind : 0;
      if (rows - r > many_rows / 2)
        add_tile<many_rows>(x + r, HWY_MIN(many_rows, rows - r), first, count, w, begin, end, ahead, sums, r);
      else
        add_tile<many_rows / 2>(x + r, rows - r, first, count, w, begin, end, ahead, sums, r);
    }
  }
  for (std::size_t g = 0; g < groups; ++g)
    for (std::size_t r = 0; r < rows; ++r) {
      vec sum[1][many_streams];
      HWY_ALIGN float row[result_room<1, many_streams>];
      for (std::size_t j = 0; j < many_streams; ++j) {
        sum[0][j] = load(sums[g][r][j]);
        const W* const weights = w.row(HWY_MIN(begin + g * many_streams + j, end - 1)) + whole;
        if (whole < w.cols)
          sum[0][j] = hn::MulAdd(load_first(x[r] + whole, w.cols - whole), load_first(weights, w.cols - whole), sum[0][j]);
      }
      store_sums(sum, row);
      for (std::size_t j = 0; j < many_streams && begin + g * many_streams + j < end; ++j) out[r][begin + g * many_streams + j] = row[j];
    }
}

template <class W>
void matmul(float* const* out, const float* const* x, std::size_t rows, weight_view<W> w, std::size_t begin, std::size_t end) noexcept {
  if (rows == 0 || begin >= end) return;
  if constexpr (block_format<W>) {
    multiply<block_rows, dot_streams>(out, x, rows, w, begin, end);
  } else {
    if (rows <= 2) return multiply<2, dot_streams>(out, x, rows, w, begin, end);  // bound by memory: not too many streams
    if (rows <= few_rows) return multiply<few_rows, few_streams>(out, x, rows, w, begin, end);
    if constexpr (HWY_CAP_GE512) {
      if (rows <= 6) return multiply<6, 4>(out, x, rows, w, begin, end);
    }
    // Short rows of x, and a few of them, need no panels: they stay in the caches by themselves.
    constexpr std::size_t short_row = HWY_CAP_GE512 ? 1024 : 2048, few_for_panels = 12;
    if (rows <= few_for_panels || w.cols <= short_row) return multiply<many_rows, many_streams>(out, x, rows, w, begin, end);
    constexpr std::size_t panel = panel_groups * many_streams;
    for (std::size_t c = begin; c < end; c += panel)
      for (std::size_t r = 0; r < rows; r += panel_rows)
        multiply_panel(out + r, x + r, HWY_MIN(panel_rows, rows - r), w, c, HWY_MIN(end, c + panel));
  }
}

template <class W>
void gathered(float* out, const float* x, weight_view<W> w, const token_id* ids, std::size_t begin, std::size_t end) noexcept {
  for (std::size_t first = begin; first < end; first += dot_streams) {
    const W* weights[dot_streams];
    for (std::size_t j = 0; j < dot_streams; ++j) weights[j] = w.row(static_cast<std::size_t>(ids[HWY_MIN(first + j, end - 1)]));
    HWY_ALIGN float result[result_room<1, dot_streams>];
    if constexpr (block_format<W>)
      block_dots(1, &x, weights, w.cols, result);
    else
      dots<1, dot_streams>(&x, weights, w.cols, ahead_of_one, result);
    for (std::size_t j = 0; j < dot_streams && first + j < end; ++j) out[first + j] = result[j];
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
