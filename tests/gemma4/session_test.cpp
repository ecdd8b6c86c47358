// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstddef>
#include <filesystem>
#include <limits>
#include <type_traits>
#include <vector>

#include "outrider/backend/reference.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "support/refusal.hpp"

namespace {

using namespace outrider;
using testing::mentions;
using testing::refusal;

const std::filesystem::path golden = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "tests" / "golden";

struct fixture {
  gemma4::model<reference> model = gemma4::load_model<reference>(golden / "e2b" / "target");
  context_of<reference> ctx{execution{}};
  gemma4::session<reference> session{model, ctx, {.max_draft = 3, .prompt_chunk = 8, .max_positions = 40}};
};

}  // namespace

TEST_CASE_FIXTURE(fixture, "a session refuses options it cannot have, with what is allowed") {
  const auto refused = [&](gemma4::session_options options) {
    return refusal(error_code::argument_invalid, [&] { gemma4::session<reference>(model, ctx, options); });
  };
  CHECK(mentions(refused({.max_draft = 17}), "17", "0 to 16"));
  CHECK(mentions(refused({.max_draft = (std::numeric_limits<std::size_t>::max)()}), "0 to 16"));
  CHECK(mentions(refused({.prompt_chunk = 0}), "0", "1 to 65536"));
  CHECK(mentions(refused({.max_positions = std::size_t{1} << 31}), "2147483648", "2147483647"));
  CHECK(mentions(refused({.max_rewind = std::size_t{1} << 31}), "2147483648", "2147483647"));
}

TEST_CASE_FIXTURE(fixture, "a pass takes from one token to the drafts and one more") {
  session.prefill(std::vector<token_id>{2, 5});
  const std::vector<token_id> five{1, 2, 3, 4, 5};
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { session.verify(five); }), "5 tokens", "1 to 4"));
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { session.verify({}); }), "0 tokens"));
  session.verify(std::span(five).first(4));
  CHECK(session.logits().rows == 4);
  CHECK(session.committed() == 2);
}

TEST_CASE_FIXTURE(fixture, "at least one and at most all rows of a pass are kept") {
  session.prefill(std::vector<token_id>{2, 5});
  const std::vector<token_id> two{7, 8};
  session.verify(two);
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { session.commit(0); }), "0 rows"));
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { session.commit(3); }), "3 rows", "2 are pending"));
  session.commit(1);
  CHECK(session.committed() == 3);
}

TEST_CASE_FIXTURE(fixture, "a prompt beyond the limit is refused before anything is processed") {
  refusal(error_code::context_full, [&] { session.prefill(std::vector<token_id>(41, 5)); });
  CHECK(session.committed() == 0);
  session.prefill(std::vector<token_id>(40, 5));
  CHECK(session.committed() == 40);
}

TEST_CASE_FIXTURE(fixture, "going back drops what was committed behind and what is pending; going forward is refused") {
  session.prefill(std::vector<token_id>{2, 5, 7, 8, 9});
  session.verify(std::vector<token_id>{1, 2});
  CHECK_FALSE(session.truncate(6));
  CHECK(session.truncate(3));
  CHECK(session.committed() == 3);
  CHECK(session.cache().pending() == 0);
  CHECK(session.truncate(0));
  CHECK(session.committed() == 0);
}

TEST_CASE_FIXTURE(fixture, "an assistant of another model is refused when the two are joined") {
  const auto other = gemma4::load_assistant<reference>(golden / "e4b" / "assistant");
  assistant_drafter<reference> drafter(other, ctx);
  CHECK(mentions(refusal(error_code::pair_mismatch, [&] { speculative_decoder(session, drafter); }), "do not belong together"));
}

TEST_CASE("what a session or a drafter borrows cannot be a temporary") {
  CHECK_FALSE(std::is_constructible_v<gemma4::session<reference>, gemma4::model<reference>, context_of<reference>&>);
  CHECK_FALSE(std::is_constructible_v<assistant_drafter<reference>, gemma4::assistant<reference>, context_of<reference>&>);
}
