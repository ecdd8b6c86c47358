// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>

#include "fixture.hpp"

namespace contract {

using outrider::pointwise_ops;
using outrider::reference;

inline constexpr float infinity = std::numeric_limits<float>::infinity();
inline constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// One row of given values.
template <class T = float>
padded<T> row_of(const std::vector<T>& values) {
  return padded<T>(1, values.size()).fill([&, i = std::size_t{0}]() mutable { return values[i++]; });
}

// ------------------------------------------------------------------------------------------------ rms_norm

/// A mean of n squares is off by (n + 1)·u at most and its root by half of that; eps, root, division and two products add one rounding
/// each, the reference's own rounding one more: (n/2 + 8)·u relative.
inline double rms_norm_bound(float want, std::size_t n) { return (static_cast<double>(n) / 2 + 8) * u * std::abs(double{want}); }

TEST_CASE_TEMPLATE("rms_norm agrees with the reference, with and without weight, also in place", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 401;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  context_of<reference> plain;
  for (const std::size_t n : lengths)
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t extra : sizes{0, 5})
        for (const bool weighted : {false, true}) {
          INFO("n = ", n, ", m = ", m, ", extra = ", extra, ", weighted = ", weighted);
          const auto x = padded<float>(m, n, extra).fill(random.uniforms(30));
          const auto weights = padded<float>(1, n).fill(random.uniforms(2));
          const float* weight = weighted ? weights.data() : nullptr;
          padded<float> got(m, n, extra), want(m, n), in_place = x;
          pointwise_ops<B>::rms_norm(ctx, got.view(), x.view(), weight, 1e-6f);
          pointwise_ops<B>::rms_norm(ctx, in_place.view(), in_place.view(), weight, 1e-6f);
          pointwise_ops<reference>::rms_norm(plain, want.view(), x.view(), weight, 1e-6f);
          check_within(got, want, [&](std::size_t r, std::size_t c) { return rms_norm_bound(want(r, c), n); });
          check_same(in_place, got);
        }
}

TEST_CASE_TEMPLATE("pitfall 26: rms_norm uses the weight as stored and matches the known row", B, OUTRIDER_TESTED_BACKENDS) {
  context_of<B> ctx(execution{1});
  const auto x = row_of({1, -2, 3, -4}), weight = row_of({1, 2, 0.5f, -1});
  const auto known = row_of({0.36514837f, -0.73029673f, 1.09544516f, -1.46059346f});
  const auto scaled = row_of({0.36514837f, -1.46059346f, 0.54772258f, 1.46059346f});
  padded<float> got(1, 4);
  pointwise_ops<B>::rms_norm(ctx, got.view(), x.view(), nullptr, 1e-6f);
  check_within(got, known, [&](std::size_t, std::size_t c) { return rms_norm_bound(known(0, c), 4); });
  pointwise_ops<B>::rms_norm(ctx, got.view(), x.view(), weight.data(), 1e-6f);
  check_within(got, scaled, [&](std::size_t, std::size_t c) { return rms_norm_bound(scaled(0, c), 4); });
}

TEST_CASE_TEMPLATE("pitfall 127: rms_norm of large residuals is finite and of zeros is zero", B, OUTRIDER_TESTED_BACKENDS) {
  context_of<B> ctx(execution{1});
  const auto large = padded<float>(1, 513).fill([] { return 1e15f; }), zeros = padded<float>(1, 513).fill([] { return 0.0f; });
  const auto ones = padded<float>(1, 513).fill([] { return 1.0f; });
  padded<float> got(1, 513);
  pointwise_ops<B>::rms_norm(ctx, got.view(), large.view(), nullptr, 1e-6f);
  check_within(got, ones, [](std::size_t, std::size_t) { return rms_norm_bound(1, 513); });
  pointwise_ops<B>::rms_norm(ctx, got.view(), zeros.view(), nullptr, 1e-6f);
  check_same(got, zeros);
}

// ------------------------------------------------------------------------------------------------ rope

/// theta^(−2i / dim) for the first `live` pairs of a head, then 0.
inline padded<float> frequencies(double theta, std::size_t dim, std::size_t live) {
  return padded<float>(1, dim / 2).fill([=, i = std::size_t{0}]() mutable {
    const double f = i < live ? std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(dim)) : 0.0;
    return ++i, static_cast<float>(f);
  });
}

