// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The tiny pair with keys and values stored in fewer bits: how far its logits move, and what it writes.
#pragma once
#include <cmath>
#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "golden_data.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/dequantize.hpp"
#include "writing.hpp"

#if !defined(OUTRIDER_TESTED_BACKENDS)
#error "Define OUTRIDER_TESTED_BACKENDS as the backend tags to test before including kv_types_golden.hpp."
#endif

namespace models {

inline const std::filesystem::path kv_pair_directory = source_directory / "examples/data/tiny-kjv";

/// What a session makes of a text: the logits of every position, and the keys and values of the first layer that are still held.
struct text_read {
  std::vector<float> logits, stored;
  std::size_t bytes = 0;  // of the cache
};

template <class Kv, class B>
text_read read_text(const model_pair<B>& pair, context_of<B>& ctx, std::span<const token_id> text) {
  gemma4::session<B, Kv> session(pair.target, ctx, {.max_positions = text.size()});
  text_read read;
  while (session.committed() < text.size()) {
    const auto rows = text.subspan(session.committed()).first((std::min)(session.max_draft() + 1, text.size() - session.committed()));
    session.verify(rows);
    session.commit(rows.size());
    const std::vector<float> logits = copy_of(session.logits());
    read.logits.insert(read.logits.end(), logits.begin(), logits.end());
  }
  const kv_view<const Kv, host_space> layer = session.cache().layer(0);
  const key_window seen{text.size(), pair.target.config().window};
  const auto keep = [&](std::size_t, float number) { read.stored.push_back(number); };
  for (std::size_t p = seen.begin(0); p < seen.end(0); ++p)
    for (std::size_t h = 0; h < layer.heads; ++h) {
      for_each_weight(layer.key(p, h), layer.head_dim, keep);
      for_each_weight(layer.value(p, h), layer.head_dim, keep);
    }
  read.bytes = session.cache().bytes();
  return read;
}

/// Root mean square of got − want, as a part of that of want.
inline double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  REQUIRE(got.size() == want.size());
  double error = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    error += std::pow(double{got[i]} - double{want[i]}, 2);
    size += std::pow(double{want[i]}, 2);
  }
  return std::sqrt(error / size);
}

/// All recorded texts of the tiny pair in one.
inline std::vector<token_id> recorded_texts() {
  std::vector<token_id> all;
  const nlohmann::json expected = read_json(kv_pair_directory / "expected.json");
  for (const nlohmann::json& recorded : expected.at("cases"))
    for (const char* part : {"prompt_ids", "tokens"})
      for (const token_id token : recorded.at(part).get<std::vector<token_id>>()) all.push_back(token);
  return all;
}

/// What is stored is off by at most `storage` in the root mean square, relatively. Each layer passes such an error on and adds its own; all of
/// one sign, the logits would be off by the number of layers times that.
template <class Kv, class B>
void check_logits(const model_pair<B>& pair, context_of<B>& ctx, std::span<const token_id> text, const text_read& exact, double storage,
                  double bytes) {
  const text_read rounded = read_text<Kv>(pair, ctx, text);
  const double stored = relative_error(rounded.stored, exact.stored), moved = relative_error(rounded.logits, exact.logits);
  CAPTURE(stored);
  CAPTURE(moved);
  CHECK(stored > 0);
  CHECK(stored <= storage);
  CHECK(moved > 0);
  CHECK(moved <= stored * static_cast<double>(pair.target.config().layer_count()));
  CHECK(static_cast<double>(rounded.bytes) == bytes * static_cast<double>(exact.bytes));
}

TEST_CASE_TEMPLATE("keys and values in fewer bits move the logits as far as their rounding explains", B, OUTRIDER_TESTED_BACKENDS) {
  const model_pair<B> pair(kv_pair_directory);
  context_of<B> ctx{one_thread};
  const std::vector<token_id> text = recorded_texts();
  const text_read exact = read_text<float>(pair, ctx, text);
  check_logits<bf16>(pair, ctx, text, exact, 0x1p-8, 0.5);
  check_logits<f16>(pair, ctx, text, exact, 0x1p-11, 0.5);
  // Half a step of peak / 127 and the rounding of the step; the peak of a block is at most √32 times the root of its mean square.
  check_logits<q8_0>(pair, ctx, text, exact, std::sqrt(32.0) * (0.5 / 127 + 0x1p-11), 34.0 / 128);
}

/// A text parts from the recorded one only where its next two tokens are so close that the rounding of keys and values explains it: two
/// logits of a row that are off by e each change places within 2·e.
template <class Kv, class B>
void check_texts(const model_pair<B>& pair, context_of<B>& ctx) {
  const nlohmann::json expected = read_json(kv_pair_directory / "expected.json");
  const std::size_t vocab = pair.target.config().vocab_size;
  std::size_t whole = 0;
  for (const nlohmann::json& recorded : expected.at("cases")) {
    const std::vector<token_id> ids = recorded.at("prompt_ids"), want = recorded.at("tokens");
    std::vector<token_id> text = ids;
    text.insert(text.end(), want.begin(), want.end() - 1);
    const text_read exact = read_text<float>(pair, ctx, text), rounded = read_text<Kv>(pair, ctx, text);
    gemma4::session<B, Kv> session(pair.target, ctx);
    const std::vector<token_id> got = write_plain(session, ids, {want.size(), 0, {}, {}}).tokens;
    REQUIRE(got.size() == want.size());
    const auto at = static_cast<std::size_t>(std::mismatch(got.begin(), got.end(), want.begin()).first - got.begin());
    if (at == want.size()) {
      ++whole;
      continue;
    }
    CAPTURE(at);
    const float *a = exact.logits.data() + (ids.size() - 1 + at) * vocab, *b = rounded.logits.data() + (ids.size() - 1 + at) * vocab;
    float off = 0;
    for (std::size_t i = 0; i < vocab; ++i) off = (std::max)(off, std::abs(b[i] - a[i]));
    CHECK(a[want[at]] - a[got[at]] <= 2 * off);
  }
  CHECK(whole > 0);
}

TEST_CASE_TEMPLATE("with keys and values in fewer bits the tiny pair writes its recorded texts, near-ties aside", B,
                   OUTRIDER_TESTED_BACKENDS) {
  const model_pair<B> pair(kv_pair_directory);
  context_of<B> ctx{one_thread};
  check_texts<bf16>(pair, ctx);
  check_texts<f16>(pair, ctx);
  check_texts<q8_0>(pair, ctx);
}

TEST_CASE_TEMPLATE("a model whose heads have no whole blocks is refused keys and values in blocks", B, OUTRIDER_TESTED_BACKENDS) {
  const auto target = gemma4::load_model<B>(golden_directory / "e2b/target");
  context_of<B> ctx{one_thread};
  try {
    const gemma4::session<B, q8_0> session(target, ctx);
    FAIL("heads of size 8 were stored in blocks of 32");
  } catch (const error& e) {
    CHECK(e.code() == error_code::argument_invalid);
    CHECK(std::string_view(e.what()).find("heads of size 8, keys and values stored in blocks need a multiple of 32") !=
          std::string_view::npos);
  }
}

}  // namespace models
