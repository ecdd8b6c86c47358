// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/text/tokenizer.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/io/json.hpp"
#include "outrider/io/mapped_file.hpp"

using namespace outrider;
using nlohmann::json;

namespace {

const std::string tiny_path = OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/target/tokenizer.json";

json read(const std::string& path) { return io::parse_json(io::read_text_file(path), path); }

const json& tiny_document() {
  static const json document = read(tiny_path);
  return document;
}

const tokenizer& tiny() {
  static const tokenizer tokens = tokenizer::from_json_file(tiny_path);
  return tokens;
}

std::string with_spaces_for_signs(std::string text) {
  for (std::size_t at; (at = text.find("▁")) != text.npos;) text.replace(at, 3, " ");
  return text;
}

void check_cases(const tokenizer& tokens, const json& cases) {
  for (const json& row : cases) {
    const auto text = row["text"].get<std::string>();
    CAPTURE(text);
    const auto plain = tokens.encode(text, {.add_bos = false, .parse_special = false});
    CHECK(plain == row["plain"].get<std::vector<token_id>>());
    CHECK(tokens.encode(text, {.add_bos = false, .parse_special = true}) == row["special"].get<std::vector<token_id>>());
    CHECK(tokens.decode_text(plain) == with_spaces_for_signs(text));
  }
}

struct refusal {
  error_code code;
  std::string sentence;
};

refusal refusal_of(const std::string& text) {
  try {
    (void)tokenizer::from_json(text, "some/tokenizer.json");
  } catch (const error& e) {
    return {e.code(), e.what()};
  }
  FAIL("the file was accepted");
  return {};
}

/// The tiny file after one edit must be refused with exactly this sentence.
void check_refused(const std::function<void(json&)>& edit, const std::string& sentence) {
  json document = tiny_document();
  edit(document);
  const refusal r = refusal_of(document.dump());
  CHECK(r.code == error_code::tokenizer_malformed);
  CHECK(r.sentence == "some/tokenizer.json: " + sentence);
}

}  // namespace

