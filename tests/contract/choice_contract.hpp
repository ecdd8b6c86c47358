// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The ops that choose: top_k, argmax, mask, gather_ids, route_experts, weighted_sum.
#pragma once
#include <algorithm>

#include "fixture.hpp"
#include "pointwise_contract.hpp"

namespace contract {

inline constexpr matrix_view<const token_id> no_ids{};

/// A permutation of 0 … n − 1, so that the id of a column says nothing about its place.
inline padded<token_id> shuffled_ids(std::size_t m, std::size_t n, random_numbers& random) {
  padded<token_id> ids(m, n, 2);
  for (std::size_t r = 0; r < m; ++r) {
    for (std::size_t c = 0; c < n; ++c) ids(r, c) = static_cast<token_id>(c);
    for (std::size_t c = n; c > 1; --c) std::swap(ids(r, c - 1), ids(r, random.below(c)));
  }
  return ids;
}

/// Few distinct values, so that most of them tie, and some −∞.
inline auto tied(random_numbers& random) {
  return [&random] {
    const auto draw = random.below(10);
    return draw == 0 ? -infinity : static_cast<float>(draw) - 5;
  };
}

// ------------------------------------------------------------------------------------------------ top_k

TEST_CASE_TEMPLATE("pitfall 119: top_k is a stable sort by falling value: ties give the lowest column first", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 501;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for (const std::size_t n : lengths)
    for (const std::size_t k : sizes{0, 1, 2, 8, 32, n})
      for (const std::size_t m : sizes{0, 1, 3})
        for (const bool ties : {false, true}) {
          if (k > n) continue;
          INFO("n = ", n, ", k = ", k, ", m = ", m, ", ties = ", ties);
          padded<float> x(m, n, 3);
          if (ties)
            x.fill(tied(random));
          else
            x.fill(random.uniforms());
          padded<std::int32_t> got(m, k, 3), want(m, k);
          for (std::size_t r = 0; r < m; ++r) {
            std::vector<std::int32_t> order(n);
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
              return x(r, static_cast<std::size_t>(a)) > x(r, static_cast<std::size_t>(b));
            });
            for (std::size_t j = 0; j < k; ++j) want(r, j) = order[j];
          }
          pointwise_ops<B>::top_k(ctx, got.view(), x.view());
          check_same(got, want);
        }
}

TEST_CASE_TEMPLATE("top_k takes both zeros as equal", B, OUTRIDER_TESTED_BACKENDS) {
  context_of<B> ctx(execution{1});
  const auto x = row_of({-1, -0.0f, 0.0f, -0.0f, 1});
  padded<std::int32_t> got(1, 4);
  pointwise_ops<B>::top_k(ctx, got.view(), x.view());
  check_same(got, row_of<std::int32_t>({4, 1, 2, 3}));
}

TEST_CASE_TEMPLATE("top_k gives distinct valid columns even when NaN is among the values", B, OUTRIDER_TESTED_BACKENDS) {
  context_of<B> ctx(execution{1});
  for (const std::size_t numbers : sizes{0, 1, 20, 33}) {
    CAPTURE(numbers);
    const auto x = padded<float>(1, 33).fill([=, i = std::size_t{0}]() mutable { return i++ < numbers ? 1.0f : nan; });
    padded<std::int32_t> got(1, 8);
    pointwise_ops<B>::top_k(ctx, got.view(), x.view());
    std::vector<std::int32_t> columns(got.row(0), got.row(0) + 8);
    std::sort(columns.begin(), columns.end());
    CHECK(std::adjacent_find(columns.begin(), columns.end()) == columns.end());
    CHECK(columns.front() >= 0);
    CHECK(columns.back() < 33);
  }
}

// ------------------------------------------------------------------------------------------------ argmax

