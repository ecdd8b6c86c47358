// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/decode/speculative_decoder.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "hash_target.hpp"
#include "support/drafters.hpp"

namespace {

using namespace outrider;
using testing::hash_target;
using testing::scripted_drafter;
using strings = std::vector<std::string>;

const std::vector<token_id> prompt{3, 1, 4, 1, 5};

/// Reads all a target offers, as an assistant does, and keeps what it saw.
struct watching_drafter {
  static constexpr draft_needs needs{.hidden = true, .keys = true, .embedding = true};
  scripted_drafter script;
  strings seen;

  template <class Target>
  std::size_t propose(const Target& target, const draft_request& request, std::span<token_id> out) {
    const auto keys = target.keys();
    matrix<float, host_space> embedding(1, 1);
    target.embed(embedding.view(), request.last());
    seen.push_back("token " + std::to_string(static_cast<int>(embedding.view()(0, 0))) + ", hidden of " +
                   std::to_string(static_cast<int>(target.hidden()(0, 0))) + ", position " + std::to_string(keys.position) +
                   ", keys 0 to " + std::to_string(keys.ends[0] - 1) + ", " + std::to_string(out.size()) + " drafts");
    CHECK(keys.ends[0] == keys.ends[1]);
    return script.propose(target, request, out);
  }
};

struct outcome {
  std::vector<token_id> tokens;
  generation result;
};

template <class Drafter>
outcome decode(hash_target& target, Drafter& drafter, const generate_options& options, const std::vector<token_id>& ids = prompt) {
  outcome out;
  speculative_decoder decoder(target, drafter, greedy{}, fixed<max_draft_length>{});
  out.result = decoder.generate(ids, options, [&](token_id token) { out.tokens.push_back(token); });
  return out;
}

std::vector<token_id> continuation(std::size_t count) {
  const std::vector<token_id> text = hash_target::continued(prompt, count);
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
}

// n − 1: index and position of the token a round begins with. n − 2: its hidden state, and the last key the drafter sees.
TEST_CASE("the indexes of three rounds behind a prompt of five tokens, with one, three and no drafts accepted") {
  hash_target target;
  const std::vector<token_id> y = hash_target::continued(prompt, 20);
  watching_drafter drafter{scripted_drafter(y, {1, 3, 0}), {}};
  const outcome out = decode(target, drafter, {8, 3, {}, {}});

  const auto token = [&](std::size_t i) { return std::to_string(y[i]); };
  const auto wrong = [&](std::size_t i) { return std::to_string((y[i] + 1) % 50); };
  CHECK(drafter.seen == strings{
                            "token " + token(5) + ", hidden of 4, position 5, keys 0 to 4, 3 drafts",
                            "token " + token(7) + ", hidden of 6, position 7, keys 0 to 6, 3 drafts",
                            // round 3 has n = 12: of 8 wanted tokens 7 are there, and the last is the target's own
                        });
  CHECK(target.calls == strings{
                            "prefill 0: 3 1 4 1 5",
                            "verify 5: " + token(5) + ' ' + token(6) + ' ' + wrong(7) + ' ' + wrong(8),
                            "commit 2",  // 5 and d1 = y6
                            "verify 7: " + token(7) + ' ' + token(8) + ' ' + token(9) + ' ' + token(10),
                            "commit 4",  // 7 and d1 … d3; none dropped
                            "verify 11: " + token(11),
                            "commit 1",
                        });
  CHECK(out.tokens == std::vector<token_id>(y.begin() + 5, y.begin() + 13));
  CHECK(target.committed() == 12);
  CHECK(out.result.stats.passes[3][1] == 1);
  CHECK(out.result.stats.passes[3][3] == 1);
  CHECK(out.result.stats.passes[0][0] == 1);
}

TEST_CASE("a third round drafts from the state of the row the second one kept") {
  hash_target target;
  const std::vector<token_id> y = hash_target::continued(prompt, 20);
  watching_drafter drafter{scripted_drafter(y, {1, 3, 0}), {}};
  decode(target, drafter, {9, 3, {}, {}});
  REQUIRE(drafter.seen.size() == 3);
  CHECK(drafter.seen[2] == "token " + std::to_string(y[11]) + ", hidden of 10, position 11, keys 0 to 10, 1 drafts");
}

TEST_CASE("every pattern of right and wrong drafts writes the text of plain decoding") {
  const std::vector<token_id> y = hash_target::continued(prompt, 80), want = continuation(60);
  hash_target plain;
  std::vector<token_id> tokens;
  generate(plain, prompt, {60, 0, {}, {}}, [&](token_id token) { tokens.push_back(token); });
  CHECK(tokens == want);
  for (std::size_t k = 0; k <= 16; ++k)
    for (const auto& right : {std::vector<std::size_t>{0}, {1}, {2, 0, 5}, {0, 16}, {scripted_drafter::everything}}) {
      CAPTURE(k);
      hash_target target;
      scripted_drafter drafter(y, right);
      const outcome out = decode(target, drafter, {60, k, {}, {}});
      CHECK(out.tokens == want);
      CHECK((out.result.stats.drafted() > 0) == (k > 0));
      CHECK(target.tokens() == std::vector<token_id>(y.begin(), y.begin() + 64));
    }
}

struct fixed_drafter {
  static constexpr draft_needs needs{};
  std::vector<token_id> guesses;
  std::size_t claimed = 0;

