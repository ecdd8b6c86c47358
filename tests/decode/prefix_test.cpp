// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/decode/prefix.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

namespace {

using namespace outrider;
using ids = std::vector<token_id>;

/// A target that can go back to `least` tokens, or to none.
struct short_memory {
  std::size_t length = 0, least = 0;
  bool cleared = false;

  [[nodiscard]] std::size_t committed() const { return length; }
  bool truncate(std::size_t n) {
    if (n < least) return false;
    length = n;
    return true;
  }
  void clear() {
    length = 0;
    cleared = true;
  }
};

std::size_t reused(short_memory& target, const ids& committed, const ids& prompt) {
  target.length = committed.size();
  const std::size_t count = reuse_prefix(target, committed, prompt);
  CHECK(target.length == count);
  return count;
}

}  // namespace

TEST_CASE("two texts share what they begin with") {
  CHECK(common_prefix(ids{1, 2, 3}, ids{1, 2, 4}) == 2);
  CHECK(common_prefix(ids{1, 2}, ids{1, 2, 4}) == 2);
  CHECK(common_prefix(ids{1, 2, 3}, ids{1}) == 1);
  CHECK(common_prefix(ids{}, ids{1}) == 0);
  CHECK(common_prefix(ids{2}, ids{1}) == 0);
}

TEST_CASE("what a prompt shares with the committed text is kept") {
  short_memory target;
  CHECK(reused(target, {1, 2, 3}, {1, 2, 3, 4, 5}) == 3);
  CHECK(reused(target, {1, 2, 3}, {1, 2, 9, 9}) == 2);
  CHECK(reused(target, {1, 2, 3}, {7}) == 0);
  CHECK(reused(target, {}, {1, 2}) == 0);
  CHECK_FALSE(target.cleared);
}

TEST_CASE("the last token of a prompt is never reused: its row gives the next token") {
  short_memory target;
  CHECK(reused(target, {1, 2, 3}, {1, 2, 3}) == 2);
  CHECK(reused(target, {1, 2, 3}, {1, 2}) == 1);
  CHECK(reused(target, {1, 2, 3}, {1}) == 0);
}

TEST_CASE("a target that cannot go back so far begins anew") {
  short_memory target{.least = 2};
  CHECK(reused(target, {1, 2, 3}, {1, 2, 4}) == 2);
  CHECK_FALSE(target.cleared);
  CHECK(reused(target, {1, 2, 3}, {1, 3, 4}) == 0);
  CHECK(target.cleared);
}
