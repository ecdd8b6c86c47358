// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Many texts at once: each must be the text it is alone.
#include "outrider/decode/batch_decoder.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "outrider/backend/highway_dispatch.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/calibrate.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "outrider/text/tokenizer.hpp"
#include "support/refusal.hpp"

namespace {

using namespace outrider;
using B = highway_dispatch;
using ids = std::vector<token_id>;
using testing::mentions;
using testing::refusal;

const std::filesystem::path pair = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "examples/data/tiny-kjv";

struct fixture {
  context_of<B> ctx{execution{2}};
  gemma4::model<B> model = gemma4::load_model<B>(pair / "target");
  gemma4::assistant<B> assistant = gemma4::load_assistant<B>(pair / "assistant");
  tokenizer text = tokenizer::from_file(pair / "target");
  assistant_drafter<B> drafter{assistant, ctx};

  ids prompt(std::size_t i) const {
    const char* words[] = {"In the beginning God created", "And", "The LORD is my shepherd; I shall not want. He maketh me to lie down",
                           "And it came to pass, when", "A wise son maketh a glad father:"};
    ids out = text.encode(words[i % 5]);
    while (i % 3 == 2 && out.size() < 150) out.insert(out.end(), out.begin() + 1, out.end());  // more than a chunk
    return out;
  }
  /// What generate() writes alone.
  std::pair<ids, generation> alone(const batch_request& request, const ids& before = {}) {
    gemma4::session<B> session(model, ctx);
    if (!before.empty()) session.prefill(before);
    ids out;
    const generation result = generate(
        session, request.prompt, request.options, [&](token_id token) { out.push_back(token); }, sampling(request.sampling));
    return {out, result};
  }
};

/// A request whose tokens go to `out`, and its end to `end`.
struct written {
  ids tokens;
  std::optional<generation> end;
};
batch_request request_for(written& w, ids prompt, std::size_t length) {
  batch_request request;
  request.prompt = std::move(prompt);
  request.options.max_new_tokens = length;
  request.on_token = [&w](token_id token) -> std::optional<finish_reason> { return w.tokens.push_back(token), std::nullopt; };
  request.on_finish = [&w](const generation& result) { w.end = result; };
  return request;
}

TEST_CASE("texts of a batch with unlike prompts, lengths, drafts and draws are those they are alone") {
  fixture f;
  constexpr std::size_t count = 11;
  for (const std::size_t slots : {std::size_t{1}, std::size_t{2}, std::size_t{4}, std::size_t{16}}) {
    CAPTURE(slots);
    gemma4::batch<B> batch(f.model, f.ctx, {.max_sequences = slots});
    batch_decoder decoder(batch, f.drafter);
    std::vector<written> out(count);
    std::vector<batch_request> requests;
    for (std::size_t i = 0; i < count; ++i) {
      batch_request request = request_for(out[i], f.prompt(i), 5 + 7 * i);
      if (i % 4 != 3) request.options.draft = i % 7;
      if (i % 2 == 1) request.sampling.temperature = 0.8, request.sampling.seed = i, request.sampling.top_k = 30;
      if (i == 5)
        request.options.eos = f.alone(request).first,
        request.options.eos.erase(request.options.eos.begin(), request.options.eos.begin() + 9);
      requests.push_back(request);
      if (i < 6) decoder.submit(request);
    }
    std::size_t steps = 0, late = 6;
    while (decoder.step() || late < count) {
      CHECK(decoder.running() <= slots);
      if (++steps % 5 == 0 && late < count) decoder.submit(requests[late++]);  // others join between passes
    }
    for (std::size_t i = 0; i < count; ++i) {
      CAPTURE(i);
      const auto [want, result] = f.alone(requests[i]);
      CHECK(out[i].tokens == want);
      REQUIRE(out[i].end);
      CHECK(out[i].end->finish == result.finish);
      CHECK(out[i].end->stats.tokens == want.size());
    }
    CHECK(batch.size() == 0);
  }
}

TEST_CASE("random joins, leaves and sizes change no text") {
  constexpr unsigned seed = 4711;
  CAPTURE(seed);
  std::mt19937 random(seed);
  fixture f;
  for (int run = 0; run < 4; ++run) {
    gemma4::batch<B> batch(f.model, f.ctx,
                           {.max_sequences = 1 + random() % 5, .max_rows = 40 + random() % 60, .prompt_chunk = 16 + random() % 20});
    batch_decoder decoder(batch, f.drafter);
    std::vector<written> out(8);
    std::vector<batch_request> requests;
    std::size_t sent = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      requests.push_back(request_for(out[i], f.prompt(random() % 5), 1 + random() % 40));
      requests.back().options.draft = random() % 17;
      requests.back().sampling.temperature = random() % 2 == 0 ? 0 : 1.2;
      requests.back().sampling.seed = random();
    }
    bool busy = true;
    while (busy || sent < out.size()) {
      if (sent < out.size() && random() % 3 == 0) decoder.submit(requests[sent++]);
      busy = decoder.step();
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
      CAPTURE(i);
      CHECK(out[i].tokens == f.alone(requests[i]).first);
    }
  }
}

