// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/text/detokenizer.hpp"

#include <doctest/doctest.h>

#include <random>
#include <string>
#include <vector>

using namespace outrider;

namespace {

const tokenizer& tiny() {
  static const tokenizer tokens = tokenizer::from_json_file(OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/target/tokenizer.json");
  return tokens;
}

std::vector<token_id> byte_tokens(const std::string& bytes) {
  std::vector<token_id> ids;
  for (const char c : bytes) ids.push_back(*tiny().find("<0x00>") + static_cast<unsigned char>(c));
  return ids;
}

bool is_whole_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = utf8_character_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string streamed(const std::vector<token_id>& ids, bool special = false) {
  detokenizer stream(tiny(), special);
  std::string text;
  for (const token_id id : ids) {
    const std::string_view piece = stream.push(id);
    CHECK(is_whole_utf8(piece));
    text += piece;
  }
  text += stream.finish();
  return text;
}

}  // namespace

TEST_CASE("pitfall 94: streamed pieces put together are the whole text, characters never split") {
  for (const std::string text : {"In the beginning God created", " Hello\n\n", "日本語のテスト", "👩‍👩‍👧‍👦 🏳️‍🌈",
                                 "e\u0301 \ufffd \U0010ffff", "a\xe2\x96 b\xff"}) {
    const auto ids = tiny().encode(text);
    CHECK(streamed(ids) == tiny().decode_text(ids));
    CHECK(streamed(ids, true) == tiny().decode_text(ids, true));
  }
}

TEST_CASE("random tokens, half of them bytes, stream to the same text as decoding them at once") {
  const unsigned seed = 4242;
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const token_id first_byte = *tiny().find("<0x00>");
  const std::vector<int> telling{0x41, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc2, 0xe0, 0xe2, 0xed, 0xef, 0xf0, 0xf4, 0xf5, 0xff};
  for (int round = 0; round < 3000; ++round) {
    std::vector<token_id> ids(random() % 12);
    for (token_id& id : ids) switch (random() % 4) {
        case 0:
          id = static_cast<token_id>(random() % tiny().vocab_size());
          break;
        case 1:
          id = first_byte + static_cast<token_id>(random() % 256);
          break;
        default:
          id = first_byte + telling[random() % telling.size()];
      }
    CAPTURE(ids);
    CHECK(streamed(ids) == tiny().decode_text(ids));
    CHECK(streamed(ids, true) == tiny().decode_text(ids, true));
  }
}

TEST_CASE("a character appears with its last byte") {
  detokenizer stream(tiny());
  const auto ids = byte_tokens("🦙");
  for (std::size_t i = 0; i < 3; ++i) CHECK(stream.push(ids[i]).empty());
  CHECK(stream.push(ids[3]) == "🦙");
  CHECK(stream.finish().empty());
}

TEST_CASE("a byte that cannot go on breaks the pending character and counts anew") {
  detokenizer stream(tiny());
  const auto ids = byte_tokens("\xe2\x96");
  CHECK(stream.push(ids[0]).empty());
  CHECK(stream.push(ids[1]).empty());
  CHECK(stream.push(byte_tokens("A")[0]) == "\ufffdA");
  CHECK(stream.push(byte_tokens("\xe0")[0]).empty());
  CHECK(stream.push(byte_tokens("\x80")[0]) == "\ufffd\ufffd");  // E0 needs A0 … BF
}

TEST_CASE("what is left incomplete at the end becomes one U+FFFD, once") {
  detokenizer stream(tiny());
  for (const token_id id : byte_tokens("\xf0\x9f\xa6")) CHECK(stream.push(id).empty());
  CHECK(stream.finish() == "\ufffd");
  CHECK(stream.finish().empty());
  CHECK(stream.push(byte_tokens("A")[0]) == "A");
}

TEST_CASE("a marker inside a character does not disturb it") {
  std::vector<token_id> ids = byte_tokens("é");
  ids.insert(ids.begin() + 1, tiny().bos());
  CHECK(streamed(ids) == "é");
  CHECK(streamed(ids) == tiny().decode_text(ids));
}

TEST_CASE("pushing tokens reuses the memory of the constructor") {
  detokenizer stream(tiny(), true);
  const char* const memory = stream.push(*tiny().find("<0x41>")).data();
  for (std::size_t id = 0; id < tiny().vocab_size(); ++id) {
    CHECK(stream.push(static_cast<token_id>(id)).data() == memory);
    CHECK(stream.push(byte_tokens("\xf0")[0]).data() == memory);
  }
  CHECK(stream.finish().data() == memory);
}

TEST_CASE("a token outside the vocabulary is refused and leaves the stream as it was") {
  detokenizer stream(tiny());
  const auto ids = byte_tokens("é");
  CHECK(stream.push(ids[0]).empty());
  CHECK_THROWS_AS((void)stream.push(-1), error);
  CHECK_THROWS_AS((void)stream.push(2048), error);
  CHECK(stream.push(ids[1]) == "é");
}