TEST_CASE("the tiny pair's prompts and texts equal what the reference recorded") {
  const json expected = read(OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/expected.json");
  REQUIRE(expected["cases"].size() == 10);
  for (const json& row : expected["cases"]) {
    CHECK(tiny().encode(row["prompt"].get<std::string>()) == row["prompt_ids"].get<std::vector<token_id>>());
    CHECK(tiny().decode_text(row["tokens"].get<std::vector<token_id>>()) == row["text"].get<std::string>());
  }
}

TEST_CASE("ids equal the tokenizers library's, markers parsed or not") {
  check_cases(tiny(), read(OUTRIDER_SOURCE_DIR "/tests/text/fixtures/tiny_kjv.json")["cases"]);
}

TEST_CASE("added tokens that are no markers are always split out, as the tokenizers library does") {
  const json fixture = read(OUTRIDER_SOURCE_DIR "/tests/text/fixtures/tiny_kjv.json");
  json document = tiny_document();
  for (const json& token : fixture["extra_added_tokens"]) document["added_tokens"].push_back(token);
  const tokenizer tokens = tokenizer::from_json(document.dump(), "extended");
  CHECK(tokens.vocab_size() == tiny().vocab_size() + fixture["extra_added_tokens"].size());
  check_cases(tokens, fixture["extra_cases"]);
}

TEST_CASE("merges written as strings mean the same as pairs") {
  json document = tiny_document();
  for (json& merge : document["model"]["merges"]) merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  const tokenizer tokens = tokenizer::from_json(document.dump(), "strings");
  const std::string text = "And the LORD spake unto Moses, saying,\n";
  CHECK(tokens.encode(text) == tiny().encode(text));
}

TEST_CASE("the order of keys in the file does not matter") {
  const json& d = tiny_document();
  const std::string text = R"({"decoder":)" + d["decoder"].dump() + R"(,"model":{"merges":)" + d["model"]["merges"].dump() +
                           R"(,"vocab":)" + d["model"]["vocab"].dump() + R"(,"byte_fallback":true,"type":"BPE"},"normalizer":)" +
                           d["normalizer"].dump() + R"(,"added_tokens":)" + d["added_tokens"].dump() + "}";
  CHECK(tokenizer::from_json(text, "reordered").encode("the LORD\n") == tiny().encode("the LORD\n"));
}

TEST_CASE("lines are encoded one by one only where no merge joins a newline with something else") {
  // The tiny vocabulary has such a merge ("s:\n"); without it the ids of a text are those of its lines and newline runs.
  CHECK(tiny().find("s:\n"));
  json document = tiny_document();
  json kept = json::array();
  for (const json& merge : document["model"]["merges"]) {
    const std::string result = merge[0].get<std::string>() + merge[1].get<std::string>();
    if (result.find('\n') == result.npos || result.find_first_not_of('\n') == result.npos) kept.push_back(merge);
  }
  document["model"]["merges"] = kept;
  const tokenizer tokens = tokenizer::from_json(document.dump(), "without");
  constexpr encode_options no_bos{.add_bos = false};
  std::vector<token_id> joined;
  for (const std::string part : {"\n\n", "and his sons:", "\n", "the LORD", "\n\n\n"})
    for (const token_id id : tokens.encode(part, no_bos)) joined.push_back(id);
  CHECK(tokens.encode("\n\nand his sons:\nthe LORD\n\n\n", no_bos) == joined);
}

TEST_CASE("pitfall 140: user text with marker spellings stays text") {
  for (const std::string text : {"<|turn>model\n", "<bos>", "a<eos>b", "<turn|>\n<|turn>user\n"}) {
    const auto ids = tiny().encode(text, {.add_bos = false});
    for (const token_id id : ids) CHECK_FALSE(tiny().is_special(id));
    CHECK(tiny().decode_text(ids) == text);
  }
  const auto byte_spelling = tiny().encode("<0x0A>", {.add_bos = false});
  CHECK(byte_spelling.size() > 1);
  CHECK(tiny().decode_bytes(byte_spelling) == "<0x0A>");
}

TEST_CASE("pitfall 141: no double bos") {
  CHECK(tiny().encode("") == std::vector{tiny().bos()});
  const auto once = tiny().encode("<bos>Hello", {.add_bos = true, .parse_special = true});
  CHECK(once[0] == tiny().bos());
  CHECK(once[1] != tiny().bos());
  CHECK(once == tiny().encode("<bos>Hello", {.add_bos = false, .parse_special = true}));
  // As a user's words it is text, and text has its bos in front.
  CHECK(tiny().decode_text(tiny().encode("<bos>Hello")) == "<bos>Hello");
  CHECK(tiny().encode("<bos>Hello")[0] == tiny().bos());
}

TEST_CASE("pitfall 142: texts of newlines, spaces and tabs only come back") {
  for (const char c : {'\n', ' ', '\t', '\r'})
    for (const std::size_t length : {1u, 2u, 30u, 31u, 32u, 33u, 100u}) {
      const std::string text(length, c);
      CHECK(tiny().decode_bytes(tiny().encode(text)) == text);
    }
}

TEST_CASE("special tokens are left out of decoded text unless asked for") {
  const auto ids = tiny().encode("<|turn>user\nHello<turn|>", {.add_bos = true, .parse_special = true});
  CHECK(tiny().decode_text(ids) == "user\nHello");
  CHECK(tiny().decode_text(ids, true) == "<bos><|turn>user\nHello<turn|>");
}

TEST_CASE("no leading space is removed, and byte tokens that spell the space sign are not a space") {
  CHECK(tiny().decode_text(tiny().encode(" Hello")) == " Hello");
  const token_id zero = *tiny().find("<0x00>");
  const std::vector<token_id> sign{zero + 0xe2, zero + 0x96, zero + 0x81};
  CHECK(tiny().decode_text(sign) == "▁");
}

TEST_CASE("each maximal invalid sub-sequence of byte tokens becomes one U+FFFD") {
  const token_id zero = *tiny().find("<0x00>");
  const auto text_of = [&](const std::string& bytes) {
    std::vector<token_id> ids;
    for (const char c : bytes) ids.push_back(zero + static_cast<unsigned char>(c));
    CHECK(tiny().decode_bytes(ids) == bytes);
    return tiny().decode_text(ids);
  };
  CHECK(text_of("\xe2\x82\xac\xff") == "€\ufffd");
  CHECK(text_of("\xe2\x96") == "\ufffd");
  CHECK(text_of("\xe2\x96"
                "A") == "\ufffdA");
  CHECK(text_of("\xe0\x80\xaf") == "\ufffd\ufffd\ufffd");            // overlong
  CHECK(text_of("\xed\xa0\x80") == "\ufffd\ufffd\ufffd");            // a surrogate
  CHECK(text_of("\xf0\x9f\xa6\xf0\x9f\xa6\x99") == "\ufffd🦙");    // cut short, then whole
  CHECK(text_of("\xf4\x90\x80\x80") == "\ufffd\ufffd\ufffd\ufffd");  // above U+10FFFF
  CHECK(text_of("\xc0\x80\x80") == "\ufffd\ufffd\ufffd");
}

TEST_CASE("any byte string comes back, but for the vocabulary's sign for a space") {
  const unsigned seed = 20240611;
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const std::vector<std::string> parts{
      " ", "\n", "the", "LORD", "é", "日", "🦙", "\xe2", "\x96", "\x81", "▁", "\xf0\x9f", "<bos>", "<", std::string(1, '\0')};
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    const auto size = random() % 40;
    for (std::size_t i = 0; i < size; ++i)
      if (random() % 2)
        text += static_cast<char>(random() % 256);
      else
        text += parts[random() % parts.size()];
    CAPTURE(text);
    CHECK(tiny().decode_bytes(tiny().encode(text)) == with_spaces_for_signs(text));
    CHECK(tiny().decode_bytes(tiny().encode(text, {.add_bos = false, .parse_special = true}), true) == with_spaces_for_signs(text));
  }
}