TEST_CASE("a text may go on behind a prefix that several share") {
  fixture f;
  gemma4::batch<B> batch(f.model, f.ctx, {.max_sequences = 4});
  const ids before = f.prompt(2);
  const std::size_t prefix = batch.add();
  for (std::size_t begin = 0; begin < before.size(); begin += batch.prompt_chunk()) {
    const std::size_t n = (std::min)(batch.prompt_chunk(), before.size() - begin);
    const gemma4::sequence_rows rows[] = {{prefix, std::span(before).subspan(begin, n), 1, true}};
    batch.forward(rows);
    batch.commit(prefix, n);
  }
  batch_decoder decoder(batch, f.drafter);
  std::vector<written> out(5);
  std::vector<batch_request> requests;
  for (std::size_t i = 0; i < out.size(); ++i) {
    requests.push_back(request_for(out[i], f.prompt(3 * i), 20));
    requests.back().prefix = prefix;
    decoder.submit(requests.back());
  }
  while (decoder.step()) {
  }
  for (std::size_t i = 0; i < out.size(); ++i) CHECK(out[i].tokens == f.alone(requests[i], before).first);
  CHECK(batch.committed(prefix) == before.size());
}

TEST_CASE("texts begin in the order of submission and all of them get on") {
  fixture f;
  gemma4::batch<B> batch(f.model, f.ctx, {.max_sequences = 3, .max_rows = 20, .prompt_chunk = 8});
  no_draft none;
  batch_decoder decoder(batch, none);
  std::vector<std::size_t> firsts;
  std::vector<written> out(6);
  for (std::size_t i = 0; i < out.size(); ++i) {
    batch_request request = request_for(out[i], f.prompt(0), 10);
    request.on_token = [&, i](token_id) -> std::optional<finish_reason> {
      if (std::find(firsts.begin(), firsts.end(), i) == firsts.end()) firsts.push_back(i);
      return std::nullopt;
    };
    decoder.submit(request);
  }
  while (decoder.step()) {
  }
  CHECK(firsts == std::vector<std::size_t>{0, 1, 2, 3, 4, 5});
}

TEST_CASE("a text is cancelled while it waits, while it runs, by its token, and by its callback; the others go on") {
  fixture f;
  gemma4::batch<B> batch(f.model, f.ctx, {.max_sequences = 3});
  batch_decoder decoder(batch, f.drafter);
  std::vector<written> out(5);
  std::stop_source stop;
  std::vector<batch_request> requests;
  for (std::size_t i = 0; i < out.size(); ++i) requests.push_back(request_for(out[i], f.prompt(i), 30));
  requests[2].on_token = [&](token_id token) -> std::optional<finish_reason> {
    out[2].tokens.push_back(token);
    return out[2].tokens.size() == 4 ? std::optional(finish_reason::caller) : std::nullopt;
  };
  requests[1].options.cancel = stop.get_token();
  std::vector<std::uint64_t> id;
  for (const batch_request& request : requests) id.push_back(decoder.submit(request));
  CHECK(decoder.cancel(id[4]));
  CHECK_FALSE(decoder.cancel(id[4] + 1));
  for (int i = 0; i < 4; ++i) decoder.step();
  CHECK(decoder.cancel(id[0]));
  stop.request_stop();
  while (decoder.step()) {
  }
  CHECK(out[0].end->finish == finish_reason::cancelled);
  CHECK(out[1].end->finish == finish_reason::cancelled);
  CHECK(out[2].end->finish == finish_reason::caller);
  CHECK(out[2].tokens.size() == 4);
  CHECK(out[3].tokens == f.alone(requests[3]).first);
  CHECK(out[4].end->finish == finish_reason::cancelled);
  CHECK(out[4].tokens.empty());
  const ids whole = f.alone(request_for(out[0], f.prompt(0), 30)).first;
  CHECK(std::equal(out[0].tokens.begin(), out[0].tokens.end(), whole.begin()));
  CHECK_FALSE(decoder.cancel(id[0]));
}

