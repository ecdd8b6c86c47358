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
#include "outrider/decode/cascade_drafter.hpp"
#include "outrider/decode/ngram_drafter.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/batch.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "support/elsewhere_backend.hpp"

namespace outrider::testing {

/// Elsewhere, with the op that draws. It counts how often the host waits.
struct drawing {};
struct drawing_context : elsewhere_context {
  using elsewhere_context::elsewhere_context;
  std::size_t waits = 0;
  void wait() noexcept { ++waits; }
};

}  // namespace outrider::testing

namespace outrider {

template <>
struct backend_traits<testing::drawing> : backend_traits<testing::elsewhere> {
  using context = testing::drawing_context;
};
template <class W>
  requires listed_weight<W> || listed_group<W>
struct linear_ops<testing::drawing, W> : linear_ops<testing::elsewhere, W> {
};
template <listed_kv Kv>
struct attention_ops<testing::drawing, Kv> : attention_ops<testing::elsewhere, Kv> {};

template <>
struct pointwise_ops<testing::drawing> : pointwise_ops<testing::elsewhere> {
  static void draw(context& ctx, token_id* out, rows<const float> x, rows<const token_id> ids, std::size_t position,
                   const draw_rule& rule) noexcept {
    sampling host({.temperature = rule.temperature,
                   .top_k = rule.top_k,
                   .top_p = rule.top_p,
                   .min_p = rule.min_p,
                   .seed = rule.seed,
                   .sequence = rule.sequence});
    for (std::size_t r = 0; r < x.rows; ++r)
      context::reach(out)[r] =
          host.draw<reference>(ctx, testing::here(x.slice_rows(r, 1)),
                               ids.data ? testing::here(ids.slice_rows(r, 1)) : matrix_view<const token_id>{}, position + r);
  }
};

static_assert(check_backend<testing::drawing>());
static_assert(has_draw<testing::drawing> && !has_draw<testing::elsewhere> && !has_draw<reference>);

}  // namespace outrider

namespace {

using namespace outrider;
using testing::copy_count;
using testing::counting_space;
using testing::drawing;
using testing::elsewhere;

const std::filesystem::path golden_directory = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "tests/golden";
const std::vector<token_id> prompt{2, 17, 90, 3, 44, 101, 7, 9, 65, 12, 33, 5};
constexpr std::size_t waits_of_prompt = 3 + 1;  // its chunks, and the token behind it

struct written {
  std::vector<token_id> tokens;
  std::vector<std::size_t> accepted;
  std::size_t joint_drafts = 0;  // made and verified at one go

  bool operator==(const written& other) const { return tokens == other.tokens && accepted == other.accepted; }
};

/// A drafter that somebody else keeps.
template <class D>
struct borrowed {
  static constexpr draft_needs needs = D::needs;
  D* drafter;

  template <class Target>
  std::size_t propose(const Target& target, const draft_request& request, std::span<token_id> out) {
    return drafter->propose(target, request, out);
  }
  [[nodiscard]] bool may_draft_there(const draft_request& request) const requires requires(const D& d) { d.may_draft_there(request); }
  { return std::as_const(*drafter).may_draft_there(request); }
  template <class Target>
    requires drafts_there<D, Target> std::size_t propose_there(const Target& target, const draft_request& request, std::size_t count,
                                                               token_id* ids) {
      return drafter->propose_there(target, request, count, ids);
    }
};

/// A pair on backend B, loaded from a golden model.
template <class B>
struct pair {
  explicit pair(const char* name)
      : target(gemma4::load_model<B>(golden_directory / name / "target")),
        assistant(gemma4::load_assistant<B>(golden_directory / name / "assistant")) {}

  template <class Sampler>
  written write(std::size_t drafts, Sampler sampler, generate_options options = {}) {
    assistant_drafter<B> drafter(assistant, ctx);
    return write_with(drafter, drafts, sampler, options);
  }

