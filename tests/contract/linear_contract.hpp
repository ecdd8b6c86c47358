// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include "fixture.hpp"

namespace contract {

using outrider::linear_ops;
using outrider::reference;
using outrider::weight_types;

/// A product of k terms x·w in float, summed in any order, fused or not: each term meets at most k roundings, the reference one more, so
/// |error| <= (k + 2)·u·Σ|x·w| with room for the higher powers of u.
template <class W>
double dot_bound(const float* x, const W* w, std::size_t k) {
  double sum = 0;
  for (std::size_t i = 0; i < k; ++i) sum += std::abs(double{x[i]} * static_cast<double>(w[i]));
  return static_cast<double>(k + 2) * u * sum;
}

TEST_CASE_TEMPLATE("matmul and matmul_prompt agree with the reference for every shape, stride and weight type", B,
                   OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 301;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  context_of<reference> plain;
  for_each_type(weight_types{}, [&]<class W>() {
    for (const std::size_t k : lengths)
      for (const std::size_t n : sizes{0, 1, 2, 3, 5, 8, 17, 33})
        for (const std::size_t m : sizes{0, 1, 2, 3, 4, 5, 9, 65})
          for (const std::size_t extra : sizes{0, 3}) {
            INFO("k = ", k, ", n = ", n, ", m = ", m, ", extra = ", extra);
            const auto x = padded<float>(m, k, extra).fill(random.uniforms());
            const auto w = padded<W>(n, k, extra).fill(random.uniforms());
            padded<float> got(m, n, extra), prompt(m, n, extra), want(m, n);
            linear_ops<B, W>::matmul(ctx, got.view(), x.view(), w.weight());
            linear_ops<B, W>::matmul_prompt(ctx, prompt.view(), x.view(), w.weight());
            linear_ops<reference, W>::matmul(plain, want.view(), x.view(), w.weight());
            const auto bound = [&](std::size_t r, std::size_t c) { return dot_bound(x.row(r), w.row(c), k); };
            check_within(got, want, bound);
            check_within(prompt, want, bound);
          }
  });
}

TEST_CASE_TEMPLATE("matmul is exact where float is", B, OUTRIDER_TESTED_BACKENDS) {
  // Multiples of 1/16 up to 1: products are multiples of 1/256, 513 of them sum to less than 2^10, so 18 bits hold every partial sum.
  constexpr std::uint64_t seed = 302;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for_each_type(weight_types{}, [&]<class W>() {
    for (const std::size_t k : lengths) {
      CAPTURE(k);
      const auto x = padded<float>(3, k, 5).fill(random.grids());
      const auto w = padded<W>(21, k, 1).fill(random.grids());
      padded<float> got(3, 21), want(3, 21);
      for (std::size_t r = 0; r < 3; ++r)
        for (std::size_t c = 0; c < 21; ++c) {
          int sum = 0;
          for (std::size_t i = 0; i < k; ++i) sum += static_cast<int>(x(r, i) * 16) * static_cast<int>(static_cast<float>(w(c, i)) * 16);
          want(r, c) = static_cast<float>(sum) / 256;
        }
      linear_ops<B, W>::matmul(ctx, got.view(), x.view(), w.weight());
      check_same(got, want);
    }
  });
}

TEST_CASE_TEMPLATE("a matmul row has the bits it has alone, whatever is beside it", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 303;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_type(weight_types{}, [&]<class W>() {
    for (const std::size_t k : sizes{9, 65, 256, 513}) {
      CAPTURE(k);
      const std::size_t n = k / 8 + 3;
      const auto x = padded<float>(source_rows, k).fill(random.uniforms());
      const auto w = padded<W>(n, k).fill(random.uniforms());
      check_rows_are_independent<B>([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
        padded<float> out(rows.size(), n);
        linear_ops<B, W>::matmul(ctx, out.view(), pick(x, rows).read(), w.weight());
        return out.bits();
      });
    }
  });
}

TEST_CASE_TEMPLATE("a matmul output does not depend on which weight rows are beside it", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 304;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for_each_type(weight_types{}, [&]<class W>() {
    const auto x = padded<float>(3, 257).fill(random.uniforms());
    const auto w = padded<W>(21, 257).fill(random.uniforms());
    padded<float> whole(3, 21);
    linear_ops<B, W>::matmul(ctx, whole.view(), x.view(), w.weight());
    for (std::size_t first = 0; first < 21; ++first)
      for (const std::size_t count : sizes{1, 2, 3, 7}) {
        if (first + count > 21) continue;
        INFO("first = ", first, ", count = ", count);
        padded<float> part(3, count);
        linear_ops<B, W>::matmul(ctx, part.view(), x.view(), w.weight().slice_rows(first, count));
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
  for_each_type(weight_types{}, [&]<class W>() {
    const auto x = padded<float>(source_rows, k).fill(random.uniforms());
    const auto w = padded<W>(experts * n, k).fill(random.uniforms());
    const auto chosen = padded<std::int32_t>(source_rows, 2).fill(random.indexes(experts));
    const auto ids = padded<token_id>(source_rows, n).fill(random.indexes(experts * n));
    check_threads_do_not_matter<B>([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
      padded<float> out(rows.size(), n);
      linear_ops<B, W>::matmul(ctx, out.view(), pick(x, rows).read(), w.weight().slice_rows(n, n));
      return out.bits();
    });
    check_threads_do_not_matter<B>([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
      padded<float> out(rows.size() * 2, n);
      linear_ops<B, W>::expert_matmul(ctx, out.view(), pick(x, rows).read(), w.weight(), pick(chosen, rows).data());
      return out.bits(2);
    });
    check_threads_do_not_matter<B>([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
      padded<float> out(rows.size(), n);
      linear_ops<B, W>::gathered_matmul(ctx, out.view(), pick(x, rows).read(), w.weight(), pick(ids, rows).read());
      return out.bits();
    });
  });
}

TEST_CASE_TEMPLATE("expert_matmul sends every row through its own experts", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 306;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for_each_type(weight_types{}, [&]<class W>() {
    for (const std::size_t k : lengths)
      for (const std::size_t n : sizes{0, 1, 9, 16})
        for (const std::size_t m : sizes{0, 1, 2, 5})
          for (const std::size_t s : sizes{1, 2, 3})
            for (const std::size_t extra : sizes{0, 3}) {
              INFO("k = ", k, ", n = ", n, ", m = ", m, ", s = ", s, ", extra = ", extra);
              constexpr std::size_t experts = 4;
              const auto x = padded<float>(m, k, extra).fill(random.uniforms());
              const auto w = padded<W>(experts * n, k, extra).fill(random.uniforms());
              const auto chosen = padded<std::int32_t>(m, s).fill(random.indexes(experts));
              padded<float> got(m * s, n, extra), want(m * s, n);
              linear_ops<B, W>::expert_matmul(ctx, got.view(), x.view(), w.weight(), chosen.data());
              const auto weight_row = [&](std::size_t i, std::size_t c) {
                return w.row(static_cast<std::size_t>(chosen(i / s, i % s)) * n + c);
              };
              context_of<reference> plain;
              for (std::size_t i = 0; i < m * s; ++i)
                linear_ops<reference, W>::matmul(plain, want.view().slice_rows(i, 1), x.view().slice_rows(i / s, 1),
                                                 w.weight().slice_rows(static_cast<std::size_t>(chosen(i / s, i % s)) * n, n));
              check_within(got, want, [&](std::size_t i, std::size_t c) { return dot_bound(x.row(i / s), weight_row(i, c), k); });
            }
  });
}

TEST_CASE_TEMPLATE("an expert_matmul row has the bits it has alone, whatever is beside it", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 307;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_type(weight_types{}, [&]<class W>() {
    constexpr std::size_t k = 129, n = 19, s = 2, experts = 3;
    const auto x = padded<float>(source_rows, k).fill(random.uniforms());
    const auto w = padded<W>(experts * n, k).fill(random.uniforms());
    const auto chosen = padded<std::int32_t>(source_rows, s).fill(random.indexes(experts));
    check_rows_are_independent<B>([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
      padded<float> out(rows.size() * s, n);
      linear_ops<B, W>::expert_matmul(ctx, out.view(), pick(x, rows).read(), w.weight(), pick(chosen, rows).data());
      return out.bits(s);
    });
  });
}

TEST_CASE_TEMPLATE("gathered_matmul multiplies with the rows named and no others", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 308;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for_each_type(weight_types{}, [&]<class W>() {
    for (const std::size_t k : lengths)
      for (const std::size_t c : sizes{0, 1, 5, 17})
        for (const std::size_t m : sizes{0, 1, 2, 5})
          for (const std::size_t extra : sizes{0, 3}) {
            INFO("k = ", k, ", c = ", c, ", m = ", m, ", extra = ", extra);
            const auto x = padded<float>(m, k, extra).fill(random.uniforms());
            padded<W> w(80, k, extra);  // odd rows stay poisoned: nobody asks for them
            for (std::size_t r = 0; r < w.rows(); r += 2)
              for (std::size_t i = 0; i < k; ++i) w(r, i) = static_cast<W>(random.uniform());
            const auto ids = padded<token_id>(m, c, extra).fill([&] { return 2 * random.index(40); });
            padded<float> got(m, c, extra), want(m, c);
            linear_ops<B, W>::gathered_matmul(ctx, got.view(), x.view(), w.weight(), ids.view());
            context_of<reference> plain;
            for (std::size_t r = 0; r < m; ++r)
              for (std::size_t j = 0; j < c; ++j)
                linear_ops<reference, W>::matmul(plain, want.view().slice_rows(r, 1).slice_cols(j, 1), x.view().slice_rows(r, 1),
                                                 w.weight().slice_rows(static_cast<std::size_t>(ids(r, j)), 1));
            check_within(got, want,
                         [&](std::size_t r, std::size_t j) { return dot_bound(x.row(r), w.row(static_cast<std::size_t>(ids(r, j))), k); });
          }
  });
}

TEST_CASE_TEMPLATE("a gathered_matmul row has the bits it has alone, whatever is beside it", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 309;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_type(weight_types{}, [&]<class W>() {
    constexpr std::size_t k = 129, n = 40, c = 21;
    const auto x = padded<float>(source_rows, k).fill(random.uniforms());
    const auto w = padded<W>(n, k).fill(random.uniforms());
    const auto ids = padded<token_id>(source_rows, c).fill(random.indexes(n));
    check_rows_are_independent<B>([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
      padded<float> out(rows.size(), c);
      linear_ops<B, W>::gathered_matmul(ctx, out.view(), pick(x, rows).read(), w.weight(), pick(ids, rows).read());
      return out.bits();
    });
  });
}

TEST_CASE_TEMPLATE("gather_rows widens the rows named and multiplies them once", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 310;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for_each_type(weight_types{}, [&]<class W>() {
    for (const std::size_t k : lengths)
      for (const std::size_t m : sizes{0, 1, 4})
        for (const std::size_t extra : sizes{0, 3})
          for (const float factor : {1.0f, 39.25f, 0.1f}) {
            INFO("k = ", k, ", m = ", m, ", extra = ", extra, ", factor = ", factor);
            const auto w = padded<W>(9, k, extra).fill(random.uniforms());
            const auto ids = padded<token_id>(m, 1).fill(random.indexes(9));
            padded<float> got(m, k, extra), want(m, k);
            for (std::size_t r = 0; r < m; ++r)
              for (std::size_t c = 0; c < k; ++c) want(r, c) = static_cast<float>(w(static_cast<std::size_t>(ids(r, 0)), c)) * factor;
            linear_ops<B, W>::gather_rows(ctx, got.view(), w.weight(), ids.data(), factor);
            check_same(got, want);
          }
  });
}

}  // namespace contract
