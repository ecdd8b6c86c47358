// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/decode/ngram_drafter.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "support/refusal.hpp"

namespace {

using namespace outrider;
using testing::mentions;
using testing::refusal;
using ids = std::vector<token_id>;

constexpr auto latest = ngram_occurrence::latest, leftmost = ngram_occurrence::leftmost;

struct no_target {};
static_assert(check_drafter<ngram_drafter, no_target>());  // reads nothing of it

struct cuts {
  ids eos = {}, suppress = {};
};

ids draft_of(const ngram_options& options, const ids& text, std::size_t most, const cuts& cut = {}) {
  ids out(most, -1);
  draft_request request{};
  request.text = text;
  request.eos = cut.eos;
  request.suppress = cut.suppress;
  const std::size_t count = ngram_drafter(options).propose(no_target{}, request, out);
  REQUIRE(count <= most);
  out.resize(count);
  return out;
}

bool has(const ids& list, token_id id) { return std::find(list.begin(), list.end(), id) != list.end(); }

/// The same by the words of the contract: one search per length, and a text that grows by what is drafted.
ids expected(const ngram_options& options, ids text, std::size_t most, const cuts& cut) {
  const std::size_t n = text.size();
  for (std::size_t size = (std::min)(options.max_ngram, n - 1); size >= options.min_ngram; --size) {
    std::vector<std::size_t> ends;
    for (std::size_t begin = 0; begin + size < n; ++begin)
      if (std::equal(text.begin() + static_cast<std::ptrdiff_t>(begin), text.begin() + static_cast<std::ptrdiff_t>(begin + size),
                     text.end() - static_cast<std::ptrdiff_t>(size)))
        ends.push_back(begin + size);
    if (ends.empty()) continue;
    ids draft;
    for (std::size_t from = options.occurrence == latest ? ends.back() : ends.front(); draft.size() < most; ++from) {
      const token_id token = text[from];
      if (has(cut.suppress, token)) break;
      draft.push_back(token);
      text.push_back(token);
      if (has(cut.eos, token)) break;
    }
    return draft;
  }
  return {};
}

}  // namespace

TEST_CASE("a draft is what followed the end of the text earlier on") {
  CHECK(draft_of({}, {1, 2, 3, 4, 5, 6, 1, 2}, 3) == ids{3, 4, 5});
  CHECK(draft_of({}, {1, 2, 3, 4, 5, 6, 1, 2}, 1) == ids{3});
  CHECK(draft_of({}, {1, 2, 3, 4, 5, 6, 1, 2}, 0).empty());
  CHECK(draft_of({}, {1, 2, 3, 4, 5, 6, 7, 8}, 3).empty());
}

TEST_CASE("the longest n-gram wins over a more recent shorter one") {
  const ids text{1, 2, 3, 4, 9, 2, 3, 5, 9, 1, 2, 3};
  CHECK(draft_of({3, 1, latest}, text, 1) == ids{4});
  CHECK(draft_of({2, 1, latest}, text, 1) == ids{5});
}

TEST_CASE("of several occurrences the latest is followed, or the leftmost if asked for") {
  const ids text{1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2};
  CHECK(draft_of({2, 2, latest}, text, 1) == ids{5});
  CHECK(draft_of({2, 2, leftmost}, text, 1) == ids{3});
}

TEST_CASE("n-grams shorter than the least are no match") {
  const ids text{1, 2, 3, 7, 3};
  CHECK(draft_of({3, 1, latest}, text, 1) == ids{7});
  CHECK(draft_of({3, 2, latest}, text, 1).empty());
}

TEST_CASE("a periodic text is continued beyond what is known") {
  CHECK(draft_of({}, {1, 2, 1, 2}, 7) == ids{1, 2, 1, 2, 1, 2, 1});
  CHECK(draft_of({}, {5, 5, 5}, 4) == ids{5, 5, 5, 5});
  CHECK(draft_of({2, 1, latest}, {5, 5}, 3) == ids{5, 5, 5});
  CHECK(draft_of({}, {9, 1, 2, 3, 1, 2, 3}, 5) == ids{1, 2, 3, 1, 2});
}

TEST_CASE("a text of one token has nothing before it") {
  CHECK(draft_of({1, 1, latest}, {7}, 4).empty());
  CHECK(draft_of({4, 1, leftmost}, {7}, 4).empty());
  CHECK(draft_of({}, {7}, 4).empty());
}

