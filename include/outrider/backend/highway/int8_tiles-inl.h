// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Products of grouped weights with int8 activations: tiles of a few rows over the groups of a matrix, for one way to multiply bytes, see
// int8_sums-inl.h. The float steps after each part are those of the contract, so bits depend neither on the instruction set nor on tiles or
// streams. Included like that file.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "outrider/backend/highway/compat-inl.h"
#include "outrider/backend/highway/int8-inl.h"
#include "outrider/backend/highway/kernel_table.hpp"
#include "outrider/core/extents.hpp"
#include "outrider/core/grouped.hpp"
#include "outrider/core/int8.hpp"
#include "outrider/core/view.hpp"

#if defined(OUTRIDER_INT8_WAY)

#if !defined(OUTRIDER_INSTRUMENTED)
#if defined(__SANITIZE_ADDRESS__)
#define OUTRIDER_INSTRUMENTED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define OUTRIDER_INSTRUMENTED 1
#endif
#endif
#endif
#if !defined(OUTRIDER_INSTRUMENTED)
#define OUTRIDER_INSTRUMENTED 0
#endif

OUTRIDER_BEFORE_INT8_WAY
namespace outrider {
namespace HWY_NAMESPACE {
namespace OUTRIDER_INT8_WAY {

// The numbers of rows of x that tiles are made for, what 16 or 32 registers hold; others take the next larger tile, its last row again and
// again. Fewer tiles where they matter less: each is compiled for every format.
#if OUTRIDER_INT8_KIND == 0 || OUTRIDER_INSTRUMENTED  // (instrumented tiles take minutes to compile)
using tile_sizes = std::index_sequence<1, HWY_CAP_GE512 && OUTRIDER_INT8_KIND == 2 ? 8 : 4>;
#elif HWY_CAP_GE512 && OUTRIDER_INT8_KIND == 1
using tile_sizes = std::index_sequence<1, 2, 4>;
#elif HWY_CAP_GE512
using tile_sizes = std::index_sequence<1, 2, 3, 4, 6, 8>;
#else
using tile_sizes = std::index_sequence<1, 2, 3, 4>;
#endif
constexpr std::size_t tile_rows_int8 = HWY_CAP_GE512 && OUTRIDER_INT8_KIND == 2 ? 8 : 4;
// A thread whose rows wait for memory walks several linear streams of weights in step, or one, which the prefetchers of newer CPUs follow by
// themselves. Measured: on Zen 3 four streams read a third more than one; on Zen 4 (AVX-512) one stream without requests is the fastest for
// one row, and one with requests far ahead into the second-level cache for more.
constexpr std::size_t streams = OUTRIDER_INT8_KIND == 1 && !HWY_CAP_GE512 ? 4 : 1, streamed_rows = 4;

/// a · b + c with one rounding.
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2  // no such instruction
HWY_NOINLINE inline vec fused(vec a, vec b, vec c) {
  HWY_ALIGN float x[lanes], y[lanes], z[lanes];
  hn::Store(a, floats(), x);
  hn::Store(b, floats(), y);
  hn::Store(c, floats(), z);
  for (std::size_t i = 0; i < lanes; ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::Load(floats(), z);
}
#else
HWY_INLINE vec fused(vec a, vec b, vec c) { return hn::MulAdd(a, b, c); }
#endif

/// Running results of MT rows: in registers where a line is one vector, else in the first-level cache.
template <std::size_t MT>
class accumulators {
 public:
#if HWY_CAP_GE512
  HWY_INLINE accumulators() {
    OUTRIDER_UNROLL
    for (std::size_t m = 0; m < MT; ++m) value_[m] = zero();
  }
  HWY_INLINE vec get(std::size_t m, std::size_t) const { return value_[m]; }
  HWY_INLINE void put(std::size_t m, std::size_t, vec value) { value_[m] = value; }

 private:
  vec value_[MT];
#else
  HWY_INLINE accumulators() { std::memset(value_, 0, sizeof(value_)); }
  HWY_INLINE vec get(std::size_t m, std::size_t v) const { return hn::Load(floats(), value_[m] + v * lanes); }
  HWY_INLINE void put(std::size_t m, std::size_t v, vec value) { hn::Store(value, floats(), value_[m] + v * lanes); }

 private:
  HWY_ALIGN float value_[MT][group_rows];
#endif
};

/// acc ← fma(float(Σ q·x.q), scale · x.d, acc) for one scale of a part.
template <std::size_t MT, class W, class Part>
HWY_INLINE void add_products(const int8_sums<W, MT>& sums, const grouped<W>& w, const Part& part, std::size_t half,
                             const int8_block* const* x, accumulators<MT>& acc) {
  vec scale[line_vectors];
  OUTRIDER_UNROLL
  for (std::size_t v = 0; v < line_vectors; ++v) {
    scale[v] = scales_of(w, part, half, v);
    pin(scale[v]);
  }
  OUTRIDER_UNROLL
  for (std::size_t m = 0; m < MT; ++m) {
    vec d = set(x[m]->d);
    pin(d);
    OUTRIDER_UNROLL
    for (std::size_t v = 0; v < line_vectors; ++v) {
      vec sum = fused(hn::ConvertTo(floats(), sums.total(m, v)), hn::Mul(scale[v], d), acc.get(m, v));
      pin(sum);
      acc.put(m, v, sum);
    }
  }
}

/// Adds part p of record w for MT rows; x[m] is row m's block of these columns.
template <std::size_t MT, class W>
HWY_INLINE void add_part(const grouped<W>& w, std::size_t p, const int8_block* const* x, accumulators<MT>& acc) {
  const auto& part = part_at(w, p);
  if constexpr (scale_columns<W> == 32) {
    int8_sums<W, MT> sums(x, 0);
    sums.template add<0, 4>(part, x);
    sums.template add<1, 5>(part, x);
    sums.template add<2, 6>(part, x);
    sums.template add<3, 7>(part, x);
    add_products(sums, w, part, 0, x, acc);
  } else {
    int8_sums<W, MT> first(x, 0);
    first.template add<0, 1>(part, x);
    first.template add<2, 3>(part, x);
    add_products(first, w, part, 0, x, acc);
    int8_sums<W, MT> second(x, 1);
    second.template add<4, 5>(part, x);
    second.template add<6, 7>(part, x);
    add_products(second, w, part, 1, x, acc);
  }
  if constexpr (has_minimum<W>) {
    OUTRIDER_UNROLL
    for (std::size_t v = 0; v < line_vectors; ++v) {
      const vec minimum = hn::Neg(hn::Mul(load(w.dmin + v * lanes), load(part.minimum + v * lanes)));
      OUTRIDER_UNROLL
      for (std::size_t m = 0; m < MT; ++m) acc.put(m, v, fused(minimum, set(x[m]->sum), acc.get(m, v)));
    }
  }
}

/// What a tile works on: S groups, `stream` records apart, each walked record by record.
template <class W>
struct tile_of_products {
  const int8_block* const* x;  // the tile's rows
  float* const* out;           // of each of them, where the first group's results go
  std::size_t width;           // results of a group, at most 16
  const grouped<W>* w;
  std::size_t records, stream, columns;  // records of a group; records and results from stream to stream
  const std::byte* ahead;                // what to ask for meanwhile, `share` bytes a record in every stream
  std::size_t share;
};

/// out[m][s·columns + r] = the product of row m with row r of group s, for MT rows and S groups.
template <std::size_t MT, std::size_t S, class W>
HWY_NOINLINE void multiply(const tile_of_products<W>& t) noexcept {
  accumulators<MT> acc[S];
  const int8_block* x[MT];
  OUTRIDER_UNROLL
  for (std::size_t m = 0; m < MT; ++m) x[m] = t.x[m];
  const grouped<W>* w = t.w;
  const std::byte* ahead = t.ahead;
  for (std::size_t b = 0; b < t.records; ++b, ++w, ahead += t.share) {
    OUTRIDER_UNROLL
    for (std::size_t s = 0; s < S; ++s)
      for (std::size_t i = 0; i < t.share; i += 64) prefetch_ahead(ahead + s * t.stream * sizeof(grouped<W>) + i);
    for (std::size_t p = 0; p < grouped<W>::parts; ++p) {
      OUTRIDER_UNROLL
      for (std::size_t s = 0; s < S; ++s) add_part(w[s * t.stream], p, x, acc[s]);
      OUTRIDER_UNROLL
      for (std::size_t m = 0; m < MT; ++m) ++x[m];
    }
  }
  OUTRIDER_UNROLL
  for (std::size_t s = 0; s < S; ++s) {
    OUTRIDER_UNROLL
    for (std::size_t m = 0; m < MT; ++m) {
      float* out = t.out[m] + s * t.columns;
      OUTRIDER_UNROLL
      for (std::size_t v = 0; v < line_vectors; ++v) {
        const std::size_t first = v * lanes;
        if (first + lanes <= t.width) {
          store(acc[s].get(m, v), out + first);
        } else if (first < t.width) {
          store_first(acc[s].get(m, v), out + first, t.width - first);
        }
      }
    }
  }
}

/// multiply() with the smallest tile for `rows` rows.
template <std::size_t S, class W, std::size_t... Rows>
inline void multiply_rows(std::size_t rows, const tile_of_products<W>& t, std::index_sequence<Rows...>) noexcept {
  static_cast<void>(((rows <= Rows && (multiply<Rows, S>(t), true)) || ...));
}

/// out[m][c] = x[m] · w(c) for m < rows and the columns c of the groups begin … end - 1. Up to a tile of rows waits for memory. More rows
/// compute: their tiles go over one group after the other while it is in the cache, and ask for the next group, a share each.
template <class W>
void int8_matmul(float* const* out, const int8_block* const* x, std::size_t rows, weight_view<grouped<W>> w, std::size_t begin,
                 std::size_t end) noexcept {
  if (rows == 0 || begin >= end) return;
  constexpr std::size_t record = sizeof(grouped<W>);
  const std::size_t records = w.cols / grouped<W>::elements, tiles = divide_up(rows, tile_rows_int8);
  const int8_block* row[tile_rows_int8];
  float* to[tile_rows_int8];
  const auto tile = [&](std::size_t g, std::size_t t) {
    const std::size_t first = t * tile_rows_int8, count = (std::min)(tile_rows_int8, rows - first);
    for (std::size_t m = 0; m < tile_rows_int8; ++m) {
      const std::size_t r = first + (std::min)(m, count - 1);
      row[m] = x[r];
      to[m] = out[r] + g * group_rows;
    }
    const auto* bytes = reinterpret_cast<const std::byte*>(w.group(g));
    return std::pair(count, tile_of_products<W>{row, to, (std::min)(group_rows, w.rows - g * group_rows), w.group(g), records, 0, 0,
                                                bytes + prefetch_distance, 0});
  };

  std::size_t g = begin;
  if constexpr (streams > 1) {
    const std::size_t whole = (std::min)(end, w.rows / group_rows), run = begin < whole ? (whole - begin) / streams : 0;
    if (rows <= streamed_rows) {
      for (; g < begin + run; ++g) {
        auto [count, t] = tile(g, 0);
        t.stream = run * w.stride;
        t.columns = run * group_rows;
        t.share = record;
        multiply_rows<streams>(count, t, tile_sizes());
      }
      g = begin + run * streams;
    }
  }
  const std::size_t share = divide_up(divide_up(record, tiles), 64) * 64;
  for (; g < end; ++g)
    for (std::size_t n = 0; n < tiles; ++n) {
      auto [count, t] = tile(g, n);
      if (tiles > 1) {
        const std::size_t offset = n * share * records, group_bytes = w.stride * record;
        t.ahead = reinterpret_cast<const std::byte*>(w.group(g)) + group_bytes + offset;
        t.share = offset < group_bytes ? share : 0;
      } else if (rows > 1 || streams > 1) {
        t.share = record;
      }
      multiply_rows<1>(count, t, tile_sizes());
    }
}

/// This way's entry of the kernel table.
template <class... G>
constexpr auto int8_table(type_list<G...>) {
  return std::tuple{detail::int8_kernels<G>{int8_matmul, widen_row}...};
}

}  // namespace OUTRIDER_INT8_WAY
}  // namespace HWY_NAMESPACE
}  // namespace outrider
HWY_AFTER_NAMESPACE();

#endif
