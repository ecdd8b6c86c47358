// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/text/merge_table.hpp"

#include <doctest/doctest.h>

#include <random>
#include <vector>

using namespace outrider;

namespace {

/// The rule itself: look through all pairs, merge the leftmost of the lowest rank, start again.
std::vector<token_id> merged_slowly(std::vector<token_id> symbols, const std::vector<merge_table::merge>& merges) {
  for (;;) {
    std::size_t best = merges.size(), place = 0;
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i)
      for (std::size_t rank = 0; rank < best; ++rank)
        if (merges[rank].left == symbols[i] && merges[rank].right == symbols[i + 1]) {
          best = rank;
          place = i;
        }
    if (best == merges.size()) return symbols;
    symbols[place] = merges[best].result;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(place) + 1);
  }
}

std::vector<token_id> merged(std::vector<token_id> symbols, const std::vector<merge_table::merge>& merges) {
  merge_table(merges).apply(symbols);
  return symbols;
}

}  // namespace

TEST_CASE("merging with a heap equals looking through all pairs again and again") {
  const unsigned seed = 99;
  INFO("seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 3000; ++round) {
    CAPTURE(round);
    // Few ids, so that merges chain, results collide and equal pairs appear twice.
    const auto ids = 2 + random() % 6;
    const auto any = [&] { return static_cast<token_id>(random() % ids); };
    std::vector<merge_table::merge> merges(random() % 12);
    for (auto& m : merges) m = {any(), any(), any()};
    std::vector<token_id> symbols(random() % 80);
    for (token_id& s : symbols) s = any();
    CHECK(merged(symbols, merges) == merged_slowly(symbols, merges));
  }
}

TEST_CASE("the leftmost pair of equal rank is merged first") {
  CHECK(merged({1, 1, 1}, {{1, 1, 2}}) == std::vector<token_id>{2, 1});
  CHECK(merged({1, 1, 1, 1, 1}, {{1, 1, 2}}) == std::vector<token_id>{2, 2, 1});
}

TEST_CASE("of two merges with the same parts the first one counts") {
  CHECK(merged({1, 2}, {{1, 2, 3}, {1, 2, 4}}) == std::vector<token_id>{3});
}

TEST_CASE("nothing to merge, nothing changed") {
  CHECK(merged({}, {{1, 2, 3}}).empty());
  CHECK(merged({1}, {{1, 1, 2}}) == std::vector<token_id>{1});
  CHECK(merged({1, 2}, {}) == std::vector<token_id>{1, 2});
  std::vector<token_id> symbols{1, 2};
  merge_table().apply(symbols);
  CHECK(symbols == std::vector<token_id>{1, 2});
}
