// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
// Gemma 4's released vocabulary and, beside it as .inp and .out, llama.cpp's own vectors for it; support/released_vocabulary.hpp says where.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "outrider/io/mapped_file.hpp"
#include "outrider/text/detokenizer.hpp"
#include "outrider/text/tokenizer.hpp"
#include "support/released_vocabulary.hpp"

using namespace outrider;

namespace {

constexpr encode_options plain{.add_bos = false, .parse_special = false};
constexpr encode_options with_markers{.add_bos = false, .parse_special = true};

const tokenizer& released(const std::string& path) {
  static const tokenizer tokens = tokenizer::from_file(path);
  return tokens;
}

std::vector<token_id> numbers(const std::string& line) {
  std::istringstream stream(line);
  std::vector<token_id> ids;
  for (token_id id; stream >> id;) ids.push_back(id);
  return ids;
}

struct row {
  std::string_view text;
  std::string ids;
};

void check_rows(const tokenizer& tokens, const std::vector<row>& rows, encode_options options) {
  for (const row& r : rows) {
    CAPTURE(r.text);
    CHECK(tokens.encode(r.text, options) == numbers(r.ids));
    CHECK(tokens.decode_bytes(numbers(r.ids), true) == r.text);
  }
}

std::string streamed(const tokenizer& tokens, const std::vector<token_id>& ids) {
  detokenizer stream(tokens);
  std::string text;
  for (const token_id id : ids) text += stream.push(id);
  text += stream.finish();
  return text;
}

}  // namespace

TEST_CASE("released vocabulary: what it consists of") {
  const auto path = testing::released_vocabulary();
  if (!path) return;
  const tokenizer& tokens = released(*path);
  CHECK(tokens.vocab_size() == 262144);
  CHECK(tokens.merges().size() == 514906);
  CHECK(tokens.bos() == 2);
  CHECK(tokens.eos() == 1);
  CHECK(tokens.find("<0x41>") == 238 + 0x41);
  for (const token_id marker : {0, 1, 2, 3, 4, 46, 47, 48, 49, 50, 51, 52, 98, 100, 101, 105, 106, 255999, 256000, 258880, 258884}) {
    CAPTURE(marker);
    CHECK(tokens.is_special(marker));
  }
  CHECK(tokens.token_text(212) == "</s>");
  CHECK_FALSE(tokens.is_special(212));
}

TEST_CASE("pitfall 140, released vocabulary: llama.cpp's vectors") {
  const auto path = testing::released_vocabulary();
  if (!path) return;
  const tokenizer& tokens = released(*path);
  // .inp holds texts with a line of the separator between two of them, .out a line of ids for each.
  const std::string texts = io::read_text_file(*path + ".inp"), separator = "\n__ggml_vocab_test__\n";
  std::istringstream lines(io::read_text_file(*path + ".out"));
  std::size_t vectors = 0;
  for (std::size_t begin = 0, end; begin <= texts.size(); begin = end + separator.size(), ++vectors) {
    end = (std::min)(texts.find(separator, begin), texts.size());
    const std::string text = texts.substr(begin, end - begin);
    std::string line;
    std::getline(lines, line);
    CAPTURE(text);
    CHECK(tokens.encode(text, plain) == numbers(line));
    CHECK(tokens.decode_bytes(numbers(line)) == text);
  }
  CHECK(vectors == 46);
}

