// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The kernels of choice.cuh on the CPU, against the reference: ties, NaN, rows of one block and of many.
#include "kernel_fixture.hpp"
//
#include <limits>
#include <vector>

#include "outrider/backend/cuda/choice.cuh"

namespace {

using namespace kernel_test;
using outrider::pointwise_ops;
using outrider::reference;

constexpr matrix_view<const token_id> no_ids{};

/// What a row may hold: numbers that differ, few values so that most tie, both zeros, NaN among numbers, and nothing but NaN or −∞.
enum class kind { distinct, tied, zeros, some_nan, all_nan, all_infinite };
constexpr kind kinds[] = {kind::distinct, kind::tied, kind::zeros, kind::some_nan, kind::all_nan, kind::all_infinite};

padded<float> row_of_kind(kind k, std::size_t n, std::size_t extra, random_numbers& random) {
  return padded<float>(1, n, extra).fill([&] {
    switch (k) {
      case kind::distinct:
        return 50 * random.uniform();
      case kind::tied:
        return random.below(10) == 0 ? -infinity : random.grid(3);
      case kind::zeros:
        return random.below(2) == 0 ? 0.0f : -0.0f;
      case kind::some_nan:
        return random.below(3) == 0 ? not_a_number : random.below(2) == 0 ? -random.uniform() : -infinity;
      case kind::all_nan:
        return not_a_number;
      case kind::all_infinite:
        return -infinity;
    }
    return 0.0f;
  });
}

/// A row of every kind, one below the other.
padded<float> rows_of_all_kinds(std::size_t n, std::size_t extra, random_numbers& random) {
  padded<float> all(std::size(kinds), n, extra);
  for (std::size_t r = 0; r < all.rows(); ++r) {
    const padded<float> row = row_of_kind(kinds[r], n, 0, random);
    for (std::size_t c = 0; c < n; ++c) all(r, c) = row(0, c);
  }
  return all;
}

/// A permutation of 0 … n − 1, so that the id of a column says nothing about its place.
padded<token_id> shuffled_ids(std::size_t m, std::size_t n, random_numbers& random) {
  padded<token_id> ids(m, n, 2);
  for (std::size_t r = 0; r < m; ++r) {
    for (std::size_t c = 0; c < n; ++c) ids(r, c) = static_cast<token_id>(c);
    for (std::size_t c = n; c > 1; --c) std::swap(ids(r, c - 1), ids(r, random.below(c)));
  }
  return ids;
}

}  // namespace

// ------------------------------------------------------------------------------------------------ top_k

TEST_CASE("top_k agrees with the reference on ties, zeros, infinities and NaN, for rows shorter and longer than a block sorts") {
  constexpr std::uint64_t seed = 2201;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t n : sizes{1, 2, 31, 32, 33, 100, 1000, 1024, 1025, 2100})
    for (const std::size_t k : sizes{0, 1, 2, 31, 64, n}) {
      if (k > n || (k == n && n > 100)) continue;
      INFO("n = ", n, ", k = ", k);
      const auto x = rows_of_all_kinds(n, n % 2 == 0 ? 3 : 0, random);  // without padding a row ends where the next begins
      padded<std::int32_t> want(x.rows(), k);
      pointwise_ops<reference>::top_k(plain, want.view(), x.read());
      const auto op = [&](auto& q, auto& out) { device::top_k(q, on_device(out), on_device(x)); };
      check_same(n <= 100 ? result_of(padded<std::int32_t>(x.rows(), k, 3), op) : result_of(padded<std::int32_t>(x.rows(), k, 3), op, {1}),
                 want);
    }
}