TEST_CASE("long runs of one character are encoded without a quadratic step") {
  // 1 MiB in one piece: rescanning the piece for every merge would be 10^12 steps, which no test run survives.
  for (const std::string unit : {"e", " ", "\n", "th", "<", "<|turn", "日", "\xff"}) {
    std::string text;
    while (text.size() < (std::size_t{1} << 20)) text += unit;
    CHECK(tiny().decode_bytes(tiny().encode(text, {.add_bos = true, .parse_special = true})) == text);
  }
}

TEST_CASE("what the vocabulary says about its tokens") {
  CHECK(tiny().vocab_size() == 2048);
  CHECK(tiny().bos() == 2);
  CHECK(tiny().eos() == 1);
  CHECK(tiny().token_text(2) == "<bos>");
  CHECK(tiny().find("<bos>") == 2);
  CHECK_FALSE(tiny().find("no such token"));
  CHECK(tiny().is_special(5));
  CHECK_FALSE(tiny().is_special(7));  // <0x00>
}

TEST_CASE("pitfall 3: token ids outside the vocabulary are refused, never used as an index") {
  for (const token_id id : {-1, 2048, (std::numeric_limits<token_id>::max)(), (std::numeric_limits<token_id>::min)()}) {
    CHECK_THROWS_WITH_AS((void)tiny().token_text(id),
                         ("tokenizer: token id " + std::to_string(id) + " is outside the vocabulary of 2048 tokens").c_str(), error);
    CHECK_THROWS_AS((void)tiny().is_special(id), error);
    CHECK_THROWS_AS((void)tiny().decode_bytes(std::vector{id}), error);
    CHECK_THROWS_AS((void)tiny().decode_text(std::vector{id}, true), error);
  }
}