  template <class Drafter, class Sampler>
  written write_with(Drafter& inner, std::size_t drafts, Sampler sampler, generate_options options = {}) {
    gemma4::session<B> text(target, ctx, {.max_draft = 6, .prompt_chunk = 5, .max_positions = 200});
    any_drafter<gemma4::session<B>> drafter{borrowed<Drafter>{&inner}};
    speculative_decoder decoder(text, drafter, sampler, fixed<max_draft_length>{});
    written result;
    options.max_new_tokens = 30;
    options.draft = drafts;
    options.on_pass = [&](const round_record& r) {
      result.accepted.push_back(r.accepted);
      result.joint_drafts += r.joint_drafts;
      CHECK((r.joint_drafts == 0 || (r.joint_drafts >= r.drafted && r.draft_seconds == 0)));
    };
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

TEST_CASE("drawn texts are the same on a device, whether it draws by itself or not, and their drafts are accepted as often") {
  for (const char* name : {"e2b", "dense31b"}) {  // with a sparse head and without
    CAPTURE(name);
    pair<reference> here(name);
    pair<elsewhere> there(name);
    pair<drawing> by_itself(name);
    for (const sampling_options& options :
         {sampling_options{.temperature = 1, .seed = 5}, sampling_options{.temperature = 0.8, .top_k = 5, .top_p = 0.9, .seed = 6},
          sampling_options{.temperature = 1.5, .min_p = 0.01, .seed = 7, .sequence = 3},
          sampling_options{.temperature = 1, .repetition_penalty = 1.3, .seed = 8}})
      for (const std::size_t drafts : std::initializer_list<std::size_t>{0, 1, 4}) {
        CAPTURE(options.seed);
        CAPTURE(drafts);
        const written want = here.write(drafts, sampling(options));
        CHECK(there.write(drafts, sampling(options)) == want);
        CHECK(by_itself.write(drafts, sampling(options)) == want);
      }
  }
}

TEST_CASE("a least confidence, suppressed tokens and an end of text mean the same for drawn drafts") {
  pair<reference> here("e2b");
  pair<drawing> there("e2b");
  const sampling sampler({.temperature = 1, .top_k = 20, .seed = 5});
  const written plain = here.write(0, sampler);
  generate_options options;
  options.suppress = {plain.tokens[1], plain.tokens[4]};
  CHECK(there.write(4, sampler, options) == here.write(4, sampler, options));
  options.suppress = {};
  options.eos = {plain.tokens[5]};
  CHECK(there.write(4, sampler, options) == here.write(4, sampler, options));
  options.eos = {};
  options.min_confidence = 0.02f;
  CHECK(there.write(4, sampler, options) == here.write(4, sampler, options));
}

TEST_CASE("a device that draws is waited for once a round, and no logits are copied") {
  pair<drawing> there("e2b");
  for (const sampling_options& options : {sampling_options{}, sampling_options{.temperature = 1, .top_k = 20, .top_p = 0.9, .seed = 5}})
    for (const std::size_t drafts : std::initializer_list<std::size_t>{0, 4}) {
      CAPTURE(options.temperature);
      CAPTURE(drafts);
      const copy_count copied = counting_space::out<float>;
      const std::size_t waited = there.ctx.waits;
      const written text = there.write(drafts, sampling(options));
      CHECK((text.joint_drafts > 0) == (drafts > 0));
      CHECK(there.ctx.waits - waited == waits_of_prompt + text.accepted.size());
      CHECK(counting_space::out<float>.elements == copied.elements);
    }
}

TEST_CASE("a device is waited for once a round as well where drafts come from the host, or from either") {
  pair<reference> here("e2b");
  pair<drawing> there("e2b");
  assistant_drafter<reference> assistant_here(here.assistant, here.ctx);
  assistant_drafter<drawing> assistant_there(there.assistant, there.ctx);
  ngram_drafter n_grams({.max_ngram = 2, .min_ngram = 1});
  cascade_drafter both_here(n_grams, assistant_here);
  cascade_drafter both_there(n_grams, assistant_there);
  for (const sampling_options& options : {sampling_options{}, sampling_options{.temperature = 0.3, .seed = 5}}) {
    CAPTURE(options.temperature);
    const auto waits_of = [&](auto& drafter, const written& want) {
      const std::size_t waited = there.ctx.waits;
      const written text = there.write_with(drafter, 4, sampling(options));
      CHECK(text == want);
      CHECK(there.ctx.waits - waited == waits_of_prompt + text.accepted.size());
      return text;
    };
    CHECK(waits_of(n_grams, here.write_with(n_grams, 4, sampling(options))).joint_drafts == 0);
    CHECK(waits_of(both_there, here.write_with(both_here, 4, sampling(options))).joint_drafts > 0);
  }
  for (const std::size_t source : std::initializer_list<std::size_t>{0, 1}) {
    CHECK(both_there.from(source).rounds > 0);
    CHECK(both_there.from(source).rounds == both_here.from(source).rounds);
  }
}

TEST_CASE("penalties need the host, also where a device could draw") {
  const sampling greedy_one, drawn({.temperature = 1}), penalised({.temperature = 1, .presence_penalty = 1});
  CHECK((greedy_one.may_pick_there<elsewhere>() && greedy_one.may_pick_there<drawing>()));
  CHECK((!drawn.may_pick_there<elsewhere>() && drawn.may_pick_there<drawing>()));
  CHECK((!penalised.may_pick_there<drawing>() && penalised.may_draw_there<drawing>()));
}

TEST_CASE("more rows than ids fit into the memory of both sides are drawn in parts") {
  constexpr std::size_t m = 150, n = 40;
  buffer<float, counting_space> memory(m * n);
  std::vector<float> logits(m * n);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 37 % 101) / 16;
  space_copy<host_space, counting_space>::copy(memory.data(), logits.data(), logits.size());
  const std::vector<token_id> text(m + 5);
  for (const double temperature : {0.0, 1.0}) {
    sampling sampler({.temperature = temperature});
    std::vector<token_id> there(m), here(m);
    testing::drawing_context ctx;
    sampler.pick<drawing>(ctx, {memory.data(), m, n, n}, text, there.data());
    reference_context plain;
    sampler.pick<reference>(plain, {logits.data(), m, n, n}, text, here.data());
    CHECK(there == here);
    CHECK(ctx.waits == 3);
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
