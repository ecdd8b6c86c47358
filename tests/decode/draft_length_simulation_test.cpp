// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Policies on texts and machines that exist only as numbers. Whether the draft of token p would hold behind a right prefix is drawn once for
// each p, so every policy meets the same text; time is counted in exact costs, whatever noise the policy saw.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "outrider/decode/draft_length.hpp"

namespace {

using namespace outrider;

/// A number in [0, 1) for each (seed, counter).
double uniform(std::uint64_t seed, std::uint64_t counter) {
  std::uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15u + counter * 0xd1342543de82ef95u;
  for (int i = 0; i < 3; ++i) x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u, x ^= x >> 27;
  return static_cast<double>(x >> 11) * 0x1p-53;
}

struct text_kind {
  std::string name;
  std::function<double(std::size_t position, std::size_t draft)> rate;  // of draft 1, 2, … of a round, for the token at this position
  std::function<float(std::size_t position)> confidence = {};           // of the drafter; none: it says nothing
};

std::vector<text_kind> text_kinds() {
  const auto by_draft = [](std::vector<double> rates) {
    return [rates](std::size_t, std::size_t i) { return rates[(std::min)(i, rates.size()) - 1]; };
  };
  return {{"copying", by_draft({.96, .97})},
          {"31B", by_draft({.92, .86, .86, .87})},
          {"chat", by_draft({.79, .80, .79, .78})},
          {"code", by_draft({.76, .72, .73, .73})},
          {"prose", by_draft({.62, .55, .50, .59, .55})},
          {"poor", by_draft({.35, .30})},
          {"hopeless", by_draft({0})},
          {"switching", [](std::size_t p, std::size_t) { return p / 250 % 2 == 0 ? .55 : .97; }},
          {"on and off", [](std::size_t p, std::size_t) { return p / 400 % 2 == 0 ? 0 : .9; }}};
}

struct machine {
  std::string name;
  draft_costs costs;
};

/// Costs from a few passes, linear between them.
machine make_machine(std::string name, double step, const std::vector<std::pair<std::size_t, double>>& known) {
  machine made{std::move(name), {.step = step}};
  for (std::size_t m = 1; m < made.costs.pass.size(); ++m) {
    std::size_t right = 1;
    while (right + 1 < known.size() && known[right].first < m) ++right;
    const auto [m0, v0] = known[right - 1];
    const auto [m1, v1] = known[right];
    made.costs.pass[m] = v0 + (v1 - v0) * (static_cast<double>(m) - static_cast<double>(m0)) / static_cast<double>(m1 - m0);
  }
  return made;
}
std::vector<machine> machines() {
  return {make_machine("flat", .01, {{1, 1}, {4, 1.1}, {8, 1.3}}),
          make_machine("middling", .12, {{1, 1}, {2, 1.03}, {3, 1.15}, {4, 1.39}, {8, 2.38}, {9, 2.98}, {16, 4.84}, {17, 6.1}}),
          make_machine("steep", .05, {{1, 1}, {4, 1.7}, {8, 3.5}}),
          make_machine("experts", .05, {{1, 1}, {2, 1.4}, {4, 2.2}, {8, 3.5}, {17, 5}}),
          make_machine("dear drafts", .25, {{1, 1}, {4, 1.1}, {8, 1.3}}),
          make_machine("linear", .05, {{1, 1}, {2, 2}})};
}

struct setting {
  const text_kind* text = nullptr;
  const machine* on = nullptr;
  std::uint64_t seed = 0;
  std::size_t tokens = 4000;
  bool clock = false;  // the policy sees times, with noise and some accidents
};

/// Plain passes' worth of time for the whole text.
template <draft_length_policy Policy>
double time_of(Policy policy, const setting& s) {
  double time = 0;
  std::size_t pass = 0;
  std::array<float, max_draft_length> confidence{};
  for (std::size_t n = 0; n < s.tokens; ++pass) {
    const draft_plan plan = policy.plan((std::min)(max_draft_length, s.tokens - n - 1));
    round_record round{.position = n};
    std::size_t steps = 0;  // a draft that is refused was a step, too
    for (bool go_on = true; go_on && steps < plan.drafts; ++steps) {
      confidence[steps] = s.text->confidence ? s.text->confidence(n + steps) : 0;
      go_on = !s.text->confidence || confidence[steps] >= plan.min_confidence;
      if (go_on) ++round.drafted;
      round.doubted = !go_on;
    }
    if (s.text->confidence && plan.wants_confidence) round.confidence = std::span(confidence).first(round.drafted);
    while (round.accepted < round.drafted && uniform(s.seed, n + round.accepted) < s.text->rate(n + round.accepted, round.accepted + 1))
      ++round.accepted;
    const double draft = static_cast<double>(steps) * s.on->costs.step, verify = s.on->costs.pass[round.drafted + 1];
    if (s.clock) {
      const auto noise = [&](std::uint64_t what) {
        const double u = uniform(s.seed ^ 0xabcdef, 4 * pass + what), v = uniform(s.seed ^ 0x123456, 4 * pass + what);
        return (1 + .05 * std::sqrt(3.0) * (2 * u - 1)) * (v < .01 ? 5 : 1);
      };
      round.draft_seconds = .02 * draft * noise(0), round.verify_seconds = .02 * verify * noise(1);
    }
    policy.record(round);
    time += draft + verify, n += round.accepted + 1;
  }
  return time;
}

struct result {
  double adaptive = 0, best = 0;  // speed against plain
  std::size_t best_length = 0;
};
result compare(const setting& s) {
  const double plain = static_cast<double>(s.tokens);
  result r{.adaptive = plain / time_of(s.clock ? adaptive() : adaptive(s.on->costs), s), .best = 1};
  for (std::size_t k = 1; k <= max_draft_length; ++k) {
    const double speed = plain / time_of(fixed(k), s);
    if (speed > r.best) r.best = speed, r.best_length = k;
  }
  return r;
}

std::string table(const std::vector<text_kind>& texts, const std::vector<machine>& on, std::uint64_t seed, std::size_t tokens, bool clock) {
  std::string out = "\nspeed against plain of adaptive / best fixed length";
  for (const machine& m : on) out += " | " + m.name;
  for (const text_kind& text : texts) {
    out += "\n" + text.name;
    for (const machine& m : on) {
      const result r = compare({&text, &m, seed, tokens, clock});
      char cell[64];
      std::snprintf(cell, sizeof cell, " | %.3f / %.3f @%zu%s", r.adaptive, r.best, r.best_length, r.adaptive < .97 * r.best ? " !" : "");
      out += cell;
    }
  }
  return out;
}

TEST_CASE("adaptive comes close to the best fixed length of hindsight, and is never slower than plain decoding") {
  const auto texts = text_kinds();
  const auto on = machines();
  constexpr std::uint64_t seeds = 4;
  for (const bool clock : {false, true}) {
    bool good = true;
    std::string tables;
    for (const text_kind& text : texts)
      for (const machine& m : on) {
        double share = 0;  // of the best's speed, mean of the seeds
        for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
          const result r = compare({&text, &m, seed, 4000, clock});
          good = good && r.adaptive >= .98 && r.adaptive >= .95 * r.best;
          share += r.adaptive / r.best / seeds;
        }
        good = good && share >= .97;
      }
    for (std::uint64_t seed = 1; seed <= seeds && !good; ++seed)
      tables += "\nseed " + std::to_string(seed) + table(texts, on, seed, 4000, clock);
    INFO((clock ? "noisy times" : "exact costs"), tables);
    CHECK(good);
  }
}

TEST_CASE("a drafter that knows when it is right makes drafting faster, and is asked to stop in time") {
  const auto sure = [](std::size_t p) { return uniform(99, p) < .6; };
  const auto rate = [sure](std::size_t p, std::size_t) { return sure(p) ? .97 : .25; };
  const text_kind silent{"silent", rate}, saying{"saying", rate, [sure](std::size_t p) { return sure(p) ? .98f : .3f; }};
  for (const machine& m : machines()) {
    CAPTURE(m.name);
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      CAPTURE(seed);
      const double without = time_of(adaptive(m.costs), {&silent, &m, seed}), with = time_of(adaptive(m.costs), {&saying, &m, seed});
      CHECK(with <= 1.02 * without);
      if (m.name == "steep" || m.name == "experts") CHECK(with <= .95 * without);
    }
  }
}

}  // namespace
