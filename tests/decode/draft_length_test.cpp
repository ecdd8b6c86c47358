// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/decode/draft_length.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "outrider/backend/reference.hpp"
#include "outrider/decode/calibrate.hpp"

namespace {

using namespace outrider;

static_assert(draft_length_policy<fixed<4>> && draft_length_policy<fixed<>> && draft_length_policy<heuristic> &&
              draft_length_policy<adaptive>);

/// Passes of M rows for 1 + beta (M - 1).
draft_costs straight(double step, double beta) {
  draft_costs costs{.step = step};
  for (std::size_t m = 1; m < costs.pass.size(); ++m) costs.pass[m] = 1 + beta * static_cast<double>(m - 1);
  return costs;
}

/// Coins that fall the same way every time.
class coins {
 public:
  bool operator()(double rate) { return std::uniform_real_distribution<double>()(random_) < rate; }

 private:
  std::mt19937 random_{7};
};

/// A round whose every draft behind right ones is right with probability `rate`; how many there were.
std::size_t play_round(adaptive& policy, double rate, coins& draw) {
  const std::size_t drafts = policy.plan(max_draft_length).drafts;
  std::size_t accepted = 0;
  while (accepted < drafts && draw(rate)) ++accepted;
  policy.record({.drafted = drafts, .accepted = accepted});
  return drafts;
}

TEST_CASE("a fixed length is kept as far as there is room") {
  fixed<4> four;
  CHECK(four.plan(16).drafts == 4);
  CHECK(four.plan(3).drafts == 3);
  four.record({.drafted = 4, .accepted = 0});
  CHECK(four.plan(16).drafts == 4);
  CHECK(fixed(7).plan(16).drafts == 7);
  CHECK(fixed(7).plan(0).drafts == 0);
  CHECK(fixed<0>().plan(16).drafts == 0);
  CHECK_FALSE(four.plan(16).wants_confidence);
}

TEST_CASE("the heuristic drafts two more after a round that held, else one fewer, from 1 to the most there is") {
  heuristic policy;
  CHECK(policy.plan(16).drafts == 4);
  policy.record({.drafted = 4, .accepted = 4});
  CHECK(policy.plan(16).drafts == 6);
  policy.record({.drafted = 6, .accepted = 5});
  CHECK(policy.plan(16).drafts == 5);
  policy.record({});  // a plain pass says nothing
  CHECK(policy.plan(16).drafts == 5);
  CHECK(policy.plan(2).drafts == 2);
  for (int i = 0; i < 20; ++i) policy.record({.drafted = 5, .accepted = 0});
  CHECK(policy.plan(16).drafts == 1);
  for (int i = 0; i < 20; ++i) policy.record({.drafted = 1, .accepted = 1});
  CHECK(policy.plan(100).drafts == max_draft_length);
}

TEST_CASE("adaptive finds the lengths that known costs and acceptance ask for") {
  // The optimum of E(k) / (k c + 1 + beta k), found here by trying all.
  for (const auto& pair : {std::pair{.02, .01}, {.05, .02}, {.11, .02}, {.11, .10}, {.22, .20}, {.05, 1.0}})
    for (const double rate : {0.0, .2, .4, .5, .6, .7, .8, .9}) {
      const double step = pair.first, beta = pair.second;
      CAPTURE(step);
      CAPTURE(beta);
      CAPTURE(rate);
      const draft_costs costs = straight(step, beta);
      const auto speed = [&](std::size_t k) {
        double tokens = 1, all = 1;
        for (std::size_t i = 0; i < k; ++i) tokens += all *= rate;
        return tokens / (static_cast<double>(k) * step + costs.pass[k + 1]);
      };
      double best = 1;
      for (std::size_t k = 1; k <= max_draft_length; ++k) best = (std::max)(best, speed(k));

      adaptive policy(costs);
      coins draw;
      for (int i = 0; i < 200; ++i) play_round(policy, rate, draw);
      constexpr int rounds = 1000;
      double time = 0, tokens = 0;
      for (int i = 0; i < rounds; ++i) {
        const std::size_t k = play_round(policy, rate, draw);
        double expected = 0, all = 1;
        for (std::size_t j = 0; j < k; ++j) expected += all *= rate;
        tokens += 1 + expected, time += static_cast<double>(k) * step + costs.pass[k + 1];
      }
      CHECK(tokens / time >= .97 * best);
      CHECK(tokens / time >= .99);
    }
}

TEST_CASE("adaptive drafts no more than is allowed, and nothing where nothing is") {
  adaptive policy(straight(.01, .01));
  for (const std::size_t most : std::initializer_list<std::size_t>{0, 1, 2, 5, 16, 1000}) {
    CAPTURE(most);
    CHECK(policy.plan(most).drafts <= (std::min)(most, max_draft_length));
  }
  CHECK(policy.plan(0).drafts == 0);
}

TEST_CASE("adaptive goes on drafting when a text becomes predictable again") {
  adaptive policy(straight(.05, .1));
  coins draw;
  std::size_t drafted = 0;
  for (int i = 0; i < 2000; ++i) drafted += play_round(policy, 0, draw);
  CHECK(drafted < 300);
  std::size_t passes = 0;
  for (; passes < 2000 && play_round(policy, .95, draw) < 4; ++passes) {
  }
  CAPTURE(passes);
  CHECK(passes < 500);
}

TEST_CASE("adaptive spends less than a hundredth of the time on probes") {
  for (const draft_costs& costs : {straight(.01, .02), straight(.05, .2), straight(.25, .05), straight(.1, 1)}) {
    adaptive policy(costs);
    coins draw;
    double lost = 0;
    constexpr int tokens = 4000;
    for (int i = 0; i < 500; ++i) play_round(policy, 0, draw);  // learns that nothing holds
    for (int i = 0; i < tokens; ++i) {
      const std::size_t k = play_round(policy, 0, draw);
      lost += static_cast<double>(k) * costs.step + costs.pass[k + 1] - 1;
    }
    CAPTURE(costs.pass[2]);
    CHECK(lost < .01 * tokens);
    CHECK(lost > 0);
  }
}

TEST_CASE("without times adaptive is the same function of its rounds every time") {
  adaptive first(straight(.05, .2)), second(straight(.05, .2));
  coins draw, again;
  for (int i = 0; i < 1000; ++i) REQUIRE(play_round(first, i < 500 ? .8 : .3, draw) == play_round(second, i < 500 ? .8 : .3, again));
}

TEST_CASE("costs only count as ratios") {
  draft_costs thousandfold = straight(.05, .2);
  thousandfold.step *= 1000;
  for (double& pass : thousandfold.pass) pass *= 1000;
  adaptive first(straight(.05, .2)), second(thousandfold);
  coins draw, again;
  for (int i = 0; i < 300; ++i) REQUIRE(play_round(first, .7, draw) == play_round(second, .7, again));
}

TEST_CASE("costs that are not costs are refused, times that are not times are ignored") {
  for (const double wrong : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    draft_costs costs = typical_draft_costs();
    costs.step = wrong;
    CHECK_THROWS_AS(adaptive{costs}, error);
    costs = typical_draft_costs();
    costs.pass[3] = wrong;
    CHECK_THROWS_AS(adaptive{costs}, error);
  }
  CHECK_THROWS_WITH_AS(adaptive{draft_costs{}},
                       "outrider: the cost of a pass of 1 rows is 0.000000; a positive number is needed, for a draft step 0 is allowed",
                       error);

  adaptive policy;
  for (const double wrong : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    const std::size_t drafts = policy.plan(16).drafts;
    policy.record({.drafted = drafts, .accepted = drafts, .draft_seconds = wrong, .verify_seconds = wrong});
  }
  CHECK(policy.plan(16).drafts > 4);
}

TEST_CASE("times teach costs, whatever speed the machine has at the moment") {
  const draft_costs truth = straight(.1, .4);
  detail::running_costs costs(typical_draft_costs());
  for (std::size_t i = 0; i < 600; ++i) {
    const double scale = .01 * (i / 100 % 2 == 0 ? 1 : 1.5);  // busy every other minute
    const std::size_t rows = i % 4 == 0 ? 1 : 1 + i % 5;
    costs.record_pass(rows, scale * truth.pass[rows] * (i % 37 == 0 ? 5 : 1));
    costs.record_steps(4, scale * 4 * truth.step);
  }
  for (std::size_t m = 2; m <= 5; ++m) {
    CAPTURE(m);
    CHECK(costs.pass(m) == doctest::Approx(truth.pass[m]).epsilon(.1));
  }
  CHECK(costs.pass(9) == doctest::Approx(truth.pass[9]).epsilon(.2));  // never timed
  CHECK(costs.step() == doctest::Approx(truth.step).epsilon(.25));
}

TEST_CASE("rounds whose drafts nobody timed by themselves teach what both cost, and drafts count as free") {
  const draft_costs truth = straight(.1, .4);
  const auto joint = [&](std::size_t rows) { return truth.pass[rows] + truth.step * static_cast<double>(rows - 1); };
  detail::running_costs costs(typical_draft_costs());
  for (std::size_t i = 0; i < 400; ++i) {
    const std::size_t rows = 1 + i % 5;
    if (rows == 1)
      costs.record_pass(1, .01);
    else
      costs.record_joint(rows, .01 * joint(rows));
  }
  CHECK(costs.step() == 0);
  for (std::size_t m = 2; m <= 5; ++m) {
    CAPTURE(m);
    CHECK(costs.pass(m) == doctest::Approx(joint(m)).epsilon(.05));
  }
}

TEST_CASE("confidences that tell right from wrong become a gate") {
  adaptive policy(straight(.02, .5));  // rows are dear
  std::array<float, max_draft_length> confidence{};
  float gate = 0;
  for (std::size_t i = 0; i < 300; ++i) {
    const draft_plan plan = policy.plan(16);
    CHECK((plan.drafts == 0 || plan.wants_confidence));
    // Sure and right, sure and right, unsure and wrong.
    std::size_t drafted = 0;
    for (; drafted < plan.drafts; ++drafted) {
      confidence[drafted] = drafted < 2 ? .97f : .3f;
      if (confidence[drafted] < plan.min_confidence) break;
    }
    policy.record({.drafted = drafted,
                   .accepted = (std::min)(drafted, std::size_t{2}),
                   .doubted = drafted < plan.drafts,
                   .confidence = std::span(confidence).first(drafted)});
    gate = plan.min_confidence;
  }
  CHECK(gate > .3f);
  CHECK(gate <= .97f);
}

TEST_CASE("a drafter that says no confidence is not gated") {
  adaptive policy(straight(.02, .3));
  const std::array<float, max_draft_length> unknown{};
  for (int i = 0; i < 200; ++i) {
    const draft_plan plan = policy.plan(16);
    CHECK(plan.min_confidence == 0);
    policy.record({.drafted = plan.drafts, .accepted = plan.drafts / 2, .confidence = std::span(unknown).first(plan.drafts)});
  }
}

/// Counts what it is told to do.
struct counting_target {
  using backend_type = reference;
  std::size_t drafts = 16, positions = 1000, kept = 0, prefilled = 0, cleared = 0;
  std::vector<std::size_t> passes = {};