TEST_CASE("what a callback throws comes out of the step, ends its text and no other") {
  fixture f;
  gemma4::batch<B> batch(f.model, f.ctx, {.max_sequences = 2});
  batch_decoder decoder(batch, f.drafter);
  written bad, good;
  batch_request request = request_for(bad, f.prompt(0), 30);
  request.on_token = [&](token_id token) -> std::optional<finish_reason> {
    bad.tokens.push_back(token);
    if (bad.tokens.size() == 6) throw std::runtime_error("enough");
    return std::nullopt;
  };
  decoder.submit(request);
  const batch_request other = request_for(good, f.prompt(1), 30);
  decoder.submit(other);
  std::size_t thrown = 0;
  for (bool busy = true; busy;) try {
      busy = decoder.step();
    } catch (const std::runtime_error& problem) {
      CHECK(std::string(problem.what()) == "enough");
      ++thrown;
    }
  CHECK(thrown == 1);
  CHECK(bad.tokens.size() == 6);
  CHECK(good.tokens == f.alone(other).first);
}

/// Throws when it is asked for the third token behind a prompt.
struct failing_drafter {
  static constexpr draft_needs needs{};
  ids bad_prompt;
  template <class Target>
  std::size_t propose(const Target&, const draft_request& request, std::span<token_id>) const {
    const bool begins_so =
        request.text.size() >= bad_prompt.size() && std::equal(bad_prompt.begin(), bad_prompt.end(), request.text.begin());
    if (begins_so && request.text.size() == bad_prompt.size() + 3) throw std::runtime_error("no idea");
    return 0;
  }
};

TEST_CASE("what a drafter throws ends the text it was asked about and no other") {
  fixture f;
  gemma4::batch<B> batch(f.model, f.ctx, {.max_sequences = 2});
  failing_drafter drafter{f.prompt(0)};
  batch_decoder decoder(batch, drafter, fixed<4>{});
  written bad, good;
  decoder.submit(request_for(bad, f.prompt(0), 20));
  const batch_request other = request_for(good, f.prompt(3), 20);
  decoder.submit(other);
  std::size_t thrown = 0;
  for (bool busy = true; busy;) try {
      busy = decoder.step();
    } catch (const std::runtime_error&) {
      ++thrown;
    }
  CHECK(thrown == 1);
  REQUIRE(bad.end);
  CHECK(bad.tokens.size() == 3);
  CHECK(good.tokens == f.alone(other).first);
}

TEST_CASE("an assistant of another model is refused when it is joined with a batch") {
  fixture f;
  const auto other = gemma4::load_assistant<B>(std::filesystem::path(OUTRIDER_SOURCE_DIR) / "tests/golden/dense31b/assistant");
  assistant_drafter<B> drafter(other, f.ctx);
  gemma4::batch<B> batch(f.model, f.ctx, {.max_sequences = 2});
  CHECK(mentions(refusal(error_code::pair_mismatch, [&] { batch_decoder(batch, drafter); }), "do not belong together"));
  gemma4::session<B> session(f.model, f.ctx);
  CHECK(mentions(refusal(error_code::pair_mismatch, [&] { static_cast<void>(calibrate(session, drafter, 4)); }), "do not belong together"));
}

TEST_CASE("who waits in the middle of the queue hears of being cancelled at once") {
  fixture f;
  gemma4::batch<B> batch(f.model, f.ctx, {.max_sequences = 1});
  batch_decoder decoder(batch, f.drafter);
  std::vector<written> out(4);
  std::stop_source stop;
  std::vector<std::uint64_t> id;
  for (std::size_t i = 0; i < out.size(); ++i) {
    batch_request request = request_for(out[i], f.prompt(i), 60);
    if (i == 3) request.options.cancel = stop.get_token();
    id.push_back(decoder.submit(request));
  }
  decoder.step();
  CHECK(decoder.cancel(id[2]));
  stop.request_stop();
  decoder.step();
  REQUIRE(out[2].end);
  CHECK(out[2].end->finish == finish_reason::cancelled);
  REQUIRE(out[3].end);
  CHECK(out[3].end->finish == finish_reason::cancelled);
  CHECK(decoder.waiting() == 1);
}

