// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/text/word_cache.hpp"

#include <doctest/doctest.h>

#include <random>
#include <string>
#include <vector>

using namespace outrider;

namespace {

/// Appends a number of ids that only this word has.
void append_ids(const std::string& word, std::vector<token_id>& ids) {
  for (const char c : word) ids.push_back(c);
  ids.push_back(-static_cast<token_id>(word.size()));
}

}  // namespace

TEST_CASE("a word met again is copied, not encoded anew") {
  word_cache words(1000);
  std::vector<token_id> ids;
  int encoded = 0;
  for (int i = 0; i < 3; ++i)
    words.append("word", ids, [&] {
      ++encoded;
      append_ids("word", ids);
    });
  CHECK(encoded == 1);
  CHECK(ids == std::vector<token_id>{'w', 'o', 'r', 'd', -4, 'w', 'o', 'r', 'd', -4, 'w', 'o', 'r', 'd', -4});
}

TEST_CASE("words of any length, in a cache of any size, have the ids they have without it") {
  const unsigned seed = 12;
  INFO("seed " << seed);
  std::mt19937 random(seed);
  for (const std::size_t bytes : {0u, 1u, 64u, 4000u, 10000000u}) {
    CAPTURE(bytes);
    word_cache words(bytes);
    std::vector<token_id> ids, expected;
    for (int i = 0; i < 5000; ++i) {
      const std::string word(1 + random() % 24, static_cast<char>('a' + random() % 26));
      words.append(word, ids, [&] { append_ids(word, ids); });
      append_ids(word, expected);
    }
    CHECK(ids == expected);
  }
}
