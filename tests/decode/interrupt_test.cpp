// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What ends a text before its tokens are written: the clock, another thread, a full context; and what passes report.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <stop_token>
#include <string>
#include <vector>

#include "hash_target.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "support/drafters.hpp"
#include "support/refusal.hpp"

namespace {

using namespace outrider;
using testing::hash_target;
using testing::mentions;
using testing::refusal;
using testing::scripted_drafter;

const std::vector<token_id> prompt{3, 1, 4, 1, 5};

/// A clock that counts its readings.
std::size_t readings = 0;
double counting_clock() noexcept { return static_cast<double>(++readings); }

struct outcome {
  std::vector<token_id> tokens;
  generation result;
};
outcome speculate(hash_target& target, const generate_options& options) {
  outcome out;
  scripted_drafter drafter(hash_target::continued(prompt, 300), {3, 0, 1});
  speculative_decoder decoder(target, drafter, greedy{}, fixed<4>{});
  out.result = decoder.generate(prompt, options, [&](token_id token) { out.tokens.push_back(token); });
  return out;
}
std::vector<token_id> continuation(std::size_t count) {
  const std::vector<token_id> text = hash_target::continued(prompt, count);
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
}

TEST_CASE("a time budget ends the text between two passes, and the text so far is that of plain decoding") {
  for (const double budget : {3.0, 10.0, 50.0}) {
    CAPTURE(budget);
    readings = 0;
    hash_target target;
    const outcome out = speculate(target, {.max_new_tokens = 200, .time_budget = budget, .clock = counting_clock});
    CHECK(out.result.finish == finish_reason::time_budget);
    CHECK(!out.tokens.empty());
    CHECK(out.tokens == continuation(out.tokens.size()));
    CHECK(target.committed() == prompt.size() + out.tokens.size() - 1);
  }
}

TEST_CASE("a budget that ends within the prompt gives no token, and its time is the prompt's") {
  for (const double budget : {0.0, 1.0, 2.0}) {
    CAPTURE(budget);
    readings = 1'000'000;  // seconds since who knows when
    hash_target target;
    const outcome out = speculate(target, {.max_new_tokens = 20, .time_budget = budget, .clock = counting_clock});
    CHECK(out.result.finish == finish_reason::time_budget);
    CHECK(out.tokens.empty());
    CHECK(out.result.kept == 0);
    CHECK(target.committed() <= prompt.size());
    CHECK(out.result.stats.decode_seconds == 0);
    CHECK(out.result.stats.prefill_seconds > 0);
    CHECK(out.result.stats.prefill_seconds < 100);
  }
}

TEST_CASE("without a clock nothing is timed and no budget ends a text") {
  readings = 0;
  hash_target target;
  const outcome out = speculate(target, {.max_new_tokens = 50, .time_budget = 0, .clock = nullptr});
  CHECK(out.tokens == continuation(50));
  CHECK(out.result.stats.decode_seconds == 0);
  CHECK(out.result.stats.verify_seconds == 0);
  CHECK(readings == 0);
}

TEST_CASE("a stop request ends the text between two passes, and the conversation goes on from there") {
  std::stop_source stop;
  hash_target target;
  const std::vector<token_id> y = hash_target::continued(prompt, 300);
  scripted_drafter drafter(y, {3, 0, 1});
  speculative_decoder decoder(target, drafter, greedy{}, fixed<4>{});
  std::vector<token_id> tokens;
  const generate_options options{.max_new_tokens = 100, .cancel = stop.get_token()};
  const generation result = decoder.generate(prompt, options, [&](token_id token) {
    tokens.push_back(token);
    if (tokens.size() == 10) stop.request_stop();
  });
  CHECK(result.finish == finish_reason::cancelled);
  CHECK(tokens.size() >= 10);
  CHECK(tokens.size() < 15);  // the round it came in is finished
  CHECK(tokens == continuation(tokens.size()));

  const std::size_t before = tokens.size();
  const std::vector<token_id> rest{tokens.back()};
  decoder.generate(rest, {.max_new_tokens = 20}, [&](token_id token) { tokens.push_back(token); });
  CHECK(tokens == continuation(before + 20));
}

TEST_CASE("a request that is cancelled before it begins leaves the target as it was") {
  std::stop_source stop;
  stop.request_stop();
  hash_target target;
  const outcome out = speculate(target, {.max_new_tokens = 5, .cancel = stop.get_token()});
  CHECK(out.result.finish == finish_reason::cancelled);
  CHECK(out.tokens.empty());
  CHECK(target.committed() == 0);
  CHECK(out.result.stats.decode_seconds == 0);
}

TEST_CASE("options that mean nothing are refused with their value") {
  hash_target target;
  const auto refuse = [&](const generate_options& options) {
    return refusal(error_code::argument_invalid, [&] { generate(target, prompt, options, [](token_id) {}); });
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(mentions(refuse({.min_confidence = nan}), "confidence", "nan", "0 to 1"));
  CHECK(mentions(refuse({.min_confidence = 1.5f}), "confidence", "1.5"));
  CHECK(mentions(refuse({.time_budget = -1}), "time budget", "-1"));
  CHECK(mentions(refuse({.time_budget = std::nan("")}), "time budget", "nan"));
  CHECK(target.calls.empty());
}

TEST_CASE("every pass is reported with its place, its drafts and what they gave, and the reports add up") {
  hash_target target;
  std::vector<round_record> passes;
  generate_options options{.max_new_tokens = 60};
  options.on_pass = [&](const round_record& record) { passes.push_back(record); };
  const outcome out = speculate(target, options);
  std::size_t position = prompt.size() + 1, drafted = 0, accepted = 0;
  for (const round_record& pass : passes) {
    CHECK(pass.position == position);
    CHECK(pass.emitted >= pass.accepted);
    CHECK(pass.emitted <= pass.accepted + 1);
    position += pass.emitted;
    drafted += pass.drafted;
    accepted += pass.accepted;
  }
  CHECK(position == prompt.size() + 60);
  CHECK(drafted == out.result.stats.drafted());
  CHECK(accepted == out.result.stats.accepted());
  CHECK(passes.size() == out.result.stats.rounds() + out.result.stats.plain_passes());
}

/// Says how sure it is of each guess, and obeys the least confidence.
struct doubting_drafter {
  static constexpr draft_needs needs{};
  std::vector<float> least;
  template <class Target>
  std::size_t propose(const Target&, const draft_request& request, std::span<token_id> out) {
    least.push_back(request.min_confidence);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const float sure = 1 - 0.25f * static_cast<float>(i);
      if (sure < request.min_confidence) return i;
      out[i] = 0;
      if (!request.confidence.empty()) request.confidence[i] = sure;
    }
    return out.size();
  }
};

TEST_CASE("drafts end before a guess the drafter believes less than asked for") {
  hash_target target;
  doubting_drafter drafter;
  speculative_decoder decoder(target, drafter, greedy{}, fixed<8>{});
  generate_options options{.max_new_tokens = 20, .min_confidence = 0.5f};
  options.on_pass = [&](const round_record& record) { CHECK(record.drafted <= 3); };
  decoder.generate(prompt, options, [](token_id) {});
  for (const float least : drafter.least) CHECK(least == 0.5f);
}

/// Counts what it is asked and told.
struct counting_length {
  std::size_t* plans;
  std::size_t* records;
  draft_plan plan(std::size_t most) { return ++*plans, draft_plan{.drafts = (std::min)(most, std::size_t{3})}; }
  void record(const round_record&) { ++*records; }
};

TEST_CASE("a policy plans every pass that it hears of") {
  hash_target target;
  std::size_t plans = 0, records = 0;
  scripted_drafter drafter(hash_target::continued(prompt, 60), {1, 0, 2});
  speculative_decoder decoder(target, drafter, greedy{}, counting_length{&plans, &records});
  const generation result = decoder.generate(prompt, {.max_new_tokens = 30}, [](token_id) {});
  CHECK(plans == records);
  CHECK(records == result.stats.rounds() + result.stats.plain_passes());
}

TEST_CASE("the adaptive policy writes the text of plain decoding, without a clock in the same rounds every time") {
  std::vector<std::size_t> first;
  for (int run = 0; run < 2; ++run) {
    hash_target target;
    scripted_drafter drafter(hash_target::continued(prompt, 300), {4, 1, 0, 2});
    speculative_decoder decoder(target, drafter);
    std::vector<token_id> tokens;
    std::vector<std::size_t> drafts;
    generate_options options{.max_new_tokens = 200, .clock = nullptr};
    options.on_pass = [&](const round_record& record) { drafts.push_back(record.drafted); };
    decoder.generate(prompt, options, [&](token_id token) { tokens.push_back(token); });
    CHECK(tokens == continuation(200));
    if (run == 0) first = drafts;
    CHECK(drafts == first);
  }
}

}  // namespace
