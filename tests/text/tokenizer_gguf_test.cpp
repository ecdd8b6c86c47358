// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/io/gguf.hpp"
#include "outrider/io/mapped_file.hpp"
#include "outrider/text/tokenizer.hpp"
#include "support/refusal.hpp"
#include "support/temporary_directory.hpp"
#include "support/write_gguf.hpp"

using namespace outrider;
using testing::refusal;
using testing::temporary_directory;

namespace {

const std::string tiny_path = OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/target";

const tokenizer& tiny() {
  static const tokenizer tokens = tokenizer::from_file(tiny_path);
  return tokens;
}

/// The tokenizer.ggml.* keys of the tiny pair as llama.cpp's converter writes them: markers that tokenizer_config.json does not name,
/// "<|turn>" and "<turn|>", have type normal there.
struct gguf_keys {
  std::string model = "gemma4";
  std::vector<std::string> tokens, merges;
  std::vector<float> scores;
  std::vector<std::int32_t> types;
  std::function<void(testing::gguf_builder&)> more = [](testing::gguf_builder& b) {
    b.pair("tokenizer.ggml.bos_token_id", std::uint32_t{2}).pair("tokenizer.ggml.eos_token_id", std::uint32_t{1});
    b.pair("tokenizer.ggml.unknown_token_id", std::uint32_t{3}).pair("tokenizer.ggml.padding_token_id", std::uint32_t{0});
  };

  gguf_keys() {
    for (std::size_t id = 0; id < tiny().vocab_size(); ++id) {
      tokens.emplace_back(tiny().token_text(static_cast<token_id>(id)));
      types.push_back(id < 5 ? 3 : tiny().types()[id] == token_type::byte ? 6 : 1);
    }
    scores.assign(tokens.size(), -1000.0f);
    for (const auto& merge : tiny().merges())
      merges.push_back(std::string(tiny().token_text(merge.left)) + " " + std::string(tiny().token_text(merge.right)));
  }
  [[nodiscard]] token_id id(std::string_view text) const {
    return static_cast<token_id>(std::find(tokens.begin(), tokens.end(), text) - tokens.begin());
  }
  [[nodiscard]] testing::gguf_builder builder() const {
    testing::gguf_builder b;
    b.pair("tokenizer.ggml.model", model).array("tokenizer.ggml.tokens", tokens).array("tokenizer.ggml.scores", scores);
    b.array("tokenizer.ggml.token_type", types).array("tokenizer.ggml.merges", merges);
    more(b);
    return b;
  }
};

tokenizer load(const testing::gguf_builder& builder) {
  const temporary_directory directory;
  builder.write(directory.path() / "model.gguf");
  return tokenizer::from_file(directory.path() / "model.gguf");
}
tokenizer load(const gguf_keys& keys) { return load(keys.builder()); }

/// The sentence that refuses the file, after the file's name.
std::string refused(const testing::gguf_builder& builder) {
  const temporary_directory directory;
  const auto path = directory.path() / "model.gguf";
  builder.write(path);
  const std::string sentence = refusal(error_code::tokenizer_malformed, [&] { (void)tokenizer::from_file(path); });
  const std::string start = path.string() + ": ";
  REQUIRE(sentence.starts_with(start));
  return sentence.substr(start.size());
}
std::string refused(const std::function<void(gguf_keys&)>& edit) {
  gguf_keys keys;
  edit(keys);
  return refused(keys.builder());
}
std::string refused_key(const std::function<void(testing::gguf_builder&)>& more) {
  gguf_keys keys;
  keys.more = more;
  return refused(keys.builder());
}

/// A file in which one key has another value, or none if `write` does nothing.
testing::gguf_builder with_key(std::string_view key, const std::function<void(testing::gguf_builder&)>& write) {
  const gguf_keys keys;
  testing::gguf_builder b;
  if (key != "model") b.pair("tokenizer.ggml.model", keys.model);
  if (key != "tokens") b.array("tokenizer.ggml.tokens", keys.tokens);
  if (key != "scores") b.array("tokenizer.ggml.scores", keys.scores);
  if (key != "token_type") b.array("tokenizer.ggml.token_type", keys.types);
  if (key != "merges") b.array("tokenizer.ggml.merges", keys.merges);
  write(b);
  return b;
}
void nothing(testing::gguf_builder&) {}

}  // namespace