template <class B>
token_id argmax_of(const padded<float>& x, matrix_view<const token_id> ids) {
  context_of<B> ctx(execution{1});
  token_id chosen = poison<token_id>();
  pointwise_ops<B>::argmax(ctx, &chosen, x.view(), ids);
  return chosen;
}

TEST_CASE_TEMPLATE("pitfall 41: argmax gives equal maxima to the lowest id, whatever its column", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 502;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for (const std::size_t n : lengths)
    for (const std::size_t m : sizes{0, 1, 3})
      for (const bool named : {false, true})
        for (int repeat = 0; repeat < 5; ++repeat) {
          if (n == 0) continue;  // no column, no id
          INFO("n = ", n, ", m = ", m, ", named = ", named);
          const auto x = padded<float>(m, n, 3).fill(tied(random));
          const auto ids = shuffled_ids(m, n, random);
          std::vector<token_id> got(m, poison<token_id>()), want;
          for (std::size_t r = 0; r < m; ++r) {
            const float largest = *std::max_element(x.row(r), x.row(r) + n);
            token_id lowest = std::numeric_limits<token_id>::max();
            for (std::size_t c = 0; c < n; ++c)
              if (x(r, c) == largest) lowest = std::min(lowest, named ? ids(r, c) : static_cast<token_id>(c));
            want.push_back(lowest);
          }
          pointwise_ops<B>::argmax(ctx, got.data(), x.view(), named ? ids.view() : no_ids);
          CHECK(got == want);
        }
}

TEST_CASE_TEMPLATE("argmax finds a single maximum in every column", B, OUTRIDER_TESTED_BACKENDS) {
  for (const std::size_t n : sizes{1, 7, 33, 100}) {
    auto x = padded<float>(1, n).fill([] { return -3.0f; });
    for (std::size_t c = 0; c < n; ++c) {
      INFO("n = ", n, ", c = ", c);
      x(0, c) = -2;
      CHECK(argmax_of<B>(x, no_ids) == static_cast<token_id>(c));
      x(0, c) = -3;
    }
  }
}

TEST_CASE_TEMPLATE("argmax takes both zeros as equal", B, OUTRIDER_TESTED_BACKENDS) {
  CHECK(argmax_of<B>(row_of({-1, -0.0f, 0.0f}), no_ids) == 1);
}

TEST_CASE_TEMPLATE("argmax never chooses a NaN while a number is there", B, OUTRIDER_TESTED_BACKENDS) {
  for (const std::size_t n : sizes{2, 7, 33, 65})
    for (const float number : {1.0f, -1e30f, -infinity})
      for (std::size_t place = 0; place < n; ++place) {
        INFO("n = ", n, ", number = ", number, ", place = ", place);
        auto x = padded<float>(1, n).fill([] { return nan; });
        x(0, place) = number;
        CHECK(argmax_of<B>(x, no_ids) == static_cast<token_id>(place));
      }
}

TEST_CASE_TEMPLATE("argmax of an all-NaN row is the id of column 0, of an all −∞ row the lowest id", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 503;
  CAPTURE(seed);
  random_numbers random(seed);
  for (const std::size_t n : sizes{1, 7, 8, 33, 65}) {
    CAPTURE(n);
    const auto ids = shuffled_ids(1, n, random);
    const auto nans = padded<float>(1, n).fill([] { return nan; }), infinities = padded<float>(1, n).fill([] { return -infinity; });
    CHECK(argmax_of<B>(nans, no_ids) == 0);
    CHECK(argmax_of<B>(nans, ids.view()) == ids(0, 0));
    CHECK(argmax_of<B>(infinities, no_ids) == 0);
    CHECK(argmax_of<B>(infinities, ids.view()) == 0);
  }
}

// ------------------------------------------------------------------------------------------------ mask, gather_ids

