// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Products with int8 activations: every backend has the bits of the definition, whatever the shape, the company of a row and the threads.
#pragma once
#include "grouped_weights.hpp"

namespace contract {

using outrider::linear_ops;
using outrider::pointwise_ops;
using outrider::reference;

TEST_CASE_TEMPLATE("quantize gives the blocks of the definition bit for bit", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 701;
  CAPTURE(seed);
  random_numbers random(seed);
  for (const unsigned threads : {1u, 3u}) {
    context_of<B> ctx(execution{threads});
    for (const std::size_t m : sizes{0, 1, 2, 5, 70})
      for (const std::size_t k : sizes{32, 64, 96, 1024}) {
        INFO("threads = ", threads, ", m = ", m, ", k = ", k);
        auto x = activations(random, m, k, 1);
        if (m > 4) x(3, 7) = std::numeric_limits<float>::infinity();
        if (m > 4) x(4, 0) = -0.0f, x(4, 1) = 0x1p-149f, x(4, 2) = 3e38f;
        int8_rows got(m, k / 32, 1);
        const int8_rows want(x, 1);
        pointwise_ops<B>::quantize(ctx, got.view(), x.read());
        CHECK(got.same_bits_as(want));
      }
  }
}

/// matmul on B and on reference, for one matrix.
template <class B, class W>
void check_int8_matmul(random_numbers& random, const grouped_weights<W>& w, std::size_t m, std::size_t extra, unsigned threads) {
  if (!takes_case()) return;
  INFO("n = ", w.rows, ", k = ", w.cols, ", m = ", m, ", extra = ", extra, ", threads = ", threads);
  context_of<B> ctx(execution{threads});
  outrider::reference_context plain;
  const int8_rows x(activations(random, m, w.cols, m / 2), extra);
  padded<float> got(m, w.rows, extra), want(m, w.rows);
  linear_ops<B, grouped<W>>::matmul(ctx, got.view(), x.read(), w.view());
  linear_ops<reference, grouped<W>>::matmul(plain, want.view(), x.read(), w.view());
  check_exact(got, want);
}

TEST_CASE_TEMPLATE("int8 matmul has the bits of the definition for every format, shape, stride and number of threads", B,
                   OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 702;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_grouped([&]<class W>() {
    for (const std::size_t blocks : sizes{1, 3})
      for (const std::size_t n : sizes{1, 16, 17, 69}) {
        const grouped_weights<W> w(random, n, blocks * W::elements);
        for (const std::size_t m : sizes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 17})
          check_int8_matmul<B>(random, w, m, m % 2 == 0 ? 3 : 0, m % 3 == 0 ? 3 : 1);
      }
    const grouped_weights<W> w(random, 16 * 21 + 5, 2 * W::elements);  // several streams of groups, and more rows than go together
    for (const std::size_t m : sizes{1, 4, 300}) check_int8_matmul<B>(random, w, m, 0, 2);
  });
}

TEST_CASE_TEMPLATE("int8 matmul is exact where integers and scales are at their ends", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 703;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  outrider::reference_context plain;
  for_each_grouped([&]<class W>() {
    for (const block_bits kind : {block_bits::zeros, block_bits::ones, block_bits::extreme})
      for (const float sign : {1.0f, -1.0f, 0.0f}) {  // 0: signs in turn
        INFO("bits ", static_cast<int>(kind), ", sign ", sign);
        const grouped_weights<W> w(random, 33, 2 * W::elements, kind);
        padded<float> floats(9, w.cols);
        for (std::size_t r = 0; r < floats.rows(); ++r)
          for (std::size_t c = 0; c < floats.cols(); ++c) floats(r, c) = sign != 0 ? sign : (c + r) % 2 == 0 ? 1.0f : -1.0f;  // q = ±127
        const int8_rows x(floats, 0);
        padded<float> got(9, w.rows), want(9, w.rows);
        linear_ops<B, grouped<W>>::matmul(ctx, got.view(), x.read(), w.view());
        linear_ops<reference, grouped<W>>::matmul(plain, want.view(), x.read(), w.view());
        check_exact(got, want);
      }
  });
}

TEST_CASE_TEMPLATE("int8 expert_matmul takes every row through its experts", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 704;
  constexpr std::size_t experts = 5;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for_each_grouped([&]<class W>() {
    for (const std::size_t n : sizes{16, 48}) {
      const grouped_weights<W> w(random, experts * n, W::elements);
      for (const std::size_t m : sizes{0, 1, 2, 7})
        for (const std::size_t active : sizes{1, 2}) {
          INFO("n = ", n, ", m = ", m, ", active = ", active);
          context_of<B> ctx(execution{m == 7 ? 3u : 1u});
          std::vector<std::int32_t> chosen(m * active);
          for (std::int32_t& e : chosen) e = random.index(experts);
          const int8_rows x(activations(random, m, w.cols), 1);
          padded<float> got(m * active, n, 2), want(m * active, n);
          linear_ops<B, grouped<W>>::expert_matmul(ctx, got.view(), x.read(), w.view(), chosen.data());
          linear_ops<reference, grouped<W>>::expert_matmul(plain, want.view(), x.read(), w.view(), chosen.data());
          check_exact(got, want);
        }
    }
  });
}

TEST_CASE_TEMPLATE("gather_rows from groups gives the floats of the stored format bit for bit", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 705;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  outrider::reference_context plain;
  for_each_grouped([&]<class W>() {
    for (const block_bits kind : {block_bits::random, block_bits::ones, block_bits::extreme})
      for (const float factor : {1.0f, 39.25f}) {
        INFO("bits ", static_cast<int>(kind), ", factor ", factor);
        const grouped_weights<W> w(random, 37, 2 * W::elements, kind);
        const std::vector<token_id> ids{36, 0, 15, 16, 16, 31};
        padded<float> got(ids.size(), w.cols, 3), want(ids.size(), w.cols);
        linear_ops<B, grouped<W>>::gather_rows(ctx, got.view(), w.view(), ids.data(), factor);
        linear_ops<reference, W>::gather_rows(plain, want.view(), w.as_stored(), ids.data(), factor);
        check_exact(got, want);
      }
  });
}

}  // namespace contract
