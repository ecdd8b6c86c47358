// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What the golden tests do with a model: step an assistant by hand, write texts plainly and speculatively.
#pragma once
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "golden_data.hpp"
#include "outrider/decode/drafter.hpp"
#include "outrider/decode/generate.hpp"
#include "outrider/decode/speculative_decoder.hpp"

namespace models {

/// One assistant with its workspace, stepped by hand.
template <class B>
class hand_drafter {
 public:
  hand_drafter(const gemma4::assistant<B>& assistant, context_of<B>& ctx)
      : assistant_(&assistant), ctx_(&ctx), workspace_(assistant.config()) {}

  struct step {
    token_id token = 0;
    std::vector<float> logits, state;    // over the whole vocabulary; [T]
    std::vector<std::int32_t> clusters;  // ascending; empty for a dense head
  };

  /// One step from the two halves of its input.
  template <class Kv>
  step forward(const std::vector<float>& embedding, const std::vector<float>& state, const gemma4::shared_kv<Kv, space_of<B>>& keys) {
    const auto input = assistant_->input(workspace_);
    REQUIRE(embedding.size() + state.size() == input.cols);
    space_copy<host_space, space_of<B>>::copy(input.data, embedding.data(), embedding.size());
    space_copy<host_space, space_of<B>>::copy(input.data + embedding.size(), state.data(), state.size());
    const candidates<B> found = assistant_->forward(*ctx_, workspace_, keys);

    step result;
    most_likely<B>(*ctx_, {&result.token, 1}, found.logits, found.ids);
    matrix<float, space_of<B>> dense(1, assistant_->config().text.vocab_size);
    assistant_->dense_logits(*ctx_, dense.view(), found);
    result.logits = copy_of(dense.view());
    result.state = copy_of(assistant_->state(workspace_));
    const auto clusters = assistant_->clusters(workspace_);
    for (const float cluster : copy_of(clusters)) result.clusters.push_back(static_cast<std::int32_t>(cluster));
    std::sort(result.clusters.begin(), result.clusters.end());
    return result;
  }

 private:
  const gemma4::assistant<B>* assistant_;
  context_of<B>* ctx_;
  typename gemma4::assistant<B>::workspace workspace_;
};

/// A session that has processed all but the last token of a text.
template <class B>
gemma4::session<B> session_behind(const model_pair<B>& pair, context_of<B>& ctx, std::span<const token_id> text) {
  gemma4::session<B> session(pair.target, ctx);
  session.prefill(text.first(text.size() - 1));
  return session;
}

template <class B>
std::vector<float> embedding_of(const gemma4::session<B>& session, token_id token) {
  matrix<float, space_of<B>> row(1, session.config().hidden_size);
  session.embed(row.view(), token);
  return copy_of(row.view());
}

/// A text with what its generation reports.
struct written {
  std::vector<token_id> tokens;
  finish_reason finish{};
  statistics stats;
};

template <class Target>
written write_plain(Target& target, std::span<const token_id> prompt, const generate_options& options) {
  written text;
  const generation result = generate(target, prompt, options, [&](token_id token) { text.tokens.push_back(token); });
  text.finish = result.finish;
  text.stats = result.stats;
  CHECK(text.stats.tokens == text.tokens.size());
  CHECK(text.stats.rounds() == 0);
  return text;
}

/// Also checks what holds for every generation with at least one token: the numbers add up, and the cache is at a commit point, with all
/// but the last token.
template <class Target, class Drafter>
written write_speculatively(Target& target, Drafter& drafter, std::span<const token_id> prompt, const generate_options& options) {
  written text;
  const std::size_t before = target.committed();
  speculative_decoder decoder(target, drafter, greedy{}, fixed<max_draft_length>{});
  const generation result = decoder.generate(prompt, options, [&](token_id token) { text.tokens.push_back(token); });
  text.finish = result.finish;
  text.stats = result.stats;
  CHECK(text.stats.tokens == text.tokens.size());
  CHECK(text.stats.prompt_tokens == prompt.size());
  CHECK(target.committed() == before + prompt.size() + text.tokens.size() - 1);
  // Every pass but a last one cut by an accepted end yields its accepted drafts and one token.
  const std::size_t passes = text.stats.rounds() + text.stats.plain_passes();
  CHECK(text.tokens.size() <= 1 + text.stats.accepted() + passes);
  CHECK(text.tokens.size() + 1 >= 1 + text.stats.accepted() + passes);
  return text;
}

}  // namespace models
