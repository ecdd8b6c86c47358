// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Forty thousand tokens, some hundred windows of the sliding layers.
#include <doctest/doctest.h>

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "outrider/backend/highway_dispatch.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "outrider/text/tokenizer.hpp"
#include "support/instrumented.hpp"

namespace {

using namespace outrider;
using B = highway_dispatch;
using ids = std::vector<token_id>;

constexpr std::size_t length = testing::is_instrumented ? 4'000 : 40'000;

struct fixture {
  std::filesystem::path pair = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "examples/data/tiny-kjv";
  context_of<B> ctx{execution{2}};
  gemma4::model<B> model = gemma4::load_model<B>(pair / "target");
  gemma4::assistant<B> assistant = gemma4::load_assistant<B>(pair / "assistant");
  tokenizer text = tokenizer::from_file(pair / "target");
  assistant_drafter<B> drafter{assistant, ctx};

  ids long_prompt(std::size_t count) const {
    const ids verses = text.encode(
        "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was upon the face "
        "of the deep. And the Spirit of God moved upon the face of the waters. And God said, Let there be light: and there was light. ");
    ids out;
    while (out.size() < count) out.insert(out.end(), verses.begin() + (out.empty() ? 0 : 1), verses.end());
    out.resize(count);
    return out;
  }
};

TEST_CASE("behind forty thousand tokens drafts are still accepted and the text is that of plain decoding") {
  fixture f;
  const ids prompt = f.long_prompt(length);
  gemma4::session<B, bf16> session(f.model, f.ctx, {.max_positions = length + 200, .max_rewind = 200});
  ids plain, drafted;
  generate(session, prompt, {.max_new_tokens = 150}, [&](token_id token) { plain.push_back(token); });

  // The same again behind the same keys.
  REQUIRE(session.truncate(prompt.size() - 1));
  const ids last{prompt.back()};
  speculative_decoder decoder(session, f.drafter, greedy{}, fixed<4>{});
  const generation result = decoder.generate(last, {.max_new_tokens = 150}, [&](token_id token) { drafted.push_back(token); });
  CHECK(drafted == plain);
  MESSAGE("accepted: ", 100 * result.stats.acceptance_rate(), " % of drafts accepted behind ", prompt.size(), " tokens");
  CHECK(result.stats.acceptance_rate() > 0.25);  // far above what a wrong position or stale keys leave
}

TEST_CASE("memory of the sliding layers is constant, that of the full ones grows with the text") {
  fixture f;
  gemma4::session<B> session(f.model, f.ctx, {.max_positions = std::size_t{1} << 20});
  const std::size_t empty = session.cache().bytes();
  session.reserve(10'240);
  const std::size_t some = session.cache().bytes();
  session.reserve(40'960);
  const std::size_t more = session.cache().bytes();
  CHECK(more - empty == 4 * (some - empty));

  std::size_t row = 0;  // bytes of a position in the full layers
  for (const kv_layer_shape& layer : f.model.kv_layers())
    if (layer.window == 0) row += 2 * layer.heads * layer.head_dim * sizeof(float);
  CHECK(some - empty == 10'240 * row);
}

TEST_CASE("a full context ends the text with its reason, and is never wrapped around") {
  fixture f;
  gemma4::session<B> session(f.model, f.ctx, {.max_positions = 700});
  const ids prompt = f.long_prompt(600);
  ids plain, drafted;
  CHECK(generate(session, prompt, {.max_new_tokens = 500}, [&](token_id token) { plain.push_back(token); }).finish ==
        finish_reason::context_full);
  CHECK(session.committed() == 700);
  session.clear();
  speculative_decoder decoder(session, f.drafter, greedy{}, fixed<8>{});
  CHECK(decoder.generate(prompt, {.max_new_tokens = 500}, [&](token_id token) { drafted.push_back(token); }).finish ==
        finish_reason::context_full);
  CHECK(drafted == plain);
  CHECK(plain.size() == 101);  // the last one is chosen, and has no room to be processed
}

}  // namespace
