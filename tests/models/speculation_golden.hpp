// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Whole generations against the recorded texts and rounds: plain and speculative, every draft length, good and bad drafters, and every way
// in which a text ends. Pitfall 154: the recorded gaps between the best two tokens are checked to be wider than the noise, so texts are
// compared for equality. Pitfalls 74 and 151: every speculative test asserts that drafts were made.
#pragma once
#include <array>
#include <initializer_list>

#include "golden_data.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/generate.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "support/drafters.hpp"
#include "writing.hpp"

namespace models {

using lengths = std::initializer_list<std::size_t>;
using testing::recorded_drafter;
using testing::scripted_drafter;

/// The recorded rounds [n, drafts, accepted] as a generation shows them: from its drafter's calls and its statistics. The last target pass
/// may be a plain one, for which no drafter is asked.
inline std::vector<std::array<std::size_t, 3>> rounds_of(const std::vector<testing::draft_round>& calls, const written& text,
                                                         std::size_t prompt) {
  const std::size_t end = prompt + text.tokens.size(), plain = text.stats.plain_passes();
  REQUIRE(plain <= 1);
  std::vector<std::array<std::size_t, 3>> rounds;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const std::size_t next = i + 1 < calls.size() ? calls[i + 1].n : end - plain;
    rounds.push_back({calls[i].n, calls[i].drafts, next - calls[i].n - 1});
  }
  if (plain != 0) rounds.push_back({end - 1, 0, 0});
  return rounds;
}

TEST_CASE_TEMPLATE("plain greedy decoding writes every recorded text", B, OUTRIDER_TESTED_BACKENDS) {
  for (const char* name : {"e2b", "e4b", "dense31b", "moe26b", "unified12b", "e2b_bf16", "multimodal_names"}) {
    CAPTURE(name);
    const golden expected(name);
    context_of<B> ctx{one_thread};
    const auto target = gemma4::load_model<B>(expected.directory / "target");
    gemma4::session<B> session(target, ctx);
    for (const std::string& prompt : expected.prompts()) {
      CAPTURE(prompt);
      if (expected.has(prompt + ".greedy.gap"))
        for (const float gap : expected.floats(prompt + ".greedy.gap")) REQUIRE(double{gap} > 2 * expected.tolerance("logits"));
      const std::vector<token_id> want = expected.ids(prompt + ".greedy");
      session.clear();
      CHECK(write_plain(session, expected.ids(prompt + ".prompt"), {want.size(), 0, {}, {}}).tokens == want);
    }
  }
}

// Pitfalls 69 (zero, partial, full acceptance; k = 1; k = k_max), 72 (k beyond the trained depth).
TEST_CASE_TEMPLATE("speculation writes the greedy text with every drafter and draft length", B, OUTRIDER_TESTED_BACKENDS) {
  for (const char* name : {"e2b", "e4b", "dense31b", "moe26b", "unified12b", "e2b_bf16"}) {
    CAPTURE(name);
    const golden expected(name);
    model_pair<B> pair(expected.directory);
    gemma4::session<B> by_chunks(pair.target, pair.ctx, {.max_draft = 16, .prompt_chunk = 5}), at_once(pair.target, pair.ctx);
    assistant_drafter<B> assistant(pair.assistant, pair.ctx);
    std::size_t accepted = 0, rejected = 0;
    for (const std::string prompt : {"p0", "p1"})
      for (const std::size_t k : lengths{0, 1, 2, 3, 4, 5, 6, 7, 8, 16}) {
        CAPTURE(prompt);
        CAPTURE(k);
        const std::vector<token_id> ids = expected.ids(prompt + ".prompt"), want = expected.ids(prompt + ".greedy");
        const generate_options options{want.size(), k, {}, {}};
        gemma4::session<B>& session = k % 2 == 0 ? by_chunks : at_once;
        const auto run = [&](auto& drafter) {
          session.clear();
          const written text = write_speculatively(session, drafter, ids, options);
          CHECK(text.tokens == want);
          CHECK(text.finish == finish_reason::max_new_tokens);
          return text.stats;
        };
        const statistics by_assistant = run(assistant);
        accepted += by_assistant.accepted();
        rejected += by_assistant.drafted() - by_assistant.accepted();

        no_draft none;
        CHECK(run(none).drafted() == 0);
        scripted_drafter always_wrong(expected.text(prompt), {0}), always_right(expected.text(prompt), {scripted_drafter::everything});
        const statistics by_wrong = run(always_wrong), by_right = run(always_right);
        CHECK(by_wrong.accepted() == 0);
        CHECK(by_right.accepted() == by_right.drafted());
        if (k != 0) {
          CHECK(by_assistant.drafted() > 0);
          CHECK(by_wrong.drafted() > 0);
          CHECK(by_right.drafted() > 0);
          CHECK(by_right.rounds() + by_right.plain_passes() == (want.size() - 1 + k) / (k + 1));
        }
      }
    CHECK(accepted > 0);
    CHECK(rejected > 0);
  }
}

