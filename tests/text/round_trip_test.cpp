// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
// decode_bytes(encode(x)) is x for every byte string x, but that "▁" comes back as a space.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "outrider/io/mapped_file.hpp"
#include "outrider/text/detokenizer.hpp"
#include "outrider/text/tokenizer.hpp"
#include "support/released_vocabulary.hpp"

using namespace outrider;

namespace {

std::string with_spaces_for_signs(std::string text) {
  constexpr std::string_view sign = "▁";
  std::size_t to = 0;
  for (std::size_t from = 0; from < text.size(); ++to) {
    const bool is_sign = std::string_view(text).substr(from).starts_with(sign);
    text[to] = is_sign ? ' ' : text[from];
    from += is_sign ? sign.size() : 1;
  }
  text.resize(to);
  return text;
}

void check_round_trip(const tokenizer& tokens, const std::string& text) {
  CAPTURE(text);
  const std::string expected = with_spaces_for_signs(text);
  CHECK(tokens.decode_bytes(tokens.encode(text)) == expected);
  CHECK(tokens.decode_bytes(tokens.encode(text, {.add_bos = false, .parse_special = true}), true) == expected);
}

/// Random strings of one of several kinds.
class generator {
 public:
  generator(const tokenizer& tokens, unsigned seed) : tokens_(tokens), random_(seed) {
    for (token_id id = 0; id < static_cast<token_id>(tokens.vocab_size()); ++id)
      if (tokens.is_special(id)) markers_.emplace_back(tokens.token_text(id));
  }

  std::string next() {
    std::string text;
    const auto kind = below(6);
    for (auto parts = 1 + below(12); parts > 0; --parts) text += part(kind < 5 ? kind : below(5));
    return text;
  }

 private:
  std::size_t below(std::size_t bound) { return random_() % bound; }
  std::string part(std::size_t kind) {
    switch (kind) {
      case 0:  // bytes
        return std::string(1, static_cast<char>(below(256)));
      case 1:  // any character of Unicode, each length equally often
        return character(std::array<std::uint32_t, 5>{0, 0x80, 0x800, 0x10000, 0x110000});
      case 2:  // pieces of the vocabulary, spaces as signs or as spaces
        return below(2) ? piece() : with_spaces_for_signs(piece());
      case 3:  // runs of white space
        return std::string(1 + (below(8) ? below(4) : below(70)), " \n\t\r"[below(4)]);
      default: {  // markers and byte tokens, whole and broken
        const std::string marker = below(4) ? markers_[below(markers_.size())] : std::string(tokens_.token_text(*tokens_.find("<0x0A>")));
        return below(2) ? marker : marker.substr(below(marker.size()), 1 + below(marker.size()));
      }
    }
  }
  std::string piece() { return std::string(tokens_.token_text(static_cast<token_id>(below(tokens_.vocab_size())))); }
  std::string character(const std::array<std::uint32_t, 5>& bounds) {
    const std::size_t length = 1 + below(4);
    const auto point = static_cast<std::uint32_t>(bounds[length - 1] + below(bounds[length] - bounds[length - 1]));
    if (length == 1) return std::string(1, static_cast<char>(point));
    std::string bytes(length, '\0');
    for (std::size_t i = 0; i < length; ++i) bytes[i] = static_cast<char>(0x80 | (point >> 6 * (length - 1 - i) & 0x3f));
    bytes[0] = static_cast<char>((0xff00u >> length & 0xffu) | point >> 6 * (length - 1));
    return bytes;
  }

  const tokenizer& tokens_;
  std::mt19937 random_;
  std::vector<std::string> markers_;
};

void check_random(const tokenizer& tokens, int rounds, unsigned seed) {
  CAPTURE(seed);
  generator texts(tokens, seed);
  for (int round = 0; round < rounds; ++round) check_round_trip(tokens, texts.next());
}

const tokenizer& tiny() {
  static const tokenizer tokens = tokenizer::from_file(OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/target");
  return tokens;
}

/// Every line of every text file of the repository, and the files themselves.
std::size_t check_repository(const tokenizer& tokens) {
  std::size_t files = 0;
  const std::filesystem::path root = OUTRIDER_SOURCE_DIR;
  for (auto entry = std::filesystem::recursive_directory_iterator(root); entry != std::filesystem::recursive_directory_iterator();
       ++entry) {
    const std::string name = entry->path().filename().string(), extension = entry->path().extension().string();
    if (entry->is_directory() && (name.starts_with(".git") || (entry.depth() == 0 && name.starts_with("build")))) {
      entry.disable_recursion_pending();
      continue;
    }
    constexpr std::size_t longest = std::size_t{1} << 20;
    constexpr auto extensions = std::to_array<std::string_view>({".md", ".hpp", ".cpp", ".inl", ".h", ".py", ".sh", ".txt", ".build"});
    if (!entry->is_regular_file() || entry->file_size() > longest) continue;
    if (std::find(extensions.begin(), extensions.end(), extension) == extensions.end()) continue;
    const std::string text = io::read_text_file(entry->path());
    CAPTURE(entry->path().string());
    check_round_trip(tokens, text);
    for (std::size_t begin = 0, end; begin < text.size(); begin = end) {
      end = (std::min)(text.find('\n', begin), text.size() - 1) + 1;
      check_round_trip(tokens, text.substr(begin, end - begin));
    }
    ++files;
  }
  return files;
}

}  // namespace

TEST_CASE("100,000 random byte strings come back from their tokens") { check_random(tiny(), 100000, 20261130); }

TEST_CASE("100,000 random byte strings come back from their tokens of the released vocabulary") {
  if (const auto path = testing::released_vocabulary()) check_random(tokenizer::from_file(*path), 100000, 4);
}

TEST_CASE("the lines of this repository's text files come back from their tokens") { CHECK(check_repository(tiny()) > 100); }

TEST_CASE("the lines of this repository's text files come back from their tokens of the released vocabulary") {
  if (const auto path = testing::released_vocabulary()) CHECK(check_repository(tokenizer::from_file(*path)) > 100);
}

TEST_CASE("streamed text equals the text decoded at once, for random tokens") {
  const unsigned seed = 9;
  INFO("seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 2000; ++round) {
    std::vector<token_id> ids(random() % 20);
    for (token_id& id : ids) id = static_cast<token_id>(random() % (random() % 2 ? 263 : tiny().vocab_size()));  // bytes half of the time
    detokenizer stream(tiny());
    std::string streamed;
    for (const token_id id : ids) streamed += stream.push(id);
    streamed += stream.finish();
    CHECK(streamed == tiny().decode_text(ids));
  }
}