TEST_CASE_TEMPLATE("mask removes the columns with a banned id and nothing else", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 504;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for (const std::size_t n : lengths)
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t count : sizes{0, 1, 3, 20})
        for (const bool named : {false, true}) {
          INFO("n = ", n, ", m = ", m, ", count = ", count, ", named = ", named);
          const auto ids = shuffled_ids(m, n, random);
          const auto banned = padded<token_id>(1, count).fill(random.indexes(2 * n + 1));  // some are ids of no column
          padded<float> got = padded<float>(m, n, 3).fill(random.uniforms()), want = got;
          for (std::size_t r = 0; r < m; ++r)
            for (std::size_t c = 0; c < n; ++c)
              for (std::size_t i = 0; i < count; ++i)
                if (banned(0, i) == (named ? ids(r, c) : static_cast<token_id>(c))) want(r, c) = -infinity;
          pointwise_ops<B>::mask(ctx, got.view(), named ? ids.view() : no_ids, banned.data(), count);
          check_same(got, want);
        }
}

TEST_CASE_TEMPLATE("gather_ids lays the table rows named side by side", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 505;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for (const std::size_t w : sizes{0, 1, 3, 8, 33})
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t s : sizes{0, 1, 4}) {
        INFO("w = ", w, ", m = ", m, ", s = ", s);
        const auto table = padded<token_id>(6, w, 2).fill(random.indexes(1000));
        const auto rows = padded<std::int32_t>(m, s, 1).fill(random.indexes(6));
        padded<token_id> got(m, s * w, 3), want(m, s * w);
        for (std::size_t r = 0; r < m; ++r)
          for (std::size_t c = 0; c < s * w; ++c) want(r, c) = table(static_cast<std::size_t>(rows(r, c / w)), c % w);
        pointwise_ops<B>::gather_ids(ctx, got.view(), table.view(), rows.view());
        check_same(got, want);
      }
}

// ------------------------------------------------------------------------------------------------ route_experts, weighted_sum

TEST_CASE_TEMPLATE("pitfall 115: route_experts renormalises over the chosen, then scales by expert", B, OUTRIDER_TESTED_BACKENDS) {
  context_of<B> ctx(execution{1});
  // e^logit = 1, 6, 1, 3, 2: the chosen are 1 and 3 with 6/9 and 3/9, and their scales 0.5 and 4.
  auto logits = row_of({0, std::log(6.0f), 0, std::log(3.0f), std::log(2.0f)});
  const auto scales = row_of({9, 0.5f, 9, 4, 9});
  padded<std::int32_t> experts(1, 2);
  padded<float> weights(1, 2);
  pointwise_ops<B>::route_experts(ctx, experts.view(), weights.view(), logits.view(), scales.data());
  check_same(experts, row_of<std::int32_t>({1, 3}));
  check_within(weights, row_of({1.0f / 3, 4.0f / 3}), [](std::size_t, std::size_t) { return 32 * u; });  // as below, range and e small
}

TEST_CASE_TEMPLATE("pitfall 119: route_experts agrees with the reference and gives ties to the lowest expert", B,
                   OUTRIDER_TESTED_BACKENDS) {
  // A numerator e^(l − max) is off by u·(max − l) through its argument and by 4 ulp = 8·u through the function; the sum over the chosen
  // likewise, with s − 1 additions; a division by the sum over all experts first adds e more. Products and quotients: 8·u in all.
  constexpr std::uint64_t seed = 506;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  context_of<reference> plain;
  for (const std::size_t e : sizes{1, 4, 7, 8, 9, 33, 128})
    for (const std::size_t s : sizes{1, 2, 8})
      for (const std::size_t m : sizes{0, 1, 3})
        for (const bool ties : {false, true}) {
          if (s > e) continue;
          INFO("e = ", e, ", s = ", s, ", m = ", m, ", ties = ", ties);
          padded<float> logits(m, e, 3);
          if (ties)
            logits.fill(random.grids(3));
          else
            logits.fill(random.uniforms(10));
          const auto scales = padded<float>(1, e).fill(random.uniforms(2));
          padded<float> left = logits, got(m, s, 3), want(m, s);
          padded<std::int32_t> got_experts(m, s, 3), want_experts(m, s);
          pointwise_ops<reference>::route_experts(plain, want_experts.view(), want.view(), padded<float>(logits).view(), scales.data());
          pointwise_ops<B>::route_experts(ctx, got_experts.view(), got.view(), left.view(), scales.data());
          check_same(got_experts, want_experts);
          check_within(got, want, [&](std::size_t r, std::size_t c) {
            constexpr double range = 20;  // of the logits
            return (2 * range + static_cast<double>(e + s) + 24) * u * std::abs(double{want(r, c)});
          });
          CHECK(left.padding_untouched());
        }
}

