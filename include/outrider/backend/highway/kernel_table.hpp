// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What the vector kernels look like from outside: plain functions of plain views, gathered in one table per SIMD target. Includes no Highway
// header, so that a program which dispatches at run time pays for Highway in one translation unit only.
#pragma once
#include <cstddef>
#include <tuple>

#include "outrider/backend/concepts.hpp"
#include "outrider/core/grouped.hpp"
#include "outrider/core/int8.hpp"
#include "outrider/core/kv_view.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/view.hpp"

namespace outrider::detail {

// Every kernel is serial and works on a range [begin, end) of outputs or on all rows of its views; the caller splits the work. What a range
// leaves out it does not write, and no output depends on where a range begins.

template <class W>
struct linear_kernels {
  /// out[i][c] = x[i] · w(c) for i < rows and begin <= c < end.
  void (*matmul)(float* const* out, const float* const* x, std::size_t rows, weight_view<W> w, std::size_t begin, std::size_t end) noexcept;
  /// out[j] = x · w(ids[j]) for begin <= j < end.
  void (*gathered)(float* out, const float* x, weight_view<W> w, const token_id* ids, std::size_t begin, std::size_t end) noexcept;
  /// out [n] = w [n] · factor; n is a multiple of elements_of<W>.
  void (*widen)(float* out, const W* w, std::size_t n, float factor) noexcept;
};

/// G is grouped<W>.
template <class G>
struct int8_kernels {
  /// out[i][c] = x[i] · w(c) for i < rows and the columns c of the groups begin <= g < end; x[i] points to cols / 32 blocks.
  void (*matmul)(float* const* out, const int8_block* const* x, std::size_t rows, weight_view<G> w, std::size_t begin,
                 std::size_t end) noexcept;
  /// out [cols] = row `row` of w · factor.
  void (*widen)(float* out, weight_view<G> w, std::size_t row, float factor) noexcept;
};

/// The ops of pointwise_ops that touch enough elements to be worth a vector kernel, with the same meaning.
struct pointwise_kernels {
  void (*rms_norm)(matrix_view<float> out, matrix_view<const float> x, const float* weight, float eps) noexcept;
  /// x [m·heads, 2h] with the rows first … first + x.rows - 1 of the whole: row r uses row (first + r) / heads of the tables.
  void (*rope)(matrix_view<float> x, matrix_view<const float> cos, matrix_view<const float> sin, std::size_t first,
               std::size_t heads) noexcept;
  void (*gelu_mul)(matrix_view<float> out, matrix_view<const float> gate, matrix_view<const float> up) noexcept;
  void (*add)(matrix_view<float> out, matrix_view<const float> x, matrix_view<const float> y) noexcept;
  void (*scale)(matrix_view<float> out, matrix_view<const float> x, float factor) noexcept;
  void (*softcap)(matrix_view<float> out, matrix_view<const float> x, float cap) noexcept;
  /// out [blocks] = x [32 · blocks] as int8 blocks.
  void (*quantize)(int8_block* out, const float* x, std::size_t blocks) noexcept;
  void (*argmax)(token_id* out, matrix_view<const float> x, matrix_view<const token_id> ids) noexcept;
  void (*weighted_sum)(matrix_view<float> out, matrix_view<const float> x, matrix_view<const float> weights) noexcept;
};

/// A query head on its way through some of its keys.
struct attention_part {
  const float* q;          // [d]
  float* sum;              // [d]: Σ exp(score − largest) · value
  std::size_t begin, end;  // the positions it sees; none if begin >= end
  float largest, total;    // the largest score, and Σ exp(score − largest)
};

/// How many parts go through the same keys together: a tile of keys and values is read once and stays in the second-level cache.
inline constexpr std::size_t attention_group = 32;
/// The keys of a query are cut into at most so many spans, and two more at the ends of its window.
inline constexpr std::size_t most_spans = 16;

template <class Kv>
struct attention_kernels {
  /// Computes sum, largest and total of up to attention_group parts, all of KV head `head`. sum must not overlap q.
  void (*add_keys)(attention_part* parts, std::size_t count, kv_view<const Kv> cache, std::size_t head) noexcept;
  /// out [d] = Σ sum · f / Σ total · f over up to most_spans + 2 parts of one query, f = exp(largest − the largest of all), in their order;
  /// zeros if none sees a key. out may be the sum of a part that is the only one.
  void (*join)(float* out, const attention_part* parts, std::size_t count, std::size_t d) noexcept;
};

template <template <class> class Kernels, class List>
struct one_per_type;
template <template <class> class Kernels, class... T>
struct one_per_type<Kernels, type_list<T...>> {
  using type = std::tuple<Kernels<T>...>;
};

/// All kernels of one SIMD target.
struct kernel_table {
  const char* (*target)() noexcept;  // "AVX2"
  one_per_type<linear_kernels, weight_types>::type linear;
  one_per_type<int8_kernels, grouped_types>::type int8;
  pointwise_kernels pointwise;
  one_per_type<attention_kernels, kv_types>::type attention;
};

}  // namespace outrider::detail