TEST_CASE("tokenizer.json and the GGUF keys of a model both give the ids of the tokenizers library") {
  const std::string rows = io::read_text_file(OUTRIDER_SOURCE_DIR "/tests/golden/tokenizer/ids.jsonl");
  const tokenizer from_gguf = load(gguf_keys());
  std::size_t count = 0;
  for (std::size_t begin = 0, end; (end = rows.find('\n', begin)) != rows.npos; begin = end + 1, ++count) {
    const auto row = nlohmann::json::parse(rows.substr(begin, end - begin));
    const auto text = row[0].get<std::string>();
    const auto plain = row[1].get<std::vector<token_id>>(), with_markers = row.back().get<std::vector<token_id>>();
    CAPTURE(text);
    for (const tokenizer* tokens : {&tiny(), &from_gguf}) {
      CHECK(tokens->encode(text, {.add_bos = false, .parse_special = false}) == plain);
      CHECK(tokens->encode(text, {.add_bos = false, .parse_special = true}) == with_markers);
    }
  }
  CHECK(count == 2400);
}

TEST_CASE("a GGUF file gives the tokens, types and merges of the model's tokenizer.json") {
  const tokenizer tokens = load(gguf_keys());
  REQUIRE(tokens.vocab_size() == tiny().vocab_size());
  for (token_id id = 0; id < static_cast<token_id>(tokens.vocab_size()); ++id) CHECK(tokens.token_text(id) == tiny().token_text(id));
  CHECK(std::equal(tokens.types().begin(), tokens.types().end(), tiny().types().begin(), tiny().types().end()));
  const auto same = [](const merge_table::merge& a, const merge_table::merge& b) {
    return a.left == b.left && a.right == b.right && a.result == b.result;
  };
  CHECK(std::equal(tokens.merges().begin(), tokens.merges().end(), tiny().merges().begin(), tiny().merges().end(), same));
  const auto equal = [](const added_token& a, const added_token& b) {
    return a.id == b.id && a.special == b.special && a.normalized == b.normalized;
  };
  CHECK(std::equal(tokens.added().begin(), tokens.added().end(), tiny().added().begin(), tiny().added().end(), equal));
  CHECK(tokens.bos() == tiny().bos());
  CHECK(tokens.eos() == tiny().eos());
}

TEST_CASE("a tokenizer is read from a directory, a tokenizer.json or a GGUF file of any name") {
  CHECK(tokenizer::from_file(tiny_path + "/tokenizer.json").vocab_size() == 2048);
  const temporary_directory directory;
  gguf_keys().builder().write(directory.path() / "model");
  CHECK(tokenizer::from_file(directory.path() / "model").vocab_size() == 2048);
  CHECK(testing::mentions(refusal(error_code::file_not_found, [&] { (void)tokenizer::from_file(directory.path()); }), "tokenizer.json"));
  CHECK(testing::mentions(refusal(error_code::file_not_found, [&] { (void)tokenizer::from_file(directory.path() / "other"); }), "other"));
}

TEST_CASE("the tokenizer of a GGUF file does not need the file any more") {
  const temporary_directory directory;
  const auto path = directory.path() / "model.gguf";
  gguf_keys().builder().write(path);
  const tokenizer tokens = [&] { return tokenizer::from_gguf(io::open_gguf(path)); }();
  std::filesystem::remove(path);
  CHECK(tokens.decode_text(tokens.encode("the LORD\n")) == "the LORD\n");
}