TEST_CASE_TEMPLATE("rope_table takes the functions of the angle rounded to float", B, OUTRIDER_TESTED_BACKENDS) {
  // A function within one ulp of a value up to 1 is off by 2·u, the reference's own rounding by u.
  context_of<B> ctx(execution{1});
  const auto positions = padded<std::int32_t>(1, 9).fill(
      [values = {0, 1, 2, 3, 511, 512, 1023, 65537, 131071}, i = 0]() mutable { return values.begin()[i++]; });
  for (const std::size_t h : lengths)
    for (const std::size_t m : sizes{0, 1, 9})
      for (const std::size_t extra : sizes{0, 3}) {
        INFO("h = ", h, ", m = ", m, ", extra = ", extra);
        const auto f = frequencies(10000, 2 * h, h);
        padded<float> cos(m, h, extra), sin(m, h, extra), want_cos(m, h), want_sin(m, h);
        for (std::size_t r = 0; r < m; ++r)
          for (std::size_t i = 0; i < h; ++i) {
            const float angle = static_cast<float>(positions(0, r)) * f(0, i);
            want_cos(r, i) = static_cast<float>(std::cos(double{angle}));
            want_sin(r, i) = static_cast<float>(std::sin(double{angle}));
          }
        pointwise_ops<B>::rope_table(ctx, cos.view(), sin.view(), positions.data(), f.data());
        check_within(cos, want_cos, [](std::size_t, std::size_t) { return 3 * u; });
        check_within(sin, want_sin, [](std::size_t, std::size_t) { return 3 * u; });
      }
}

TEST_CASE_TEMPLATE("rope agrees with the reference for several heads a row", B, OUTRIDER_TESTED_BACKENDS) {
  // a·c − b·s: two products and a difference in float, one rounding in the reference: 3·u·(|a·c| + |b·s|), and room for the powers of u.
  constexpr std::uint64_t seed = 402;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  context_of<reference> plain;
  for (const std::size_t h : lengths)
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t heads : sizes{1, 2, 5})
        for (const std::size_t extra : sizes{0, 3}) {
          INFO("h = ", h, ", m = ", m, ", heads = ", heads, ", extra = ", extra);
          const auto cos = padded<float>(m, h, extra).fill(random.uniforms()), sin = padded<float>(m, h, extra).fill(random.uniforms());
          const auto x = padded<float>(m * heads, 2 * h, extra).fill(random.uniforms(8));
          padded<float> got = x, want = x;
          pointwise_ops<B>::rope(ctx, got.view(), cos.view(), sin.view());
          pointwise_ops<reference>::rope(plain, want.view(), cos.view(), sin.view());
          check_within(got, want, [&](std::size_t r, std::size_t c) {
            const std::size_t i = c < h ? c : c - h;
            const double a = std::abs(double{x(r, c)}), b = std::abs(double{x(r, c < h ? c + h : i)});
            return 3.01 * u * (a * std::abs(double{cos(r / heads, i)}) + b * std::abs(double{sin(r / heads, i)}));
          });
        }
}

TEST_CASE_TEMPLATE("pitfall 28: full layers rotate 0-63 and 256-319 with denominator 512 and pass the rest exactly", B,
                   OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 403;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  const auto f = frequencies(1e6, 512, 64);
  const std::int32_t position = 1;
  padded<float> cos(1, 256), sin(1, 256);
  pointwise_ops<B>::rope_table(ctx, cos.view(), sin.view(), &position, f.data());
  CHECK(std::abs(double{sin(0, 1)} - std::sin(0.9474635257)) < 4 * u);  // 1e6^(−2/512)
  CHECK(std::abs(double{sin(0, 1)} - std::sin(0.8058421878)) > 0.05);   // not 1e6^(−2/128)

  const auto x = padded<float>(1, 512).fill(random.uniforms());
  padded<float> y = x;
  pointwise_ops<B>::rope(ctx, y.view(), cos.view(), sin.view());
  for (std::size_t c = 0; c < 512; ++c) {
    CAPTURE(c);
    CHECK((y(0, c) == x(0, c)) == (c % 256 >= 64));
  }
}

// ------------------------------------------------------------------------------------------------ gelu_mul, add, scale, copy, softcap

/// gelu(z)·up: the inner polynomial is off by 5·u relative, which tanh damps to 5·u·max(v·sech²v) < 3·u; tanh itself by 4 ulp = 8·u; sum,
/// three products and the reference by u each, of at most |z|: together below 16·u·|z·up|.
inline double gelu_bound(float z, float up) { return 16 * u * std::abs(double{z} * double{up}); }

