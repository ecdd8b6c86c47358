// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The kernels of draw.cuh on the CPU, against the sampler of the host. Both take the same logarithms here, so tokens are equal but where top-p
// decides between sums that tie within roundings; random logits do not tie so closely.
#include "kernel_fixture.hpp"
//
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "outrider/backend/cuda/draw.cuh"
#include "outrider/decode/sampler.hpp"

namespace {

using namespace kernel_test;
using outrider::draw_rule;
using outrider::reference;
using outrider::sampling;

std::string describe(const draw_rule& rule) {
  return "temperature " + std::to_string(rule.temperature) + ", top_k " + std::to_string(rule.top_k) + ", top_p " +
         std::to_string(rule.top_p) + ", min_p " + std::to_string(rule.min_p);
}

std::vector<token_id> drawn_there(const padded<float>& x, const padded<token_id>* ids, std::size_t position, const draw_rule& rule,
                                  std::initializer_list<std::uint64_t> seeds = {}) {
  const auto once = [&](std::uint64_t seed) {
    outrider::cuda_emulation::settings.seed = seed;
    std::vector<token_id> out(x.rows(), poison<token_id>());
    device::queue& q = the_queue();
    device::draw(q, out.data(), on_device(x), ids ? on_device(*ids) : matrix_view<const token_id, device_space>{}, position, rule);
    q.wait();
    outrider::cuda_emulation::settings.seed = 0;
    return out;
  };
  const std::vector<token_id> first = once(0);
  for (const std::uint64_t seed : seeds) {
    CAPTURE(seed);
    CHECK(once(seed) == first);
  }
  return first;
}

std::vector<token_id> drawn_here(const padded<float>& x, const padded<token_id>* ids, std::size_t position, const draw_rule& rule) {
  sampling sampler({.temperature = rule.temperature,
                    .top_k = rule.top_k,
                    .top_p = rule.top_p,
                    .min_p = rule.min_p,
                    .seed = rule.seed,
                    .sequence = rule.sequence});
  outrider::reference_context ctx(execution{1});
  std::vector<token_id> out;
  for (std::size_t r = 0; r < x.rows(); ++r)
    out.push_back(sampler.draw<reference>(ctx, x.view().slice_rows(r, 1),
                                          ids ? ids->view().slice_rows(r, 1) : matrix_view<const token_id>{}, position + r));
  return out;
}

/// What a row may hold.
enum class kind { spread, narrow, flat, tied, with_nothing, infinite, nothing };
constexpr kind kinds[] = {kind::spread, kind::narrow, kind::flat, kind::tied, kind::with_nothing, kind::infinite, kind::nothing};

float logit_of(kind k, random_numbers& random) {
  const auto normal = [&] { return random.uniform() + random.uniform() + random.uniform(); };
  switch (k) {
    case kind::spread:  // as of a language model
      return 6 * normal();
    case kind::narrow:
      return 1e-3f * normal();
    case kind::flat:
      return -2;
    case kind::tied:
      return random.grid(40);
    case kind::with_nothing:
      return random.below(3) == 0 ? not_a_number : random.below(3) == 0 ? -infinity : 3 * normal();
    case kind::infinite:
      return random.below(9) == 0 ? infinity : 3 * normal();
    case kind::nothing:
      return random.below(2) == 0 ? not_a_number : -infinity;
  }
  return 0;
}

padded<float> logits_of_kinds(std::size_t m, std::size_t n, std::size_t extra, random_numbers& random) {
  padded<float> x(m, n, extra);
  for (std::size_t r = 0; r < m; ++r)
    for (std::size_t c = 0; c < n; ++c) x(r, c) = logit_of(kinds[r % std::size(kinds)], random);
  return x;
}

/// Different ids, in no order, with gaps.
padded<token_id> some_ids(std::size_t m, std::size_t n, random_numbers& random) {
  padded<token_id> ids(m, n, 3);
  for (std::size_t r = 0; r < m; ++r) {
    for (std::size_t c = 0; c < n; ++c) ids(r, c) = static_cast<token_id>(3 * c + 5);
    for (std::size_t c = n; c > 1; --c) std::swap(ids(r, c - 1), ids(r, random.below(c)));
  }
  return ids;
}

/// Filters alone and together; k on either side of a list's and a row's length, P and the least share from all to next to nothing.
std::vector<draw_rule> rules() {
  return {{},
          {.temperature = 0.05},
          {.temperature = 30},
          {.temperature = 0.7, .top_k = 1},
          {.top_k = 5},
          {.top_k = 64, .top_p = 0.95},
          {.temperature = 1.3, .top_k = 700, .top_p = 0.6},
          {.temperature = 2, .top_k = 900, .min_p = 0.02},
          {.top_p = 0.9},
          {.temperature = 3, .top_p = 0.3},
          {.top_p = 1e-9},
          {.top_p = 1 - 1e-9},
          {.min_p = 0.1},
          {.min_p = 1},
          {.temperature = 1.5, .top_k = 40, .top_p = 0.8, .min_p = 0.05}};
}

TEST_CASE("tokens are those that the host draws, under every filter, for rows of every kind and length") {
  constexpr std::uint64_t seed = 2301;
  CAPTURE(seed);
  random_numbers random(seed);
  for (const std::size_t n : sizes{1, 2, 3, 7, 8, 9, 333, 1001, 4096, 4099, 9000})
    for (const bool named : {false, true}) {
      const auto x = logits_of_kinds(std::size(kinds), n, n % 2 == 0 ? 4 : 3, random);
      const auto ids = some_ids(x.rows(), n, random);
      for (draw_rule rule : rules()) {
        rule.seed = random.below(1u << 30) << 30;
        rule.sequence = random.below(1u << 30) << 20;
        const std::size_t position = random.below(1u << 31);
        INFO("n = ", n, ", named = ", named, ", ", describe(rule));
        const padded<token_id>* const names = named ? &ids : nullptr;
        CHECK(drawn_there(x, names, position, rule) == drawn_here(x, names, position, rule));
      }
    }
}

TEST_CASE("many positions of one row follow the host's noise, in any order of threads") {
  constexpr std::uint64_t seed = 2302;
  CAPTURE(seed);
  random_numbers random(seed);
  constexpr std::size_t n = 600, m = 20;
  for (const kind each : {kind::spread, kind::narrow, kind::tied}) {
    const padded<float> row = padded<float>(1, n).fill([&] { return logit_of(each, random); });
    padded<float> x(m, n);
    for (std::size_t r = 0; r < m; ++r)
      for (std::size_t c = 0; c < n; ++c) x(r, c) = row(0, c);
    for (draw_rule rule :
         {draw_rule{}, draw_rule{.temperature = 2, .top_k = 64, .top_p = 0.95}, draw_rule{.temperature = 5, .top_p = 0.9}}) {
      INFO("kind ", static_cast<int>(each), ", ", describe(rule));
      rule.seed = 3;
      CHECK(drawn_there(x, nullptr, 1000, rule, {1, 2, 3}) == drawn_here(x, nullptr, 1000, rule));
    }
  }
}

TEST_CASE("equal logits: top-k keeps all that tie with its last, top-p the lowest ids, in lists longer than shared memory") {
  constexpr std::uint64_t seed = 2303;
  CAPTURE(seed);
  random_numbers random(seed);
  for (const std::size_t n : sizes{10, 1500, 3000}) {
    auto x = padded<float>(3, n).fill([&] { return 1.5f; });
    for (std::size_t c = 0; c < n; ++c) x(1, c) = static_cast<float>(c % 3);
    for (std::size_t c = 0; c < n; c += 5) x(2, c) = c % 2 == 0 ? 0.0f : -0.0f;
    const auto ids = some_ids(3, n, random);
    for (const draw_rule& rule : {draw_rule{.top_k = 4}, draw_rule{.top_p = 0.9}, draw_rule{.top_k = 4, .top_p = 0.9},
                                  draw_rule{.top_k = 4, .top_p = 0.25}, draw_rule{.top_k = n - 1, .top_p = 0.5}})
      for (const std::size_t position : sizes{0, 3, 6}) {
        INFO("n = ", n, ", position = ", position, ", ", describe(rule));
        CHECK(drawn_there(x, nullptr, position, rule) == drawn_here(x, nullptr, position, rule));
        CHECK(drawn_there(x, &ids, position, rule) == drawn_here(x, &ids, position, rule));
      }
  }
}

TEST_CASE("shares that add up to P but for roundings have reached it, as on the host") {
  constexpr std::size_t m = 100, n = 6;
  const auto x = padded<float>(m, n).fill([] { return 1.0f; });
  for (const std::size_t kept : sizes{1, 2, 3, 4, 5}) {
    CAPTURE(kept);
    const draw_rule rule{.top_p = static_cast<double>(kept) / n, .seed = 4};
    const std::vector<token_id> drawn = drawn_there(x, nullptr, 0, rule);
    CHECK(drawn == drawn_here(x, nullptr, 0, rule));
    CHECK(*std::max_element(drawn.begin(), drawn.end()) == static_cast<token_id>(kept) - 1);
  }
}

TEST_CASE("min-p tells neighbouring floats apart") {
  constexpr std::size_t m = 50, n = 64;
  constexpr double min_p = 0.5;
  const auto edge = static_cast<float>(std::log(min_p));
  const float above = std::nextafter(edge, 0.0f), below = std::nextafter(edge, -1.0f);
  REQUIRE(double{above} >= std::log(min_p));
  REQUIRE(double{below} < std::log(min_p));
  auto x = padded<float>(m, n).fill([&] { return below; });
  for (std::size_t r = 0; r < m; ++r) {
    x(r, 20) = 0;
    x(r, 40) = above;
  }
  const draw_rule rule{.min_p = min_p, .seed = 6};
  const std::vector<token_id> drawn = drawn_there(x, nullptr, 0, rule);
  CHECK(drawn == drawn_here(x, nullptr, 0, rule));
  CHECK(std::count(drawn.begin(), drawn.end(), 20) + std::count(drawn.begin(), drawn.end(), 40) == m);
}

TEST_CASE("of equal sums the lower id wins, in whatever order they meet") {
  CHECK(device::winner_of({1.5, 7}, {1.5, 3}).id == 3);
  CHECK(device::winner_of({1.5, 3}, {1.5, 7}).id == 3);
  CHECK(device::winner_of({1.5, 3}, {2.5, 7}).id == 7);
}

TEST_CASE("a list that names one token in all its columns gives that token") {
  constexpr std::size_t n = 1200;
  const auto x = padded<float>(1, n).fill([] { return 2.0f; });
  const auto ids = padded<token_id>(1, n).fill([] { return 9; });
  for (const draw_rule& rule : rules()) {
    INFO(describe(rule));
    CHECK(drawn_there(x, &ids, 0, rule) == std::vector<token_id>{9});
  }
}

TEST_CASE("a row without a number above minus infinity gives the id of the column that is greatest, the first of equals") {
  padded<float> x(3, 9);
  for (std::size_t c = 0; c < 9; ++c) {
    x(0, c) = not_a_number;
    x(1, c) = -infinity;
    x(2, c) = c < 4 ? not_a_number : -infinity;
  }
  padded<token_id> ids(3, 9);
  for (std::size_t r = 0; r < 3; ++r)
    for (std::size_t c = 0; c < 9; ++c) ids(r, c) = static_cast<token_id>(90 - c);
  for (const draw_rule& rule : rules()) {
    INFO(describe(rule));
    CHECK(drawn_there(x, nullptr, 4, rule) == std::vector<token_id>{0, 0, 4});
    CHECK(drawn_there(x, &ids, 4, rule) == std::vector<token_id>{90, 90, 86});
  }
}

TEST_CASE("rows of a whole vocabulary") {
  constexpr std::uint64_t seed = 2304;
  CAPTURE(seed);
  random_numbers random(seed);
  constexpr std::size_t n = 262144;
  padded<float> x(2, n);
  for (std::size_t c = 0; c < n; ++c) {
    x(0, c) = logit_of(kind::spread, random);
    x(1, c) = logit_of(kind::tied, random);
  }
  for (draw_rule rule : {draw_rule{}, draw_rule{.top_k = 64, .top_p = 0.95}, draw_rule{.temperature = 0.8, .top_p = 0.9},
                         draw_rule{.temperature = 1.2, .min_p = 0.05}}) {
    INFO(describe(rule));
    rule.seed = 9;
    CHECK(drawn_there(x, nullptr, 77, rule) == drawn_here(x, nullptr, 77, rule));
  }
}

TEST_CASE("a row gives the token it gives alone, whatever is beside it, wherever it lies") {
  constexpr std::uint64_t seed = 2305;
  CAPTURE(seed);
  random_numbers random(seed);
  constexpr std::size_t n = 5001;
  const auto row = padded<float>(1, n).fill([&] { return logit_of(kind::spread, random); });
  for (const draw_rule& rule : rules()) {
    INFO(describe(rule));
    const token_id alone = drawn_there(row, nullptr, 500, rule).front();
    for (const std::size_t m : sizes{2, 5})
      for (const std::size_t place : sizes{0, m - 1}) {
        INFO("m = ", m, ", place = ", place);
        padded<float> x(m, n, m);  // the others are NaN
        for (std::size_t c = 0; c < n; ++c) x(place, c) = row(0, c);
        CHECK(drawn_there(x, nullptr, 500 - place, rule)[place] == alone);
      }
  }
}

TEST_CASE("no row and no column is nothing to draw from") {
  token_id chosen = 5;
  device::queue& q = the_queue();
  device::draw(q, &chosen, {nullptr, 0, 10, 10}, {}, 0, {});
  device::draw(q, &chosen, {nullptr, 1, 0, 0}, {}, 0, {.top_k = 3, .top_p = 0.5});
  q.wait();
  CHECK(chosen == 5);
}

TEST_CASE("a chunk's length is a power of two, and no row has more chunks than a block has threads") {
  for (const std::size_t n : sizes{1, 8, 9, 8192, 8193, 262144, 262145, std::size_t{1} << 31}) {
    const std::size_t length = device::chunk_length(n);
    CHECK((length >= 8 && (length & (length - 1)) == 0));
    CHECK((n + length - 1) / length <= device::most_chunks);
  }
}

}  // namespace
