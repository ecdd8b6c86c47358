// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/decode/statistics.hpp"

#include <doctest/doctest.h>

#include "outrider/decode/acceptance.hpp"

namespace {

using namespace outrider;

/// Four rounds (3 drafts: 0, 2 and 3 accepted; 1 draft: 1 accepted) and two plain passes.
statistics example() {
  statistics s;
  s.passes[3][0] = s.passes[3][2] = s.passes[3][3] = s.passes[1][1] = 1;
  s.passes[0][0] = 2;
  s.texts = 1;
  s.tokens = 1 + 4 + 6 + 2;  // the prompt's, one a round, the accepted, one a plain pass
  s.decode_seconds = 2;
  return s;
}

TEST_CASE("a round is a pass with drafts; plain passes are counted apart") {
  CHECK(example().rounds() == 4);
  CHECK(example().plain_passes() == 2);
}

TEST_CASE("drafted and accepted are sums over rounds") {
  CHECK(example().drafted() == 10);
  CHECK(example().accepted() == 6);
  CHECK(example().acceptance_rate() == 0.6);
}

TEST_CASE("position i counts the rounds that drafted, and accepted, at least i") {
  const statistics s = example();
  CHECK(s.drafted_at(1) == 4);
  CHECK(s.drafted_at(2) == 3);
  CHECK(s.drafted_at(3) == 3);
  CHECK(s.drafted_at(4) == 0);
  CHECK(s.accepted_at(1) == 3);
  CHECK(s.accepted_at(2) == 2);
  CHECK(s.accepted_at(3) == 1);
  CHECK(s.accepted_at(4) == 0);
}

TEST_CASE("tokens per round includes the target's own, tokens per pass the prompt's pass") {
  CHECK(example().tokens_per_round() == 1 + 6.0 / 4);
  CHECK(example().tokens_per_pass() == 13.0 / 7);
}

TEST_CASE("tokens per second leaves out the token of the prompt's pass") { CHECK(example().tokens_per_second() == 6); }

TEST_CASE("the longest draft is counted like any other") {
  statistics s;
  s.passes[16][16] = 2;
  s.passes[16][0] = 1;
  CHECK(s.drafted() == 48);
  CHECK(s.accepted() == 32);
  CHECK(s.accepted_at(16) == 2);
}

TEST_CASE("without drafts, rounds or time all ratios are defined") {
  const statistics s;
  CHECK(s.acceptance_rate() == 0);
  CHECK(s.tokens_per_round() == 1);
  CHECK(s.tokens_per_pass() == 0);
  CHECK(s.tokens_per_second() == 0);
}

TEST_CASE("drafts are accepted up to the first that differs") {
  constexpr token_id drafts[] = {5, 6, 7};
  constexpr token_id all[] = {5, 6, 7, 8}, two[] = {5, 6, 9, 7}, none[] = {4, 6, 7, 8};
  static_assert(count_accepted(drafts, all, 3) == 3);
  static_assert(count_accepted(drafts, two, 3) == 2);
  static_assert(count_accepted(drafts, none, 3) == 0);
  static_assert(count_accepted(drafts, all, 0) == 0);
}

}  // namespace
