// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The target's pass against itself: in chunks, with rows nobody wants, beside other rows, on other numbers of threads.
#pragma once
#include "stages_golden.hpp"

namespace models {

// Pitfalls 33 (decoding is the prompt's pass, row by row, with every feature), 38 (sharing across chunks), 105.
TEST_CASE_TEMPLATE("a prompt in one chunk, in uneven chunks and token by token gives one result", B, OUTRIDER_TESTED_BACKENDS) {
  for (const char* name : float_cases) {
    CAPTURE(name);
    const golden expected(name);
    context_of<B> ctx{one_thread};
    const auto target = gemma4::load_model<B>(expected.directory / "target");
    const std::vector<token_id> tokens = expected.ids("p1.prompt");
    const std::size_t n = tokens.size();
    for (const row_kind kind : {row_kind::prompt, row_kind::decode}) {
      const prompt_outcome whole = process_in_chunks(target, ctx, tokens, {n}, kind);
      for (const auto& chunks : {std::vector<std::size_t>(n, 1), {1, 2, 7, n - 10}, {n - 1, 1}, {8, 8, n - 16}, {1, n - 1}}) {
        CAPTURE(chunks.size());
        CAPTURE(chunks.front());
        const prompt_outcome parts = process_in_chunks(target, ctx, tokens, chunks, kind);
        if (kind == row_kind::decode || prompts_are_exact<B>) {
          CHECK(same_bits(parts.logits, whole.logits));
          CHECK(same_bits(parts.hidden, whole.hidden));
          CHECK(same_bits(parts.keys, whole.keys));
        } else {
          const double roundings = roundings_per_layer * static_cast<double>(target.config().layer_count() + 2);
          check_close("logits", parts.logits, whole.logits, parts.logits.size(), expected.tolerance("logits"), roundings);
          check_close("hidden", parts.hidden, whole.hidden, parts.hidden.size(), expected.tolerance("hidden"), roundings);
          check_close("keys", parts.keys, whole.keys, parts.keys.size(), expected.tolerance("kv"), roundings);
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("pitfall 40: stopping unwanted rows at the first sharing layer changes no bit of the wanted ones", B,
                   OUTRIDER_TESTED_BACKENDS) {
  for (const char* name : float_cases) {
    CAPTURE(name);
    const golden expected(name);
    context_of<B> ctx{one_thread};
    const auto target = gemma4::load_model<B>(expected.directory / "target");
    const std::vector<token_id> tokens = expected.ids("p1.prompt");
    passes<B> all(target, ctx, tokens.size());
    const auto whole = all.forward(tokens, tokens.size(), row_kind::decode);
    for (const std::size_t wanted : {std::size_t{1}, std::size_t{2}, std::size_t{9}, tokens.size() - 1}) {
      CAPTURE(wanted);
      passes<B> some(target, ctx, tokens.size());
      const auto part = some.forward(tokens, wanted, row_kind::decode);
      CHECK(same_bits(copy_of(part.logits), copy_of(whole.logits.last_rows(wanted))));
      CHECK(same_bits(copy_of(part.hidden), copy_of(whole.hidden.last_rows(wanted))));
    }
  }
}

TEST_CASE_TEMPLATE("pitfall 126: a row verified among others has the bits of the row decoded alone", B, OUTRIDER_TESTED_BACKENDS) {
  for (const char* name : {"e2b", "e4b", "dense31b", "moe26b", "unified12b", "e2b_bf16"}) {
    CAPTURE(name);
    const golden expected(name);
    context_of<B> one{one_thread};
    const auto target = gemma4::load_model<B>(expected.directory / "target");
    const std::vector<token_id> text = expected.text("p1");
    const std::size_t window = target.config().window;
    for (const std::size_t position : {std::size_t{0}, std::size_t{3}, window - 1, window, 3 * window + 2}) {
      CAPTURE(position);
      const std::span<const token_id> before = std::span(text).first(position);
      const auto alone = rows_behind(target, one, before, std::span(text).subspan(position, 9), false);
      for (const unsigned threads : {1u, 2u, 3u}) {
        CAPTURE(threads);
        context_of<B> ctx{execution{threads}};
        for (std::size_t m = 1; m <= 9; m += threads == 1 ? 1 : 4) {
          CAPTURE(m);
          const auto rows = rows_behind(target, ctx, before, std::span(text).subspan(position, m), true);
          CHECK(std::equal(rows.begin(), rows.end(), alone.begin(), same_bits));
        }
      }
    }
  }
}

TEST_CASE_TEMPLATE("both layouts of the multimodal names give exactly the logits of the text model", B, OUTRIDER_TESTED_BACKENDS) {
  const golden expected("multimodal_names");
  context_of<B> ctx{one_thread};
  const auto e2b = gemma4::load_model<B>(golden_directory / "e2b/target");
  for (const char* layout : {"target", "target_flat"}) {
    CAPTURE(layout);
    const auto target = gemma4::load_model<B>(expected.directory / layout);
    for (const std::string prompt : {"p0", "p1"}) {
      const std::vector<token_id> tokens = expected.ids(prompt + ".prompt");
      passes<B> run(target, ctx, tokens.size()), text_only(e2b, ctx, tokens.size());
      const std::vector<float> logits = copy_of(run.forward(tokens, tokens.size(), row_kind::prompt).logits);
      CHECK(same_bits(logits, copy_of(text_only.forward(tokens, tokens.size(), row_kind::prompt).logits)));
      check_close("logits", logits, expected.floats(prompt + ".logits"), target.config().vocab_size, expected.tolerance("logits"),
                  roundings_per_layer * static_cast<double>(target.config().layer_count() + 2));
    }
  }
}

}  // namespace models
