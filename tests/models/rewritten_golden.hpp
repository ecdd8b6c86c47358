// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Recorded checkpoints in other clothes: bfloat16 weights as they are and widened to float, and dead tensors with other contents.
#pragma once
#include <cstdint>

#include "drafts_golden.hpp"
#include "golden_data.hpp"
#include "speculation_golden.hpp"
#include "support/rewrite_checkpoint.hpp"
#include "support/temporary_directory.hpp"

namespace models {

inline void widen_to_float(std::vector<testing::stored_tensor>& tensors) {
  for (testing::stored_tensor& t : tensors) {
    if (t.dtype != "BF16") continue;
    std::vector<std::byte> wide(2 * t.bytes.size(), std::byte{0});  // a float's upper half, behind its lower one
    for (std::size_t i = 0; i < t.bytes.size(); i += 2) {
      wide[2 * i + 2] = t.bytes[i];
      wide[2 * i + 3] = t.bytes[i + 1];
    }
    t.dtype = "F32";
    t.bytes = std::move(wide);
  }
}

// The recording rounds every activation to bfloat16, this library none: the two differ by that rounding, whose size the case states as
// largest and as mean square difference.
TEST_CASE_TEMPLATE("bfloat16 weights give the recorded logits but for the rounding of activations", B, OUTRIDER_TESTED_BACKENDS) {
  const golden expected("e2b_bf16");
  const auto target = gemma4::load_model<B>(expected.directory / "target");
  for (const std::string prompt : {"p0", "p1"}) {
    CAPTURE(prompt);
    const std::vector<float> logits = prompt_logits(target, expected.ids(prompt + ".prompt")), want = expected.floats(prompt + ".logits");
    REQUIRE(logits.size() == want.size());
    double largest = 0, sum = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      const double off = std::abs(double{logits[i]} - double{want[i]});
      if (!(off <= largest)) largest = off;
      sum += off * off;
    }
    CHECK(largest <= expected.tolerance("logits"));
    CHECK(std::sqrt(sum / static_cast<double>(want.size())) <= expected.tolerance("logits_rms"));
  }
}

TEST_CASE_TEMPLATE("the same weights widened to float give the recorded float logits, drafts, texts and rounds", B,
                   OUTRIDER_TESTED_BACKENDS) {
  const golden expected("e2b_bf16");
  const testing::temporary_directory directory;
  testing::rewrite_checkpoint(expected.directory / "target", directory.path() / "target", widen_to_float);
  testing::rewrite_checkpoint(expected.directory / "assistant", directory.path() / "assistant", widen_to_float);
  model_pair<B> pair(directory.path());
  const std::size_t layers = pair.target.config().layer_count();
  // The case has no tolerances for float drafts and hidden states; those of e2b, whose weights these are, hold.
  const golden e2b("e2b");
  for (const std::string prompt : {"p0", "p1"}) {
    CAPTURE(prompt);
    check_close("logits", prompt_logits(pair.target, expected.ids(prompt + ".prompt")), expected.floats(prompt + ".f32.logits"),
                pair.target.config().vocab_size, expected.tolerance("f32.logits"), roundings_per_layer * static_cast<double>(layers + 2));
    check_recorded_drafts(expected, pair, prompt, ".f32", {e2b.tolerance("draft_logits"), e2b.tolerance("draft_state")},
                          e2b.tolerance("hidden"));
    CHECK(expected.ids(prompt + ".f32.greedy") == expected.ids(prompt + ".greedy"));
  }
  check_clean_rounds(expected, pair);
}

TEST_CASE_TEMPLATE("pitfall 14: dead tensors of sharing layers change nothing, not even as NaN", B, OUTRIDER_TESTED_BACKENDS) {
  const golden expected("multimodal_names");
  const std::vector<std::string> dead = expected.json.at("dead_tensors");
  REQUIRE(!dead.empty());
  const testing::temporary_directory directory;
  std::size_t spoiled = 0;
  testing::rewrite_checkpoint(expected.directory / "target", directory.path() / "target",
                              [&](std::vector<testing::stored_tensor>& tensors) {
                                for (testing::stored_tensor& t : tensors) {
                                  if (std::find(dead.begin(), dead.end(), t.name) == dead.end()) continue;
                                  std::fill(t.bytes.begin(), t.bytes.end(), std::byte{0xff});  // every float a NaN
                                  ++spoiled;
                                }
                              });
  REQUIRE(spoiled == dead.size());
  const std::vector<token_id> tokens = expected.ids("p1.prompt");
  CHECK(same_bits(prompt_logits(gemma4::load_model<B>(directory.path() / "target"), tokens),
                  prompt_logits(gemma4::load_model<B>(expected.directory / "target"), tokens)));
}

}  // namespace models
