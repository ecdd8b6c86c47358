// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend with whole models: recorded stages and drafts, and texts against those of the reference.
#include "emulated_device.hpp"
#if defined(OUTRIDER_EMULATED_DEVICE)
#include "cuda_emulation/emulation.hpp"
#endif
#include <random>

#include "outrider/backend/cuda.hpp"
#define OUTRIDER_TESTED_BACKENDS outrider::cuda
#include "models/recorded_drafts_golden.hpp"
#include "models/stages_golden.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/decode/mirrored_drafter.hpp"
#include "outrider/decode/speculative_decoder.hpp"

namespace models {

constexpr std::size_t new_tokens = OUTRIDER_DEVICE_SLOWNESS == 1 ? 64 : OUTRIDER_DEVICE_SLOWNESS < 10 ? 20 : 6;

/// A text, and how many drafts each of its rounds kept.
struct device_text {
  std::vector<token_id> tokens;
  std::vector<std::size_t> accepted;
};

template <class B, class Kv = float, class Sampler = greedy>
device_text write_text(const model_pair<B>& pair, context_of<B>& ctx, std::span<const token_id> prompt, std::size_t drafts,
                       Sampler sampler = {}) {
  gemma4::session<B, Kv> session(pair.target, ctx, {.max_draft = 4, .prompt_chunk = 32, .max_positions = 256});
  assistant_drafter<B> drafter(pair.assistant, ctx);
  speculative_decoder decoder(session, drafter, sampler, fixed<max_draft_length>{});
  device_text text;
  generate_options options{.max_new_tokens = new_tokens, .draft = drafts};
  options.on_pass = [&](const round_record& round) { text.accepted.push_back(round.accepted); };
  decoder.generate(prompt, options, [&](token_id token) { text.tokens.push_back(token); });
  return text;
}

TEST_CASE("texts are the recorded ones, with and without drafts") {
  for (const char* name : float_cases) {
    CAPTURE(name);
    const golden expected(name);
    model_pair<cuda> pair(expected.directory);
    const std::vector<token_id> prompt = expected.ids("p0.prompt");
    std::vector<token_id> want = expected.ids("p0.greedy");
    want.resize((std::min)(want.size(), new_tokens));
    REQUIRE(!want.empty());
    for (const std::size_t drafts : std::initializer_list<std::size_t>{0, 3}) {
      CAPTURE(drafts);
      std::vector<token_id> got = write_text(pair, pair.ctx, prompt, drafts).tokens;
      got.resize((std::min)(got.size(), want.size()));
      CHECK(got == want);
    }
  }
}

std::vector<token_id> first_prompt() {
  return read_json(source_directory / "examples/data/tiny-kjv/expected.json").at("cases").at(0).at("prompt_ids");
}

/// The tiny pair in a format, quantised matrices in groups.
template <class B>
model_pair<B> tiny_pair(const std::string& format) {
  const auto directory = source_directory / "examples/data/tiny-kjv";
  const gemma4::load_options grouped{.form = gemma4::weight_form::grouped};
  if (format == "bf16") return {gemma4::load_model<B>(directory / "target"), gemma4::load_assistant<B>(directory / "assistant")};
  return {gemma4::load_model<B>(directory / ("gguf/target-" + format + ".gguf"), grouped),
          gemma4::load_assistant<B>(directory / "gguf/assistant-q8_0.gguf", grouped)};
}

TEST_CASE("the tiny pair writes what it writes on the reference backend, and drafts as well") {
  const std::vector<token_id> prompt = first_prompt();
  for (const char* format : {"bf16", "q4_0", "q8_0", "q4_k_m"}) {
    CAPTURE(format);
    auto here = tiny_pair<reference>(format);
    auto there = tiny_pair<cuda>(format);
    const device_text want = write_text(here, here.ctx, prompt, 3), plain = write_text(there, there.ctx, prompt, 0),
                      got = write_text(there, there.ctx, prompt, 3);
    CHECK(plain.tokens == want.tokens);
    CHECK(got.tokens == want.tokens);
    CHECK(got.accepted == want.accepted);
  }
}

TEST_CASE("keys and values in 16 and 8 bits, and drawn tokens, leave speculation exact") {
  const std::vector<token_id> prompt =
      read_json(source_directory / "examples/data/tiny-kjv/expected.json").at("cases").at(1).at("prompt_ids");
  auto pair = tiny_pair<cuda>("q8_0");
  const auto same = [&]<class Kv, class Sampler>(Sampler sampler) {
    CHECK(write_text<cuda, Kv>(pair, pair.ctx, prompt, 3, sampler).tokens ==
          write_text<cuda, Kv>(pair, pair.ctx, prompt, 0, sampler).tokens);
  };
  same.operator()<bf16>(greedy{});
  same.operator()<f16>(greedy{});
  same.operator()<q8_0>(greedy{});
  same.operator()<float>(sampling(sampling_options{.temperature = 1, .seed = 3}));
}

/// The text of a target on one backend with an assistant on another, in another memory.
template <class Near, class Far>
device_text write_mirrored(const gemma4::model<Near>& target, const gemma4::assistant<Far>& assistant, std::span<const token_id> prompt) {
  context_of<Near> near(one_thread);
  context_of<Far> far(one_thread);
  gemma4::session<Near> session(target, near, {.max_draft = 4, .prompt_chunk = 32, .max_positions = 256});
  assistant_drafter<Far> inner(assistant, far);
  mirrored_drafter<Far, assistant_drafter<Far>, gemma4::session<Near>> drafter(inner, session);
  speculative_decoder decoder(session, drafter, greedy{}, fixed<max_draft_length>{});
  device_text text;
  generate_options options{.max_new_tokens = new_tokens, .draft = 3};
  options.on_pass = [&](const round_record& round) { text.accepted.push_back(round.accepted); };
  decoder.generate(prompt, options, [&](token_id token) { text.tokens.push_back(token); });
  return text;
}

TEST_CASE("a target on the device with its drafter on the CPU, and the reverse") {
  const std::vector<token_id> prompt = first_prompt();
  auto here = tiny_pair<reference>("q8_0");
  auto there = tiny_pair<cuda>("q8_0");
  const device_text want = write_text(here, here.ctx, prompt, 3);
  for (const device_text& got :
       {write_mirrored(there.target, here.assistant, prompt), write_mirrored(here.target, there.assistant, prompt)}) {
    CHECK(got.tokens == want.tokens);
    CHECK(got.accepted == want.accepted);
  }
}

#if defined(OUTRIDER_EMULATED_DEVICE)
TEST_CASE("a device that does nothing before somebody waits writes the same") {
  const std::vector<token_id> prompt = first_prompt();
  auto pair = tiny_pair<cuda>("q4_0");
  const device_text want = write_text(pair, pair.ctx, prompt, 3);
  cuda_emulation::runtime.settings.late = true;
  for (const std::size_t drafts : std::initializer_list<std::size_t>{0, 3})
    CHECK(write_text(pair, pair.ctx, prompt, drafts).tokens == want.tokens);
  cuda_emulation::runtime.settings.late = false;
}
#endif

TEST_CASE("tokens drawn on the device are those drawn on the host from the same logits") {
  constexpr std::uint64_t seed = 11;
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  constexpr std::size_t rows = 5, vocabulary = 3000;
  matrix<float, host_space> here(rows, vocabulary);
  for (std::size_t i = 0; i < rows * vocabulary; ++i) here.view().data[i] = static_cast<float>(random() >> 40) * 0x1p-21f - 4;
  cuda_context ctx;
  reference_context plain;
  const std::vector<token_id> text(20, 3);
  for (const sampling_options& options :
       {sampling_options{.temperature = 1, .seed = 1}, sampling_options{.temperature = 0.7, .top_k = 40, .seed = 2},
        sampling_options{.temperature = 1.2, .top_k = 64, .top_p = 0.95, .seed = 3},
        sampling_options{.temperature = 1, .top_p = 0.5, .seed = 4}, sampling_options{.temperature = 0.9, .min_p = 0.2, .seed = 5},
        sampling_options{.temperature = 1, .repetition_penalty = 1.5, .seed = 6}}) {
    CAPTURE(options.seed);
    matrix<float, device_space> there(rows, vocabulary);
    matrix<float, host_space> logits(rows, vocabulary);
    copy_across(there.view(), here.view());
    copy_across(logits.view(), here.view());
    std::vector<token_id> got(rows), want(rows);
    sampling(options).pick<cuda>(ctx, there.view(), text, got.data());
    sampling(options).pick<reference>(plain, logits.view(), text, want.data());
    CHECK(got == want);
  }
}

}  // namespace models
