// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/decode/text_stream.hpp"

#include <doctest/doctest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "outrider/backend/reference.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "support/refusal.hpp"

namespace {

using namespace outrider;

const std::filesystem::path pair = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "examples/data/tiny-kjv";

const tokenizer& tokens() {
  static const tokenizer t = tokenizer::from_file(pair / "target");
  return t;
}

/// The tokens of a text as a model writes it: without the marker that encode() begins with.
std::vector<token_id> written(const std::string& text) {
  std::vector<token_id> ids = tokens().encode(text);
  if (tokens().decode_text(std::span(ids).first(1)).empty()) ids.erase(ids.begin());
  return ids;
}

using B = reference;
struct tiny_pair {
  context_of<B> ctx{execution{1}};
  gemma4::model<B> model = gemma4::load_model<B>(pair / "target");
  gemma4::assistant<B> assistant = gemma4::load_assistant<B>(pair / "assistant");
  assistant_drafter<B> drafter{assistant, ctx};
};

struct streamed {
  std::string text;
  std::vector<std::string> pieces;
  std::optional<finish_reason> finish;
  std::size_t pushed = 0, needed = 0;
};
streamed stream_of(const std::string& whole, std::vector<std::string> stops) {
  streamed s;
  text_stream stream(
      tokens(),
      [&](std::string_view piece) {
        s.text += piece;
        s.pieces.emplace_back(piece);
        return true;
      },
      std::move(stops));
  for (const token_id token : written(whole)) {
    ++s.pushed;
    if ((s.finish = stream(token))) break;
  }
  s.needed = stream.tokens_of_text();
  stream.finish();
  return s;
}

TEST_CASE("without stop strings all text passes, piece by piece, and never an empty one") {
  const std::string whole = "And God said, Let there be light: and there was light.";
  const streamed s = stream_of(whole, {});
  CHECK(s.text == whole);
  CHECK(s.pieces.size() > 5);
  for (const std::string& piece : s.pieces) CHECK(!piece.empty());
  CHECK(!s.finish);
  CHECK(s.needed == s.pushed);
}

TEST_CASE("text ends before the first stop string, wherever tokens cut it, and its tokens are no longer needed") {
  const std::string whole = "And God said, Let there be light: and there was light.";
  for (const std::string stop : {" said", "d, L", "light: and", ".", "And", "h"}) {
    CAPTURE(stop);
    const streamed s = stream_of(whole, {stop});
    CHECK(s.text == whole.substr(0, whole.find(stop)));
    REQUIRE(s.finish);
    CHECK(*s.finish == finish_reason::stop_string);
    const std::vector<token_id> all = written(whole);
    std::string kept, before;
    for (std::size_t i = 0; i < s.needed; ++i) {
      before = kept;
      kept = tokens().decode_text(std::span(all).first(i + 1));
    }
    CHECK(kept.size() >= s.text.size());                      // they suffice,
    CHECK((s.needed == 0 || before.size() < s.text.size()));  // and none is too many
  }
}

TEST_CASE("what only began like a stop string is shown at the end") {
  const streamed s = stream_of("And God said", {"said so"});
  CHECK(s.text == "And God said");
  CHECK(!s.finish);
}

TEST_CASE("a callback that returns false stops the text as the caller's wish") {
  std::string seen;
  text_stream stream(tokens(), [&](std::string_view piece) {
    seen += piece;
    return seen.size() < 5;
  });
  std::optional<finish_reason> finish;
  for (const token_id token : tokens().encode("And God said, Let there be light"))
    if ((finish = stream(token))) break;
  REQUIRE(finish);
  CHECK(*finish == finish_reason::caller);
}

TEST_CASE("a stop string across drafts ends the text there, its tokens leave the sequence, and the text can go on") {
  tiny_pair tiny;
  const std::vector<token_id> prompt = tokens().encode("In the beginning God created");
  const auto write = [&](std::size_t draft, const std::string& stop, gemma4::session<B>& session) {
    std::string text;
    text_stream stream(tokens(), [&](std::string_view piece) { return text += piece, true; }, {stop});
    generate_options options;
    options.max_new_tokens = 48;
    options.draft = draft;
    const generation result =
        draft == 0 ? generate(session, prompt, options, stream)
                   : speculative_decoder(session, tiny.drafter, greedy{}, fixed<max_draft_length>{}).generate(prompt, options, stream);
    stream.finish();
    CHECK(result.finish == finish_reason::stop_string);
    CHECK(session.committed() + 1 == prompt.size() + result.kept);
    return std::pair(text, result.kept);
  };
  for (const std::string stop : {" of the LORD", "and", "e"}) {
    CAPTURE(stop);
    gemma4::session<B> plain(tiny.model, tiny.ctx), drafted(tiny.model, tiny.ctx);
    const auto want = write(0, stop, plain);
    CHECK(want.first.find(stop) == std::string::npos);
    CHECK(write(8, stop, drafted) == want);
    // Both go on as one.
    CHECK(std::vector<token_id>(plain.tokens().begin(), plain.tokens().end()) ==
          std::vector<token_id>(drafted.tokens().begin(), drafted.tokens().end()));
    std::vector<token_id> more[2];
    const std::vector<token_id> next = tokens().encode(" and");
    generate(plain, next, {.max_new_tokens = 12}, [&](token_id token) { more[0].push_back(token); });
    generate(drafted, next, {.max_new_tokens = 12}, [&](token_id token) { more[1].push_back(token); });
    CHECK(more[0] == more[1]);
  }
}

TEST_CASE("whether a long stop string's tokens can leave the sequence does not depend on drafts") {
  tiny_pair tiny;
  const std::vector<token_id> prompt = tokens().encode("In the beginning God created");
  std::vector<token_id> all;
  {
    gemma4::session<B> session(tiny.model, tiny.ctx);
    generate(session, prompt, {.max_new_tokens = 190}, [&](token_id token) { all.push_back(token); });
  }
  for (const std::size_t held : {std::size_t{100}, std::size_t{112}, std::size_t{118}, std::size_t{126}, std::size_t{135}}) {
    CAPTURE(held);
    const std::string stop = tokens().decode_text(std::span(all).subspan(50, held));
    std::vector<std::size_t> kept;
    for (const std::size_t draft : {std::size_t{0}, std::size_t{3}, std::size_t{16}}) {
      gemma4::session<B> session(tiny.model, tiny.ctx);
      text_stream stream(tokens(), [](std::string_view) { return true; }, {stop});
      generate_options options;
      options.max_new_tokens = 190;
      options.draft = draft;
      kept.push_back(
          speculative_decoder(session, tiny.drafter, greedy{}, fixed<max_draft_length>{}).generate(prompt, options, stream).kept);
      CHECK(session.committed() + 1 == prompt.size() + kept.back());
      stream.finish();
    }
    CHECK(kept[1] == kept[0]);
    CHECK(kept[2] == kept[0]);
  }
}

TEST_CASE("bytes of a character that begins a stop string leave with it") {
  std::string text;
  text_stream stream(tokens(), [&](std::string_view piece) { return text += piece, true; }, {"é"});
  std::size_t needed = 0;
  for (const token_id token : written("And é")) {
    if (stream(token)) break;
    if (!text.ends_with(' ')) needed = stream.tokens_of_text();
  }
  const std::vector<token_id> all = written("And ");
  CHECK(text == "And ");
  CHECK(stream.tokens_of_text() == all.size());
  CHECK(needed <= all.size());
}

TEST_CASE("a callback that wants no more is not called again") {
  std::size_t calls = 0;
  text_stream stream(tokens(), [&](std::string_view) { return ++calls < 2; }, {"light be"});
  for (const token_id token : tokens().encode("And God said, Let there be light"))
    if (stream(token)) break;
  stream.finish();
  CHECK(calls == 2);
}

TEST_CASE("an empty stop string is refused") {
  const std::string sentence = testing::refusal(error_code::argument_invalid, [] {
    text_stream(tokens(), [](std::string_view) { return true; }, {"a", ""});
  });
  CHECK(testing::mentions(sentence, "empty"));
}

}  // namespace
