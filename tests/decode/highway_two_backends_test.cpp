// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Target and drafter in one memory space but on different backends, teams of threads and types of weights: no mirror is needed.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/backend/highway.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/mirrored_drafter.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"

namespace {

using namespace outrider;

const std::filesystem::path tiny_directory = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "examples/data/tiny-kjv";

std::vector<token_id> tiny_prompt() {
  std::ifstream file(tiny_directory / "expected.json");
  return nlohmann::json::parse(file).at("cases").at(2).at("prompt_ids").get<std::vector<token_id>>();
}

/// A file of the tiny pair, "target-q4_0" for instance, or a directory of it.
std::filesystem::path model_at(const std::string& name) {
  return name.find('-') == name.npos ? tiny_directory / name : tiny_directory / "gguf" / (name + ".gguf");
}

struct written {
  std::vector<token_id> tokens;
  std::size_t drafted = 0, accepted = 0;
};

template <class Target, class Drafter>
written write(Target& target, Drafter& drafter, std::size_t length, std::size_t k) {
  target.clear();
  written text;
  speculative_decoder decoder(target, drafter, greedy{}, fixed<max_draft_length>{});
  const auto result = decoder.generate(tiny_prompt(), {length, k}, [&](token_id token) { text.tokens.push_back(token); });
  text.drafted = result.stats.drafted();
  text.accepted = result.stats.accepted();
  return text;
}

/// The text of a target with an assistant on another backend is that without; so it is with a mirror between them, which changes no draft.
template <class TargetBackend, class AssistantBackend, class Kv>
void check_apart(const std::string& target_name, const std::string& assistant_name, std::array<unsigned, 2> threads, std::size_t length) {
  CAPTURE(target_name);
  CAPTURE(assistant_name);
  const auto target = gemma4::load_model<TargetBackend>(model_at(target_name));
  const auto assistant = gemma4::load_assistant<AssistantBackend>(model_at(assistant_name));
  context_of<TargetBackend> target_context{execution{threads[0]}};
  context_of<AssistantBackend> assistant_context{execution{threads[1]}};
  using session_type = gemma4::session<TargetBackend, Kv>;
  session_type session(target, target_context, {.max_draft = 5, .max_positions = 200});
  assistant_drafter<AssistantBackend> drafter(assistant, assistant_context);
  mirrored_drafter<AssistantBackend, assistant_drafter<AssistantBackend>, session_type> mirrored(drafter, session);

  no_draft none;
  const written plain = write(session, none, length, 0);
  CHECK(plain.tokens.size() == length);
  for (const std::size_t k : std::initializer_list<std::size_t>{1, 5}) {
    const written text = write(session, drafter, length, k);
    CHECK(text.tokens == plain.tokens);
    CHECK(text.accepted > 0);
    const written again = write(session, mirrored, length, k);
    CHECK(again.tokens == plain.tokens);
    CHECK(again.drafted == text.drafted);
    CHECK(again.accepted == text.accepted);
  }
}

using serial_highway = basic_highway<HWY_STATIC_TARGET, serial>;

TEST_CASE_TEMPLATE("the reference writes with an assistant on highway, on threads of its own, what it writes alone", Kv, float, bf16) {
  check_apart<reference, highway, Kv>("target", "assistant", {1, 2}, 12);
  check_apart<reference, highway, Kv>("target-q4_0", "assistant-bf16", {1, 3}, 8);
}

TEST_CASE_TEMPLATE("highway writes with an assistant on another backend or team of threads, and of other weights, what it writes alone", Kv,
                   float, bf16, q8_0) {
  check_apart<highway, reference, Kv>("target-q4_k_m", "assistant-bf16", {2, 1}, 24);
  check_apart<highway, serial_highway, Kv>("target-bf16", "assistant-q8_0", {3, 1}, 64);
  check_apart<serial_highway, highway, Kv>("target-q8_0", "assistant", {1, 2}, 64);
  check_apart<highway, highway, Kv>("target-q4_0", "assistant-q8_0", {1, 3}, 64);
}

}  // namespace