TEST_CASE("top_k takes every k, by sorting or by counting") {
  constexpr std::uint64_t seed = 2202;
  CAPTURE(seed);
  random_numbers random(seed);
  struct extent {
    std::size_t n, k;
  };
  for (const extent size : {extent{1024, 1024}, extent{1025, 512}, extent{1300, 512}, extent{1300, 513}, extent{1300, 1300}, extent{0, 0}})
    for (const kind each : {kind::distinct, kind::tied}) {
      const std::size_t n = size.n, k = size.k;
      INFO("n = ", n, ", k = ", k, ", tied = ", each == kind::tied);
      const auto x = row_of_kind(each, n, 1, random);
      std::vector<std::int32_t> order(n);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
        return x(0, static_cast<std::size_t>(a)) > x(0, static_cast<std::size_t>(b));
      });
      padded<std::int32_t> want(1, k);
      for (std::size_t j = 0; j < k; ++j) want(0, j) = order[j];
      check_same(result_of(padded<std::int32_t>(1, k, 3), [&](auto& q, auto& out) { device::top_k(q, on_device(out), on_device(x)); }, {1}),
                 want);
    }
}

TEST_CASE("top_k and argmax of a whole vocabulary") {
  constexpr std::uint64_t seed = 2203;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  constexpr std::size_t n = 262144, k = 64;
  auto x = padded<float>(1, n).fill([&] { return static_cast<float>(random.below(2000)); });  // many ties of the largest
  padded<std::int32_t> want(1, k);
  pointwise_ops<reference>::top_k(plain, want.view(), x.read());
  check_same(result_of(padded<std::int32_t>(1, k), [&](auto& q, auto& out) { device::top_k(q, on_device(out), on_device(x)); }, {}), want);
  x(0, static_cast<std::size_t>(want(0, 0))) = not_a_number;
  const auto chosen = result_of(padded<token_id>(1, 1), [&](auto& q, auto& out) {
    device::argmax(q, out.view().data, on_device(std::as_const(x)), on_device(no_ids));
  });
  CHECK(chosen(0, 0) == want(0, 1));
}

// ------------------------------------------------------------------------------------------------ argmax

TEST_CASE("argmax agrees with the reference on ties, zeros, infinities and NaN, for rows of one block and of several") {
  constexpr std::uint64_t seed = 2204;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t n : sizes{1, 2, 3, 4, 5, 33, 128, 1023, 2047, 2048, 2049, 4099})
    for (const std::size_t extra : sizes{0, 3})
      for (const bool named : {false, true}) {
        INFO("n = ", n, ", extra = ", extra, ", named = ", named);
        const auto x = rows_of_all_kinds(n, extra, random);
        const auto shuffled = shuffled_ids(x.rows(), n, random);
        const auto ids = named ? shuffled.view() : no_ids;
        padded<token_id> want(x.rows(), 1);
        pointwise_ops<reference>::argmax(plain, want.view().data, x.read(), ids);
        check_same(result_of(padded<token_id>(x.rows(), 1),
                             [&](auto& q, auto& out) { device::argmax(q, out.view().data, on_device(x), on_device(ids)); }),
                   want);
      }
}

TEST_CASE("argmax finds a single maximum in every column, also when all else is NaN") {
  for (const std::size_t n : sizes{7, 2060})
    for (const float others : {-3.0f, not_a_number})
      for (std::size_t c = 0; c<n; c += n> 100 ? 37 : 1) {
        INFO("n = ", n, ", c = ", c, ", others = ", others);
        auto x = padded<float>(1, n).fill([&] { return others; });
        x(0, c) = -2;
        token_id chosen = poison<token_id>();
        device::queue& q = the_queue();
        device::argmax(q, &chosen, on_device(std::as_const(x)), on_device(no_ids));
        q.wait();
        CHECK(chosen == static_cast<token_id>(c));
      }
}

TEST_CASE("no row and no column is nothing to choose from") {
  device::queue& q = the_queue();
  token_id chosen = 5;
  device::argmax(q, &chosen, {nullptr, 0, 10, 10}, on_device(no_ids));
  device::argmax(q, &chosen, {nullptr, 1, 0, 0}, on_device(no_ids));
  device::top_k(q, {nullptr, 0, 4, 4}, {nullptr, 0, 10, 10});
  device::top_k(q, {nullptr, 3, 0, 0}, {nullptr, 3, 0, 0});
  device::route_experts(q, {nullptr, 0, 2, 2}, {nullptr, 0, 2, 2}, {nullptr, 0, 8, 8}, nullptr);
  q.wait();
  CHECK(chosen == 5);
}

