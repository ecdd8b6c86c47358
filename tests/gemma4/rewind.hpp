// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Going back: a session that was cut back to an earlier length and goes on differently, beside a new one that was given the kept tokens.
// The including file names the backends in OUTRIDER_TESTED_BACKENDS; their prompts are row-exact, so all is compared bit by bit.
#pragma once
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "outrider/backend/reference.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/prefix.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"

namespace going_back {

using namespace outrider;
using lengths = std::initializer_list<std::size_t>;

inline const std::filesystem::path source_directory = OUTRIDER_SOURCE_DIR;

/// A pair whose sliding windows are shorter than the texts of the tests, and its numbers.
struct setting {
  std::filesystem::path pair;
  std::size_t window, prompt, written;
};
inline const setting random_pair{source_directory / "tests/golden/e2b", 8, 30, 20};
inline const setting trained_pair{source_directory / "examples/data/tiny-kjv", 48, 90, 40};

template <class B>
struct models {
  context_of<B> ctx{execution{1}};
  gemma4::model<B> target;
  gemma4::assistant<B> assistant;

  explicit models(const setting& s)
      : target(gemma4::load_model<B>(s.pair / "target")), assistant(gemma4::load_assistant<B>(s.pair / "assistant")) {}
};

/// A session with its drafter, and the tokens at its positions.
template <class B>
struct text {
  gemma4::session<B> session;
  assistant_drafter<B> drafter;
  std::vector<token_id> tokens;  // one more than committed after write()

  text(models<B>& m, const gemma4::session_options& options) : session(m.target, m.ctx, options), drafter(m.assistant, m.ctx) {}

  /// The committed tokens.
  [[nodiscard]] std::span<const token_id> committed() const { return std::span(tokens).first(session.committed()); }

