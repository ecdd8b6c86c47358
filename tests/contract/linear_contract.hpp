// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include "fixture.hpp"
#include "stored_weights.hpp"

namespace contract {

using outrider::linear_ops;
using outrider::reference;

/// x · w over k columns as the reference has it: every product is exact in double, and the sum is rounded to float once.
inline float dot(const float* x, const float* w, std::size_t k) {
  double sum = 0;
  for (std::size_t i = 0; i < k; ++i) sum += double{x[i]} * double{w[i]};
  return static_cast<float>(sum);
}

/// A product of k terms x·w in float, summed in any order, fused or not: each term meets at most k roundings, the reference one more, so
/// |error| <= (k + 2)·u·Σ|x·w| with room for the higher powers of u. (What a block stands for is a float without any rounding.)
inline double dot_bound(const float* x, const float* w, std::size_t k) {
  double sum = 0;
  for (std::size_t i = 0; i < k; ++i) sum += std::abs(double{x[i]} * double{w[i]});
  return static_cast<double>(k + 2) * u * sum;
}

/// got(r, c) is the product of row r of x and the row of w that weight_row(r, c) names, within the bound.
template <class WeightRow>
void check_products(const padded<float>& got, const padded<float>& x, std::size_t rows_per_x, const stored_weights& w,
                    WeightRow weight_row) {
  padded<float> want(got.rows(), got.cols());
  for (std::size_t r = 0; r < got.rows(); ++r)
    for (std::size_t c = 0; c < got.cols(); ++c) want(r, c) = dot(x.row(r / rows_per_x), w.values.row(weight_row(r, c)), x.cols());
  check_within(got, want,
               [&](std::size_t r, std::size_t c) { return dot_bound(x.row(r / rows_per_x), w.values.row(weight_row(r, c)), x.cols()); });
}

TEST_CASE_TEMPLATE("matmul and matmul_prompt agree with the reference for every shape, stride and weight type", B,
                   OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 301;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for_each_format<B>([&](const weight_format<B>& format) {
    for (const std::size_t k : format.row_lengths())
      for (const std::size_t n : sizes{0, 1, 2, 3, 5, 8, 17, 33})
        for (const std::size_t m : sizes{0, 1, 2, 3, 4, 5, 9, 65})
          for (const std::size_t extra : sizes{0, 3}) {
            if (!takes_case()) continue;
            INFO("k = ", k, ", n = ", n, ", m = ", m, ", extra = ", extra);
            const auto x = padded<float>(m, k, extra).fill(random.uniforms());
            const auto w = format.random_matrix(random, n, k, extra);
            padded<float> got(m, n, extra), prompt(m, n, extra);
            format.matmul(ctx, got.view(), x.view(), w.view());
            format.matmul_prompt(ctx, prompt.view(), x.view(), w.view());
            const auto weight_row = [](std::size_t, std::size_t c) { return c; };
            check_products(got, x, 1, w, weight_row);
            check_products(prompt, x, 1, w, weight_row);
          }
  });
}

TEST_CASE_TEMPLATE("matmul is exact where float is", B, OUTRIDER_TESTED_BACKENDS) {
  // Scalar weights and x are multiples of 1/16 up to 1: products are multiples of 1/256, 513 of them sum to less than 2^10, so 18 bits hold
  // every partial sum. Weights of blocks are multiples of 1/16 up to 2^8, with x in {-1/16, 0, 1/16}: 768 products sum to less than 2^14,
  // 22 bits.
  constexpr std::uint64_t seed = 302;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for_each_format<B>([&](const weight_format<B>& format) {
    for (const std::size_t k : format.row_lengths()) {
      CAPTURE(k);
      const auto x = padded<float>(3, k, 5).fill(random.grids(format.block == 1 ? 16 : 1));
      const auto w = format.random_matrix(random, 21, k, 1, numbers::sixteenths);
      padded<float> got(3, 21), want(3, 21);
      for (std::size_t r = 0; r < 3; ++r)
        for (std::size_t c = 0; c < 21; ++c) {
          int sum = 0;
          for (std::size_t i = 0; i < k; ++i) sum += static_cast<int>(x(r, i) * 16) * static_cast<int>(w.values(c, i) * 16);
          want(r, c) = static_cast<float>(sum) / 256;
        }
      format.matmul(ctx, got.view(), x.view(), w.view());
      check_same(got, want);
    }
  });
}

TEST_CASE_TEMPLATE("a matmul row has the bits it has alone, whatever is beside it", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 303;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_format<B>([&](const weight_format<B>& format) {
    for (const std::size_t length : sizes{9, 65, 256, 513}) {
      const std::size_t k = format.whole(length), n = length / 8 + 3;
      CAPTURE(k);
      const auto x = padded<float>(source_rows, k).fill(random.uniforms());
      const auto w = format.random_matrix(random, n, k);
      check_rows_are_independent<B>([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
        padded<float> out(rows.size(), n);
        format.matmul(ctx, out.view(), pick(x, rows).read(), w.view());
        return out.bits();
      });
    }
  });
}

TEST_CASE_TEMPLATE("long rows of scalar weights: agreement with the reference, and rows that have the bits they have alone", B,
                   OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 307;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_format<B>([&](const weight_format<B>& format) {
    if (format.block != 1) return;
    for (const std::size_t k : sizes{1043, 4105})
      for (const std::size_t n : sizes{7, 53}) {
        INFO("k = ", k, ", n = ", n);
        const auto w = format.random_matrix(random, n, k, 1);
        context_of<B> one(execution{1});
        for (const std::size_t m : sizes{5, 8, 9, 17, 35, 65}) {
          CAPTURE(m);
          const auto x = padded<float>(m, k).fill(random.uniforms());
          padded<float> got(m, n);
          format.matmul(one, got.view(), x.view(), w.view());
          check_products(got, x, 1, w, [](std::size_t, std::size_t c) { return c; });
        }
        const auto x = padded<float>(source_rows, k).fill(random.uniforms());
        const auto product = [&](context_of<B>& ctx, std::span<const std::size_t> rows) {
          padded<float> out(rows.size(), n);
          format.matmul(ctx, out.view(), pick(x, rows).read(), w.view());
          return out.bits();
        };
        check_rows_are_independent<B>(product);
        check_threads_do_not_matter<B>(product);
      }
  });
}

TEST_CASE_TEMPLATE("a matmul output does not depend on which weight rows are beside it", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 304;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for_each_format<B>([&](const weight_format<B>& format) {
    const std::size_t k = format.whole(257);
    const auto x = padded<float>(3, k).fill(random.uniforms());
    const auto w = format.random_matrix(random, 21, k);
    padded<float> whole(3, 21);
    format.matmul(ctx, whole.view(), x.view(), w.view());
    for (std::size_t first = 0; first < 21; ++first)
      for (const std::size_t count : sizes{1, 2, 3, 7}) {
        if (first + count > 21) continue;
        INFO("first = ", first, ", count = ", count);
        padded<float> part(3, count);
        format.matmul(ctx, part.view(), x.view(), w.view().slice_rows(first, count));
        bool same = true;
        for (std::size_t r = 0; r < 3; ++r) same = same && same_bits(part.row(r), whole.row(r) + first, count);
        CHECK(same);
      }
  });
}

TEST_CASE_TEMPLATE("threads do not change a matmul, an expert_matmul or a gathered_matmul", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 305;
  CAPTURE(seed);
  random_numbers random(seed);
  constexpr std::size_t k = 256, n = 777, experts = 3;  // large enough to be worth a second thread
  for_each_format<B>([&](const weight_format<B>& format) {
    const auto x = padded<float>(source_rows, k).fill(random.uniforms());
    const auto w = format.random_matrix(random, experts * n, k);
    const auto chosen = padded<std::int32_t>(source_rows, 2).fill(random.indexes(experts));
    const auto ids = padded<token_id>(source_rows, n).fill(random.indexes(experts * n));
    check_threads_do_not_matter<B>([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
      padded<float> out(rows.size(), n);
      format.matmul(ctx, out.view(), pick(x, rows).read(), w.view().slice_rows(n, n));
      return out.bits();
    });
    check_threads_do_not_matter<B>([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
      padded<float> out(rows.size() * 2, n);
      format.expert_matmul(ctx, out.view(), pick(x, rows).read(), w.view(), pick(chosen, rows).data());
      return out.bits(2);
    });
    check_threads_do_not_matter<B>([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
      padded<float> out(rows.size(), n);
      format.gathered_matmul(ctx, out.view(), pick(x, rows).read(), w.view(), pick(ids, rows).read());
      return out.bits();
    });
  });
}

TEST_CASE_TEMPLATE("expert_matmul sends every row through its own experts", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 306;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for_each_format<B>([&](const weight_format<B>& format) {
    for (const std::size_t k : format.row_lengths())
      for (const std::size_t n : sizes{0, 1, 9, 16})
        for (const std::size_t m : sizes{0, 1, 2, 5})
          for (const std::size_t s : sizes{1, 2, 3})
            for (const std::size_t extra : sizes{0, 3}) {
              INFO("k = ", k, ", n = ", n, ", m = ", m, ", s = ", s, ", extra = ", extra);
              constexpr std::size_t experts = 4;
              const auto x = padded<float>(m, k, extra).fill(random.uniforms());
              const auto w = format.random_matrix(random, experts * n, k, extra);
              const auto chosen = padded<std::int32_t>(m, s).fill(random.indexes(experts));
              padded<float> got(m * s, n, extra);
              format.expert_matmul(ctx, got.view(), x.view(), w.view(), chosen.data());
              check_products(got, x, s, w,
                             [&](std::size_t i, std::size_t c) { return static_cast<std::size_t>(chosen(i / s, i % s)) * n + c; });
            }
  });
}

TEST_CASE_TEMPLATE("an expert_matmul row has the bits it has alone, whatever is beside it", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 307;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_format<B>([&](const weight_format<B>& format) {
    constexpr std::size_t n = 19, s = 2, experts = 3;
    const std::size_t k = format.whole(129);
    const auto x = padded<float>(source_rows, k).fill(random.uniforms());
    const auto w = format.random_matrix(random, experts * n, k);
    const auto chosen = padded<std::int32_t>(source_rows, s).fill(random.indexes(experts));
    check_rows_are_independent<B>([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
      padded<float> out(rows.size() * s, n);
      format.expert_matmul(ctx, out.view(), pick(x, rows).read(), w.view(), pick(chosen, rows).data());
      return out.bits(s);
    });
  });
}

TEST_CASE_TEMPLATE("gathered_matmul multiplies with the rows named and no others", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 308;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for_each_format<B>([&](const weight_format<B>& format) {
    for (const std::size_t k : format.row_lengths())
      for (const std::size_t c : sizes{0, 1, 5, 17})
        for (const std::size_t m : sizes{0, 1, 2, 5})
          for (const std::size_t extra : sizes{0, 3}) {
            INFO("k = ", k, ", c = ", c, ", m = ", m, ", extra = ", extra);
            const auto x = padded<float>(m, k, extra).fill(random.uniforms());
            const auto w = format.random_matrix(random, 80, k, extra, numbers::any, 2);  // odd rows stay poisoned: nobody asks for them
            const auto ids = padded<token_id>(m, c, extra).fill([&] { return 2 * random.index(40); });
            padded<float> got(m, c, extra);
            format.gathered_matmul(ctx, got.view(), x.view(), w.view(), ids.view());
            check_products(got, x, 1, w, [&](std::size_t r, std::size_t j) { return static_cast<std::size_t>(ids(r, j)); });
          }
  });
}

TEST_CASE_TEMPLATE("a gathered_matmul row has the bits it has alone, whatever is beside it", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 309;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_format<B>([&](const weight_format<B>& format) {
    constexpr std::size_t n = 40, c = 21;
    const std::size_t k = format.whole(129);
    const auto x = padded<float>(source_rows, k).fill(random.uniforms());
    const auto w = format.random_matrix(random, n, k);
    const auto ids = padded<token_id>(source_rows, c).fill(random.indexes(n));
    check_rows_are_independent<B>([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
      padded<float> out(rows.size(), c);
      format.gathered_matmul(ctx, out.view(), pick(x, rows).read(), w.view(), pick(ids, rows).read());
      return out.bits();
    });
  });
}

TEST_CASE_TEMPLATE("gather_rows widens the rows named and multiplies them once", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 310;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for_each_format<B>([&](const weight_format<B>& format) {
    for (const std::size_t k : format.row_lengths())
      for (const std::size_t m : sizes{0, 1, 4})
        for (const std::size_t extra : sizes{0, 3})
          for (const float factor : {1.0f, 39.25f, 0.1f}) {
            INFO("k = ", k, ", m = ", m, ", extra = ", extra, ", factor = ", factor);
            const auto w = format.random_matrix(random, 9, k, extra);
            const auto ids = padded<token_id>(m, 1).fill(random.indexes(9));
            padded<float> got(m, k, extra), want(m, k);
            for (std::size_t r = 0; r < m; ++r)
              for (std::size_t c = 0; c < k; ++c) want(r, c) = w.values(static_cast<std::size_t>(ids(r, 0)), c) * factor;
            format.gather_rows(ctx, got.view(), w.view(), ids.data(), factor);
            check_same(got, want);
          }
  });
}

TEST_CASE_TEMPLATE("pitfall 114: a table is gathered from and multiplied with as the same numbers, whatever its type", B,
                   OUTRIDER_TESTED_BACKENDS) {
  // The product with a row of the unit matrix is one weight, without any rounding.
  constexpr std::uint64_t seed = 311;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for_each_format<B>([&](const weight_format<B>& format) {
    const std::size_t k = format.whole(33), n = 5;
    const auto table = format.random_matrix(random, n, k);
    padded<float> units(k, k), columns(k, n), rows(n, k), want(k, n);
    for (std::size_t r = 0; r < k; ++r)
      for (std::size_t c = 0; c < k; ++c) units(r, c) = r == c ? 1.0f : 0.0f;
    format.matmul(ctx, columns.view(), units.view(), table.view());
    const auto ids = padded<token_id>(n, 1).fill([i = 0]() mutable { return i++; });
    format.gather_rows(ctx, rows.view(), table.view(), ids.data(), 1.0f);
    for (std::size_t r = 0; r < k; ++r)
      for (std::size_t c = 0; c < n; ++c) want(r, c) = rows(c, r) + 0.0f;  // a sum that begins with 0 is never -0
    check_same(columns, want);
  });
}

}  // namespace contract