TEST_CASE_TEMPLATE("gelu_mul agrees with the reference, also in place of either input", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 404;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  context_of<reference> plain;
  for (const std::size_t n : lengths)
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t extra : sizes{0, 5}) {
        INFO("n = ", n, ", m = ", m, ", extra = ", extra);
        const auto gate = padded<float>(m, n, extra).fill(random.uniforms(6)), up = padded<float>(m, n, extra).fill(random.uniforms(3));
        padded<float> got(m, n, extra), want(m, n), over_gate = gate, over_up = up;
        pointwise_ops<B>::gelu_mul(ctx, got.view(), gate.view(), up.view());
        pointwise_ops<B>::gelu_mul(ctx, over_gate.view(), over_gate.view(), up.view());
        pointwise_ops<B>::gelu_mul(ctx, over_up.view(), gate.view(), over_up.view());
        pointwise_ops<reference>::gelu_mul(plain, want.view(), gate.view(), up.view());
        check_within(got, want, [&](std::size_t r, std::size_t c) { return gelu_bound(gate(r, c), up(r, c)); });
        check_same(over_gate, got);
        check_same(over_up, got);
      }
}

TEST_CASE_TEMPLATE("gelu_mul matches the known values of gelu_tanh", B, OUTRIDER_TESTED_BACKENDS) {
  context_of<B> ctx(execution{1});
  const auto z = row_of({-3, -1, -0.5f, 0, 0.5f, 1, 3}), ones = row_of({1, 1, 1, 1, 1, 1, 1});
  const auto known = row_of({-0.0036373921f, -0.1588080094f, -0.1542859902f, 0, 0.3457140098f, 0.8411919906f, 2.9963626079f});
  padded<float> got(1, 7);
  pointwise_ops<B>::gelu_mul(ctx, got.view(), z.view(), ones.view());
  check_within(got, known, [&](std::size_t, std::size_t c) { return gelu_bound(z(0, c), 1); });
}

TEST_CASE_TEMPLATE("pitfall 127: gelu_mul of huge values is the value or zero, never NaN", B, OUTRIDER_TESTED_BACKENDS) {
  context_of<B> ctx(execution{1});
  const auto z = row_of({20, 100, 1e4f, 1e15f, -20, -100, -1e4f, -1e15f}), ones = padded<float>(1, 8).fill([] { return 1.0f; });
  padded<float> got(1, 8);
  pointwise_ops<B>::gelu_mul(ctx, got.view(), z.view(), ones.view());
  for (std::size_t c = 0; c < 8; ++c) {
    CAPTURE(c);
    CHECK(got(0, c) == (c < 4 ? z(0, c) : 0.0f));
  }
}

TEST_CASE_TEMPLATE("add, scale and copy are exact, also in place", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 405;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for (const std::size_t n : lengths)
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t extra : sizes{0, 5}) {
        INFO("n = ", n, ", m = ", m, ", extra = ", extra);
        const auto x = padded<float>(m, n, extra).fill(random.uniforms()), y = padded<float>(m, n, extra).fill(random.uniforms(1000));
        padded<float> sum(m, n), product(m, n), got(m, n, extra), over_x = x, over_y = y, scaled = x;
        for (std::size_t r = 0; r < m; ++r)
          for (std::size_t c = 0; c < n; ++c) {
            sum(r, c) = x(r, c) + y(r, c);
            product(r, c) = x(r, c) * 0.7f;
          }
        pointwise_ops<B>::add(ctx, got.view(), x.view(), y.view());
        check_same(got, sum);
        pointwise_ops<B>::add(ctx, over_x.view(), over_x.view(), y.view());
        check_same(over_x, sum);
        pointwise_ops<B>::add(ctx, over_y.view(), x.view(), over_y.view());
        check_same(over_y, sum);
        pointwise_ops<B>::scale(ctx, got.view(), x.view(), 0.7f);
        check_same(got, product);
        pointwise_ops<B>::scale(ctx, scaled.view(), scaled.view(), 0.7f);
        check_same(scaled, product);
        pointwise_ops<B>::copy(ctx, got.view(), x.view());
        check_same(got, x);
      }
}

/// cap·tanh(x/cap): the quotient's rounding is damped below u, tanh is off by 4 ulp = 8·u, product and reference by u each.
inline double softcap_bound(float cap) { return 12 * u * double{cap}; }