  [[nodiscard]] std::size_t committed() const noexcept { return kept; }
  [[nodiscard]] std::size_t max_draft() const noexcept { return drafts; }
  [[nodiscard]] std::size_t max_positions() const noexcept { return positions; }
  [[nodiscard]] std::size_t vocab_size() const noexcept { return 11; }
  void reserve(std::size_t count) const { CHECK(count <= positions); }
  void prefill(std::span<const token_id> tokens) {
    check(tokens);
    kept += tokens.size(), prefilled += tokens.size();
  }
  void verify(std::span<const token_id> tokens) {
    check(tokens);
    passes.push_back(tokens.size());
  }
  void clear() noexcept { kept = 0, ++cleared; }
  static void check(std::span<const token_id> tokens) {
    for (const token_id id : tokens) CHECK((id >= 0 && id < 11));
  }
};
struct counting_drafter {
  static constexpr draft_needs needs{};
  std::size_t asked = 0;
  std::size_t propose(const counting_target& target, const draft_request& request, std::span<token_id> out) {
    CHECK(request.text.size() == target.committed() + 1);
    ++asked;
    return out.size();
  }
};

TEST_CASE("calibrate times drafts and passes of an empty target and leaves it empty") {
  counting_target target;
  counting_drafter drafter;
  const draft_costs costs = calibrate(target, drafter, 16, std::chrono::hours(1));
  CHECK(target.passes == std::vector<std::size_t>{1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 17, 17});
  CHECK(target.committed() == 0);
  CHECK(target.cleared == 1);
  CHECK(target.prefilled > 0);
  CHECK(drafter.asked > 0);
  CHECK_NOTHROW(adaptive{costs});
}

TEST_CASE("calibrate starts no pass beyond its limit, and makes up the rest") {
  counting_target target;
  counting_drafter drafter;
  const draft_costs costs = calibrate(target, drafter, 16, std::chrono::seconds(0));
  CHECK(target.passes == std::vector<std::size_t>{1});
  for (std::size_t m = 2; m < costs.pass.size(); ++m) CHECK(costs.pass[m] > costs.pass[m - 1]);
  CHECK_NOTHROW(adaptive{costs});
}

TEST_CASE("calibrate needs an empty target with room") {
  counting_drafter drafter;
  counting_target full{.kept = 3}, narrow{.drafts = 4}, short_one{.positions = 5};
  CHECK_THROWS_WITH_AS(static_cast<void>(calibrate(full, drafter, 4)),
                       "outrider: calibrate() needs an empty target, this one holds 3 positions", error);
  CHECK_THROWS_WITH_AS(static_cast<void>(calibrate(narrow, drafter, 5)), "outrider: 5 drafts to calibrate, this target takes up to 4",
                       error);
  CHECK_THROWS_WITH_AS(static_cast<void>(calibrate(short_one, drafter, 4)),
                       "outrider: a target of 5 positions is too small to time passes of 5 rows", error);
  CHECK(calibrate(narrow, drafter, 0).pass[1] > 0);
}

}  // namespace
