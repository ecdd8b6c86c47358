// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Sums of products of bytes, in one of three ways: by x86's dot-product instructions (namespace vnni), by its maddubs (namespace maddubs), and by
// products of 16 bits, which every machine has (namespace widening). Row r of a group owns 32-bit lane r, so that the products of four columns
// stay in their lane and integers are summed exactly, in whatever order. int8_ways-inl.h includes this file once for each way that a target may
// have and says in OUTRIDER_INT8_WAY which one, so it has no guard of its own; without that it is empty.
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "outrider/backend/highway/compat-inl.h"
#include "outrider/backend/highway/int8-inl.h"
#include "outrider/core/grouped.hpp"
#include "outrider/core/int8.hpp"

#if defined(OUTRIDER_INT8_WAY)

OUTRIDER_BEFORE_INT8_WAY
namespace outrider {
namespace HWY_NAMESPACE {
namespace OUTRIDER_INT8_WAY {

/// Fixes a value in a register at this point of the program: GCC would turn the exact integer sums into one long chain and load all operands
/// first, and then spill.
template <class V>
HWY_INLINE void pin([[maybe_unused]] V& v) {
#if HWY_ARCH_X86 && HWY_TARGET == HWY_AVX2 && (defined(__GNUC__) || defined(__clang__))
  asm volatile("" : "+x"(v.raw));
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
#if defined(OUTRIDER_EMULATED_VNNI)  // for tests on machines without the instruction
HWY_NOINLINE inline word_vec dot(word_vec sum, code_vec codes, word_vec x) {
  HWY_ALIGN std::int32_t s[lanes];
  HWY_ALIGN std::uint8_t c[4 * lanes];
  HWY_ALIGN std::int8_t b[4 * lanes];
  hn::Store(sum, words(), s);
  hn::Store(codes, code_bytes(), c);
  hn::Store(hn::BitCast(hn::Repartition<std::int8_t, words>(), x), hn::Repartition<std::int8_t, words>(), b);
  for (std::size_t i = 0; i < 4 * lanes; ++i) s[i / 4] += c[i] * b[i];
  return hn::Load(words(), s);
}
#elif HWY_CAP_GE512
HWY_INLINE word_vec dot(word_vec sum, code_vec codes, word_vec x) { return word_vec{_mm512_dpbusd_epi32(sum.raw, codes.raw, x.raw)}; }
#else
HWY_INLINE word_vec dot(word_vec sum, code_vec codes, word_vec x) { return word_vec{_mm256_dpbusd_avx_epi32(sum.raw, codes.raw, x.raw)}; }
#endif

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

}  // namespace OUTRIDER_INT8_WAY
}  // namespace HWY_NAMESPACE
}  // namespace outrider
HWY_AFTER_NAMESPACE();

#endif