/// Runs the drafts of a case with k = 1, 3, 5 and compares every round with the recording of a loop that drops rejected keys.
template <class B>
void check_clean_rounds(const golden& expected, model_pair<B>& pair) {
  for (const std::string prompt : {"p0", "p1"})
    for (const auto& entry : expected.numbers(prompt).at("clean").items()) {
      const std::size_t k = std::stoul(entry.key());
      const nlohmann::json& recorded = entry.value();
      CAPTURE(prompt);
      CAPTURE(k);
      const std::vector<token_id> ids = expected.ids(prompt + ".prompt"), want = expected.ids(prompt + ".greedy");
      gemma4::session<B> session(pair.target, pair.ctx);
      assistant_drafter<B> assistant(pair.assistant, pair.ctx);
      recorded_drafter drafter(assistant);
      const written text = write_speculatively(session, drafter, ids, {want.size(), k, {}, {}});
      CHECK(text.tokens == want);
      CHECK(rounds_of(drafter.rounds, text, ids.size()) == recorded.at("rounds").template get<std::vector<std::array<std::size_t, 3>>>());
      CHECK(text.stats.drafted() == recorded.at("drafted").template get<std::size_t>());
      CHECK(text.stats.accepted() == recorded.at("accepted").template get<std::size_t>());
    }
}

TEST_CASE_TEMPLATE("the assistant's rounds are the recorded ones, draft for draft", B, OUTRIDER_TESTED_BACKENDS) {
  for (const char* name : float_cases) {
    CAPTURE(name);
    const golden expected(name);
    model_pair<B> pair(expected.directory);
    check_clean_rounds(expected, pair);
  }
}

// Pitfalls 44 and 68: the window's edges, prompts of one and two tokens, and many times the window. These prompts have no recorded text, so
// speculation is compared with plain decoding.
TEST_CASE_TEMPLATE("prompts around the window's length speculate as they decode", B, OUTRIDER_TESTED_BACKENDS) {
  const golden expected("e2b");
  model_pair<B> pair(expected.directory);
  const std::size_t W = pair.target.config().window;
  const std::vector<token_id> source = expected.text("p1");
  gemma4::session<B> session(pair.target, pair.ctx);
  assistant_drafter<B> assistant(pair.assistant, pair.ctx);
  for (const std::size_t n : lengths{1, 2, W - 1, W, W + 1, 14, 2 * W, 515, 1024, 1025}) {
    CAPTURE(n);
    std::vector<token_id> prompt;
    while (prompt.size() < n) prompt.push_back(source[prompt.size() % source.size()]);
    const generate_options options{3 * W, 4, {}, {}};
    session.clear();
    const written plain = write_plain(session, prompt, options);
    session.clear();
    const written text = write_speculatively(session, assistant, prompt, options);
    CHECK(text.tokens == plain.tokens);
    CHECK(text.stats.drafted() > 0);
  }
}

// Pitfall 88: whatever place the end of text has among the drafts, nothing behind it is emitted or counted.
TEST_CASE_TEMPLATE("an end of text ends the text as first, middle and last draft, and as the target's own token", B,
                   OUTRIDER_TESTED_BACKENDS) {
  for (const char* name : float_cases) {
    CAPTURE(name);
    const golden expected(name);
    model_pair<B> pair(expected.directory);
    gemma4::session<B> session(pair.target, pair.ctx);
    constexpr std::size_t k = 4;
    const std::vector<token_id> ids = expected.ids("p1.prompt"), greedy = expected.ids("p1.greedy");
    std::array<bool, k + 1> met{};  // places in a round of k right drafts and one more token
    for (std::size_t end = 0; end < greedy.size(); ++end) {
      const token_id eos = greedy[end];
      if (std::find(greedy.begin(), greedy.begin() + static_cast<std::ptrdiff_t>(end), eos) !=
          greedy.begin() + static_cast<std::ptrdiff_t>(end))
        continue;  // it would end the text before
      CAPTURE(end);
      const std::vector<token_id> want(greedy.begin(), greedy.begin() + static_cast<std::ptrdiff_t>(end) + 1);
      const std::vector<token_id> ends{-1, eos};  // a list, with an entry that no token equals
      const generate_options options{greedy.size() + k + 1, k, ends, {}};
      scripted_drafter drafter(expected.text("p1"), {scripted_drafter::everything});
      session.clear();
      const written text = write_speculatively(session, drafter, ids, options);
      CHECK(text.tokens == want);
      CHECK(text.finish == finish_reason::end_of_text);
      // All drafts are right: of the tokens behind the prompt's own, one in k + 1 is the target's, the rest are accepted drafts.
      CHECK(text.stats.accepted() == end - end / (k + 1));
      CHECK(text.stats.rounds() + text.stats.plain_passes() == (end + k) / (k + 1));
      if (end != 0) met[(end - 1) % (k + 1)] = true;
    }
    CHECK(std::all_of(met.begin(), met.end(), [](bool place) { return place; }));
  }
}