TEST_CASE("user-defined tokens are split out of every text, control and unknown ones only on request") {
  gguf_keys keys;
  keys.tokens.insert(keys.tokens.end(), {"<mine>", "<control>", "<what>"});
  keys.types.insert(keys.types.end(), {4, 3, 2});
  keys.scores.resize(keys.tokens.size());
  const tokenizer tokens = load(keys);
  for (const bool parse_special : {false, true}) {
    const auto ids = tokens.encode("a<mine>b<control>c<what>", {.add_bos = false, .parse_special = parse_special});
    const auto has = [&](token_id id) { return std::find(ids.begin(), ids.end(), id) != ids.end(); };
    CHECK(has(2048));
    CHECK(has(2049) == parse_special);
    CHECK(has(2050) == parse_special);
    CHECK(tokens.decode_text(ids) == (parse_special ? "a<mine>bc" : "a<mine>b<control>c<what>"));
  }
}

TEST_CASE("pitfall 140: Gemma 4's markers are markers whatever type the file gives them, and </s> is none") {
  // Converters write "<|tool_response>" and "<|channel>" as user-defined, "<|turn>" as normal where the model's configuration lacks it.
  for (const std::int32_t type : {1, 2, 3, 4, 5}) {
    CAPTURE(type);
    gguf_keys keys;
    const auto added = {"<|tool>",    "<tool|>",   "<|tool_call>", "<|tool_response>", "<|\"|>", "<|channel>",
                        "<channel|>", "<|image|>", "</s>"};
    keys.tokens.insert(keys.tokens.end(), added.begin(), added.end());
    keys.types.resize(keys.tokens.size(), type);
    keys.scores.resize(keys.tokens.size());
    const tokenizer tokens = load(keys);
    for (token_id id = 2048; id < 2056; ++id) {
      const std::string text(tokens.token_text(id));
      CAPTURE(text);
      CHECK(tokens.is_special(id));
      CHECK(tokens.decode_text(tokens.encode(text)) == text);
      CHECK(tokens.encode(text, {.add_bos = false, .parse_special = true}) == std::vector{id});
    }
    CHECK_FALSE(tokens.is_special(2056));
    CHECK(tokens.encode("</s>", {.add_bos = false, .parse_special = true}).size() > 1);
  }
}

TEST_CASE("the tokens that begin and end a text are those of the keys, otherwise <bos> and <eos>") {
  const auto with = [](std::uint32_t bos, std::uint32_t eos) {
    gguf_keys keys;
    keys.more = [=](testing::gguf_builder& b) { b.pair("tokenizer.ggml.bos_token_id", bos).pair("tokenizer.ggml.eos_token_id", eos); };
    return load(keys);
  };
  CHECK(with(2, 6).eos() == 6);  // as instruction-tuned files have it
  CHECK(with(0, 6).bos() == 0);
  CHECK(with(0, 6).encode("")[0] == 0);
  gguf_keys without;
  without.more = nothing;
  CHECK(load(without).bos() == 2);
  CHECK(load(without).eos() == 1);
}

TEST_CASE("pitfall 3: special ids outside the vocabulary, and ordinary tokens in their place, are refused") {
  const std::string key = "tokenizer.ggml.";
  for (const std::string name : {"bos", "eos", "eot", "eom", "unknown", "padding", "mask"}) {
    CAPTURE(name);
    const std::string full = key + name + "_token_id";
    CHECK(refused_key([&](auto& b) { b.pair(full, std::uint32_t{2048}); }) == full + " is 2048, must be the id of one of the 2048 tokens");
    CHECK(refused_key([&](auto& b) { b.pair(full, std::int32_t{-1}); }) == full + " is -1, must be the id of one of the 2048 tokens");
    CHECK(refused_key([&](auto& b) { b.pair(full, ~std::uint64_t{0}); }) ==
          full + " is no integer, must be the id of one of the 2048 tokens");
    CHECK(refused_key([&](auto& b) { b.pair(full, "2"); }) == full + " is no integer, must be the id of one of the 2048 tokens");
    CHECK(refused_key([&](auto& b) { b.pair(full, 2.0f); }) == full + " is no integer, must be the id of one of the 2048 tokens");
    CHECK(refused_key([&](auto& b) { b.template array<std::uint32_t>(full, {2}); }) ==
          full + " is no integer, must be the id of one of the 2048 tokens");
  }
  CHECK(refused_key([&](auto& b) { b.pair(key + "eos_token_id", std::uint32_t{300}); }) ==
        "token 300, 'b', begins or ends texts, but is no special token");
}

