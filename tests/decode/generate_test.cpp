// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/decode/generate.hpp"

#include <doctest/doctest.h>

#include <limits>
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

const std::vector<token_id> prompt{3, 1, 4, 1, 5};
constexpr auto ignore = [](token_id) {};

/// The sentence both entry points refuse a request with; the target must not have been touched.
std::string both_refuse(error_code code, hash_target& target, const std::vector<token_id>& ids, const generate_options& options) {
  no_draft none;
  speculative_decoder decoder(target, none, greedy{}, fixed<max_draft_length>{});
  const auto calls = target.calls;
  const std::string plain = refusal(code, [&] { generate(target, ids, options, ignore); });
  CHECK(refusal(code, [&] { decoder.generate(ids, options, ignore); }) == plain);
  CHECK(target.calls == calls);
  return plain;
}

TEST_CASE("an empty prompt is refused") {
  hash_target target;
  CHECK(mentions(both_refuse(error_code::argument_invalid, target, {}, {}), "prompt", "no tokens", "at least one"));
}

TEST_CASE("a prompt token outside the vocabulary is refused with its place and value") {
  for (const token_id bad : {token_id{-1}, token_id{50}, (std::numeric_limits<token_id>::max)()}) {
    hash_target target;
    CHECK(mentions(both_refuse(error_code::argument_invalid, target, {1, 2, bad}, {}), "prompt token 2", std::to_string(bad), "0 to 49"));
  }
}

TEST_CASE("a suppressed token outside the vocabulary is refused") {
  hash_target target;
  const std::vector<token_id> suppress{4, 50};
  CHECK(mentions(both_refuse(error_code::argument_invalid, target, prompt, {8, 0, {}, suppress}), "suppressed token 1", "50", "0 to 49"));
}

TEST_CASE("suppressing every token is refused") {
  hash_target target;
  std::vector<token_id> all(target.vocab_size());
  for (std::size_t id = 0; id < all.size(); ++id) all[id] = static_cast<token_id>(id);
  CHECK(mentions(both_refuse(error_code::argument_invalid, target, prompt, {8, 0, {}, all}), "suppressed"));
}

TEST_CASE("an end token outside the vocabulary is harmless: it never comes") {
  hash_target target;
  const std::vector<token_id> eos{-1, 1000};
  CHECK(generate(target, prompt, {5, 0, eos, {}}, ignore).finish == finish_reason::max_new_tokens);
}

TEST_CASE("more drafts than the target was made for are refused with both numbers") {
  hash_target target(4);
  no_draft none;
  speculative_decoder decoder(target, none, greedy{}, fixed<max_draft_length>{});
  const std::string sentence = refusal(error_code::argument_invalid, [&] { decoder.generate(prompt, {8, 5, {}, {}}, ignore); });
  CHECK(mentions(sentence, "5 drafts", "up to 4"));
  CHECK(target.calls.empty());
  decoder.generate(prompt, {8, 4, {}, {}}, ignore);
}

TEST_CASE("more drafts than a round can count are refused, however large the target") {
  hash_target target(100);
  no_draft none;
  speculative_decoder decoder(target, none, greedy{}, fixed<max_draft_length>{});
  CHECK(mentions(refusal(error_code::argument_invalid,
                         [&] {
                           decoder.generate(prompt, {8, 17, {}, {}}, ignore);
                         }),
                 "17 drafts", "up to 16"));
}

TEST_CASE("plain decoding has no use for a draft length and ignores it") {
  hash_target target(0);
  generate(target, prompt, {3, 99, {}, {}}, ignore);
  CHECK(target.committed() == prompt.size() + 2);
}

TEST_CASE("a prompt that does not fit behind what the context holds is refused, one that fits exactly is not") {
  hash_target target(16, 12);
  generate(target, prompt, {3, 0, {}, {}}, ignore);
  REQUIRE(target.committed() == 7);
  const std::string sentence = both_refuse(error_code::context_full, target, {1, 2, 3, 4, 5, 6}, {});
  CHECK(mentions(sentence, "6 tokens", "7", "12"));
  const generation last = generate(target, std::vector<token_id>{1, 2, 3, 4, 5}, {3, 0, {}, {}}, ignore);
  CHECK(last.stats.tokens == 1);  // one token can still be chosen, none processed
  CHECK(last.finish == finish_reason::context_full);
}

TEST_CASE("a callback that returns false stops plain decoding behind its token") {
  hash_target target;
  std::size_t count = 0;
  const generation result = generate(target, prompt, {10, 0, {}, {}}, [&](token_id) { return ++count < 4; });
  CHECK(count == 4);
  CHECK(result.finish == finish_reason::caller);
  CHECK(target.committed() == prompt.size() + 3);
}

TEST_CASE("the end of text is emitted, counted, and the last") {
  const std::vector<token_id> y = hash_target::continued(prompt, 10);
  const std::vector<token_id> eos{49, y[8]};
  hash_target target;
  std::vector<token_id> tokens;
  const generation result = generate(target, prompt, {10, 0, eos, {}}, [&](token_id token) { tokens.push_back(token); });
  CHECK(tokens.back() == y[8]);
  CHECK(result.finish == finish_reason::end_of_text);
  CHECK(result.stats.tokens == tokens.size());
}

TEST_CASE("an end of text that the callback stops at as well, or that is the last wanted token, is an end of text") {
  const std::vector<token_id> y = hash_target::continued(prompt, 10);
  const std::vector<token_id> eos{y[5]};
  for (const std::size_t wanted : {std::size_t{1}, std::size_t{9}}) {
    hash_target target;
    CHECK(generate(target, prompt, {wanted, 0, eos, {}}, [](token_id) { return false; }).finish == finish_reason::end_of_text);
  }
}

TEST_CASE("zero tokens wanted: the prompt is processed and nothing comes out") {
  hash_target target;
  const generation result = generate(target, prompt, {0, 0, {}, {}}, [](token_id) { FAIL("a token nobody wanted"); });
  CHECK(result.stats.tokens == 0);
  CHECK(result.stats.prompt_tokens == prompt.size());
  CHECK(target.committed() == prompt.size());
}

TEST_CASE("a suppressed token is replaced by the best of the others") {
  hash_target target;
  const std::vector<token_id> y = hash_target::continued(prompt, 1);
  const std::vector<token_id> suppress{y[5], 0};
  std::vector<token_id> tokens;
  generate(target, prompt, {1, 0, {}, suppress}, [&](token_id token) { tokens.push_back(token); });
  CHECK(tokens == std::vector<token_id>{y[5] == 1 ? 2 : 1});  // all others are equal: the lowest id
}

TEST_CASE("pitfall 41: of equal logits the lowest id is chosen, in every row") {
  context_of<reference> ctx;
  matrix<float, host_space> logits(3, 6);
  logits.view()(0, 4) = logits.view()(0, 2) = 1;
  logits.view()(2, 5) = logits.view()(2, 3) = 7;
  token_id picks[3];
  greedy{}.pick<reference>(ctx, logits.view(), std::vector<token_id>(10), picks);
  CHECK(picks[0] == 2);
  CHECK(picks[1] == 0);
  CHECK(picks[2] == 3);
}

}  // namespace
