// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/decode/mirrored_drafter.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "outrider/backend/reference.hpp"
#include "outrider/decode/any_drafter.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "support/elsewhere_backend.hpp"

namespace {

using namespace outrider;
using testing::counting_space;
using testing::elsewhere;

const std::filesystem::path golden_directory = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "tests/golden";

struct written {
  std::vector<token_id> tokens;
  std::vector<std::array<std::size_t, 3>> rounds;  // position, drafted, accepted
  bool operator==(const written&) const = default;
};

template <class Target, class Drafter>
written write(Target& target, Drafter& drafter, std::span<const token_id> prompt, std::size_t length, std::size_t k) {
  written text;
  generate_options options{length, k};
  options.on_pass = [&](const round_record& r) { text.rounds.push_back({r.position, r.drafted, r.accepted}); };
  speculative_decoder decoder(target, drafter, greedy{}, fixed<max_draft_length>{});
  decoder.generate(prompt, options, [&](token_id token) { text.tokens.push_back(token); });
  return text;
}

const std::vector<token_id> prompt{2, 17, 90, 3, 44, 101, 7, 9, 65, 12, 33, 5};
const std::vector<token_id> other_prompt{2, 17, 90, 8, 8, 120, 6};

TEST_CASE_TEMPLATE("a drafter in another memory space drafts what one at the target's side does", Kv, float, bf16) {
  for (const char* name : {"e2b", "e4b", "dense31b", "moe26b"}) {
    CAPTURE(name);
    const auto target = gemma4::load_model<reference>(golden_directory / name / "target");
    const auto near_assistant = gemma4::load_assistant<reference>(golden_directory / name / "assistant");
    const auto far_assistant = gemma4::load_assistant<elsewhere>(golden_directory / name / "assistant");
    context_of<reference> ctx;
    using session = gemma4::session<reference, Kv>;
    session text(target, ctx, {.max_draft = 6, .prompt_chunk = 5, .max_positions = 200, .max_rewind = 64});
    assistant_drafter<reference> near(near_assistant, ctx);
    context_of<elsewhere> there;
    assistant_drafter<elsewhere> inner(far_assistant, there);
    mirrored_drafter<elsewhere, assistant_drafter<elsewhere>, session> far(inner, text);

    no_draft none;
    const written plain = write(text, none, prompt, 40, 0);
    for (const std::size_t k : std::initializer_list<std::size_t>{1, 3, 6}) {
      CAPTURE(k);
      text.clear();
      const written want = write(text, near, prompt, 40, k);
      text.clear();
      const written got = write(text, far, prompt, 40, k);
      CHECK(got == want);
      CHECK(got.tokens == plain.tokens);
      CHECK(got.rounds.size() > 1);
      // a conversation: back into the text, and on with something else
      REQUIRE(text.truncate(prompt.size() + 2));
      CHECK(write(text, far, other_prompt, 20, k).tokens.size() == 20);
      const std::vector<token_id> continued(text.tokens().begin(), text.tokens().end());
      text.clear();
      std::vector<token_id> whole(continued.begin(), continued.begin() + static_cast<std::ptrdiff_t>(prompt.size()) + 2);
      whole.insert(whole.end(), other_prompt.begin(), other_prompt.end());
      CHECK(write(text, near, whole, 20, k).tokens.size() == 20);
      CHECK(std::vector<token_id>(text.tokens().begin(), text.tokens().end()) == continued);
    }
  }
}

TEST_CASE("a round moves the committed keys, a hidden state and an embedding a draft, and takes no memory that was reserved") {
  const auto target = gemma4::load_model<reference>(golden_directory / "e2b/target");
  const auto assistant = gemma4::load_assistant<elsewhere>(golden_directory / "e2b/assistant");
  context_of<reference> ctx;
  using session = gemma4::session<reference, bf16>;  // so that keys are not counted with other floats
  session text(target, ctx, {.max_draft = 4, .max_positions = 600});
  context_of<elsewhere> there;
  assistant_drafter<elsewhere> inner(assistant, there);
  mirrored_drafter<elsewhere, assistant_drafter<elsewhere>, session> far(inner, text);
  far.reserve(600);
  const std::size_t blocks = counting_space::in<bf16*>.elements;

  const gemma4::text_config& c = target.config();
  std::size_t row = 0;
  for (const gemma4::attention_kind kind : gemma4::attention_kinds) row += 2 * c.shape(kind).kv_heads * c.shape(kind).head_dim;
  std::vector<token_id> known = prompt, out(4);
  text.prefill(std::span(known).first(known.size() - 1));
  far.propose(text, {known, {}, {}}, out);
  for (std::size_t kept = 1; kept <= 5; ++kept) {
    std::vector<token_id> rows{known.back(), 1, 2, 3, 4};
    text.verify(rows);
    text.commit(kept);
    known.insert(known.end(), rows.begin() + 1, rows.begin() + static_cast<std::ptrdiff_t>(kept));
    known.push_back(50);
    const auto keys = counting_space::in<bf16>, floats = counting_space::in<float>;
    CHECK(far.propose(text, {known, {}, {}}, out) == 4);
    CHECK(counting_space::in<bf16>.elements - keys.elements == kept * row);
    CHECK(counting_space::in<float>.elements - floats.elements == (1 + 4) * c.hidden_size);
  }
  CHECK(counting_space::in<bf16*>.elements == blocks);
}

TEST_CASE("two sequences of a model may share a mirrored drafter") {
  const auto target = gemma4::load_model<reference>(golden_directory / "e2b/target");
  const auto assistant = gemma4::load_assistant<elsewhere>(golden_directory / "e2b/assistant");
  context_of<reference> ctx;
  using session = gemma4::session<reference>;
  session a(target, ctx, {.max_positions = 200}), b(target, ctx, {.max_positions = 200});
  context_of<elsewhere> there;
  assistant_drafter<elsewhere> inner(assistant, there), alone_inner(assistant, there);
  mirrored_drafter<elsewhere, assistant_drafter<elsewhere>, session> shared(inner, a);
  const auto alone = [&](std::span<const token_id> ids, std::size_t drafts) {
    session text(target, ctx, {.max_positions = 200});
    mirrored_drafter<elsewhere, assistant_drafter<elsewhere>, session> drafter(alone_inner, text);
    text.prefill(ids.first(ids.size() - 1));
    std::vector<token_id> out(drafts);
    drafter.propose(text, {ids, {}, {}}, out);
    return out;
  };
  a.prefill(std::span(prompt).first(prompt.size() - 1));
  b.prefill(std::span(other_prompt).first(other_prompt.size() - 1));
  for (std::size_t round = 0; round < 3; ++round) {
    std::vector<token_id> out(5);
    shared.propose(a, {prompt, {}, {}}, out);
    CHECK(out == alone(prompt, 5));
    shared.propose(b, {other_prompt, {}, {}}, out);
    CHECK(out == alone(other_prompt, 5));
  }
}

TEST_CASE("a mirrored drafter checks the pair, has its drafter's name, and may be chosen at run time") {
  const auto target = gemma4::load_model<reference>(golden_directory / "e2b/target");
  const auto assistant = gemma4::load_assistant<elsewhere>(golden_directory / "e2b/assistant");
  const auto stranger = gemma4::load_assistant<elsewhere>(golden_directory / "dense31b/assistant");
  context_of<reference> ctx;
  using session = gemma4::session<reference>;
  session text(target, ctx, {.max_positions = 200});
  context_of<elsewhere> there;
  assistant_drafter<elsewhere> right(assistant, there), wrong(stranger, there);
  mirrored_drafter<elsewhere, assistant_drafter<elsewhere>, session> fits(right, text), does_not(wrong, text);
  CHECK_NOTHROW(fits.check(text));
  error_code code = error_code::argument_invalid;
  try {
    does_not.check(text);
  } catch (const error& e) {
    code = e.code();
  }
  CHECK(code == error_code::pair_mismatch);
  CHECK(std::string(source_of(fits)) == "assistant");

  no_draft none;
  const written plain = write(text, none, prompt, 20, 0);
  any_drafter<session> any(std::move(fits));
  text.clear();
  CHECK(write(text, any, prompt, 20, 3).tokens == plain.tokens);
  CHECK(std::string(source_of(any)) == "assistant");
}

}  // namespace
