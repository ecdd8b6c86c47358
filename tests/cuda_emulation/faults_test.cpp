// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Calls of CUDA that fail once, somewhere in a text: who is told, and that nobody goes on with what was never computed.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda_emulation/emulation.hpp"
#include "emulated_device.hpp"
#include "outrider/backend/cuda.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/batch_decoder.hpp"
#include "outrider/decode/prefix.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/batch.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"

namespace {

using namespace outrider;
using cuda_emulation::runtime;

const std::vector<const char*> calls =
    OUTRIDER_DEVICE_SLOWNESS > 10
        ? std::vector{"cudaLaunchKernel", "cudaMemcpy"}
        : std::vector{"cudaLaunchKernel", "cudaGraphInstantiate", "cudaGraphLaunch", "cudaMemcpy", "cudaStreamSynchronize"};
const generate_options some_tokens{.max_new_tokens = 3, .draft = 2};

struct pair {
  std::filesystem::path place = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "tests/golden/e2b";
  gemma4::model<cuda> target = gemma4::load_model<cuda>(place / "target");
  gemma4::assistant<cuda> assistant = gemma4::load_assistant<cuda>(place / "assistant");
};

/// Runs `work` as often as it makes the call, at most three times, with the call failing once at another place each time; then checks.
template <class Work, class Check>
void with_faults(const char* call, Work work, Check check) {
  constexpr int never = std::numeric_limits<int>::max();
  runtime.fault = {call, cudaErrorUnknown, never};
  work();
  const int count = never - runtime.fault.after;
  for (int n = 0; n < count; n += count / 3 + 1) {
    CAPTURE(n);
    runtime.fault = {call, cudaErrorUnknown, n};
    work();
    runtime.fault = {};
    check();
  }
}

TEST_CASE("a session that goes on after a failure, with the prefix it has, writes the right text") {
  const pair models;
  const std::vector<token_id> prompt{2, 17, 90, 3, 44, 101, 7, 9};
  for (const char* call : calls) {
    INFO("call ", std::string(call));
    cuda_context ctx;
    gemma4::session<cuda> session(models.target, ctx, {.max_draft = 2, .prompt_chunk = 3, .max_positions = 60});
    assistant_drafter<cuda> drafter(models.assistant, ctx);
    speculative_decoder decoder(session, drafter, greedy{}, fixed<2>{});
    std::vector<token_id> text;
    const auto write = [&] {
      text.clear();
      const std::size_t known = reuse_prefix(session, session.tokens(), prompt);
      decoder.generate(std::span(prompt).subspan(known), some_tokens, [&](token_id token) { text.push_back(token); });
    };
    write();
    const std::vector<token_id> want = text;
    with_faults(
        call,
        [&] {
          session.clear();
          try {
            write();
          } catch (const error& e) {
            CHECK(e.code() == error_code::device_failed);
            CHECK(std::string(e.what()).find(call) != std::string::npos);
          }
        },
        [&] {
          write();
          CHECK(text == want);
        });
  }
}

TEST_CASE("in a batch every text of a pass that failed ends with it, and no other text is wrong") {
  const pair models;
  const std::vector<std::vector<token_id>> prompts{{2, 17, 90, 3, 44}, {2, 5}, {9, 8}};
  struct text {
    std::vector<token_id> tokens;
    finish_reason finish{};
  };
  for (const char* call : calls) {
    INFO("call ", std::string(call));
    cuda_context ctx;
    gemma4::batch<cuda> batch(models.target, ctx, {.max_sequences = 2, .max_draft = 2, .prompt_chunk = 3, .max_positions = 60});
    std::vector<text> texts;
    const auto write = [&] {
      assistant_drafter<cuda> drafter(models.assistant, ctx);
      batch_decoder decoder(batch, drafter, fixed<2>{});
      texts.assign(prompts.size(), {});
      for (std::size_t i = 0; i < prompts.size(); ++i)
        decoder.submit({.prompt = prompts[i],
                        .options = some_tokens,
                        .on_token =
                            [&, i](token_id token) {
                              texts[i].tokens.push_back(token);
                              return std::optional<finish_reason>{};
                            },
                        .on_finish = [&, i](const generation& g) { texts[i].finish = g.finish; }});
      for (bool more = true; more;) try {
          more = decoder.step();
        } catch (const error& e) {
          CHECK(e.code() == error_code::device_failed);
        }
    };
    write();
    const std::vector<text> want = texts;
    with_faults(call, write, [&] {
      for (std::size_t i = 0; i < texts.size(); ++i) {
        CAPTURE(i);
        std::vector<token_id> expected = want[i].tokens;
        if (texts[i].finish != finish_reason::max_new_tokens) expected.resize((std::min)(expected.size(), texts[i].tokens.size()));
        CHECK(texts[i].tokens == expected);
      }
      write();
      for (std::size_t i = 0; i < texts.size(); ++i) CHECK(texts[i].tokens == want[i].tokens);
    });
  }
}

}  // namespace
