// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/text/stop_strings.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "outrider/text/detokenizer.hpp"
#include "outrider/text/tokenizer.hpp"
#include "outrider/text/utf8.hpp"
#include "support/refusal.hpp"

using namespace outrider;

namespace {

struct outcome {
  std::string shown;
  bool stopped = false;
  bool operator==(const outcome&) const = default;
};

/// The rule itself: of all places where a stop string ends, the first; of those that end there, the longest; it goes, and all behind it.
outcome cut_slowly(const std::string& text, const std::vector<std::string>& stops) {
  for (std::size_t end = 1; end <= text.size(); ++end) {
    std::size_t longest = 0;
    for (const std::string& stop : stops)
      if (text.substr(0, end).ends_with(stop)) longest = (std::max)(longest, stop.size());
    if (longest != 0) return {text.substr(0, end - longest), true};
  }
  return {text, false};
}

/// Pushed in parts of the given sizes (the last one again and again).
outcome cut(const std::string& text, const std::vector<std::string>& stops, const std::vector<std::size_t>& sizes) {
  stop_strings filter(stops);
  outcome result;
  std::size_t part = 0;
  for (std::size_t begin = 0; begin < text.size(); ++part) {
    const std::size_t size = sizes[(std::min)(part, sizes.size() - 1)];
    result.shown += filter.push(std::string_view(text).substr(begin, size));
    begin += size;
  }
  result.stopped = filter.stopped();
  result.shown += filter.finish();
  return result;
}

}  // namespace

TEST_CASE("stop strings cut a text where the rule says, however it arrives") {
  const unsigned seed = 4711;
  INFO("seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 20000; ++round) {
    // Two or three letters and short strings: false beginnings, overlaps and strings inside strings in nearly every text.
    const auto letters = 2 + random() % 2;
    const auto word = [&](std::size_t longest) {
      std::string w(1 + random() % longest, 'a');
      for (char& c : w) c = static_cast<char>('a' + random() % letters);
      return w;
    };
    std::vector<std::string> stops;
    for (auto i = random() % 4; i > 0; --i) stops.push_back(word(6));
    const std::string text = word(30);
    const std::vector<std::size_t> sizes{1 + random() % 4, 1 + random() % 4, 1 + random() % 4, 1 + random() % 9};
    CAPTURE(round);
    CAPTURE(text);
    const outcome expected = cut_slowly(text, stops), found = cut(text, stops, sizes);
    CHECK(found.shown == expected.shown);
    CHECK(found.stopped == expected.stopped);
  }
}

TEST_CASE("a beginning of a stop string waits, and passes when it turns out to be none") {
  stop_strings filter({"STOP"});
  CHECK(filter.push("a ST") == "a ");
  CHECK(filter.push("A") == "STA");
  CHECK(filter.push("S") == "");
  CHECK(filter.push("ST") == "S");
  CHECK(filter.push("OP and more") == "");
  CHECK(filter.stopped());
  CHECK(filter.push("more") == "");
  CHECK(filter.finish() == "");
}

TEST_CASE("what waits at the end of the text is shown") {
  stop_strings filter({"\n\n"});
  CHECK(filter.push("line\n") == "line");
  CHECK(filter.finish() == "\n");
  CHECK(filter.push("\nnext") == "\nnext");  // as new: the newline before does not count any more
  CHECK_FALSE(filter.stopped());
}

TEST_CASE("a stop string that begins inside the false beginning of another is found") {
  CHECK(cut("xaabaabc", {"aabaaa", "abc"}, {1}) == outcome{"xaaba", true});
  CHECK(cut("ababac", {"abac"}, {1}) == outcome{"ab", true});
  CHECK(cut("<|im_<|im_end|>", {"<|im_end|>"}, {3}) == outcome{"<|im_", true});
}

TEST_CASE("the first stop string to be complete counts, of those that end together the longest") {
  CHECK(cut("abcd", {"abcd", "bc"}, {4}) == outcome{"a", true});
  CHECK(cut("xabc", {"bc", "abc", "c"}, {4}) == outcome{"x", true});
  CHECK(cut("one two", {"two", "one"}, {7}) == outcome{"", true});
}

TEST_CASE("a stop in the middle of what one token or one round gives ends the text there") {
  CHECK(cut("Hello.\nUser: more text", {"\nUser:"}, {22}) == outcome{"Hello.", true});
}

TEST_CASE("behind a detokenizer only whole characters are shown, also around stop strings of several bytes") {
  const tokenizer tokens = tokenizer::from_file(OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/target");
  for (const std::string stop : {"日本", "🦙", "é"}) {
    CAPTURE(stop);
    const std::string text = "日月 è 🦋 ê日木 ü" + stop + " more";
    detokenizer stream(tokens);
    stop_strings filter({stop});
    std::string shown;
    const auto show = [&](std::string_view part) {
      utf8_repair repair;
      std::string repaired;
      repair.push(part, repaired);
      repair.finish(repaired);
      CHECK(repaired == part);
      shown += part;
    };
    for (const token_id id : tokens.encode(text)) show(filter.push(stream.push(id)));
    show(filter.push(stream.finish()));
    CHECK(filter.stopped());
    show(filter.finish());
    CHECK(shown == text.substr(0, text.find(stop)));
  }
}

TEST_CASE("without stop strings everything passes at once") {
  stop_strings filter({});
  CHECK(filter.push("text") == "text");
  CHECK(filter.finish() == "");
}

TEST_CASE("an empty stop string is refused") {
  CHECK(testing::refusal(error_code::argument_invalid, [] { stop_strings({"a", ""}); }) == "stop_strings: string 1 is empty");
}