TEST_CASE("rows go in ranges whose keys fit into the scratch memory and whose number fits into a grid") {
  for (const std::size_t m : sizes{0, 1, 100, 65535, 65536, 200000})
    for (const std::size_t keys : sizes{1, 128, 129, 32768, device::queue::scratch_bytes / 8}) {
      INFO("m = ", m, ", keys = ", keys);
      std::size_t next = 0;
      bool fits = true;
      device::in_ranges(m, keys, [&](std::size_t first, std::size_t count) {
        fits = fits && first == next && count > 0 && count <= 65535 && count * keys * 8 <= device::queue::scratch_bytes;
        next = first + count;
      });
      CHECK(fits);
      CHECK(next == m);
    }
}

TEST_CASE("argmax and top_k of more rows than a grid has") {
  constexpr std::uint64_t seed = 2208;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  constexpr std::size_t m = 65540, n = 2;
  const auto x = padded<float>(m, n).fill([&] { return random.grid(3); });
  const auto ids = padded<token_id>(m, n).fill(random.indexes(1000));
  padded<token_id> chosen(m, 1), want_chosen(m, 1);
  padded<std::int32_t> order(m, n), want_order(m, n);
  pointwise_ops<reference>::argmax(plain, want_chosen.view().data, x.read(), ids.read());
  pointwise_ops<reference>::top_k(plain, want_order.view(), x.read());
  device::queue& q = the_queue();
  device::argmax(q, chosen.view().data, on_device(x), on_device(ids));
  device::top_k(q, on_device(order), on_device(x));
  q.wait();
  CHECK(chosen.same_elements(want_chosen));
  CHECK(order.same_elements(want_order));
}

// ------------------------------------------------------------------------------------------------ mask

TEST_CASE("mask removes the columns with a banned id and nothing else, for more bans than one launch takes, read at once") {
  constexpr std::uint64_t seed = 2205;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t n : sizes{0, 1, 31, 300, 1027})
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t count : sizes{0, 1, 20, 128, 129, 300})
        for (const bool named : {false, true}) {
          INFO("n = ", n, ", m = ", m, ", count = ", count, ", named = ", named);
          const auto shuffled = shuffled_ids(m, n, random);
          const auto ids = named ? shuffled.view() : no_ids;
          const auto banned = padded<token_id>(1, count).fill(random.indexes(2 * n + 1));  // some are ids of no column
          const auto x = padded<float>(m, n, 3).fill(random.uniforms());
          padded<float> want = x;
          pointwise_ops<reference>::mask(plain, want.view(), ids, banned.data(), count);
          check_same(result_of(x,
                               [&](auto& q, auto& out) {
                                 std::vector<token_id> host(banned.data(), banned.data() + count);
                                 device::mask(q, on_device(out), on_device(ids), host.data(), count);
                                 host.assign(count, 0);
                                 q.wait();
                               }),
                     want);
        }
}

// ------------------------------------------------------------------------------------------------ route_experts