TEST_CASE("who found no room in a pass comes first in the next, whoever joins or leaves") {
  fixture f;
  gemma4::batch<B> batch(f.model, f.ctx, {.max_sequences = 3, .max_rows = 17, .prompt_chunk = 17});
  no_draft none;
  batch_decoder decoder(batch, none);
  std::vector<std::size_t> firsts;
  std::vector<written> out(9);
  for (std::size_t i = 0; i < out.size(); ++i) {
    ids prompt = f.prompt(2);
    prompt.resize(17);
    batch_request request = request_for(out[i], prompt, 1);
    request.on_token = [&firsts, i](token_id) -> std::optional<finish_reason> { return firsts.push_back(i), std::nullopt; };
    decoder.submit(request);
  }
  while (decoder.step()) {
  }
  CHECK(firsts == std::vector<std::size_t>{0, 1, 2, 3, 4, 5, 6, 7, 8});
}

TEST_CASE("texts that can never begin are an error, and so is a prefix that is not what it was") {
  fixture f;
  gemma4::batch<B> batch(f.model, f.ctx, {.max_sequences = 2});
  const std::size_t held = batch.add(), other = batch.add();
  const ids before = f.prompt(0);
  const gemma4::sequence_rows rows[] = {{held, before, 1, true}};
  batch.forward(rows);
  batch.commit(held, before.size());
  batch_decoder decoder(batch, f.drafter);
  written w;
  batch_request request = request_for(w, f.prompt(1), 5);
  request.prefix = held;
  decoder.submit(request);
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { decoder.step(); }), "1 texts wait", "all 2 slots"));
  batch.close(other);
  REQUIRE(batch.truncate(held, before.size() - 1));
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { decoder.step(); }), "no longer holds"));
  REQUIRE(w.end);
  CHECK(w.end->stats.tokens == 0);
  CHECK_FALSE(decoder.step());
}

TEST_CASE("a text without a clock beside one with it keeps its times at 0, and the other's are its own") {
  fixture f;
  gemma4::batch<B> batch(f.model, f.ctx, {.max_sequences = 2});
  batch_decoder decoder(batch, f.drafter);
  written first, second;
  batch_request silent = request_for(first, f.prompt(0), 12), timed = request_for(second, f.prompt(1), 12);
  silent.options.clock = nullptr;
  decoder.submit(silent);
  decoder.submit(timed);
  while (decoder.step()) {
  }
  CHECK(first.end->stats.verify_seconds == 0);
  CHECK(second.end->stats.verify_seconds > 0);
  CHECK(second.end->stats.verify_seconds <= second.end->stats.decode_seconds);
}

TEST_CASE("a callback may submit the next text") {
  fixture f;
  gemma4::batch<B> batch(f.model, f.ctx, {.max_sequences = 2});
  batch_decoder decoder(batch, f.drafter);
  written first, second;
  batch_request follower = request_for(second, f.prompt(1), 12), request = request_for(first, f.prompt(0), 8);
  request.on_finish = [&](const generation& result) {
    first.end = result;
    decoder.submit(follower);
  };
  decoder.submit(request);
  while (decoder.step()) {
  }
  CHECK(second.tokens == f.alone(follower).first);
}

TEST_CASE("requests that cannot be carried out are refused when they are submitted") {
  fixture f;
  gemma4::batch<B> batch(f.model, f.ctx, {.max_sequences = 2, .max_draft = 4, .max_positions = 64});
  batch_decoder decoder(batch, f.drafter, adaptive(), 1);
  written w;
  const auto refuse = [&](error_code code, auto&& change) {
    batch_request request = request_for(w, f.prompt(0), 8);
    change(request);
    return refusal(code, [&] { decoder.submit(request); });
  };
  CHECK(mentions(refuse(error_code::argument_invalid, [](batch_request& r) { r.prompt.clear(); }), "no tokens"));
  CHECK(mentions(refuse(error_code::argument_invalid, [](batch_request& r) { r.prompt[1] = -3; }), "prompt token 1", "-3"));
  CHECK(mentions(refuse(error_code::argument_invalid, [](batch_request& r) { r.options.draft = 5; }), "5 drafts", "up to 4"));
  CHECK(mentions(refuse(error_code::argument_invalid, [](batch_request& r) { r.sampling.top_p = 0; }), "top_p"));
  CHECK(mentions(refuse(error_code::argument_invalid, [](batch_request& r) { r.prefix = 1; }), "slot 1"));
  CHECK(mentions(refuse(error_code::context_full, [](batch_request& r) { r.prompt.resize(65, 5); }), "65 tokens", "64"));
  decoder.submit(request_for(w, f.prompt(0), 8));
  CHECK(mentions(refuse(error_code::argument_invalid, [](batch_request&) {}), "1 requests wait"));
}

}  // namespace