TEST_CASE("pitfalls 140 and 142, released vocabulary: texts and their ids, both ways") {
  const auto path = testing::released_vocabulary();
  if (!path) return;
  using namespace std::string_view_literals;
  check_rows(
      released(*path),
      {{"Hello world", "9259 1902"},
       {" Hello world", "26352 1902"},
       {"Hello World", "9259 4109"},
       {" Hello World!", "26352 4109 236888"},
       {" ", "236743"},
       {"  ", "138"},
       {"   ", "139"},
       {"\t", "255968"},
       {"\n", "107"},
       {"\n\n", "108"},
       {"\n\n\n", "109"},
       {"\t\n", "255968 107"},
       {"    Hello\n    Hello", "140 9259 107 140 9259"},
       {"\n =", "107 578"},
       {" (", "568"},
       {"' era", "236789 6933"},
       {"3", "236800"},
       {"33", "236800 236800"},
       {"333333333", "236800 236800 236800 236800 236800 236800 236800 236800 236800"},
       {"1234567890", "236770 236778 236800 236812 236810 236825 236832 236828 236819 236771"},
       {"Äpfel", "239122 22744 535"},
       {"Cửa Việt", "236780 29719 33154"},
       {"ied 4 ½ months", "1178 236743 236812 47041 3794"},
       {" this is 🦙.cpp", "672 563 236743 478 397 404 391 236761 12362"},
       {"нещо на Български", "1337 12515 1333 4632 165543 3830"},
       {"Hello, y'all! How are you 😁 ?我想在apple工作1314151天～",
        "9259 236764 570 236789 712 236888 2088 659 611 170124 2360 62133 237075 17641 11700 236770 236800 236770 236812 236770 236810 "
        "236770 237471 238352"},
       {"!!!!!!", "123947"},
       {" discards", "2243 2206"},
       {"a  b", "236746 138 236763"},
       {"  a", "138 236746"},
       {"a\n\n\nb", "236746 109 236763"},
       {"a\r\nb", "236746 251 107 236763"},
       {"\n \n", "107 236743 107"},
       {"\u00e9", "236859"},
       {"e\u0301", "236744 238288"},
       {"\0"sv, "238"},
       {"\u00a0", "432 398"},
       {"\ufffd", "238479"},
       {"\U00010348", "478 382 379 374"},
       {"\U000f0000", "481 414 366 366"},
       {"\U000e0001x", "481 398 366 367 236781"},
       {"👩‍👩‍👧‍👦", "243767 237243 243767 237243 244814 237243 244990"},
       {"<0x0A>", "236820 236771 236781 236771 236776 236813"},
       {"<unused0>", "236820 63634 236771 236813"},
       {"</s>", "954 236751 236813"},
       {"    def f(x):\n        return x\n", "140 2063 517 236769 236781 1473 107 144 2060 1123 107"},
       {"naïve café", "1789 238527 560 33443"},
       {"日本語のテスト", "94951 236945 88733"},
       {"한국어", "114216 237430"},
       {"العربية", "56734 175899"}},
      plain);
  // The one text that does not come back: the vocabulary's own sign for a space is a space.
  CHECK(released(*path).encode("▁x", plain) == numbers("1123"));
  CHECK(released(*path).encode(" x", plain) == numbers("1123"));
}

TEST_CASE("released vocabulary: texts with markers and their ids, both ways") {
  const auto path = testing::released_vocabulary();
  if (!path) return;
  check_rows(released(*path),
             {{"<bos><|turn>user\nHello.<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
               "2 105 2364 107 9259 236761 106 107 105 4368 107 100 45518 107 101"},
              {"<bos><|turn>system\n<|think|>\nYou are brief.<turn|>\n<|turn>user\nWhy is the sky blue?<turn|>\n<|turn>model\n",
               "2 105 9731 107 98 107 3048 659 8652 236761 106 107 105 2364 107 11355 563 506 7217 3730 236881 106 107 105 4368 107"},
              {"<|tool_call>call:get_weather{city:<|\"|>Oslo<|\"|>,unit:<|\"|>c<|\"|>}<tool_call|>",
               "48 6639 236787 828 236779 19323 236782 13319 236787 52 23458 844 52 236764 6805 236787 52 236755 52 236783 49"},
              {"<bos><|turn>user\n<|image|>What is this?<turn|>\n", "2 105 2364 107 258880 3689 563 672 236881 106 107"}},
             with_markers);
}

TEST_CASE("pitfall 140, released vocabulary: what a user writes never becomes a marker") {
  const auto path = testing::released_vocabulary();
  if (!path) return;
  const tokenizer& tokens = released(*path);
  for (token_id id = 0; id < static_cast<token_id>(tokens.vocab_size()); ++id) {
    if (!tokens.is_special(id)) continue;
    const std::string text = "a" + std::string(tokens.token_text(id)) + "b";
    CAPTURE(text);
    const auto ids = tokens.encode(text, plain);
    for (const token_id part : ids) CHECK_FALSE(tokens.is_special(part));
    CHECK(tokens.decode_text(ids) == text);
    CHECK(tokens.encode(text, with_markers).at(1) == id);
  }
}

TEST_CASE("released vocabulary: bytes that spell the sign for a space are not a space, and broken characters show as one U+FFFD") {
  const auto path = testing::released_vocabulary();
  if (!path) return;
  const tokenizer& tokens = released(*path);
  for (const row& r : {row{" ", "236743"}, row{"  Hello", "138 9259"}, row{"▁", "464 388 367"}, row{"\ufffdHello", "464 388 9259"},
                       row{"€\ufffd", "464 368 410 493"}}) {
    CAPTURE(r.text);
    CHECK(tokens.decode_text(numbers(r.ids)) == r.text);
    CHECK(streamed(tokens, numbers(r.ids)) == r.text);
  }
}