TEST_CASE("a text no longer than the n-gram is searched for shorter ones") {
  CHECK(draft_of({4, 1, latest}, {7, 7}, 2) == ids{7, 7});
  CHECK(draft_of({4, 2, latest}, {7, 7}, 2).empty());
  CHECK(draft_of({1000, 2, latest}, {7, 7, 7}, 2) == ids{7, 7});
}

TEST_CASE("a draft ends before a suppressed token and behind an end of text") {
  const ids text{1, 2, 3, 4, 5, 6, 1, 2};
  CHECK(draft_of({}, text, 4, {.suppress = {8, 5}}) == ids{3, 4});
  CHECK(draft_of({}, text, 4, {.suppress = {3}}).empty());
  CHECK(draft_of({}, text, 4, {.eos = {9, 4}}) == ids{3, 4});
  CHECK(draft_of({}, text, 4, {.eos = {4}, .suppress = {4}}) == ids{3});
  CHECK(draft_of({}, {4, 1, 4, 1}, 6, {.eos = {1}}) == ids{4, 1});
}

TEST_CASE("confidence is 0, and a least confidence ends nothing") {
  const ids text{1, 2, 3, 4, 5, 1, 2};
  std::vector<float> confidence(4, 0.5f);
  ids out(4);
  draft_request request{};
  request.text = text;
  request.eos = std::span(text).subspan(3, 1);
  request.confidence = confidence;
  request.min_confidence = 0.9f;
  CHECK(ngram_drafter().propose(no_target{}, request, out) == 2);
  CHECK(confidence == std::vector<float>{0, 0, 0.5f, 0.5f});
}

TEST_CASE("drafts are those of a search by the words of the contract, on random texts") {
  constexpr std::uint32_t seed = 20240611;
  CAPTURE(seed);
  std::mt19937 random(seed);
  const auto draw = [&](std::size_t least, std::size_t most) { return least + random() % (most - least + 1); };
  for (int i = 0; i < 20000; ++i) {
    CAPTURE(i);
    const std::size_t alphabet = draw(1, 6);
    ids text(i % 10 == 0 ? draw(1, 300) : draw(1, 80));
    for (token_id& id : text) id = static_cast<token_id>(draw(0, alphabet - 1));
    if (i % 3 == 0)  // mostly one token, so that rare ones are far apart
      for (token_id& id : text) id = draw(0, 30) == 0 ? id : 9;
    ngram_options options{.min_ngram = draw(1, 4), .occurrence = draw(0, 1) == 0 ? latest : leftmost};
    options.max_ngram = options.min_ngram + draw(0, i % 7 == 0 ? 40 : 4);
    cuts cut;
    if (draw(0, 2) == 0) cut.eos.push_back(static_cast<token_id>(draw(0, 6)));
    if (draw(0, 2) == 0) cut.suppress.push_back(static_cast<token_id>(draw(0, 6)));
    const std::size_t most = draw(0, 20);
    CAPTURE(options.max_ngram);
    CAPTURE(options.min_ngram);
    CAPTURE(static_cast<int>(options.occurrence));
    REQUIRE(draft_of(options, text, most, cut) == expected(options, text, most, cut));
  }
}

TEST_CASE("an occurrence is found wherever it lies in a long text") {
  for (std::size_t n = 6; n < 140; ++n)
    for (std::size_t at = 0; at + 3 < n - 2; ++at)
      for (const auto occurrence : {latest, leftmost}) {
        CAPTURE(n);
        CAPTURE(at);
        ids text(n);
        for (std::size_t i = 0; i < n; ++i) text[i] = static_cast<token_id>(100 + i);
        text[at] = text[n - 2] = 1;
        text[at + 1] = text[n - 1] = 2;
        REQUIRE(draft_of({3, 2, occurrence}, text, 1) == ids{text[at + 2]});
      }
}

TEST_CASE("lengths that are none are refused") {
  CHECK(mentions(refusal(error_code::argument_invalid, [] { ngram_drafter({3, 0, latest}); }), "n-grams of 0 to 3 tokens", "1 or more"));
  CHECK(mentions(refusal(error_code::argument_invalid, [] { ngram_drafter({0, 0, latest}); }), "n-grams of 0 to 0 tokens"));
  CHECK(mentions(refusal(error_code::argument_invalid,
                         [] {
                           ngram_drafter({2, 3, latest});
                         }),
                 "n-grams of 3 to 2 tokens", "the first not above the second"));
}
