// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Quantised models with int8 activations: exact between rows, chunks and threads, and the reference's texts on any backend.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "golden_data.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/core/quantize.hpp"
#include "support/model_as_gguf.hpp"
#include "support/temporary_directory.hpp"
#include "writing.hpp"

namespace models {

/// The reference, but for products of grouped weights, which are B's.
template <class B>
struct reference_around {};

template <class B>
struct both_contexts : context_of<reference>, context_of<B> {
  explicit both_contexts(execution how) : context_of<reference>(how), context_of<B>(how) {}
  [[nodiscard]] unsigned threads() const noexcept { return context_of<B>::threads(); }
};

}  // namespace models

namespace outrider {

template <class B>
struct backend_traits<models::reference_around<B>> : backend_traits<reference> {
  using context = models::both_contexts<B>;
};
template <class B, class W>
struct linear_ops<models::reference_around<B>, W> : linear_ops<reference, W> {};
template <class B, class W>
  requires listed_group<W>
struct linear_ops<models::reference_around<B>, W> : linear_ops<B, W> {
};
template <class B>
struct pointwise_ops<models::reference_around<B>> : pointwise_ops<reference> {
  static void quantize(context_of<B>& ctx, matrix_view<int8_block> out, matrix_view<const float> x) noexcept {
    pointwise_ops<B>::quantize(ctx, out, x);
  }
};
template <class B, class Kv>
struct attention_ops<models::reference_around<B>, Kv> : attention_ops<reference, Kv> {};

}  // namespace outrider