  /// Processes the prompt behind what is committed and writes `count` tokens.
  statistics write(std::span<const token_id> prompt, std::size_t count, std::size_t draft) {
    tokens.resize(session.committed());
    tokens.insert(tokens.end(), prompt.begin(), prompt.end());
    const auto emit = [&](token_id token) { tokens.push_back(token); };
    const generate_options options{count, draft};
    return draft == 0 ? generate(session, prompt, options, emit).stats
                      : speculative_decoder(session, drafter, greedy{}, fixed<max_draft_length>{}).generate(prompt, options, emit).stats;
  }
};

template <class B>
bool same_bits(const gemma4::session<B>& a, const gemma4::session<B>& b) {
  const auto equal = [](auto x, auto y) {
    if (x.rows != y.rows || x.cols != y.cols) return false;
    for (std::size_t r = 0; r < x.rows; ++r)
      if (std::memcmp(x.row(r), y.row(r), x.cols * sizeof(float)) != 0) return false;
    return true;
  };
  return equal(a.logits(), b.logits()) && equal(a.hidden(), b.hidden());
}

inline std::vector<token_id> random_tokens(std::mt19937_64& random, std::size_t count, std::size_t vocabulary) {
  std::uniform_int_distribution<token_id> any(7, static_cast<token_id>(vocabulary) - 1);
  std::vector<token_id> tokens(count);
  for (token_id& token : tokens) token = any(random);
  return tokens;
}

/// Every distance back from `least` to `most`: cuts a fresh text back, goes on, and compares with a new session.
template <class B>
void check_distances(const setting& s, std::size_t max_rewind, std::size_t draft, std::size_t least, std::size_t most) {
  models<B> m(s);
  std::mt19937_64 random(max_rewind + 1);
  const std::size_t vocabulary = m.target.config().vocab_size;
  REQUIRE(m.target.config().window == s.window);
  const gemma4::session_options options{.max_draft = 4, .prompt_chunk = 8, .max_positions = 400, .max_rewind = max_rewind};
  text<B> old(m, options), fresh(m, options);
  std::size_t went = 0, refused = 0, drafted = 0;
  for (std::size_t back = least; back <= most; ++back) {
    CAPTURE(back);
    CAPTURE(max_rewind);
    old.session.clear();
    old.write(random_tokens(random, s.prompt, vocabulary), s.written, draft);
    const std::size_t committed = old.session.committed(), kept = committed - back;
    if (!old.session.truncate(kept)) {
      ++refused;
      CHECK(back > max_rewind);
      CHECK(old.session.committed() == committed);
      continue;
    }
    ++went;
    CHECK(old.session.committed() == kept);
    fresh.session.clear();
    if (kept != 0) fresh.session.prefill(old.committed());
    fresh.tokens = old.tokens;
    const auto other = random_tokens(random, 1 + back % 11, vocabulary);
    const statistics after = old.write(other, s.written, draft), expected = fresh.write(other, s.written, draft);
    CHECK(old.tokens == fresh.tokens);
    CHECK(after.passes == expected.passes);
    CHECK(same_bits(old.session, fresh.session));
    drafted += after.drafted();
  }
  CHECK(went >= 1 + max_rewind - least);
  CHECK(refused > 0);
  CHECK((drafted > 0) == (draft > 0));
}

/// A conversation of prompts that share what they share with the text before: longer, shorter, edited in front, equal.
template <class B>
void check_conversation(const setting& s, std::size_t draft) {
  models<B> m(s);
  std::mt19937_64 random(102);
  const std::size_t vocabulary = m.target.config().vocab_size;
  const auto draw = [&](std::size_t low, std::size_t high) { return std::uniform_int_distribution<std::size_t>(low, high)(random); };
  const gemma4::session_options options{.max_draft = 4, .prompt_chunk = 8, .max_positions = 400, .max_rewind = s.window / 2};
  text<B> chat(m, options), fresh(m, options);
  std::size_t reused_some = 0, reused_none = 0;
  for (int turn = 0; turn < 30; ++turn) {
    CAPTURE(turn);
    const std::size_t shared =
        draw(0, 2) == 0 ? draw(0, chat.tokens.size()) : chat.tokens.size() - (std::min)(draw(0, s.window), chat.tokens.size());
    std::vector<token_id> prompt(chat.tokens.begin(), chat.tokens.begin() + static_cast<std::ptrdiff_t>(shared));
    if (prompt.size() > 200) prompt.resize(20);
    const auto more = random_tokens(random, draw(prompt.empty() ? 1 : 0, 12), vocabulary);
    prompt.insert(prompt.end(), more.begin(), more.end());

    const std::size_t reused = reuse_prefix(chat.session, chat.committed(), prompt);
    CHECK(reused == chat.session.committed());
    CHECK(reused < prompt.size());
    (reused == 0 ? reused_none : reused_some) += 1;
    chat.write(std::span(prompt).subspan(reused), s.written, draft);
    fresh.session.clear();
    fresh.write(prompt, s.written, draft);
    CHECK(chat.tokens == fresh.tokens);
    CHECK(same_bits(chat.session, fresh.session));
  }
  CHECK(reused_some > 10);
  CHECK(reused_none > 1);
}

TEST_CASE_TEMPLATE("pitfall 51: going back any distance is refused or exact", B, OUTRIDER_TESTED_BACKENDS) {
  for (const std::size_t draft : lengths{0, 3})
    for (const std::size_t max_rewind : lengths{0, 1, 6}) check_distances<B>(random_pair, max_rewind, draft, 0, 49);
}

TEST_CASE_TEMPLATE("pitfall 103: with the trained pair too, the drafter goes on as behind a fresh prompt", B, OUTRIDER_TESTED_BACKENDS) {
  if constexpr (!std::is_same_v<B, reference>)  // which would take half a minute
    for (const std::size_t max_rewind : lengths{0, 20}) check_distances<B>(trained_pair, max_rewind, 3, max_rewind, max_rewind + 9);
}

TEST_CASE_TEMPLATE("pitfall 102: every prompt of a conversation, longer, shorter or edited, gives the text of a fresh start", B,
                   OUTRIDER_TESTED_BACKENDS) {
  for (const std::size_t draft : lengths{0, 3}) check_conversation<B>(random_pair, draft);
}

}  // namespace going_back
