// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The assistant's steps in other circumstances than those of recorded_drafts_golden.hpp.
#pragma once
#include "recorded_drafts_golden.hpp"

namespace models {

/// Recorded keys [heads, rows, head_dim] and values as a drafter reads them: one block of a growing layer.
class recorded_layer {
 public:
  recorded_layer(const golden& expected, const std::string& name)
      : shape_(expected.shape(name + ".k")), memory_(expected.floats(name + ".k")) {
    const std::vector<float> values = expected.floats(name + ".v");
    memory_.insert(memory_.end(), values.begin(), values.end());
    block_ = memory_.data();
  }
  recorded_layer(const recorded_layer&) = delete;
  recorded_layer& operator=(const recorded_layer&) = delete;

  [[nodiscard]] std::size_t rows() const noexcept { return shape_[1]; }
  [[nodiscard]] kv_view<const float> view() const noexcept { return {&block_, rows(), 0, shape_[0], shape_[2]}; }

 private:
  std::vector<std::size_t> shape_;
  std::vector<float> memory_;
  const float* block_ = nullptr;
};

TEST_CASE_TEMPLATE("pitfall 70: with the rejected keys transformers hands over, its drafts come out; without them, others do", B,
                   OUTRIDER_TESTED_BACKENDS) {
  for (const char* name : float_cases) {
    CAPTURE(name);
    const golden expected(name);
    model_pair<B> pair(expected.directory);
    for (const std::string prompt : {"p0", "p1"}) {
      const std::string stale = prompt + ".stale";
      CAPTURE(stale);
      const nlohmann::json& numbers = expected.numbers(prompt).at("stale");
      const std::size_t n = numbers.at("n");
      const std::vector<token_id> text = expected.text(prompt);
      const auto session = session_behind(pair, pair.ctx, std::span(text).first(n));

      std::array<std::unique_ptr<recorded_layer>, 2> layers;
      gemma4::shared_kv<float, host_space> handed_over;
      for (const attention_kind kind : gemma4::attention_kinds) {
        const auto at = static_cast<std::size_t>(kind);
        layers[at] = std::make_unique<recorded_layer>(expected, stale + ".kv." + name_of(kind));
        handed_over.layers[at] = layers[at]->view();
        handed_over.ends[at] = layers[at]->rows();
        CHECK(layers[at]->rows() == numbers.at("keys").at(name_of(kind)).template get<std::size_t>());
        CHECK(numbers.at("stale_keys").at(name_of(kind)).template get<std::size_t>() > 0);
      }
      handed_over.position = numbers.at("position");
      REQUIRE(handed_over.position == n - 1);
      const std::vector<float> embedding = expected.floats(stale + ".input_embedding"), hidden = expected.floats(stale + ".hidden_in");
      const draft_tolerance tolerance{expected.tolerance("draft_logits"), expected.tolerance("draft_state")};
      hand_drafter<B> drafter(pair.assistant, pair.ctx);
      check_drafts(expected, stale, session, drafter, embedding, hidden, handed_over, tolerance);

      // Full layers: n − 1 committed keys, and exactly one more in the hand-over.
      CHECK(session.keys().ends == std::array{n - 1, n - 1});
      CHECK(handed_over.ends[static_cast<std::size_t>(attention_kind::full)] == n);
      const std::vector<float> clean = drafter.forward(embedding, hidden, session.keys()).logits,
                               recorded = expected.floats(stale + ".logits.0");
      double difference = 0;
      for (std::size_t i = 0; i < clean.size(); ++i) difference = (std::max)(difference, std::abs(double{clean[i]} - double{recorded[i]}));
      CHECK(difference > 10 * tolerance.logits);
    }
  }
}

TEST_CASE_TEMPLATE("a draft step has the same bits on every number of threads", B, OUTRIDER_TESTED_BACKENDS) {
  for (const char* name : {"e2b", "dense31b"}) {
    CAPTURE(name);
    const golden expected(name);
    model_pair<B> pair(expected.directory);
    const std::vector<token_id> text = expected.text("p1");
    const auto session = session_behind(pair, pair.ctx, text);
    const auto step_on = [&](unsigned threads) {
      context_of<B> ctx{execution{threads}};
      return hand_drafter<B>(pair.assistant, ctx).forward(embedding_of(session, text.back()), copy_of(session.hidden()), session.keys());
    };
    const auto alone = step_on(1);
    for (const unsigned threads : {2u, 3u}) {
      CHECK(same_bits(step_on(threads).logits, alone.logits));
      CHECK(same_bits(step_on(threads).state, alone.state));
    }
  }
}

}  // namespace models
