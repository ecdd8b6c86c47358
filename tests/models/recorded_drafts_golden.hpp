// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The assistant's steps against the recorded ones: by the public calls a drafter makes, after the same text.
//
// Pitfalls that a recorded step settles without a test of their own:
//   53 embedding first, then hidden; the target's scaled embedding     `input_embedding`, `logits.0`
//   54 hidden after the final norm, 56 target-wide                     `hidden_in`, `state.j`
//   55 post_projection reads the normed state                          `state.j`, `logits.1` …
//   58 the MLP's residual, 59 no softcap                               `logits.j`
//   60 the last W + 1 committed keys, 62 donors through sharing        `logits.j` of the long prompt, 23 > W
//   61 one position for all steps of a round                           `logits.1` …
//   63 candidates mapped back to ids, 64 the fill                      `tokens`, `logits.j` over the whole vocabulary
//   68 the first round has the last prompt row's hidden state          `draft.hidden_in`, right after the prompt
#pragma once
#include <array>
#include <cstdint>
#include <memory>

#include "golden_data.hpp"
#include "outrider/decode/assistant_drafter.hpp"

#include "writing.hpp"

namespace models {

struct draft_tolerance {
  double logits, state;
};

/// Steps `drafter` from the given input and compares every recorded tensor under `name`; the drafts.
template <class B, class Kv>
std::vector<token_id> check_drafts(const golden& expected, const std::string& name, const gemma4::session<B, Kv>& target,
                                   hand_drafter<B>& drafter, std::vector<float> embedding, std::vector<float> state,
                                   const gemma4::shared_kv<Kv, space_of<B>>& keys, draft_tolerance tolerance) {
  CAPTURE(name);
  const std::vector<token_id> tokens = expected.ids(name + ".tokens");
  const std::vector<token_id> centroids = expected.has(name + ".centroids") ? expected.ids(name + ".centroids") : std::vector<token_id>{};
  std::vector<token_id> drafts;
  for (std::size_t j = 0; j < tokens.size(); ++j) {
    const std::string at = "." + std::to_string(j);
    const auto step = drafter.forward(embedding, state, keys);
    // The target's depth, four layers, and those of every draft before.
    const double roundings = roundings_per_layer * static_cast<double>(target.config().layer_count() + 5 * (j + 1));
    check_close(name + ".logits" + at, step.logits, expected.floats(name + ".logits" + at), step.logits.size(), tolerance.logits,
                roundings);
    if (expected.has(name + ".state" + at))
      check_close(name + ".state" + at, step.state, expected.floats(name + ".state" + at), step.state.size(), tolerance.state, roundings);
    if (!centroids.empty()) {
      const auto row = centroids.begin() + static_cast<std::ptrdiff_t>(j * step.clusters.size());
      CHECK(std::equal(step.clusters.begin(), step.clusters.end(), row));
    }
    CHECK(step.token == tokens[j]);
    drafts.push_back(step.token);
    matrix<float, space_of<B>> next(1, embedding.size());
    target.embed(next.view(), step.token);
    embedding = copy_of(next.view());
    state = step.state;
  }
  return drafts;
}

/// The recorded drafts of a prompt, right behind it and later in its text; `infix` is "" or ".f32".
template <class B>
void check_recorded_drafts(const golden& expected, model_pair<B>& pair, const std::string& prompt, const std::string& infix,
                           draft_tolerance tolerance, double hidden_tolerance) {
  const std::vector<token_id> text = expected.text(prompt);
  const std::string names[] = {prompt + infix + ".draft", prompt + infix + ".draft_late"};
  for (std::size_t i = 0; i < 2; ++i) {
    CAPTURE(names[i]);
    const std::size_t n = expected.numbers(prompt).at("draft_at").at(i);
    const auto session = session_behind(pair, pair.ctx, std::span(text).first(n));
    REQUIRE(session.committed() == n - 1);
    REQUIRE(session.keys().position == n - 1);
    REQUIRE(session.keys().ends == std::array{n - 1, n - 1});
    const std::vector<float> embedding = embedding_of(session, text[n - 1]), hidden = copy_of(session.hidden());
    const double roundings = roundings_per_layer * static_cast<double>(session.config().layer_count() + 2);
    check_close("input_embedding", embedding, expected.floats(names[i] + ".input_embedding"), embedding.size(), tolerance.state, 1);
    check_close("hidden_in", hidden, expected.floats(names[i] + ".hidden_in"), hidden.size(), hidden_tolerance, roundings);

    hand_drafter<B> by_hand(pair.assistant, pair.ctx);
    const auto drafts = check_drafts(expected, names[i], session, by_hand, embedding, hidden, session.keys(), tolerance);

    assistant_drafter<B> drafter(pair.assistant, pair.ctx);
    std::vector<token_id> proposed(drafts.size());
    CHECK(drafter.propose(session, {std::span(text).first(n), {}, {}}, proposed) == drafts.size());
    CHECK(proposed == drafts);
  }
}

TEST_CASE_TEMPLATE("the assistant drafts what is recorded, step by step, from committed keys", B, OUTRIDER_TESTED_BACKENDS) {
  for (const char* name : float_cases) {
    CAPTURE(name);
    const golden expected(name);
    model_pair<B> pair(expected.directory);
    const draft_tolerance tolerance{expected.tolerance("draft_logits"), expected.tolerance("draft_state")};
    for (const std::string prompt : {"p0", "p1"}) {
      CAPTURE(prompt);
      // Tokens and clusters can only be compared for equality because every decision behind them is wider than the noise.
      REQUIRE(expected.numbers(prompt).at("drafter_min_margin").template get<double>() > tolerance.logits);
      check_recorded_drafts(expected, pair, prompt, "", tolerance, expected.tolerance("hidden"));
    }
  }
}

}  // namespace models