TEST_CASE_TEMPLATE("softcap agrees with the reference, also in place", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 406;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  context_of<reference> plain;
  for (const std::size_t n : lengths)
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t extra : sizes{0, 5}) {
        INFO("n = ", n, ", m = ", m, ", extra = ", extra);
        const auto x = padded<float>(m, n, extra).fill(random.uniforms(80));
        padded<float> got(m, n, extra), want(m, n), in_place = x;
        pointwise_ops<B>::softcap(ctx, got.view(), x.view(), 30);
        pointwise_ops<B>::softcap(ctx, in_place.view(), in_place.view(), 30);
        pointwise_ops<reference>::softcap(plain, want.view(), x.view(), 30);
        check_within(got, want, [](std::size_t, std::size_t) { return softcap_bound(30); });
        check_same(in_place, got);
      }
}

TEST_CASE_TEMPLATE("softcap matches the known values, and huge logits reach the cap", B, OUTRIDER_TESTED_BACKENDS) {
  context_of<B> ctx(execution{1});
  const auto x = row_of({1, 10, 30, 100, 0, 1e4f, -1e4f, 1e30f, -1e30f});
  const auto known = row_of({0.9996297942f, 9.6453821260f, 22.8478246787f, 29.9237390242f, 0, 30, -30, 30, -30});
  padded<float> got(1, 9);
  pointwise_ops<B>::softcap(ctx, got.view(), x.view(), 30);
  check_within(got, known, [](std::size_t, std::size_t) { return softcap_bound(30); });
}

TEST_CASE_TEMPLATE("row-wise arithmetic gives a row the bits it has alone, whatever is beside it and with any threads", B,
                   OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 407;
  CAPTURE(seed);
  random_numbers random(seed);
  using out_view = matrix_view<float>;
  using in_view = matrix_view<const float>;
  for (const std::size_t n : sizes{7, 64, 514}) {
    CAPTURE(n);
    const auto x = padded<float>(source_rows, n).fill(random.uniforms(20)), y = padded<float>(source_rows, n).fill(random.uniforms(3));
    const auto weight = padded<float>(1, n).fill(random.uniforms());
    const auto check = [&](const std::function<void(context_of<B>&, out_view, in_view, in_view)>& op) {
      const row_op<B> run = [&](context_of<B>& ctx, std::span<const std::size_t> rows) {
        padded<float> out(rows.size(), n);
        op(ctx, out.view(), pick(x, rows).read(), pick(y, rows).read());
        return out.bits();
      };
      check_rows_are_independent<B>(run);
      check_threads_do_not_matter<B>(run);
    };
    check([&](auto& ctx, out_view out, in_view a, in_view) { pointwise_ops<B>::rms_norm(ctx, out, a, weight.data(), 1e-6f); });
    check([&](auto& ctx, out_view out, in_view a, in_view b) { pointwise_ops<B>::gelu_mul(ctx, out, a, b); });
    check([&](auto& ctx, out_view out, in_view a, in_view) { pointwise_ops<B>::softcap(ctx, out, a, 30); });
    check([&](auto& ctx, out_view out, in_view a, in_view b) { pointwise_ops<B>::add(ctx, out, a, b); });
    check([&](auto& ctx, out_view out, in_view a, in_view) { pointwise_ops<B>::scale(ctx, out, a, 0.3f); });
  }
}

TEST_CASE_TEMPLATE("a rope row has the bits it has alone, whatever is beside it and with any threads", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 408;
  CAPTURE(seed);
  random_numbers random(seed);
  constexpr std::size_t heads = 3;
  for (const std::size_t h : sizes{4, 33, 256}) {
    CAPTURE(h);
    const auto x = padded<float>(source_rows, heads * 2 * h).fill(random.uniforms());
    const auto positions = padded<std::int32_t>(source_rows, 1).fill(random.indexes(5000));
    const auto f = frequencies(10000, 2 * h, h);
    const row_op<B> run = [&](context_of<B>& ctx, std::span<const std::size_t> rows) {
      padded<float> out = pick(x, rows), cos(rows.size(), h), sin(rows.size(), h);
      pointwise_ops<B>::rope_table(ctx, cos.view(), sin.view(), pick(positions, rows).data(), f.data());
      pointwise_ops<B>::rope(ctx, out.view().split_cols(2 * h), cos.view(), sin.view());
      return out.bits();
    };
    check_rows_are_independent<B>(run);
    check_threads_do_not_matter<B>(run);
  }
}

}  // namespace contract