TEST_CASE("another kind of tokenizer is refused by its name") {
  CHECK(refused([](gguf_keys& k) { k.model = "llama"; }) == "tokenizer.ggml.model is 'llama', only 'gemma4' is supported");
  CHECK(refused([](gguf_keys& k) { k.model = ""; }) == "tokenizer.ggml.model is '', only 'gemma4' is supported");
  CHECK(refused(with_key("model", nothing)) == "tokenizer.ggml.model is missing, must be 'gemma4'");
  CHECK(refused(with_key("model", [](auto& b) { b.pair("tokenizer.ggml.model", 4); })) ==
        "tokenizer.ggml.model is no string, only 'gemma4' is supported");
  CHECK(refused(testing::gguf_builder()) == "tokenizer.ggml.model is missing, must be 'gemma4'");
}

TEST_CASE("pitfall 2: arrays that are missing, of another type or too short are refused before they are used") {
  const std::string key = "tokenizer.ggml.";
  struct array_key {
    std::string name, allowed;
  };
  for (const array_key& array : {array_key{"tokens", "an array of STRING"}, array_key{"merges", "an array of STRING"},
                                 array_key{"token_type", "an array of INT32"}, array_key{"scores", "an array of FLOAT32 or INT32"}}) {
    const std::string &name = array.name, &allowed = array.allowed, full = key + name;
    CAPTURE(name);
    if (name != "scores") CHECK(refused(with_key(name, nothing)) == full + " is missing, must be " + allowed);
    CHECK(refused(with_key(name, [&](auto& b) { b.pair(full, "text"); })) == full + " is of type STRING, must be " + allowed);
    CHECK(refused(with_key(name, [&](auto& b) { b.pair(full, std::int32_t{1}); })) == full + " is of type INT32, must be " + allowed);
    CHECK(refused(with_key(name, [&](auto& b) { b.array(full, std::vector<std::uint8_t>(4096)); })) ==
          full + " is an array of UINT8, must be " + allowed);
    CHECK(refused(with_key(name, [&](auto& b) { b.array(full, std::vector<std::int64_t>(4096)); })) ==
          full + " is an array of INT64, must be " + allowed);
  }
  CHECK(refused([](gguf_keys& k) { k.types.pop_back(); }) ==
        "tokenizer.ggml.token_type has 2047 entries, must have one for each of the 2048 tokens");
  CHECK(refused([](gguf_keys& k) { k.types.clear(); }) ==
        "tokenizer.ggml.token_type has 0 entries, must have one for each of the 2048 tokens");
  CHECK(refused([](gguf_keys& k) { k.scores.resize(1); }) ==
        "tokenizer.ggml.scores has 1 entries, must have one for each of the 2048 tokens");
  CHECK(load(with_key("scores", nothing)).vocab_size() == 2048);
  CHECK(load(with_key("scores", [](auto& b) { b.array("tokenizer.ggml.scores", std::vector<std::int32_t>(2048)); })).vocab_size() == 2048);
}

