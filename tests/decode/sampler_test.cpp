// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/decode/sampler.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "law.hpp"
#include "outrider/backend/reference.hpp"
#include "support/refusal.hpp"

namespace {

using namespace outrider;
using testing::mentions;
using testing::misfit;
using testing::refusal;

static_assert(sampler_for<greedy, reference>);
static_assert(sampler_for<sampling, reference>);
static_assert(picks_there<greedy, reference>);
static_assert(picks_there<sampling, reference>);

constexpr float infinite = std::numeric_limits<float>::infinity();

matrix_view<float> as_rows(std::vector<float>& values, std::size_t rows) {
  const std::size_t cols = values.size() / rows;
  return {values.data(), rows, cols, cols};
}

std::vector<float> random_row(std::mt19937& random, std::size_t size, double spread) {
  std::vector<float> row(size);
  for (float& s : row) s = static_cast<float>(std::normal_distribution<double>(0, spread)(random));
  return row;
}

std::vector<token_id> pick(sampling& sampler, std::vector<float> logits, std::size_t rows, const std::vector<token_id>& text) {
  reference_context ctx{execution{1}};
  std::vector<token_id> out(rows);
  sampler.pick<reference>(ctx, as_rows(logits, rows), text, out.data());
  return out;
}
token_id pick_one(sampling& sampler, const std::vector<float>& row, const std::vector<token_id>& text) {
  return pick(sampler, row, 1, text).front();
}

std::vector<token_probability> distribution(sampling& sampler, std::vector<float> row, const std::vector<token_id>& text = {}) {
  reference_context ctx{execution{1}};
  const auto list = sampler.distribution<reference>(ctx, as_rows(row, 1), text);
  return {list.begin(), list.end()};
}

token_id draw(sampling& sampler, std::vector<float> row, std::vector<token_id> ids, std::size_t position, float* probability = nullptr) {
  reference_context ctx{execution{1}};
  return sampler.draw<reference>(ctx, as_rows(row, 1), {ids.empty() ? nullptr : ids.data(), 1, ids.size(), ids.size()}, position,
                                 probability);
}

const sampling_options kinds[] = {
    {.temperature = 1, .seed = 1},
    {.temperature = 0.6, .top_k = 12, .seed = 2},
    {.temperature = 1.5, .top_p = 0.8, .seed = 3},
    {.temperature = 1.2, .min_p = 0.05, .seed = 4},
    {.temperature = 1, .top_k = 20, .top_p = 0.9, .min_p = 0.02, .seed = 5, .sequence = 6},
    {.temperature = 0.9, .top_k = 30, .repetition_penalty = 1.4, .presence_penalty = 0.3, .frequency_penalty = 0.2, .seed = 7},
    {.repetition_penalty = 1.4, .presence_penalty = 0.5},
};

TEST_CASE("options that cannot be are refused") {
  CHECK(mentions(refusal(error_code::argument_invalid, [] { sampling sampler({.temperature = -1}); }), "temperature", "-1"));
}

TEST_CASE("the choice is the argmax of score and noise, lowest id on ties, whatever is skipped on the way") {
  std::mt19937 random(11);
  for (int trial = 0; trial < 400; ++trial) {
    CAPTURE(trial);
    const auto size = static_cast<std::size_t>(1 + trial * 7);
    const double spreads[] = {0, 1e-3, 1, 4, 15, 1e4, 1e9};
    std::vector<float> row = random_row(random, size, spreads[trial % 7]);
    for (std::size_t c = 0; c < size; c += 17) row[c] = c % 2 ? -infinite : std::numeric_limits<float>::quiet_NaN();
    row[size / 2] = 0.5f;
    const sampling_options options{.temperature = trial % 2 ? 1.0 : 0.7, .seed = 42, .sequence = static_cast<std::uint64_t>(trial)};
    const std::vector<token_id> text(static_cast<std::size_t>(trial % 5));

    float largest = -infinite;
    for (const float s : row) largest = s > largest ? s : largest;
    const noise source(options.seed, options.sequence);
    token_id best = -1;
    double sum = -infinite;
    for (std::size_t c = 0; c < size; ++c) {
      const double noisy = score_of(row[c], largest, options.temperature) + source.gumbel(text.size(), static_cast<token_id>(c));
      if (noisy > sum) {
        sum = noisy;
        best = static_cast<token_id>(c);
      }
    }
    sampling sampler(options);
    CHECK(pick_one(sampler, row, text) == best);
    sampling_options listed = options;  // the same through a list of candidates
    listed.top_p = 1 - 1e-15;
    sampling by_list(listed);
    CHECK(pick_one(by_list, row, text) == best);
  }
}

TEST_CASE("of equal sums the lower id wins, in whatever order they come") {
  for (const bool rising : {true, false}) {
    detail::gumbel_race race;
    race.enter(rising ? 3 : 5, -0.5, 0x80000000u);
    race.enter(rising ? 5 : 3, -0.5, 0x80000000u);
    CHECK(race.winner() == 3);
  }
}

TEST_CASE("the least noise that wins is never skipped, however far behind a token is") {
  for (const double shift : {0.0, -3.0})
    for (double behind = -1; behind < 22.8; behind += 1.0 / 64) {
      for (const double off : {-1e-4, -1e-9, 0.0, 1e-9}) {
        detail::gumbel_race race;
        race.enter(7, shift, 0x9e3779b9u);
        const double best = shift + noise::gumbel_of(0x9e3779b9u), score = best - behind - off;
        std::uint32_t loses = 0, wins = ~std::uint32_t{0};  // bisection: the noise rises with the word
        if (score + noise::gumbel_of(wins) < best) continue;
        while (wins - loses > 1) {
          const std::uint32_t middle = loses + (wins - loses) / 2;
          (score + noise::gumbel_of(middle) < best ? loses : wins) = middle;
        }
        CAPTURE(shift);
        CAPTURE(behind);
        CHECK(race.chance_of(score).of(wins));
      }
    }
}

TEST_CASE("a row in a group, alone, or asked again gets the same token") {
  std::mt19937 random(12);
  for (const sampling_options& options : kinds) {
    const std::size_t size = 203, rows = 6;
    const std::vector<float> logits = random_row(random, size * rows, 3);
    std::vector<token_id> text(20);
    for (token_id& id : text) id = static_cast<token_id>(random() % size);
    sampling sampler(options);
    const std::vector<token_id> group = pick(sampler, logits, rows, text);
    CHECK(pick(sampler, logits, rows, text) == group);
    for (std::size_t r = 0; r < rows; ++r) {
      const std::vector<token_id> before(text.begin(), text.end() - static_cast<std::ptrdiff_t>(rows - 1 - r));
      const std::vector<float> row(logits.begin() + static_cast<std::ptrdiff_t>(r * size),
                                   logits.begin() + static_cast<std::ptrdiff_t>((r + 1) * size));
      sampling fresh(options);
      CHECK(pick_one(fresh, row, before) == group[r]);
    }
  }
}

TEST_CASE("the first row of a pass may stand behind no text at all") {
  sampling sampler({.temperature = 1, .repetition_penalty = 1.5});
  CHECK(pick(sampler, {0, -infinite, -infinite, 0}, 2, {1}) == std::vector<token_id>{0, 1});
}

TEST_CASE("seed, sequence and position each change the tokens") {
  const std::vector<float> flat(1000);
  sampling a({.temperature = 1, .seed = 1}), b({.temperature = 1, .seed = 2}), c({.temperature = 1, .seed = 1, .sequence = 1});
  std::vector<token_id> of_a, of_b, of_c, later;
  for (std::size_t n = 0; n < 20; ++n) {
    const std::vector<token_id> text(n);
    of_a.push_back(pick_one(a, flat, text));
    of_b.push_back(pick_one(b, flat, text));
    of_c.push_back(pick_one(c, flat, text));
    later.push_back(pick_one(a, flat, std::vector<token_id>(n + 100)));
  }
  CHECK(of_a != of_b);
  CHECK(of_a != of_c);
  CHECK(of_a != later);
}

TEST_CASE("a copy draws the same") {
  sampling sampler({.temperature = 1, .top_k = 5, .seed = 3});
  const std::vector<float> row{1, 2, 3, 1, 2, 3, 1, 2};
  const token_id token = pick_one(sampler, row, {1, 2});
  sampling copy(sampler);
  CHECK(pick_one(copy, row, {1, 2}) == token);
}

TEST_CASE("tokens over many positions follow the processed distribution") {
  std::mt19937 random(13);
  const std::vector<float> row = random_row(random, 61, 1.5);
  for (const sampling_options& options : kinds) {
    sampling sampler(options);
    const std::vector<token_id> said{3, 5, 5, 60};
    const auto law = distribution(sampler, row, said);
    CHECK(std::accumulate(law.begin(), law.end(), 0.0, [](double sum, const token_probability& t) { return sum + t.probability; }) ==
          doctest::Approx(1).epsilon(1e-12));
    std::vector<std::size_t> counts(row.size());
    reference_context ctx{execution{1}};
    std::vector<float> penalised = row;  // the text grows with every draw, so the penalties are applied beforehand
    row_processor(options).penalise(penalised, said);
    sampling_options plain = options;
    plain.repetition_penalty = 1;
    plain.presence_penalty = plain.frequency_penalty = 0;
    sampling drawing(plain);
    const std::vector<token_id> text(20000);
    for (std::size_t n = 0; n < text.size(); ++n) {
      token_id token = -1;
      drawing.pick<reference>(ctx, as_rows(penalised, 1), std::span(text).first(n), &token);
      ++counts[static_cast<std::size_t>(token)];
    }
    CAPTURE(options.seed);
    CHECK(misfit(counts, law) < 1);
  }
}

TEST_CASE("tokens of two neighbouring positions are independent") {
  const std::vector<float> row{0, 1, 0.5f, -0.5f};
  sampling sampler({.temperature = 1, .seed = 99});
  const auto law = distribution(sampler, row);
  std::vector<token_probability> pairs;
  for (const token_probability& a : law)
    for (const token_probability& b : law) pairs.push_back({a.id * 4 + b.id, a.probability * b.probability});
  std::vector<std::size_t> counts(16);
  std::vector<token_id> text(20000);
  for (std::size_t n = 0; n < text.size(); ++n) text[n] = draw(sampler, row, {}, n);
  for (std::size_t n = 0; n + 1 < text.size(); n += 2) ++counts[static_cast<std::size_t>(text[n] * 4 + text[n + 1])];
  CHECK(misfit(counts, pairs) < 1);
}

TEST_CASE("temperature 0 takes the largest penalised logit, the lowest id on ties") {
  sampling plain, penalised({.repetition_penalty = 2});
  CHECK(pick_one(plain, {1, 4, 4, 2}, {1, 2}) == 1);
  CHECK(pick_one(penalised, {1, 4, 4, 2}, {1}) == 2);
  CHECK(pick_one(penalised, {1, 4, 4, 2}, {1, 2}) == 1);
  sampling filtered({.top_k = 1, .top_p = 0.1, .min_p = 1});
  CHECK(pick_one(filtered, {1, 4, 4, 2}, {}) == 1);
  const auto law = distribution(plain, {1, 4, 4, 2});
  REQUIRE(law.size() == 1);
  CHECK(law[0].id == 1);
  CHECK(law[0].probability == 1);
}

TEST_CASE("a tiny temperature is greedy where there is a margin, a huge one is uniform") {
  std::mt19937 random(14);
  std::vector<float> row = random_row(random, 50, 2);
  row[33] = 9;
  sampling cold({.temperature = 1e-3}), hot({.temperature = 100});
  std::vector<std::size_t> counts(row.size());
  for (std::size_t n = 0; n < 10000; ++n) {
    REQUIRE(draw(cold, row, {}, n) == 33);
    ++counts[static_cast<std::size_t>(draw(hot, row, {}, n))];
  }
  CHECK(misfit(counts, distribution(hot, row)) < 1);
}

TEST_CASE("a masked token never comes, whatever the temperature") {
  for (sampling_options options : kinds)
    for (const double temperature : {1e-3, 1.0, 100.0}) {
      options.temperature = temperature;
      sampling sampler(options);
      std::vector<float> row(37, -infinite);
      row[5] = -3;
      row[36] = -2;
      for (std::size_t n = 0; n < 200; ++n) {
        const token_id token = pick_one(sampler, row, std::vector<token_id>(n, 7));
        REQUIRE((token == 5 || token == 36));
      }
      row[5] = -infinite;
      CHECK(pick_one(sampler, row, {36, 36}) == 36);
      CHECK(distribution(sampler, row).size() == 1);
    }
}

TEST_CASE("a row without any token gives what greedy would") {
  for (const sampling_options& options : kinds) {
    sampling sampler(options);
    CHECK(pick_one(sampler, std::vector<float>(9, -infinite), {}) == 0);
    CHECK(pick_one(sampler, std::vector<float>(9, std::numeric_limits<float>::quiet_NaN()), {}) == 0);
    float probability = -1;
    CHECK(draw(sampler, std::vector<float>(2, -infinite), {8, 8}, 3, &probability) == 8);
    CHECK(probability == 1);
  }
}

TEST_CASE("an infinite logit is chosen") {
  for (const sampling_options& options : kinds) {
    sampling sampler(options);
    CHECK(pick_one(sampler, {0, 1, infinite, 5, 2}, {}) == 2);
  }
}

// --- a drafter's draws

TEST_CASE("a draw from the target's own logits is the target's choice, in whatever order the columns are") {
  std::mt19937 random(15);
  for (sampling_options options : kinds) {
    options.repetition_penalty = 1;
    options.presence_penalty = options.frequency_penalty = 0;
    sampling sampler(options);
    for (std::size_t n = 0; n < 50; ++n) {
      const std::vector<float> row = random_row(random, 101, 2);
      const token_id token = pick_one(sampler, row, std::vector<token_id>(n));
      CHECK(draw(sampler, row, {}, n) == token);
      std::vector<token_id> ids(row.size());
      std::iota(ids.begin(), ids.end(), 0);
      std::shuffle(ids.begin(), ids.end(), random);
      std::vector<float> shuffled(row.size());
      for (std::size_t c = 0; c < ids.size(); ++c) shuffled[c] = row[static_cast<std::size_t>(ids[c])];
      CHECK(draw(sampler, shuffled, ids, n) == token);
    }
  }
}

TEST_CASE("a draw tells its probability") {
  std::mt19937 random(16);
  for (const sampling_options& options : kinds) {
    sampling sampler(options);
    const std::vector<float> row = random_row(random, 64, 2);
    std::vector<token_id> ids(row.size());
    for (std::size_t c = 0; c < ids.size(); ++c) ids[c] = static_cast<token_id>(1000 - 3 * c);
    sampling_options reading = options;
    reading.repetition_penalty = 1;
    reading.presence_penalty = reading.frequency_penalty = 0;
    if (reading.temperature == 0) reading.temperature = 1;  // then the probability is the plain softmax's
    sampling plain(reading);
    const auto law = distribution(plain, row);
    for (std::size_t n = 0; n < 20; ++n) {
      float direct = -1, named = -1;
      const token_id token = draw(sampler, row, {}, n, &direct), name = draw(sampler, row, ids, n, &named);
      const auto find = [&](token_id id) {
        return std::find_if(law.begin(), law.end(), [&](const token_probability& t) { return t.id == id; })->probability;
      };
      CHECK(direct == doctest::Approx(find(token)));
      CHECK(named == doctest::Approx(find((1000 - name) / 3)));
    }
  }
}

TEST_CASE("a proposal is what draws follow, ids rising") {
  std::mt19937 random(17);
  std::vector<float> row = random_row(random, 30, 1);
  std::vector<token_id> ids(row.size());
  for (std::size_t c = 0; c < ids.size(); ++c) ids[c] = static_cast<token_id>(90 - 3 * c);
  sampling sampler({.temperature = 1.1, .top_k = 12, .seed = 8});
  reference_context ctx{execution{1}};
  const auto list = sampler.proposal<reference>(ctx, as_rows(row, 1), {ids.data(), 1, ids.size(), ids.size()});
  const std::vector<token_probability> law(list.begin(), list.end());
  CHECK(law.size() == 12);
  CHECK(std::is_sorted(law.begin(), law.end(), [](const token_probability& a, const token_probability& b) { return a.id < b.id; }));
  std::vector<std::size_t> counts(91);
  for (std::size_t n = 0; n < 20000; ++n) ++counts[static_cast<std::size_t>(draw(sampler, row, ids, n))];
  CHECK(misfit(counts, law) < 1);
}

TEST_CASE("coupled draws agree at least as often as the distance of the distributions promises") {
  std::mt19937 random(18);
  for (int trial = 0; trial < 6; ++trial) {
    CAPTURE(trial);
    std::vector<float> p = random_row(random, 40, 2), q = p;
    for (float& s : q) s += static_cast<float>(std::normal_distribution<double>(0, 0.2 * (1 + trial))(random));
    sampling sampler({.temperature = 1, .top_k = trial % 2 ? std::size_t{20} : std::size_t{0}, .seed = static_cast<std::uint64_t>(trial)});
    std::vector<double> difference(p.size());
    for (const token_probability& t : distribution(sampler, p)) difference[static_cast<std::size_t>(t.id)] += t.probability;
    for (const token_probability& t : distribution(sampler, q)) difference[static_cast<std::size_t>(t.id)] -= t.probability;
    double distance = 0;
    for (const double d : difference) distance += std::abs(d) / 2;

    constexpr std::size_t draws = 10000;
    std::size_t equal = 0;
    for (std::size_t n = 0; n < draws; ++n)
      if (draw(sampler, p, {}, n) == draw(sampler, q, {}, n)) ++equal;
    // A share of independent trials is more than 5 · √(1/4 / draws) below its mean with a chance below 1e-6.
    CHECK(static_cast<double>(equal) / draws >= (1 - distance) / (1 + distance) - 5 * std::sqrt(0.25 / draws));
  }
}

}  // namespace