TEST_CASE_TEMPLATE("the recorded runs with an end of text end where they are recorded to", B, OUTRIDER_TESTED_BACKENDS) {
  for (const char* name : float_cases) {
    CAPTURE(name);
    const golden expected(name);
    model_pair<B> pair(expected.directory);
    gemma4::session<B> session(pair.target, pair.ctx);
    assistant_drafter<B> assistant(pair.assistant, pair.ctx);
    for (const std::string prompt : {"p0", "p1"}) {
      const nlohmann::json& recorded = expected.numbers(prompt).at("eos");
      const std::vector<token_id> eos{recorded.at("eos_token_id").template get<token_id>()};
      std::vector<token_id> want = expected.ids(prompt + ".greedy");
      want.resize(recorded.at("new_tokens"));
      REQUIRE(want.back() == eos[0]);
      for (const std::size_t k : lengths{0, 1, 3, 5}) {
        CAPTURE(k);
        session.clear();
        const written text = write_speculatively(session, assistant, expected.ids(prompt + ".prompt"), {48, k, eos, {}});
        CHECK(text.tokens == want);
        CHECK(text.finish == finish_reason::end_of_text);
        CHECK((text.stats.drafted() > 0) == (k != 0));
      }
      session.clear();
      const written plain = write_plain(session, expected.ids(prompt + ".prompt"), {48, 0, eos, {}});
      CHECK(plain.tokens == want);
      CHECK(plain.finish == finish_reason::end_of_text);
    }
  }
}

// Pitfalls 76 and 102: a finished text is a commit point, and what follows is the text a fresh start gives.
TEST_CASE_TEMPLATE("a conversation goes on behind a finished text as if it had been one prompt", B, OUTRIDER_TESTED_BACKENDS) {
  for (const char* name : float_cases) {
    CAPTURE(name);
    const golden expected(name);
    model_pair<B> pair(expected.directory);
    gemma4::session<B> session(pair.target, pair.ctx);
    assistant_drafter<B> assistant(pair.assistant, pair.ctx);
    const std::vector<token_id> first = expected.ids("p0.prompt"), greedy = expected.ids("p0.greedy"), more = expected.ids("p1.prompt");
    for (const std::size_t length : lengths{1, 7, 20}) {
      CAPTURE(length);
      const std::vector<token_id> eos{greedy[length]};  // ends the text early or in the middle of a round, or not at all
      session.clear();
      const written start = write_speculatively(session, assistant, first, {length + 1, 5, eos, {}});
      REQUIRE(std::equal(start.tokens.begin(), start.tokens.end(), greedy.begin()));
      std::vector<token_id> reply{start.tokens.back()}, whole = first;
      reply.insert(reply.end(), more.begin(), more.end());
      whole.insert(whole.end(), start.tokens.begin(), start.tokens.end());
      whole.insert(whole.end(), more.begin(), more.end());

      const generate_options options{16, 3, {}, {}};
      const written continued = write_speculatively(session, assistant, reply, options);
      session.clear();
      const written fresh = write_plain(session, whole, options);
      CHECK(continued.tokens == fresh.tokens);
      CHECK(continued.stats.drafted() > 0);
    }
  }
}

TEST_CASE_TEMPLATE("exactly as many tokens as wanted come out, and no draft is made beyond them", B, OUTRIDER_TESTED_BACKENDS) {
  const golden expected("e2b");
  model_pair<B> pair(expected.directory);
  gemma4::session<B> session(pair.target, pair.ctx);
  const std::vector<token_id> ids = expected.ids("p0.prompt"), greedy = expected.ids("p0.greedy");
  for (std::size_t wanted = 1; wanted <= 12; ++wanted)
    for (const auto& right : {std::vector<std::size_t>{0}, {scripted_drafter::everything}, {2, 0, 1}}) {
      CAPTURE(wanted);
      scripted_drafter script(expected.text("p0"), right);
      recorded_drafter drafter(script);
      session.clear();
      const written text = write_speculatively(session, drafter, ids, {wanted, 4, {}, {}});
      CHECK(std::equal(text.tokens.begin(), text.tokens.end(), greedy.begin()));
      CHECK(text.tokens.size() == wanted);
      CHECK(text.finish == finish_reason::max_new_tokens);
      for (const testing::draft_round& round : drafter.rounds) CHECK(round.n + round.drafts < ids.size() + wanted);
      if (wanted <= 2) CHECK(drafter.rounds.empty());  // k cut to 0 by length
    }
  session.clear();
  no_draft none;
  speculative_decoder decoder(session, none);
  CHECK(decoder.generate(ids, {0, 4, {}, {}}, [](token_id) { FAIL("a token nobody wanted"); }).stats.tokens == 0);
}