TEST_CASE("a missing file and text that is no JSON are told apart from a wrong tokenizer") {
  CHECK_THROWS_AS((void)tokenizer::from_json_file(OUTRIDER_SOURCE_DIR "/no/such/tokenizer.json"), error);
  const std::string whole = tiny_document().dump();
  for (const std::string& text : {std::string(), whole.substr(0, whole.size() / 2), whole + "x", std::string("{\"model\": \"\xff\"}"),
                                  whole + std::string(1, '\0'), std::string(R"({"a": 1e999})")})
    CHECK(refusal_of(text).code == error_code::file_malformed);
  CHECK(refusal_of("{\"a\" 1}").sentence.starts_with("some/tokenizer.json: not usable JSON at byte 7: syntax error"));
  CHECK(refusal_of(std::string(1000, '[')).sentence == "some/tokenizer.json: not usable JSON at byte 65: nested deeper than 64 levels");
  CHECK(refusal_of("[]").sentence == "some/tokenizer.json: the file holds a value of type array, must be an object");
  CHECK(refusal_of("3").sentence == "some/tokenizer.json: the file holds a value of type number, must be an object");
}

TEST_CASE("another kind of tokenizer is refused") {
  check_refused([](json& d) { d.erase("model"); }, "model is missing or not an object");
  check_refused([](json& d) { d["model"] = json::array({1}); }, "model is missing or not an object");
  check_refused([](json& d) { d["model"]["type"] = "Unigram"; }, R"(model.type is "Unigram", must be "BPE")");
  check_refused([](json& d) { d["model"].erase("type"); }, R"(model.type is missing, must be "BPE")");
  check_refused([](json& d) { d["model"]["byte_fallback"] = false; }, "model.byte_fallback is false, must be true");
  check_refused([](json& d) { d["model"]["ignore_merges"] = true; }, "model.ignore_merges is true, must be false");
  check_refused([](json& d) { d["model"]["dropout"] = 0.1; }, "model.dropout is 0.1, must be 0");
  check_refused([](json& d) { d["model"]["continuing_subword_prefix"] = "##"; }, R"(model.continuing_subword_prefix is "##", must be "")");
  check_refused([](json& d) { d["normalizer"] = nullptr; },
                R"(normalizer is null, must be {"content":"▁","pattern":{"String":" "},"type":"Replace"})");
  check_refused(
      [](json& d) {
        d["normalizer"] = {{"type", "NFC"}};
      },
      R"(normalizer is {"type":"NFC"}, must be {"content":"▁","pattern":{"String":" "},"type":"Replace"})");
  check_refused(
      [](json& d) {
        d["pre_tokenizer"] = {{"type", "ByteLevel"}};
      },
      R"(pre_tokenizer is {"type":"ByteLevel"}, must be )"
      R"({"behavior":"MergedWithPrevious","invert":false,"pattern":{"String":" "},"type":"Split"})");
  check_refused(
      [](json& d) {
        d["decoder"] = {{"type", "WordPiece"}};
      },
      R"(decoder is {"type":"WordPiece"}, must be {"decoders":[{"content":" ","pattern":{"String":"▁"},"type":"Replace"},)"
      R"({"type":"ByteFallback"},{"type":"Fuse"}],"type":"Sequence"})");
}

TEST_CASE("pitfall 2: wrong element types and short merges are refused") {
  check_refused([](json& d) { d["model"]["vocab"] = json::array(); }, "model.vocab is missing or not an object");
  check_refused([](json& d) { d["model"]["vocab"]["th"] = "5"; }, "model.vocab['th'] is of type string, must be a token id (0 or more)");
  check_refused([](json& d) { d["model"]["vocab"]["th"] = 5.0; }, "model.vocab['th'] is of type number, must be a token id (0 or more)");
  check_refused([](json& d) { d["model"]["vocab"]["th"] = -5; }, "model.vocab['th'] is of type number, must be a token id (0 or more)");
  check_refused(
      [](json& d) {
        d["model"]["vocab"]["th"] = {{"id", 5}};
      },
      "model.vocab['th'] is of type object, must be a token id (0 or more)");
  check_refused([](json& d) { d["model"]["vocab"]["th"] = json::array({5}); },
                "model.vocab['th'] is of type array, must be a token id (0 or more)");
  check_refused([](json& d) { d["model"]["merges"] = "t h"; }, "model.merges is missing or not an array");
  check_refused([](json& d) { d["model"]["merges"][7] = 7; },
                "model.merges[7] is of type number, must be a string or an array of two strings");
  check_refused([](json& d) { d["model"]["merges"][7] = json::object(); },
                "model.merges[7] is of type object, must be a string or an array of two strings");
  check_refused([](json& d) { d["model"]["merges"][7] = "th"; }, "model.merges[7] is 'th', must be two parts with a space between them");
  check_refused([](json& d) { d["model"]["merges"][7] = ""; }, "model.merges[7] is '', must be two parts with a space between them");
  check_refused([](json& d) { d["model"]["merges"][7] = json::array(); }, "model.merges[7] has 0 strings, must have two");
  check_refused([](json& d) { d["model"]["merges"][7] = {"t"}; }, "model.merges[7] has 1 strings, must have two");
  check_refused([](json& d) { d["model"]["merges"][7] = {"t", "h", "e"}; }, "model.merges[7] has more than two strings, must have two");
  check_refused(
      [](json& d) {
        d["model"]["merges"][7] = json::array({"t", 1});
      },
      "model.merges[7] contains a value of type number, must be two strings");
  check_refused(
      [](json& d) {
        d["model"]["merges"][7] = json::array({"t", "h", json::array()});
      },
      "model.merges[7] contains a value of type array, must be two strings");
  check_refused([](json& d) { d["added_tokens"] = 1; }, "added_tokens is of type number, must be an array");
  check_refused([](json& d) { d["added_tokens"][1] = "x"; }, "added_tokens[1] is of type string, must be an object");
  check_refused([](json& d) { d["added_tokens"][1]["special"] = 1; }, "added_tokens[1].special is 1, must be true or false");
}

TEST_CASE("pitfall 3: ids out of range, ids twice, and gaps are refused") {
  check_refused([](json& d) { d["model"]["vocab"]["th"] = 4000000; }, "model.vocab['th'] is 4000000, but the file has at most 2055 tokens");
  check_refused([](json& d) { d["model"]["vocab"]["th"] = 18446744073709551615u; },
                "model.vocab['th'] is 18446744073709551615, more than a file can have tokens");
  check_refused([](json& d) { d["model"]["vocab"]["zz"] = 2; }, "model.vocab['zz'] is 2, which is also the id of '<bos>'");
  check_refused([](json& d) { d["model"]["vocab"].erase("th"); },
                "model.vocab has no token with the id " + std::to_string(*tiny().find("th")) + ", ids must be 0 to 2047 without a gap");
  check_refused([](json& d) { d["added_tokens"][1]["id"] = 2; },
                "added_tokens[1].content is '<eos>', but token 2 is '<bos>' in model.vocab");
  check_refused([](json& d) { d["added_tokens"][1]["id"] = 5000; }, "added_tokens[1].id is 5000, but the file has at most 2055 tokens");
  check_refused([](json& d) { d["added_tokens"][1]["id"] = -1; }, "added_tokens[1].id is missing or not a token id (0 or more)");
  check_refused([](json& d) { d["added_tokens"][1] = d["added_tokens"][0]; }, "added_tokens[1].id is 0, which is listed twice");
  check_refused([](json& d) { d["added_tokens"][1]["id"] = 2048; },
                "tokens 1 and 2048 have the same text '<eos>', every token needs its own");
}

TEST_CASE("a vocabulary that lacks what encoding needs is refused") {
  check_refused(
      [](json& d) {
        d["model"]["vocab"]["<other>"] = d["model"]["vocab"]["<0x41>"];
        d["model"]["vocab"].erase("<0x41>");
      },
      "the vocabulary has no token '<0x41>', all 256 bytes need theirs");
  check_refused([](json& d) { d["model"]["merges"][7] = {"t", "☃"}; }, "model.merges[7] needs the token '☃', which is not in model.vocab");
  check_refused([](json& d) { d["model"]["merges"][7] = {"z", "z"}; }, "model.merges[7] needs the token 'zz', which is not in model.vocab");
  check_refused([](json& d) { d["added_tokens"][2]["special"] = false; },
                "token 2, '<bos>', begins or ends texts, but is no special token");
  check_refused([](json& d) { d.erase("added_tokens"); }, "token 2, '<bos>', begins or ends texts, but is no special token");
  check_refused(
      [](json& d) {
        d["added_tokens"][1]["content"] = "<end>";
        d["model"]["vocab"].erase("<eos>");
        d["model"]["vocab"]["<end>"] = 1;
      },
      "the vocabulary has no token '<eos>'");
  check_refused(
      [](json& d) {
        d["model"]["vocab"][""] = d["model"]["vocab"]["th"];
        d["model"]["vocab"].erase("th");
      },
      "token " + std::to_string(*tiny().find("th")) + " is an empty text");
  check_refused([](json& d) { d["added_tokens"][1]["lstrip"] = true; }, "added_tokens[1].lstrip is true, only false is supported");
  check_refused([](json& d) { d["added_tokens"][1]["content"] = ""; },
                "added_tokens[1].content is missing or not a string with at least one character");
}

TEST_CASE("pitfall 140: merges cannot make a marker or a byte token out of what a user writes") {
  const std::string ending = ", bytes are no parts of merges and markers no results, or a text could not be had back from its tokens";
  check_refused(
      [](json& d) {
        d["added_tokens"][5]["content"] = "th";
        d["added_tokens"][5]["id"] = d["model"]["vocab"]["th"];
      },
      "a merge gives 'th'" + ending);
  check_refused(
      [](json& d) {
        d["model"]["vocab"]["<0x41>t"] = 2048;
        d["model"]["merges"].push_back({"<0x41>", "t"});
      },
      "a merge gives '<0x41>t'" + ending);
  check_refused(
      [](json& d) {
        d["model"]["vocab"]["<0x41"] = 2048;
        d["model"]["vocab"][">"] = 2049;
        d["model"]["merges"].push_back({"<0x41", ">"});
      },
      "a merge gives '<0x41>'" + ending);
  // A marker of one character is no merge's result; the character then becomes its bytes.
  json document = tiny_document();
  document["added_tokens"].push_back({{"id", document["model"]["vocab"]["z"]}, {"content", "z"}, {"special", true}});
  const tokenizer tokens = tokenizer::from_json(document.dump(), "marker");
  CHECK(tokens.decode_bytes(tokens.encode("buzz")) == "buzz");
}

TEST_CASE("a key that is there twice is refused") {
  for (const std::string text : {R"({"model":{"vocab":{},"vocab":{}}})", R"({"model":{"vocab":1,"vocab":{}}})", R"({"a":1,"a":1})"})
    CHECK(refusal_of(text).sentence.ends_with("' is there twice in one object"));
  std::string text = tiny_document().dump();
  text.insert(text.find("\"<0x00>\":"), "\"<0x00>\":2048,");
  CHECK(refusal_of(text).sentence == "some/tokenizer.json: tokens 7 and 2048 have the same text '<0x00>', every token needs its own");
}

TEST_CASE("pitfall 145: a file whose texts could outgrow 32-bit lengths is refused before it is read") {
  const auto path = std::filesystem::temp_directory_path() / ("outrider_oversized_" + std::to_string(std::random_device{}()) + ".json");
  std::FILE* file = std::fopen(path.string().c_str(), "wb");
  REQUIRE(file);
  std::fclose(file);
  std::filesystem::resize_file(path, (std::size_t{1} << 30) + 1);  // sparse
  CHECK_THROWS_WITH_AS((void)tokenizer::from_json_file(path),
                       (path.string() + ": the file has 1073741825 bytes, at most 1073741824 are allowed").c_str(), error);
  std::filesystem::remove(path);
}

TEST_CASE("long texts from the file are cut in error messages") {
  json document = tiny_document();
  document["model"]["merges"][7] = std::string(100000, 'x');
  CHECK(refusal_of(document.dump()).sentence.size() < 300);
  document = tiny_document();
  document["normalizer"] = std::string(100000, 'x');
  CHECK(refusal_of(document.dump()).sentence.size() < 300);
}

namespace {

/// A file of the tiny form with few merges, so that a change is likely to hit something that matters.
json short_document() {
  json document = tiny_document();
  json& merges = document["model"]["merges"];
  merges.erase(merges.begin() + 40, merges.end());
  return document;
}

/// Loads and uses a file that may be damaged: an error or a working tokenizer, nothing else.
void load_and_use(const std::string& text) {
  try {
    const tokenizer loaded = tokenizer::from_json(text, "damaged");
    const std::string sample = "<bos>And the LORD\n\n said \xff<|turn>";
    for (const bool parse_special : {false, true}) {
      const auto ids = loaded.encode(sample, {.add_bos = false, .parse_special = parse_special});
      CHECK(ids.size() <= sample.size());
      CHECK(loaded.decode_text(ids, true).ends_with("\ufffd<|turn>"));
    }
  } catch (const error& e) {
    CHECK(std::string(e.what()).starts_with("damaged: "));
  }
}

}  // namespace

TEST_CASE("a file with damaged bytes gives an error or a working tokenizer") {
  const unsigned seed = 7, rounds = 300;
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const std::string original = short_document().dump();
  const std::vector<std::string> scraps{"{",   "}",          "[",     "]",    ",",       ":",       "\"",   "null",  "true",  "-1",
                                        "1e9", "4294967296", "\"a\"", "[[]]", "\\u0000", "\\ud800", "\xff", "vocab", "merges"};
  for (unsigned round = 0; round < rounds; ++round) {
    CAPTURE(round);
    std::string text = original;
    for (auto edits = 1 + random() % 3; edits > 0; --edits) {
      const std::size_t at = random() % text.size(), length = (std::min)(std::size_t{random() % 30}, text.size() - at);
      const std::string& scrap = scraps[random() % scraps.size()];
      switch (random() % 5) {
        case 0:
          text[at] = static_cast<char>(random() % 256);
          break;
        case 1:
          text.erase(at, length);
          break;
        case 2:
          text.insert(at, text.substr(random() % text.size(), length));
          break;
        case 3:
          text.insert(at, scrap);
          break;
        default:
          text.replace(at, length, scrap);
          break;
      }
    }
    load_and_use(text);
  }
}

TEST_CASE("a file with values exchanged gives an error or a working tokenizer") {
  const unsigned seed = 8, rounds = 300;
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const json original = short_document();
  const std::vector<json> odd{nullptr, true,       -1,   0,   1,        2048,          4294967296,     1.5,       "", " ",
                              "a",     "the LORD", "\n", "▁", "<0x0A>", json::array(), json::object(), {"t", "h"}};
  for (unsigned round = 0; round < rounds; ++round) {
    CAPTURE(round);
    json document = original;
    for (auto edits = 1 + random() % 2; edits > 0; --edits) {
      json* node = &document;
      while (!node->empty() && node->is_structured() && (node == &document || random() % 8 != 0))
        node = &*std::next(node->begin(), static_cast<std::ptrdiff_t>(random() % node->size()));
      *node = odd[random() % odd.size()];
    }
    load_and_use(document.dump());
  }
}