TEST_CASE("route_experts agrees with the reference and gives ties to the lowest expert") {
  // e^(l − max) is off by u·(max − l) through its argument and by 8·u through the function; the sum over the chosen likewise, with s − 1
  // additions; a quotient, a product and the reference's rounding.
  constexpr std::uint64_t seed = 2206;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t e : sizes{1, 4, 31, 32, 33, 128, 256})
    for (const std::size_t s : sizes{1, 2, 8, 16, 40})
      for (const std::size_t m : sizes{0, 1, 4, 5})
        for (const bool ties : {false, true}) {
          if (s > e) continue;
          INFO("e = ", e, ", s = ", s, ", m = ", m, ", ties = ", ties);
          auto logits = padded<float>(m, e, 3).fill([&] { return ties ? random.grid(3) : 10 * random.uniform(); });
          const auto scales = padded<float>(1, e).fill(random.uniforms(2));
          padded<float> want(m, s);
          padded<std::int32_t> want_experts(m, s);
          pointwise_ops<reference>::route_experts(plain, want_experts.view(), want.view(), padded<float>(logits).view(), scales.data());

          padded<float> weights(m, s, 3);
          const auto experts = result_of(padded<std::int32_t>(m, s, 3), [&](auto& q, auto& out) {
            padded<float> got(m, s, 3);
            device::route_experts(q, on_device(out), on_device(got), on_device(logits), scales.data());
            q.wait();
            CHECK((outrider::cuda_emulation::settings.seed == 0 || got.same_elements(weights)));
            weights = got;
          });
          check_same(experts, want_experts);
          check_within(weights, want, [&](std::size_t r, std::size_t c) {
            constexpr double range = 20;  // of the logits
            return (2 * range + static_cast<double>(s) + 24) * u * std::abs(double{want(r, c)});
          });
          CHECK(logits.padding_untouched());
        }
}

TEST_CASE("route_experts takes logits far from zero, of which only the differences count") {
  outrider::reference_context plain;
  const auto scales = padded<float>(1, 4).fill([] { return 0.5f; });
  for (const float origin : {-3e4f, -200.0f, 200.0f, 3e4f}) {
    CAPTURE(origin);
    auto logits = padded<float>(1, 4).fill([&, i = 0]() mutable { return origin + static_cast<float>(i++ * 3 % 4) / 2; });
    padded<float> weights(1, 3), want(1, 3);
    padded<std::int32_t> experts(1, 3), want_experts(1, 3);
    pointwise_ops<reference>::route_experts(plain, want_experts.view(), want.view(), padded<float>(logits).view(), scales.data());
    device::route_experts(the_queue(), on_device(experts), on_device(weights), on_device(logits), scales.data());
    the_queue().wait();
    check_same(experts, want_experts);
    check_within(weights, want, [](std::size_t, std::size_t) { return (2 * 1.5 + 3 + 24) * u; });  // as above, of differences up to 1.5
  }
}

// ------------------------------------------------------------------------------------------------ company

TEST_CASE("choices of a row are those it makes alone, whatever is beside it") {
  constexpr std::uint64_t seed = 2207;
  CAPTURE(seed);
  random_numbers random(seed);
  constexpr std::size_t n = 2100, k = 8, e = 40;
  const auto x = row_of_kind(kind::tied, n, 0, random), logits = row_of_kind(kind::distinct, e, 0, random);
  const auto scales = padded<float>(1, e).fill(random.uniforms(2));
  const auto run = [&](std::size_t m, std::size_t place) {
    padded<float> rows(m, n, 4), routed(m, e, 1), weights(m, k);  // the others are NaN
    for (std::size_t c = 0; c < n; ++c) rows(place, c) = x(0, c);
    for (std::size_t c = 0; c < e; ++c) routed(place, c) = logits(0, c);
    padded<std::int32_t> chosen(m, k), experts(m, k), largest(m, 1);
    device::queue& q = the_queue();
    device::top_k(q, on_device(chosen), on_device(std::as_const(rows)));
    device::argmax(q, largest.view().data, on_device(std::as_const(rows)), on_device(no_ids));
    device::route_experts(q, on_device(experts), on_device(weights), on_device(routed), scales.data());
    q.wait();
    std::vector<row_bits> bits{chosen.bits()[place], largest.bits()[place], experts.bits()[place], weights.bits()[place]};
    return bits;
  };
  const auto alone = run(1, 0);
  for (const std::size_t m : sizes{2, 5, 17})
    for (const std::size_t place : sizes{0, m / 2, m - 1}) {
      INFO("m = ", m, ", place = ", place);
      CHECK(run(m, place) == alone);
    }
}