// Pitfall 69: the last positions of a limited context are used up, by both kinds of decoding, and neither steps over the edge.
TEST_CASE_TEMPLATE("a full context ends the text, plain and speculative at the same token", B, OUTRIDER_TESTED_BACKENDS) {
  const golden expected("e2b");
  model_pair<B> pair(expected.directory);
  const std::vector<token_id> ids = expected.ids("p0.prompt"), greedy = expected.ids("p0.greedy");
  assistant_drafter<B> assistant(pair.assistant, pair.ctx);
  for (std::size_t room = 0; room <= 14; ++room) {
    CAPTURE(room);
    gemma4::session<B> session(pair.target, pair.ctx, {.max_draft = 8, .prompt_chunk = 5, .max_positions = ids.size() + room});
    const std::vector<token_id> want(greedy.begin(), greedy.begin() + static_cast<std::ptrdiff_t>(room) + 1);
    const written plain = write_plain(session, ids, {48, 0, {}, {}});
    CHECK(plain.tokens == want);
    CHECK(plain.finish == finish_reason::context_full);
    scripted_drafter right(expected.text("p0"), {scripted_drafter::everything}), mixed(expected.text("p0"), {1, 0, 3});
    const auto check = [&](auto& drafter, std::size_t k) {
      CAPTURE(k);
      session.clear();
      const written text = write_speculatively(session, drafter, ids, {48, k, {}, {}});
      CHECK(text.tokens == want);
      CHECK(text.finish == finish_reason::context_full);
      if (room > 1) CHECK(text.stats.drafted() > 0);
    };
    for (const std::size_t k : lengths{1, 4, 8}) {
      check(assistant, k);
      check(right, k);
      check(mixed, k);
    }
  }
}

// Pitfall 95: far behind the window and the prompt nothing drifts.
template <class B>
void check_long_text(model_pair<B>& pair, const std::vector<token_id>& prompt) {
  gemma4::session<B> session(pair.target, pair.ctx, {.max_positions = 2100});
  assistant_drafter<B> assistant(pair.assistant, pair.ctx);
  const written plain = write_plain(session, prompt, {2000, 0, {}, {}});
  session.clear();
  const written text = write_speculatively(session, assistant, prompt, {2000, 3, {}, {}});
  CHECK(text.tokens == plain.tokens);
  CHECK(text.tokens.size() == 2000);
  CHECK(text.stats.accepted() > 0);
  CHECK(text.stats.accepted() < text.stats.drafted());
}

TEST_CASE_TEMPLATE("two thousand tokens with a drafter are those without", B, OUTRIDER_TESTED_BACKENDS) {
  const golden expected("e2b");
  model_pair<B> pair(expected.directory);
  check_long_text(pair, expected.ids("p0.prompt"));
}

// Pitfall 59: an id that may not be chosen is not proposed either, so suppression costs no acceptance.
TEST_CASE_TEMPLATE("suppressed tokens are neither written nor drafted", B, OUTRIDER_TESTED_BACKENDS) {
  const golden expected("e2b");
  model_pair<B> pair(expected.directory);
  gemma4::session<B> session(pair.target, pair.ctx);
  assistant_drafter<B> assistant(pair.assistant, pair.ctx);
  const std::vector<token_id> ids = expected.ids("p0.prompt"), greedy = expected.ids("p0.greedy");
  const std::vector<token_id> suppress(greedy.begin() + 3, greedy.begin() + 9);
  const generate_options options{40, 4, {}, suppress};
  const written plain = write_plain(session, ids, options);
  for (const token_id banned : suppress) CHECK(std::find(plain.tokens.begin(), plain.tokens.end(), banned) == plain.tokens.end());
  session.clear();
  const written text = write_speculatively(session, assistant, ids, options);
  CHECK(text.tokens == plain.tokens);
  CHECK(text.stats.drafted() > 0);

  session.clear();
  session.prefill(ids);
  std::vector<token_id> drafts(16);
  std::vector<token_id> known = ids;
  known.push_back(greedy[0]);
  assistant.propose(session, {known, {}, suppress}, drafts);
  for (const token_id banned : suppress) CHECK(std::find(drafts.begin(), drafts.end(), banned) == drafts.end());
}

}  // namespace models
