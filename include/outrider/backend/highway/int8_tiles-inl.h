// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Products of grouped weights with int8 activations. Row r of a group owns 32-bit lane r, so that the products of four columns stay in their
// lane and integers are summed exactly, in whatever order; the float steps after each part are those of the contract. Bits therefore depend
// neither on the instruction set nor on tiles or streams.
//
// There are three ways to multiply bytes: x86's dot-product instructions (namespace vnni), its maddubs (namespace maddubs), and products of
// 16 bits, which every machine has (namespace widening). int8_ways-inl.h includes this file once for each way that a target may have and says
// in OUTRIDER_INT8_WAY which one, so it has no guard of its own; without that it is empty.
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

OUTRIDER_BEFORE_INT8_WAY
namespace outrider {
namespace HWY_NAMESPACE {
namespace OUTRIDER_INT8_WAY {

// The numbers of rows of x that tiles are made for, what 16 or 32 registers hold; others take the next larger tile, its last row again and
// again. Fewer tiles where they matter less: each is compiled for every format.
#if OUTRIDER_INT8_KIND == 0 || defined(__SANITIZE_ADDRESS__)  // (instrumented tiles take minutes to compile)
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

/// Fixes a value in a register at this point of the program: GCC would turn the exact integer sums into one long chain and load all operands
/// first, and then spill.
template <class V>
HWY_INLINE void pin([[maybe_unused]] V& v) {
#if HWY_ARCH_X86 && HWY_TARGET == HWY_AVX2 && (defined(__GNUC__) || defined(__clang__))
  asm volatile("" : "+x"(v.raw));
#endif
}

/// a · b + c with one rounding.
HWY_INLINE vec fused(vec a, vec b, vec c) {
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2  // no such instruction
  HWY_ALIGN float x[lanes], y[lanes], z[lanes];
  hn::Store(a, floats(), x);
  hn::Store(b, floats(), y);
  hn::Store(c, floats(), z);
  for (std::size_t i = 0; i < lanes; ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::Load(floats(), z);
#else
  return hn::MulAdd(a, b, c);
#endif
}

/// What the origin of codes from 0 on adds to a row's sum of products, in every lane.
template <class W>
HWY_INLINE word_vec code_bias(const int8_block& x, [[maybe_unused]] std::size_t half) {
  if constexpr (std::same_as<W, q4_0>) return broadcast(&x.offset);                      // codes are weights + 8
  if constexpr (std::same_as<W, q6_k>) return hn::Set(words(), -32 * x.half_sum[half]);  // weights + 32
  return hn::Zero(words());
}

// int8_sums<W, MT>: the sums of products of MT rows of x with the codes of a part, or of half of one where halves have scales of their own.
// add<F, G>() takes two quads of columns; total(m, v) is the sum of row m for vector v of the group's rows.

#if OUTRIDER_INT8_KIND == 2

/// sum + the four products of each lane, codes from 0 to 255.
HWY_INLINE word_vec dot(word_vec sum, code_vec codes, word_vec x) {
#if defined(OUTRIDER_EMULATED_VNNI)  // for tests on machines without the instruction
  HWY_ALIGN std::int32_t s[lanes];
  HWY_ALIGN std::uint8_t c[4 * lanes];
  HWY_ALIGN std::int8_t b[4 * lanes];
  hn::Store(sum, words(), s);
  hn::Store(codes, code_bytes(), c);
  hn::Store(hn::BitCast(hn::Repartition<std::int8_t, words>(), x), hn::Repartition<std::int8_t, words>(), b);
  for (std::size_t i = 0; i < 4 * lanes; ++i) s[i / 4] += c[i] * b[i];
  return hn::Load(words(), s);
#elif HWY_CAP_GE512
  return word_vec{_mm512_dpbusd_epi32(sum.raw, codes.raw, x.raw)};
#else
  return word_vec{_mm256_dpbusd_avx_epi32(sum.raw, codes.raw, x.raw)};
#endif
}

template <class W, std::size_t MT>
class int8_sums {
 public:
  HWY_INLINE int8_sums(const int8_block* const* x, std::size_t half) {
    OUTRIDER_UNROLL
    for (std::size_t m = 0; m < MT; ++m) {
      const word_vec bias = signed_codes<W> ? hn::ShiftLeft<4>(broadcast(&x[m]->offset)) : code_bias<W>(*x[m], half);
      OUTRIDER_UNROLL
      for (std::size_t v = 0; v < line_vectors; ++v) sum_[m][v] = bias;
    }
  }
  template <std::size_t F, std::size_t G, class Part>
  HWY_INLINE void add(const Part& part, const int8_block* const* x) {
    add_quad<F>(part, x);
    add_quad<G>(part, x);
  }
  HWY_INLINE word_vec total(std::size_t m, std::size_t v) const { return sum_[m][v]; }

 private:
  template <std::size_t F, class Part>
  HWY_INLINE void add_quad(const Part& part, const int8_block* const* x) {
    code_vec codes[line_vectors];
    OUTRIDER_UNROLL
    for (std::size_t v = 0; v < line_vectors; ++v) {
      codes[v] = quad_of<W, F>(part, v);
      if constexpr (signed_codes<W>) codes[v] = hn::Xor(codes[v], hn::Set(code_bytes(), 128));  // code + 128, which the bias takes back
    }
    OUTRIDER_UNROLL
    for (std::size_t m = 0; m < MT; ++m) {
      const word_vec four = broadcast(x[m]->q + 4 * F);
      OUTRIDER_UNROLL
      for (std::size_t v = 0; v < line_vectors; ++v) sum_[m][v] = dot(sum_[m][v], codes[v], four);
    }
  }
  word_vec sum_[MT][line_vectors];
};

#elif OUTRIDER_INT8_KIND == 1

/// Sums of two neighbouring products, codes from 0 on, in 16 bits.
HWY_INLINE short_vec products_of_pairs(code_vec codes, word_vec x) {
#if HWY_CAP_GE512
  return short_vec{_mm512_maddubs_epi16(codes.raw, x.raw)};
#else
  return short_vec{_mm256_maddubs_epi16(codes.raw, x.raw)};
#endif
}
HWY_INLINE word_vec sum_of_pairs(short_vec v) {
#if HWY_CAP_GE512
  return word_vec{_mm512_madd_epi16(v.raw, _mm512_set1_epi16(1))};
#else
  return word_vec{_mm256_madd_epi16(v.raw, _mm256_set1_epi16(1))};
#endif
}
/// The bytes of x, negated where those of w are negative; where w is 0 it does not matter.
HWY_INLINE word_vec with_signs_of(word_vec x, code_vec w) {
#if HWY_CAP_GE512
  return word_vec{_mm512_mask_sub_epi8(x.raw, _mm512_movepi8_mask(w.raw), _mm512_setzero_si512(), x.raw)};
#else
  return word_vec{_mm256_sign_epi8(x.raw, w.raw)};
#endif
}

template <class W, std::size_t MT>
class int8_sums {
  // Nibbles are summed in 16 bits and widened once, in total(): 16 · 15 · 127 < 2^15.
  static constexpr bool narrow = !signed_codes<W> && !std::same_as<W, q5_k> && !std::same_as<W, q6_k>;
  using sum_vec = std::conditional_t<narrow, short_vec, word_vec>;

 public:
  HWY_INLINE int8_sums(const int8_block* const* x, std::size_t half) : x_(x), half_(half) {
    OUTRIDER_UNROLL
    for (std::size_t m = 0; m < MT; ++m) {
      OUTRIDER_UNROLL
      for (std::size_t v = 0; v < line_vectors; ++v) {
        sum_[m][v] = hn::Zero(hn::DFromV<sum_vec>());
        pin(sum_[m][v]);
      }
    }
  }
  template <std::size_t F, std::size_t G, class Part>
  HWY_INLINE void add(const Part& part, const int8_block* const* x) {
    if constexpr (signed_codes<W>) {
      add_signed<F>(part, x);
      add_signed<G>(part, x);
    } else {
      code_vec f[line_vectors], g[line_vectors];
      OUTRIDER_UNROLL
      for (std::size_t v = 0; v < line_vectors; ++v) {
        f[v] = quad_of<W, F>(part, v);
        g[v] = quad_of<W, G>(part, v);
        pin(f[v]);
        pin(g[v]);
      }
      OUTRIDER_UNROLL
      for (std::size_t m = 0; m < MT; ++m) add_codes(sum_[m], f, g, x[m]->q + 4 * F, x[m]->q + 4 * G);
    }
  }
  HWY_INLINE word_vec total(std::size_t m, std::size_t v) const {
    word_vec sum;
    if constexpr (narrow) {
      sum = sum_of_pairs(sum_[m][v]);
    } else {
      sum = sum_[m][v];
    }
    return std::same_as<W, q4_0> || std::same_as<W, q6_k> ? hn::Add(sum, code_bias<W>(*x_[m], half_)) : sum;
  }

 private:
  static HWY_INLINE void add_codes(sum_vec (&sum)[line_vectors], const code_vec (&f)[line_vectors], const code_vec (&g)[line_vectors],
                                   const std::int8_t* xf, const std::int8_t* xg) {
    word_vec four = broadcast(xf);
    pin(four);
    if constexpr (narrow) {
      OUTRIDER_UNROLL
      for (std::size_t v = 0; v < line_vectors; ++v) {
        sum[v] = hn::Add(sum[v], products_of_pairs(f[v], four));
        pin(sum[v]);
      }
      four = broadcast(xg);
      pin(four);
      OUTRIDER_UNROLL
      for (std::size_t v = 0; v < line_vectors; ++v) {
        sum[v] = hn::Add(sum[v], products_of_pairs(g[v], four));
        pin(sum[v]);
      }
    } else {
      const word_vec other = broadcast(xg);
      OUTRIDER_UNROLL
      for (std::size_t v = 0; v < line_vectors; ++v) {  // 4 · 63 · 127 < 2^15
        sum[v] = hn::Add(sum[v], sum_of_pairs(hn::Add(products_of_pairs(f[v], four), products_of_pairs(g[v], other))));
        pin(sum[v]);
      }
    }
  }
  /// The weights' magnitudes with activations that take over their signs: 2 · 128 · 127 < 2^15.
  template <std::size_t F, class Part>
  HWY_INLINE void add_signed(const Part& part, const int8_block* const* x) {
    code_vec codes[line_vectors], magnitude[line_vectors];
    OUTRIDER_UNROLL
    for (std::size_t v = 0; v < line_vectors; ++v) {
      codes[v] = quad_of<W, F>(part, v);
      magnitude[v] = hn::BitCast(code_bytes(), hn::Abs(hn::BitCast(hn::Repartition<std::int8_t, words>(), codes[v])));
      pin(codes[v]);
      pin(magnitude[v]);
    }
    OUTRIDER_UNROLL
    for (std::size_t m = 0; m < MT; ++m) {
      word_vec four = broadcast(x[m]->q + 4 * F);
      pin(four);
      OUTRIDER_UNROLL
      for (std::size_t v = 0; v < line_vectors; ++v) {
        sum_[m][v] = hn::Add(sum_[m][v], sum_of_pairs(products_of_pairs(magnitude[v], with_signs_of(four, codes[v]))));
        pin(sum_[m][v]);
      }
    }
  }
  sum_vec sum_[MT][line_vectors];
  const int8_block* const* x_;
  std::size_t half_;
};

#else

template <class W, std::size_t MT>
class int8_sums {
 public:
  HWY_INLINE int8_sums(const int8_block* const* x, std::size_t half) {
    for (std::size_t m = 0; m < MT; ++m) {
      bias_[m] = code_bias<W>(*x[m], half);
      for (std::size_t v = 0; v < line_vectors; ++v) first_[m][v] = second_[m][v] = hn::Zero(words());
    }
  }
  template <std::size_t F, std::size_t G, class Part>
  HWY_INLINE void add(const Part& part, const int8_block* const* x) {
    add_quad<F>(part, x);
    add_quad<G>(part, x);
  }
  HWY_INLINE word_vec total(std::size_t m, std::size_t v) const {
    return hn::Add(hn::RearrangeToOddPlusEven(first_[m][v], second_[m][v]), bias_[m]);
  }

 private:
  template <std::size_t F, class Part>
  HWY_INLINE void add_quad(const Part& part, const int8_block* const* x) {
    for (std::size_t v = 0; v < line_vectors; ++v) {
      const short_vec codes = hn::BitCast(shorts(), quad_of<W, F>(part, v));
      for (std::size_t m = 0; m < MT; ++m) {
        const short_vec four = hn::BitCast(shorts(), broadcast(x[m]->q + 4 * F));
        word_vec& sum = first_[m][v];
        sum = hn::ReorderWidenMulAccumulate(words(), even_bytes(codes), even_bytes(four), sum, second_[m][v]);
        sum = hn::ReorderWidenMulAccumulate(words(), odd_bytes(codes), odd_bytes(four), sum, second_[m][v]);
      }
    }
  }
  static HWY_INLINE short_vec even_bytes(short_vec v) { return hn::ShiftRight<8>(hn::ShiftLeft<8>(v)); }
  static HWY_INLINE short_vec odd_bytes(short_vec v) { return hn::ShiftRight<8>(v); }

  word_vec first_[MT][line_vectors], second_[MT][line_vectors], bias_[MT];  // which lanes go to which sum is Highway's affair
};

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
        const std::size_t offset = n * share * records;
        t.ahead += w.stride * record - prefetch_distance + offset;
        t.share = offset < w.stride * record ? share : 0;
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
