// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/backend/reference.hpp"
#define OUTRIDER_TESTED_BACKENDS outrider::reference
#include <complex>

#include "ops_contract.hpp"

// The shared bodies compare the reference with itself where they have no vector of known values. Here those ops meet a formula written
// another way.

namespace contract {

TEST_CASE("the reference sums products in double") {
  context_of<reference> ctx;
  const auto x = row_of({1e8f, 1, -1e8f, 3}), w = row_of({1, 1, 1, 0.25f});  // in float 1e8 + 1 is 1e8
  padded<float> out(1, 1);
  linear_ops<reference, float>::matmul(ctx, out.view(), x.view(), w.weight());
  CHECK(out(0, 0) == 1.75f);
}

TEST_CASE("the reference rope turns the pair (i, i + h) by the angle as a complex number") {
  constexpr std::uint64_t seed = 701;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<reference> ctx;
  constexpr std::size_t m = 3, heads = 2, h = 5;
  padded<float> cos(m, h), sin(m, h), want(m * heads, 2 * h);
  const auto x = padded<float>(m * heads, 2 * h).fill(random.uniforms());
  padded<float> got = x;
  for (std::size_t r = 0; r < m; ++r)
    for (std::size_t i = 0; i < h; ++i) {
      const auto turn = std::polar(1.0L, static_cast<long double>(random.uniform()) * 3);
      cos(r, i) = static_cast<float>(turn.real());
      sin(r, i) = static_cast<float>(turn.imag());
      for (std::size_t head = 0; head < heads; ++head) {
        const std::size_t row = r * heads + head;
        const std::complex<long double> pair{x(row, i), x(row, i + h)}, turned = pair * turn;
        want(row, i) = static_cast<float>(turned.real());
        want(row, i + h) = static_cast<float>(turned.imag());
      }
    }
  pointwise_ops<reference>::rope(ctx, got.view(), cos.view(), sin.view());
  check_within(got, want, [](std::size_t, std::size_t) { return 4 * u; });  // cos and sin rounded: 2·u; both results: u each
}

TEST_CASE("the reference weighted_sum is a product of a row of weights and the rows of x") {
  context_of<reference> ctx;
  padded<float> x(4, 2), weights(2, 2), out(2, 2), want(2, 2);
  x.fill([i = 0]() mutable { return static_cast<float>(++i); });        // 1 2 / 3 4 / 5 6 / 7 8
  weights.fill([i = 0]() mutable { return static_cast<float>(++i); });  // 1 2 / 3 4
  want.fill([values = {7, 10, 43, 50}, i = 0]() mutable { return static_cast<float>(values.begin()[i++]); });
  pointwise_ops<reference>::weighted_sum(ctx, out.view(), x.view(), weights.view());
  check_same(out, want);
}

TEST_CASE("the reference attend is softmax of all scores times all values") {
  constexpr std::uint64_t seed = 702;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<reference> ctx;
  for (const std::size_t d : sizes{8, 64, 256, 300, 512}) {
    CAPTURE(d);
    constexpr std::size_t m = 4, start = 37, q_heads = 6, kv_heads = 2, width = 20, rows = start + m;
    const auto q = padded<float>(m, q_heads * d).fill(random.uniforms(0.5f));
    const auto k = padded<float>(rows, kv_heads * d).fill(random.uniforms()), v = padded<float>(rows, kv_heads * d).fill(random.uniforms());
    const kv_memory<float> memory(layout::growing, rows, kv_heads, d);
    attention_ops<reference, float>::append(ctx, memory.view(), k.view(), v.view(), 0);
    padded<float> got(m, q_heads * d), want(m, q_heads * d);
    for (std::size_t r = 0; r < m; ++r)
      for (std::size_t h = 0; h < q_heads; ++h) {
        const std::size_t position = start + r, head = h / 3;
        std::vector<long double> weights(rows, 0);
        for (std::size_t p = 0; p < rows; ++p) {
          if (p > position || p + width <= position) continue;  // i − W < j <= i
          long double score = 0;
          for (std::size_t i = 0; i < d; ++i)
            score += static_cast<long double>(q(r, h * d + i)) * static_cast<long double>(k(p, head * d + i));
          weights[p] = std::exp(score);  // |score| <= d/2: no overflow in long double
        }
        const long double total = std::accumulate(weights.begin(), weights.end(), 0.0L);
        for (std::size_t i = 0; i < d; ++i) {
          long double sum = 0;
          for (std::size_t p = 0; p < rows; ++p) sum += weights[p] / total * static_cast<long double>(v(p, head * d + i));
          want(r, h * d + i) = static_cast<float>(sum);
        }
      }
    attention_ops<reference, float>::attend(ctx, got.view(), q.view(), memory.read(), {start + 1, width});
    check_within(got, want, [](std::size_t, std::size_t) { return 3 * u; });  // both round a value of at most 1 once
  }
}

}  // namespace contract