TEST_CASE_TEMPLATE("weighted_sum agrees with the reference", B, OUTRIDER_TESTED_BACKENDS) {
  // A product of s terms: at most s roundings each, and one in the reference.
  constexpr std::uint64_t seed = 507;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  context_of<reference> plain;
  for (const std::size_t n : lengths)
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t s : sizes{0, 1, 2, 8})
        for (const std::size_t extra : sizes{0, 3}) {
          INFO("n = ", n, ", m = ", m, ", s = ", s, ", extra = ", extra);
          const auto x = padded<float>(m * s, n, extra).fill(random.uniforms());
          const auto weights = padded<float>(m, s, extra).fill(random.uniforms());
          padded<float> got(m, n, extra), want(m, n);
          pointwise_ops<B>::weighted_sum(ctx, got.view(), x.view(), weights.view());
          pointwise_ops<reference>::weighted_sum(plain, want.view(), x.view(), weights.view());
          check_within(got, want, [&](std::size_t r, std::size_t c) {
            double sum = 0;
            for (std::size_t j = 0; j < s; ++j) sum += std::abs(double{weights(r, j)} * double{x(r * s + j, c)});
            return static_cast<double>(s + 2) * u * sum;
          });
        }
}

TEST_CASE_TEMPLATE("choices of a row are those it makes alone, whatever is beside it and with any threads", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 508;
  CAPTURE(seed);
  random_numbers random(seed);
  constexpr std::size_t n = 129, k = 8;
  const auto x = padded<float>(source_rows, n).fill(tied(random)), logits = padded<float>(source_rows, n).fill(random.uniforms(5));
  const auto ids = padded<token_id>(source_rows, n).fill(random.indexes(1000));
  const auto scales = padded<float>(1, n).fill(random.uniforms(2));
  const auto terms = padded<float>(source_rows, k * n).fill(random.uniforms());
  const auto check = [](const row_op<B>& run) {
    check_rows_are_independent<B>(run);
    check_threads_do_not_matter<B>(run);
  };
  check([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
    padded<std::int32_t> out(rows.size(), k);
    pointwise_ops<B>::top_k(ctx, out.view(), pick(x, rows).read());
    return out.bits();
  });
  check([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
    padded<token_id> out(rows.size(), 1);
    pointwise_ops<B>::argmax(ctx, out.view().data, pick(x, rows).read(), pick(ids, rows).read());
    return out.bits();
  });
  check([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
    padded<std::int32_t> experts(rows.size(), k);
    padded<float> weights(rows.size(), k);
    pointwise_ops<B>::route_experts(ctx, experts.view(), weights.view(), pick(logits, rows).view(), scales.data());
    auto results = weights.bits();
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const auto chosen = experts.bits()[r];
      results[r].insert(results[r].end(), chosen.begin(), chosen.end());
    }
    return results;
  });
  check([&](context_of<B>& ctx, std::span<const std::size_t> rows) {
    padded<float> out(rows.size(), n), picked = pick(terms, rows), weights = pick(logits, rows);
    pointwise_ops<B>::weighted_sum(ctx, out.view(), picked.view().split_cols(n), weights.view().slice_cols(0, k));
    return out.bits();
  });
}

}  // namespace contract