  template <class Target>
  std::size_t propose(const Target&, const draft_request&, std::span<token_id> out) const {
    std::copy_n(guesses.begin(), (std::min)(guesses.size(), out.size()), out.begin());
    return claimed;
  }
};

TEST_CASE("pitfall 67: a guess outside the vocabulary ends the draft before the target sees it") {
  const std::vector<token_id> want = continuation(3);
  for (const token_id none : {token_id{-1}, token_id{50}, (std::numeric_limits<token_id>::max)(), (std::numeric_limits<token_id>::min)()}) {
    CAPTURE(none);
    hash_target target;
    fixed_drafter drafter{{want[1], none, want[2]}, 3};
    const outcome out = decode(target, drafter, {6, 3, {}, {}});
    CHECK(out.tokens == continuation(6));
    CHECK(out.result.stats.passes[1][1] == 1);
    for (const std::string& call : target.calls) CHECK(call.find(std::to_string(none)) == call.npos);
  }
}

TEST_CASE("a drafter that claims more guesses than it was asked for is believed up to that many") {
  hash_target target;
  fixed_drafter drafter{continuation(8), 100};
  const outcome out = decode(target, drafter, {6, 2, {}, {}});
  CHECK(out.tokens == continuation(6));
  for (std::size_t k = 3; k <= max_draft_length; ++k) CHECK(out.result.stats.drafted_at(k) == 0);
  CHECK(out.result.stats.drafted() > 0);
}

TEST_CASE("a callback that returns false stops the text, even in the middle of accepted drafts") {
  const std::vector<token_id> y = hash_target::continued(prompt, 40);
  for (std::size_t stop = 1; stop <= 12; ++stop) {
    CAPTURE(stop);
    hash_target target;
    scripted_drafter drafter(y, {scripted_drafter::everything});
    speculative_decoder decoder(target, drafter, greedy{}, fixed<max_draft_length>{});
    std::vector<token_id> tokens;
    const generation result = decoder.generate(prompt, {30, 4, {}, {}}, [&](token_id token) {
      tokens.push_back(token);
      return tokens.size() < stop;
    });
    CHECK(tokens == continuation(stop));
    CHECK(result.finish == finish_reason::caller);
    CHECK(result.stats.tokens == stop);
    CHECK(target.committed() == prompt.size() + stop - 1);  // a commit point: all but the last token
    CHECK(result.stats.accepted() == (stop - 1) - (stop - 1) / 5);
  }
}

// Pitfall 76. The tokens the callback has accepted before are committed up to the last round's end; the target takes any further request.
TEST_CASE("a callback that throws leaves the target at a commit point") {
  const std::vector<token_id> y = hash_target::continued(prompt, 60);
  for (std::size_t fatal = 1; fatal <= 12; ++fatal) {
    CAPTURE(fatal);
    hash_target target;
    scripted_drafter drafter(y, {2, 4, 0});
    speculative_decoder decoder(target, drafter, greedy{}, fixed<max_draft_length>{});
    std::size_t count = 0;
    const auto emit = [&](token_id) {
      if (++count == fatal) throw std::runtime_error("enough");
    };
    CHECK_THROWS_AS(decoder.generate(prompt, {30, 4, {}, {}}, emit), std::runtime_error);
    CHECK(count == fatal);
    const std::size_t kept = target.committed();
    REQUIRE(kept >= prompt.size());
    CHECK(kept < prompt.size() + fatal);  // no token behind the one that was refused
    CHECK(target.tokens() == std::vector<token_id>(y.begin(), y.begin() + static_cast<std::ptrdiff_t>(kept)));
    scripted_drafter again(y, {3, 1});
    const outcome out = decode(target, again, {10, 4, {}, {}}, {y[kept]});
    CHECK(out.tokens ==
          std::vector<token_id>(y.begin() + static_cast<std::ptrdiff_t>(kept) + 1, y.begin() + static_cast<std::ptrdiff_t>(kept) + 11));
  }
}

struct asking_drafter {
  static constexpr draft_needs needs{};
  std::vector<std::vector<token_id>> told;  // per round: end tokens, then suppressed ones

  std::size_t propose(const hash_target&, const draft_request& request, std::span<token_id>) {
    told.push_back({request.eos.begin(), request.eos.end()});
    told.back().insert(told.back().end(), request.suppress.begin(), request.suppress.end());
    return 0;
  }
};

TEST_CASE("a drafter is told the end tokens and the suppressed ones") {
  asking_drafter drafter;
  hash_target target;
  const outcome out = decode(target, drafter, {6, 3, {48, 49}, {7}});
  REQUIRE(!drafter.told.empty());
  for (const std::vector<token_id>& told : drafter.told) CHECK(told == std::vector<token_id>{48, 49, 7});
  CHECK(out.result.stats.rounds() == 0);  // no drafts: plain passes
  CHECK(out.result.stats.plain_passes() + 1 == out.tokens.size());
}

TEST_CASE("all memory is asked for before the first token") {
  hash_target target(16, 40);
  const std::vector<token_id> y = hash_target::continued(prompt, 60);
  scripted_drafter drafter(y, {2});
  decode(target, drafter, {10, 4, {}, {}});
  CHECK(target.reserved >= target.committed());
  CHECK(target.reserved <= 15);
  hash_target limited(16, 20);
  decode(limited, drafter, {1000, 4, {}, {}});
  CHECK(limited.reserved == 20);  // never more than there can be
}

}  // namespace