namespace models {

inline const gemma4::load_options in_groups{gemma4::weight_form::grouped, {}}, as_stored{gemma4::weight_form::stored, {}};
inline const std::filesystem::path tiny_files_directory = source_directory / "examples/data/tiny-kjv";

/// A type of the tiny pair's target file. Most of the q4_k_m file is Q5_0, which has no form in groups, so it mixes both kinds of products.
inline constexpr const char* tiny_types[] = {"q8_0", "q4_0", "q4_k_m"};

template <class B>
gemma4::model<B> load_tiny(const std::string& type, const gemma4::load_options& options = in_groups) {
  return gemma4::load_model<B>(tiny_files_directory / "gguf" / ("target-" + type + ".gguf"), options);
}
inline nlohmann::json tiny_texts() { return read_json(tiny_files_directory / "expected.json").at("cases"); }

/// The recorded mixture of experts with all matrices as Q8_0 whose rows are whole blocks: those of the experts' gate and up are, those of
/// down are not.
template <class B>
gemma4::model<B> load_quantised_experts() {
  testing::gguf_model m = testing::target_as_gguf(golden_directory / "moe26b/target");
  for (testing::gguf_tensor& t : m.tensors) {
    if (t.shape.size() < 2 || t.shape.back() % 32 != 0 || t.type != io::dtype::f32) continue;
    std::vector<float> values(t.bytes.size() / sizeof(float));
    std::memcpy(values.data(), t.bytes.data(), t.bytes.size());
    std::vector<q8_0> blocks(values.size() / 32);
    for (std::size_t i = 0; i < blocks.size(); ++i) REQUIRE(quantize(values.data() + 32 * i, blocks[i]));
    t.type = io::dtype::q8_0;
    t.bytes.resize(blocks.size() * sizeof(q8_0));
    std::memcpy(t.bytes.data(), blocks.data(), t.bytes.size());
  }
  const testing::temporary_directory directory;
  m.write(directory.path() / "target.gguf");
  return gemma4::load_model<B>(directory.path() / "target.gguf", in_groups);
}

/// Calls body(target, tokens) for the tiny pair's files and the experts.
template <class B, class Body>
void for_each_quantised_target(Body&& body) {
  const nlohmann::json first = tiny_texts().at(0);
  std::vector<token_id> text = first.at("prompt_ids");
  const std::vector<token_id> more = first.at("tokens");
  text.insert(text.end(), more.begin(), more.end());
  for (const char* type : tiny_types) {
    CAPTURE(type);
    body(load_tiny<B>(type), text);
  }
  INFO("experts");
  body(load_quantised_experts<B>(), golden("moe26b").text("p1"));
}

TEST_CASE_TEMPLATE("pitfall 126: with int8 activations a row verified among others has the bits of the row decoded alone", B,
                   OUTRIDER_TESTED_BACKENDS) {
  for_each_quantised_target<B>([](const gemma4::model<B>& target, std::span<const token_id> text) {
    context_of<B> one{one_thread};
    for (const std::size_t position : {std::size_t{0}, std::size_t{3}, std::size_t{20}}) {
      CAPTURE(position);
      const std::span<const token_id> before = text.first(position);
      const auto alone = rows_behind(target, one, before, text.subspan(position, 9), false);
      for (const unsigned threads : {1u, 2u, 3u}) {
        CAPTURE(threads);
        context_of<B> ctx{execution{threads}};
        for (std::size_t m = 1; m <= 9; m += threads == 1 ? 1 : 4) {
          CAPTURE(m);
          const auto rows = rows_behind(target, ctx, before, text.subspan(position, m), true);
          CHECK(std::equal(rows.begin(), rows.end(), alone.begin(), same_bits));
        }
      }
    }
  });
}

TEST_CASE_TEMPLATE("with int8 activations a prompt in one chunk, in uneven chunks and token by token gives one result", B,
                   OUTRIDER_TESTED_BACKENDS) {
  for_each_quantised_target<B>([](const gemma4::model<B>& target, std::span<const token_id> text) {
    context_of<B> ctx{one_thread};
    const std::size_t n = (std::min)(std::size_t{40}, text.size());
    const prompt_outcome whole = process_in_chunks(target, ctx, text.first(n), {n}, row_kind::prompt);
    for (const auto& chunks : {std::vector<std::size_t>(n, 1), {1, 2, 7, n - 10}, {n - 1, 1}, {8, 8, n - 16}, {1, n - 1}}) {
      CAPTURE(chunks.size());
      CAPTURE(chunks.front());
      const prompt_outcome parts = process_in_chunks(target, ctx, text.first(n), chunks, row_kind::prompt);
      CHECK(same_bits(parts.logits, whole.logits));
      CHECK(same_bits(parts.hidden, whole.hidden));
      CHECK(same_bits(parts.keys, whole.keys));
    }
  });
}

TEST_CASE_TEMPLATE("quantised files are multiplied by int8 activations unless exact ones are asked for", B, OUTRIDER_TESTED_BACKENDS) {
  const std::vector<token_id> ids = tiny_texts().at(0).at("prompt_ids");
  const std::vector<float> usual = prompt_logits(load_tiny<B>("q4_0", {}), ids);
  CHECK(same_bits(usual, prompt_logits(load_tiny<B>("q4_0", in_groups), ids)) == prefers_int8_products<B>);
  CHECK(same_bits(usual, prompt_logits(load_tiny<B>("q4_0", as_stored), ids)) != prefers_int8_products<B>);
}

TEST_CASE_TEMPLATE("with the products of this backend the reference computes the logits it computes alone, bit for bit", B,
                   OUTRIDER_TESTED_BACKENDS) {
  for (const char* type : tiny_types) {
    CAPTURE(type);
    const auto target = load_tiny<reference_around<B>>(type);
    const auto alone = load_tiny<reference>(type);
    for (const nlohmann::json& recorded : tiny_texts()) {
      const std::vector<token_id> ids = recorded.at("prompt_ids");
      CHECK(same_bits(prompt_logits(target, ids), prompt_logits(alone, ids)));
    }
  }
}

// Products are equal, other ops round differently, and an activation at the border between two integers may get the other one. The rows behind
// it then have blocks of other bits and errors of their own: two backends are as far apart as both are from float activations. A block cut
// into steps of a/127 has the relative error ε = 2.1 / 127 / √12, the logits about 4·ε (gguf_golden.hpp has the reasons for both), the
// difference of two logits on two backends √2·√2 times that.
TEST_CASE_TEMPLATE("with int8 activations a text is the reference's, but for tokens nearly as likely as its own", B,
                   OUTRIDER_TESTED_BACKENDS) {
  const double near_tie = 8 * 2.1 / 127 / std::sqrt(12);
  context_of<B> ctx{one_thread};
  for (const char* type : tiny_types) {
    CAPTURE(type);
    const auto target = load_tiny<B>(type);
    const auto oracle = load_tiny<reference>(type);
    gemma4::session<B> session(target, ctx);
    const nlohmann::json cases = tiny_texts();
    std::size_t different = 0, all = 0;
    for (std::size_t i = 0; i < 3; ++i) {
      std::vector<token_id> ids = cases.at(i).at("prompt_ids");
      const std::size_t prompt = ids.size();
      session.clear();
      const written text = write_plain(session, ids, {32, 0, {}, {}});
      ids.insert(ids.end(), text.tokens.begin(), text.tokens.end());
      const std::vector<float> logits = prompt_logits(oracle, ids);
      const std::size_t vocabulary = oracle.config().vocab_size;
      for (std::size_t r = prompt; r < ids.size(); ++r) {
        CAPTURE(r);
        const std::span<const float> row = std::span(logits).subspan((r - 1) * vocabulary, vocabulary);
        const double size = std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 0.0) / static_cast<double>(vocabulary));
        const float gap = *std::max_element(row.begin(), row.end()) - row[static_cast<std::size_t>(ids[r])];
        CHECK(gap <= near_tie * size);
        different += gap > 0 ? 1 : 0;
        ++all;
      }
    }
    CHECK(10 * different < all);
  }
}

}  // namespace models
