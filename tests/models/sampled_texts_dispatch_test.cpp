// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Drawn texts: for every setting the speculative text is the plain text with the same seed.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "outrider/backend/highway_dispatch.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/cascade_drafter.hpp"
#include "outrider/decode/ngram_drafter.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "outrider/text/tokenizer.hpp"
#include "support/instrumented.hpp"

namespace {

using namespace outrider;
using B = highway_dispatch;
using ids = std::vector<token_id>;

const std::filesystem::path pair = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "examples/data/tiny-kjv";

constexpr std::size_t length = testing::is_instrumented ? 40 : 420;

struct tiny_pair {
  context_of<B> ctx{execution{2}};
  gemma4::model<B> model = gemma4::load_model<B>(pair / "target");
  gemma4::assistant<B> assistant = gemma4::load_assistant<B>(pair / "assistant");
  tokenizer text = tokenizer::from_file(pair / "target");
  gemma4::session<B> session{model, ctx};
  assistant_drafter<B> drafter{assistant, ctx};
  ngram_drafter lookup;

  template <class Drafter, class Length>
  ids write(const ids& prompt, const sampling_options& draws, Drafter& with, Length policy, statistics& sum) {
    session.clear();
    ids out;
    out.reserve(length);
    speculative_decoder decoder(session, with, sampling(draws), policy);
    const generate_options options{.max_new_tokens = length, .suppress = {7, 11}};
    sum += decoder.generate(prompt, options, [&](token_id token) { out.push_back(token); }).stats;
    return out;
  }
};

constexpr std::array prompts{"In the beginning God created", "And the LORD said unto Moses,", "The LORD is my shepherd;"};
constexpr std::array temperatures{0.7, 1.0, 1.6};

/// What may be switched on besides the temperature.
std::vector<sampling_options> settings(double temperature) {
  const auto with = [&](auto&& change) {
    sampling_options options;
    options.temperature = temperature;
    options.seed = 17;
    change(options);
    return options;
  };
  return {with([](sampling_options&) {}), with([](sampling_options& o) { o.top_k = 40, o.top_p = 0.95, o.seed = 18; }),
          with([](sampling_options& o) { o.min_p = 0.02, o.repetition_penalty = 1.15, o.sequence = 5; }),
          with([](sampling_options& o) { o.top_p = 0.9, o.presence_penalty = 0.4, o.frequency_penalty = 0.1; }),
          with([](sampling_options& o) { o.top_k = 12, o.min_p = 0.05, o.repetition_penalty = 0.95, o.seed = ~std::uint64_t{0}; })};
}

TEST_CASE("drawn texts are the same for every number of drafts, at every temperature, with every processor") {
  tiny_pair tiny;
  std::size_t drawn = 0;
  for (const double temperature : temperatures) {
    statistics sum;
    for (const char* words : prompts) {
      const ids prompt = tiny.text.encode(words);
      for (const sampling_options& draws : settings(temperature)) {
        tiny.session.clear();
        ids plain;
        const generate_options options{.max_new_tokens = length, .suppress = {7, 11}};
        generate(
            tiny.session, prompt, options, [&](token_id token) { plain.push_back(token); }, sampling(draws));
        for (std::size_t k = 0; k <= 8; ++k) {
          CAPTURE(temperature);
          CAPTURE(words);
          CAPTURE(k);
          REQUIRE(tiny.write(prompt, draws, tiny.drafter, fixed(k), sum) == plain);
          drawn += plain.size();
        }
        cascade_drafter both(tiny.lookup, tiny.drafter);
        REQUIRE(tiny.write(prompt, draws, tiny.lookup, fixed(5), sum) == plain);
        REQUIRE(tiny.write(prompt, draws, both, adaptive(), sum) == plain);
        drawn += 2 * plain.size();
      }
    }
    MESSAGE("temperature ", temperature, ": ", 100 * sum.acceptance_rate(), " % of ", sum.drafted(), " drafts accepted");
    CHECK(sum.accepted() > 0);
    CHECK(sum.accepted() < sum.drafted());
  }
  MESSAGE(drawn, " tokens compared");
  CHECK((testing::is_instrumented || drawn >= 200'000));
}

TEST_CASE("another seed or another sequence gives another text, the same ones the same") {
  tiny_pair tiny;
  const ids prompt = tiny.text.encode(prompts[0]);
  statistics sum;
  const auto write = [&](std::uint64_t seed, std::uint64_t sequence) {
    sampling_options draws;
    draws.temperature = 1, draws.seed = seed, draws.sequence = sequence;
    return tiny.write(prompt, draws, tiny.drafter, fixed(4), sum);
  };
  const ids first = write(1, 0);
  CHECK(write(1, 0) == first);
  CHECK(write(2, 0) != first);
  CHECK(write(1, 1) != first);
}

/// Draws as `sampling`, but the decoder does not know it, so that the assistant drafts its most likely tokens.
struct uncoupled {
  sampling draws;
  template <backend_tag Backend>
  void pick(context_of<Backend>& ctx, matrix_for<float, Backend> logits, std::span<const token_id> text, token_id* out) {
    draws.pick<Backend>(ctx, logits, text, out);
  }
};

TEST_CASE("drafts drawn with the target's noise change the number of accepted drafts, never the text") {
  tiny_pair tiny;
  for (const double temperature : {0.7, 1.0}) {
    statistics coupled, likeliest;
    for (std::uint64_t seed = 0; seed < 4; ++seed)
      for (const char* words : prompts) {
        const ids prompt = tiny.text.encode(words);
        sampling_options draws;
        draws.temperature = temperature, draws.seed = seed;
        ids a, b;
        const generate_options options{.max_new_tokens = length};
        tiny.session.clear();
        coupled += speculative_decoder(tiny.session, tiny.drafter, sampling(draws), fixed<4>{})
                       .generate(prompt, options, [&](token_id token) { a.push_back(token); })
                       .stats;
        tiny.session.clear();
        likeliest += speculative_decoder(tiny.session, tiny.drafter, uncoupled{sampling(draws)}, fixed<4>{})
                         .generate(prompt, options, [&](token_id token) { b.push_back(token); })
                         .stats;
        CHECK(a == b);
      }
    MESSAGE("temperature ", temperature, ", 4 drafts: ", 100 * coupled.acceptance_rate(), " % accepted with the target's noise, ",
            100 * likeliest.acceptance_rate(), " % of the likeliest tokens");
    CHECK((testing::is_instrumented || coupled.accepted() > likeliest.accepted()));
  }
}

}  // namespace
