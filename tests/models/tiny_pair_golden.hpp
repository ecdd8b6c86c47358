// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The trained tiny pair of examples/data against its recording: texts, rounds and acceptance.
#pragma once
#include "golden_data.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "speculation_golden.hpp"

namespace models {

inline const std::filesystem::path tiny_pair_directory = source_directory / "examples/data/tiny-kjv";
inline const std::vector<token_id> tiny_eos{1};

// The texts must always be equal. So must all counts, except where two candidates of some draft are closer than 1e-3 in the recording
// (`smallest_draft_gap`): such a draft may come out as the other one where sums are rounded differently, and change what is accepted. The
// reference backend sums in double and is held to all of them.
TEST_CASE_TEMPLATE("the tiny pair writes its recorded texts in the recorded rounds", B, OUTRIDER_TESTED_BACKENDS) {
  model_pair<B> pair(tiny_pair_directory);
  gemma4::session<B> session(pair.target, pair.ctx);
  assistant_drafter<B> assistant(pair.assistant, pair.ctx);
  const nlohmann::json expected = read_json(tiny_pair_directory / "expected.json");
  const std::size_t new_tokens = expected.at("new_tokens");
  std::size_t accepted = 0, rejected = 0;
  for (const nlohmann::json& recorded : expected.at("cases")) {
    CAPTURE(recorded.at("prompt").template get<std::string>());
    const std::vector<token_id> ids = recorded.at("prompt_ids"), want = recorded.at("tokens");
    session.clear();
    CHECK(write_plain(session, ids, {new_tokens, 0, tiny_eos, {}}).tokens == want);
    for (const nlohmann::json& run : recorded.at("assisted")) {
      const std::size_t k = run.at("draft");
      CAPTURE(k);
      session.clear();
      recorded_drafter drafter(assistant);
      const written text = write_speculatively(session, drafter, ids, {new_tokens, k, tiny_eos, {}});
      CHECK(text.tokens == want);
      CHECK(text.stats.drafted() > 0);
      accepted += text.stats.accepted();
      rejected += text.stats.drafted() - text.stats.accepted();
      if (!std::is_same_v<B, reference> && run.at("smallest_draft_gap").template get<double>() < 1e-3) continue;
      CHECK(text.stats.rounds() + text.stats.plain_passes() == run.at("rounds").template get<std::size_t>());
      CHECK(text.stats.drafted() == run.at("drafted").template get<std::size_t>());
      CHECK(text.stats.accepted() == run.at("accepted").template get<std::size_t>());
      const std::vector<std::size_t> per_position = run.at("accepted_per_position");
      for (std::size_t i = 0; i < per_position.size(); ++i) CHECK(text.stats.accepted_at(i + 1) == per_position[i]);
      std::vector<std::array<std::size_t, 2>> trace;
      for (const auto& [n, drafts, kept] : rounds_of(drafter.rounds, text, ids.size())) trace.push_back({drafts, kept});
      CHECK(trace == run.at("trace").template get<std::vector<std::array<std::size_t, 2>>>());
    }
  }
  CHECK(accepted > 0);
  CHECK(rejected > 0);
}

TEST_CASE_TEMPLATE("on two and three threads the tiny pair has the rounds it has on one", B, OUTRIDER_TESTED_BACKENDS) {
  const std::vector<token_id> ids = read_json(tiny_pair_directory / "expected.json").at("cases").at(0).at("prompt_ids");
  const auto write_on = [&](unsigned threads) {
    model_pair<B> pair(tiny_pair_directory, execution{threads});
    gemma4::session<B> session(pair.target, pair.ctx);
    assistant_drafter<B> assistant(pair.assistant, pair.ctx);
    return write_speculatively(session, assistant, ids, {64, 4, tiny_eos, {}});
  };
  const written alone = write_on(1);
  CHECK(alone.stats.drafted() > 0);
  for (const unsigned threads : {2u, 3u}) {
    CAPTURE(threads);
    const written shared = write_on(threads);
    CHECK(shared.tokens == alone.tokens);
    CHECK(shared.stats.passes == alone.stats.passes);
  }
}

TEST_CASE_TEMPLATE("two thousand tokens of the tiny pair with a drafter are those without", B, OUTRIDER_TESTED_BACKENDS) {
  if constexpr (!std::is_same_v<B, reference>) {  // which would take half a minute
    model_pair<B> pair(tiny_pair_directory);
    check_long_text(pair, read_json(tiny_pair_directory / "expected.json").at("cases").at(0).at("prompt_ids").get<std::vector<token_id>>());
  }
}

// Over these texts 36 % of the drafts are accepted with the centroid head, 38 % with the dense one: the clusters searched hold nearly every
// winner. A wrong map from candidates to ids would leave none.
TEST_CASE_TEMPLATE("pitfall 65: with a dense head as many drafts are accepted as with the centroid head, give or take five in a hundred", B,
                   OUTRIDER_TESTED_BACKENDS) {
  const model_pair<B> pair(tiny_pair_directory);
  context_of<B> ctx{one_thread};
  gemma4::session<B> session(pair.target, ctx);
  const nlohmann::json expected = read_json(tiny_pair_directory / "expected.json");
  const auto acceptance = [&](bool centroid_head) {
    gemma4::assistant_config config = pair.assistant.config();
    config.centroid_head = centroid_head;
    const gemma4::assistant<B> assistant(config,
                                         std::make_shared<const io::tensor_set>(io::load_safetensors(tiny_pair_directory / "assistant")));
    assistant_drafter<B> drafter(assistant, ctx);
    double drafted = 0, accepted = 0;
    for (const nlohmann::json& recorded : expected.at("cases")) {
      session.clear();
      const statistics stats =
          write_speculatively(session, drafter, recorded.at("prompt_ids").template get<std::vector<token_id>>(), {48, 4, tiny_eos, {}})
              .stats;
      drafted += static_cast<double>(stats.drafted());
      accepted += static_cast<double>(stats.accepted());
    }
    return accepted / drafted;
  };
  CHECK(std::abs(acceptance(false) - acceptance(true)) < 0.05);
}

template <class Kv, class B>
void check_speculation_with(model_pair<B>& pair) {
  gemma4::session<B, Kv> session(pair.target, pair.ctx);
  assistant_drafter<B> assistant(pair.assistant, pair.ctx);
  const nlohmann::json expected = read_json(tiny_pair_directory / "expected.json");
  std::size_t accepted = 0, rejected = 0;
  for (std::size_t i = 0; i < 2; ++i) {
    const std::vector<token_id> ids = expected.at("cases").at(i).at("prompt_ids");
    CAPTURE(i);
    session.clear();
    const written plain = write_plain(session, ids, {64, 0, tiny_eos, {}});
    for (const std::size_t k : lengths{1, 4}) {
      CAPTURE(k);
      session.clear();
      const written text = write_speculatively(session, assistant, ids, {64, k, tiny_eos, {}});
      CHECK(text.tokens == plain.tokens);
      accepted += text.stats.accepted();
      rejected += text.stats.drafted() - text.stats.accepted();
    }
  }
  CHECK(accepted > 0);
  CHECK(rejected > 0);
}

TEST_CASE_TEMPLATE("with keys and values in fewer bits the tiny pair speculates the text it decodes", B, OUTRIDER_TESTED_BACKENDS) {
  model_pair<B> pair(tiny_pair_directory);
  check_speculation_with<bf16>(pair);
  check_speculation_with<q8_0>(pair);
}

}  // namespace models
