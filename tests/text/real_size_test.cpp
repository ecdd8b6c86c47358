// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstdio>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "outrider/text/detokenizer.hpp"
#include "outrider/text/tokenizer.hpp"

using namespace outrider;

namespace {

constexpr std::size_t vocab_size = 262144, merge_count = 514906, ordinary_begin = 262;  // 6 markers and 256 bytes come first

/// A tokenizer.json of the released size, indented as released files are. Its pieces are all strings over 63 characters by length, then by
/// the order of the characters, as many as there is room for; every way to cut a piece in two is a merge.
class real_size_file {
 public:
  real_size_file()
      : path_(std::filesystem::temp_directory_path() / ("outrider_real_size_" + std::to_string(std::random_device{}()) + ".json")) {
    std::string vocab, merges, added;
    std::size_t id = 0, merge = 0;
    const auto add_token = [&](const std::string& name) {
      vocab += (id == 0 ? "\n      \"" : ",\n      \"") + name + "\": " + std::to_string(id);
      ++id;
    };
    for (const std::string name : {"<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>"}) {
      added +=
          (id == 0 ? "\n    {\"id\": " : ",\n    {\"id\": ") + std::to_string(id) + R"(, "special": true, "content": ")" + name + "\"}";
      add_token(name);
    }
    for (std::size_t byte = 0; byte < 256; ++byte) {
      char name[7];
      std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(byte));
      add_token(name);
    }

    const std::vector<std::string> characters = alphabet();
    std::vector<std::vector<std::string>> shorter{{}}, longer;  // as lists of characters
    while (id < vocab_size) {
      longer.clear();
      for (const auto& front : shorter)
        for (const auto& last : characters) {
          if (id == vocab_size) break;
          auto piece = front;
          piece.push_back(last);
          add_token(join(piece, 0, piece.size()));
          for (std::size_t cut = 1; cut < piece.size() && merge < merge_count; ++cut, ++merge)
            merges += (merge == 0 ? "\n      [\n        \"" : ",\n      [\n        \"") + join(piece, 0, cut) + "\",\n        \"" +
                      join(piece, cut, piece.size()) + "\"\n      ]";
          longer.push_back(std::move(piece));
        }
      shorter.swap(longer);
    }
    REQUIRE(merge == merge_count);
    const std::string text = R"({
  "version": "1.0",
  "added_tokens": [)" + added +
                             R"(
  ],
  "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
  "decoder": {
    "type": "Sequence",
    "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
  },
  "model": {
    "type": "BPE",
    "byte_fallback": true,
    "vocab": {)" + vocab +
                             R"(
    },
    "merges": [)" + merges + R"(
    ]
  }
}
)";
    std::FILE* const file = std::fopen(path_.string().c_str(), "wb");
    REQUIRE(file);
    CHECK(std::fwrite(text.data(), 1, text.size(), file) == text.size());
    std::fclose(file);
  }
  real_size_file(const real_size_file&) = delete;
  real_size_file& operator=(const real_size_file&) = delete;
  ~real_size_file() { std::filesystem::remove(path_); }

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

  static std::vector<std::string> alphabet() {
    std::vector<std::string> characters{"▁", "é", "я", "日", "🙂", ".", ",", ";", ":", "-", "!"};
    for (char c = 'a'; c <= 'z'; ++c) characters.emplace_back(1, c);
    for (char c = 'A'; c <= 'Z'; ++c) characters.emplace_back(1, c);
    return characters;
  }

 private:
  static std::string join(const std::vector<std::string>& characters, std::size_t begin, std::size_t end) {
    std::string text;
    for (std::size_t i = begin; i < end; ++i) text += characters[i];
    return text;
  }
  std::filesystem::path path_;
};

const tokenizer& real_size() {
  static const tokenizer tokens = [] {
    const real_size_file file;
    return tokenizer::from_json_file(file.path());
  }();
  return tokens;
}

}  // namespace

TEST_CASE("a tokenizer of the released size has all its tokens") {
  CHECK(real_size().vocab_size() == vocab_size);
  for (token_id id = 0; id < static_cast<token_id>(vocab_size); ++id)
    if (real_size().find(real_size().token_text(id)) != id) FAIL("token " << id << " is not found by its text");
}

TEST_CASE("a tokenizer of the released size finds its pieces again") {
  constexpr encode_options no_bos{.add_bos = false};
  CHECK(real_size().encode("▁", no_bos) == std::vector<token_id>{ordinary_begin});
  CHECK(real_size().encode("ab", no_bos) == std::vector{*real_size().find("ab")});
  CHECK(real_size().encode("日é", no_bos) == std::vector{*real_size().find("日é")});
  // Pairs come before longer pieces, "ay" before the others of "xlay"; no piece has all four characters.
  CHECK(real_size().encode("xlay", no_bos) == std::vector{*real_size().find("xl"), *real_size().find("ay")});
}

TEST_CASE("a tokenizer of the released size gives back random texts, streamed and at once") {
  const unsigned seed = 31;
  INFO("seed " << seed);
  std::mt19937 random(seed);
  std::vector<std::string> characters = real_size_file::alphabet();
  characters[0] = " ";
  for (const char* other : {"\n", "\t", "ß", "\xff", "<bos>"}) characters.emplace_back(other);
  for (int round = 0; round < 200; ++round) {
    std::string text;
    for (auto i = random() % 200; i > 0; --i) text += characters[random() % characters.size()];
    CAPTURE(text);
    const auto ids = real_size().encode(text);
    CHECK(real_size().decode_bytes(ids) == text);
    detokenizer stream(real_size());
    std::string streamed;
    for (const token_id id : ids) streamed += stream.push(id);
    streamed += stream.finish();
    CHECK(streamed == real_size().decode_text(ids));
  }
}

TEST_CASE("pitfall 142: a long run of one character, a single line, is merged without a quadratic step") {
  for (const std::string unit : {"a", " ", "\n", "🙂", "ab"}) {
    std::string text;
    while (text.size() < (std::size_t{1} << 20)) text += unit;
    const auto ids = real_size().encode(text);
    CHECK(real_size().decode_bytes(ids) == text);
  }
}