TEST_CASE("types that do not exist, and bytes with other names than theirs, are refused") {
  for (const std::int32_t type : {0, 7, -1, 255, 0x7fffffff})
    CHECK(refused([&](gguf_keys& k) { k.types[300] = type; }) ==
          "tokenizer.ggml.token_type is " + std::to_string(type) + " for token 300, known are 1 to 6");
  for (const std::string name : {"<0x-1>", "<0x100>", "<0xG0>", "<0x0a>", "<0x0>", "0x0A", "<0x0A", "byte"})
    CHECK(refused([&](gguf_keys& k) { k.tokens[7] = name; }) ==
          "tokenizer.ggml.token_type says that token 7, '" + name + "', is a byte, whose names are '<0x00>' to '<0xFF>'");
  CHECK(refused([](gguf_keys& k) {
          k.tokens[static_cast<std::size_t>(k.id("<0x41>"))] = "<other>";
          k.types[static_cast<std::size_t>(7 + 0x41)] = 1;
        }) == "the vocabulary has no token '<0x41>', all 256 bytes need theirs");
}

TEST_CASE("tokens that are there twice or empty are refused") {
  CHECK(refused([](gguf_keys& k) { k.tokens[301] = k.tokens[300]; }) ==
        "tokenizer.ggml.tokens: tokens 300 and 301 have the same text 'b', every token needs its own");
  CHECK(refused([](gguf_keys& k) { k.tokens[301] = ""; }) == "tokenizer.ggml.tokens: token 301 is an empty text");
  CHECK(refused([](gguf_keys& k) {
          k.tokens.clear();
          k.merges.clear();
          k.more = nothing;
        }) == "the vocabulary has no token '<0x00>', all 256 bytes need theirs");
}

TEST_CASE("merges without a space, of unknown tokens or with unknown results are refused") {
  const auto with_merge = [](const std::string& merge) { return refused([&](gguf_keys& k) { k.merges[7] = merge; }); };
  const std::string here = "tokenizer.ggml.merges[7] ";
  for (const std::string merge : {"", "th", " th", " "})
    CHECK(with_merge(merge) == here + "is '" + merge + "', must be two parts with a space between them");
  CHECK(with_merge("t ") == here + "needs the token '', which is not in tokenizer.ggml.tokens");
  CHECK(with_merge("t \u2603") == here + "needs the token '\u2603', which is not in tokenizer.ggml.tokens");
  CHECK(with_merge("z z") == here + "needs the token 'zz', which is not in tokenizer.ggml.tokens");
  CHECK(with_merge("t h e") == here + "needs the token 'h e', which is not in tokenizer.ggml.tokens");
  CHECK(testing::mentions(refused([](gguf_keys& k) { k.types[static_cast<std::size_t>(k.id("th"))] = 3; }), "a merge gives 'th', "));
}

TEST_CASE("pitfall 145: a file with damaged bytes gives an error or a working tokenizer") {
  const unsigned seed = 145;
  INFO("seed " << seed);
  std::mt19937 random(seed);
  gguf_keys keys;
  keys.merges.resize(40);
  const std::string original = keys.builder().file();
  std::size_t working = 0;
  for (int round = 0; round < 400; ++round) {
    CAPTURE(round);
    std::string file = original;
    for (auto edits = 1 + random() % 3; edits > 0; --edits) {
      const std::size_t at = random() % file.size();
      if (random() % 8 == 0)
        file.resize(at + 1);
      else
        file[at] = static_cast<char>(random() % 3 ? random() % 256 : 0xff);
    }
    try {
      const std::span<const char> bytes(file);
      const tokenizer tokens = tokenizer::from_gguf(io::detail::gguf_reader(std::as_bytes(bytes), "damaged").read());
      ++working;
      const std::string sample = "<bos>And the LORD\n\n said \xff<|turn>";
      CHECK(tokens.decode_bytes(tokens.encode(sample, {.add_bos = false, .parse_special = false})).find('\xff') != sample.npos);
    } catch (const error& refused) {
      CHECK(std::string(refused.what()).starts_with("damaged: "));
    }
  }
  CHECK(working > 0);
}
