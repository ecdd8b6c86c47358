// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Target and drafter in memory that the host cannot read: the decoding loops against the same ones in host memory.
#include <doctest/doctest.h>

#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <vector>

#include "outrider/backend/reference.hpp"
#include "outrider/decode/any_drafter.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/batch_decoder.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/batch.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "support/elsewhere_backend.hpp"

namespace {

using namespace outrider;
using testing::elsewhere;

const std::filesystem::path golden_directory = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "tests/golden";
const std::vector<token_id> prompt{2, 17, 90, 3, 44, 101, 7, 9, 65, 12, 33, 5};

struct written {
  std::vector<token_id> tokens;
  std::vector<std::size_t> accepted;
  bool operator==(const written&) const = default;
};

/// A pair on backend B, loaded from a golden model.
template <class B>
struct pair {
  explicit pair(const char* name)
      : target(gemma4::load_model<B>(golden_directory / name / "target")),
        assistant(gemma4::load_assistant<B>(golden_directory / name / "assistant")) {}

  template <class Sampler>
  written write(std::size_t drafts, Sampler sampler, generate_options options = {}) {
    gemma4::session<B> text(target, ctx, {.max_draft = 6, .prompt_chunk = 5, .max_positions = 200});
    any_drafter<gemma4::session<B>> drafter{assistant_drafter<B>(assistant, ctx)};
    speculative_decoder decoder(text, drafter, sampler, fixed<max_draft_length>{});
    written result;
    options.max_new_tokens = 30;
    options.draft = drafts;
    options.on_pass = [&](const round_record& r) { result.accepted.push_back(r.accepted); };
    decoder.generate(prompt, options, [&](token_id token) { result.tokens.push_back(token); });
    CHECK(std::vector<token_id>(text.tokens().begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.tokens().end()) ==
          std::vector<token_id>(result.tokens.begin(), result.tokens.end() - 1));
    return result;
  }

  context_of<B> ctx;
  gemma4::model<B> target;
  gemma4::assistant<B> assistant;
};

TEST_CASE("rounds on a device write what rounds on the host do, accept as much, and leave the same tokens behind") {
  for (const char* name : {"e2b", "e4b", "dense31b", "moe26b"}) {
    CAPTURE(name);
    pair<reference> here(name);
    pair<elsewhere> there(name);
    for (const std::size_t drafts : std::initializer_list<std::size_t>{0, 1, 4, 6}) {
      CAPTURE(drafts);
      const written want = here.write(drafts, greedy{});
      CHECK(there.write(drafts, greedy{}) == want);
      CHECK(there.write(drafts, sampling(sampling_options{})) == want);
    }
  }
}

TEST_CASE("suppressed tokens, an end of text among the drafts and a least confidence mean the same on a device") {
  pair<reference> here("e2b");
  pair<elsewhere> there("e2b");
  const written plain = here.write(0, greedy{});
  for (const std::size_t drafts : std::initializer_list<std::size_t>{0, 3, 6}) {
    CAPTURE(drafts);
    generate_options options;
    options.suppress = {plain.tokens[1], plain.tokens[4]};
    CHECK(there.write(drafts, greedy{}, options) == here.write(drafts, greedy{}, options));
    options.suppress = {};
    for (const std::size_t last : std::initializer_list<std::size_t>{2, 5, 9}) {
      options.eos = {plain.tokens[last]};
      CHECK(there.write(drafts, greedy{}, options) == here.write(drafts, greedy{}, options));
    }
    options.eos = {};
    options.min_confidence = 0.02f;
    CHECK(there.write(drafts, greedy{}, options) == here.write(drafts, greedy{}, options));
  }
}

TEST_CASE("a table of per-layer embeddings for which a device has no room is looked up on the host") {
  for (const char* name : {"e2b", "e4b"}) {
    CAPTURE(name);
    pair<reference> here(name);
    testing::counting_space::free_bytes = 1;
    pair<elsewhere> there(name);
    testing::counting_space::free_bytes = ~std::size_t{0};
    CHECK_FALSE(there.target.reads_ids_there());
    CHECK(pair<elsewhere>(name).target.reads_ids_there());
    for (const std::size_t drafts : std::initializer_list<std::size_t>{0, 4})
      CHECK(there.write(drafts, greedy{}) == here.write(drafts, greedy{}));
  }
}

TEST_CASE("drawn texts are the same on a device") {
  pair<reference> here("e2b");
  pair<elsewhere> there("e2b");
  for (const sampling_options& options :
       {sampling_options{.temperature = 1, .seed = 5}, sampling_options{.temperature = 0.8f, .top_k = 5, .top_p = 0.9f, .seed = 6},
        sampling_options{.temperature = 1, .repetition_penalty = 1.3f, .seed = 7}}) {
    for (const std::size_t drafts : std::initializer_list<std::size_t>{0, 4}) {
      CAPTURE(drafts);
      CHECK(there.write(drafts, sampling(options)) == here.write(drafts, sampling(options)));
    }
  }
}

TEST_CASE("a batch on a device writes what each text would alone") {
  pair<reference> here("e2b");
  pair<elsewhere> there("e2b");
  const written want = here.write(3, greedy{});
  gemma4::batch<elsewhere> batch(there.target, there.ctx, {.max_sequences = 3, .max_draft = 3, .prompt_chunk = 5, .max_positions = 200});
  assistant_drafter<elsewhere> drafter(there.assistant, there.ctx);
  batch_decoder decoder(batch, drafter, fixed<max_draft_length>{});
  std::vector<std::vector<token_id>> texts(2);
  for (std::vector<token_id>& text : texts)
    decoder.submit({.prompt = prompt, .options = {.max_new_tokens = 30, .draft = 3}, .on_token = [&](token_id token) {
                      text.push_back(token);
                      return std::optional<finish_reason>{};
                    }});
  while (decoder.step()) {
  }
  for (const std::vector<token_id>& text : texts) CHECK(text == want.tokens);
}

TEST_CASE("sequences forked on a device go their own ways") {
  pair<reference> here("e2b");
  pair<elsewhere> there("e2b");
  const auto choices = []<class B>(pair<B>& p) {
    gemma4::batch<B> batch(p.target, p.ctx, {.max_sequences = 2, .max_draft = 3, .prompt_chunk = 300, .max_positions = 600});
    std::vector<token_id> ids(300);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<token_id>(2 + i * 7 % 100);
    const std::size_t first = batch.add();
    std::vector<gemma4::sequence_rows> pass{{first, ids, 1, true}};
    batch.forward(pass);
    batch.commit(first, ids.size());
    const std::size_t second = batch.fork(first);
    std::vector<token_id> chosen;
    for (int step = 0; step < 4; ++step) {
      const std::vector<token_id> a{static_cast<token_id>(10 + step)}, b{static_cast<token_id>(50 + step)};
      pass = {{first, a, 1}, {second, b, 1}};
      batch.forward(pass);
      for (std::size_t i = 0; i < 2; ++i) {
        most_likely<B>(p.ctx, {&chosen.emplace_back(), 1}, batch.logits(i));
        batch.commit(i == 0 ? first : second, 1);
      }
    }
    return chosen;
  };
  CHECK(choices(there) == choices(here));
}

}  // namespace
