// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Passes over rows of several sequences, beside each sequence alone: same bits. The including file names the backends in
// OUTRIDER_TESTED_BACKENDS; their prompts are row-exact.
#pragma once
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "models/golden_data.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/padding.hpp"
#include "outrider/gemma4/batch.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "support/refusal.hpp"

namespace batches {

using namespace outrider;
using gemma4::attention_kind;
using gemma4::sequence_rows;
using models::copy_of;
using models::golden_directory;
using models::same_bits;
using testing::mentions;
using testing::refusal;

inline std::size_t draw(std::mt19937_64& random, std::size_t low, std::size_t high) {
  return std::uniform_int_distribution<std::size_t>(low, high)(random);
}
inline std::vector<token_id> random_tokens(std::mt19937_64& random, std::size_t count, std::size_t vocabulary) {
  std::vector<token_id> tokens(count);
  for (token_id& token : tokens) token = static_cast<token_id>(draw(random, 0, vocabulary - 1));
  return tokens;
}

/// A text, and what a pass over it alone gives for each of its tokens.
template <class B, class Kv>
struct text_alone {
  std::vector<token_id> tokens;
  std::vector<std::vector<float>> logits, hidden;

  text_alone(const gemma4::model<B>& target, context_of<B>& ctx, std::vector<token_id> text) : tokens(std::move(text)) {
    models::passes<B, Kv> run(target, ctx, tokens.size());
    const auto result = run.forward(tokens, tokens.size(), row_kind::decode);
    for (std::size_t r = 0; r < tokens.size(); ++r) {
      logits.push_back(copy_of(result.logits.slice_rows(r, 1)));
      hidden.push_back(copy_of(result.hidden.slice_rows(r, 1)));
    }
  }
};

/// The keys and values that drafter and target see behind the first `committed` positions, by kind of attention.
template <class Kv>
std::vector<float> seen_keys(const gemma4::shared_kv<Kv, host_space>& keys, std::size_t window, std::size_t committed) {
  std::vector<float> all;
  for (const attention_kind kind : gemma4::attention_kinds) {
    const std::size_t begin = kind == attention_kind::sliding && committed > window + 1 ? committed - window - 1 : 0;
    const models::keys_and_values<Kv> seen(keys.layers[static_cast<std::size_t>(kind)], begin, committed);
    all.insert(all.end(), seen.keys.begin(), seen.keys.end());
    all.insert(all.end(), seen.values.begin(), seen.values.end());
  }
  return all;
}

struct met {
  std::size_t passes = 0, ragged = 0, prompts_beside_others = 0, stopped_beside_others = 0, sat_out = 0, rejected = 0, given_up = 0,
              forks = 0, closed = 0, went_back = 0;
};

/// Sequences that come, fork, go back and end at random in a batch, and take part in passes with any number of rows.
template <class B, class Kv>
void live_together(const char* name, std::uint64_t seed, met& seen) {
  CAPTURE(name);
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  context_of<B> ctx{execution{draw(random, 0, 3) == 0 ? 2u : 1u}};
  const auto target = gemma4::load_model<B>(golden_directory / name / "target");
  const std::size_t length = 50, vocabulary = target.config().vocab_size, window = target.config().window;
  gemma4::batch<B, Kv> batch(target, ctx,
                             {.max_sequences = 4,
                              .max_rows = draw(random, 12, 40),
                              .max_draft = draw(random, 0, 5),
                              .prompt_chunk = draw(random, 1, 12),
                              .max_positions = length,
                              .max_rewind = 6});
  struct member {
    std::size_t slot, longest;
    std::shared_ptr<const text_alone<B, Kv>> text;
    bool known = false;  // its last state
  };
  std::vector<member> open;
  const auto new_text = [&](std::span<const token_id> begin) {
    std::vector<token_id> tokens(begin.begin(), begin.end());
    const auto more = random_tokens(random, length - begin.size(), vocabulary);
    tokens.insert(tokens.end(), more.begin(), more.end());
    return std::make_shared<const text_alone<B, Kv>>(target, ctx, std::move(tokens));
  };

  for (int step = 0; step < 60; ++step) {
    if (open.empty() || (batch.size() < batch.max_sequences() && draw(random, 0, 3) == 0)) open.push_back({batch.add(), 0, new_text({})});
    if (draw(random, 0, 9) == 0 && batch.size() < batch.max_sequences()) {
      const member& from = open[draw(random, 0, open.size() - 1)];
      const member fork{batch.fork(from.slot), from.longest, new_text(batch.tokens(from.slot)), from.known};
      open.push_back(fork);
      ++seen.forks;
    }
    if (draw(random, 0, 11) == 0 && open.size() > 1) {
      const std::size_t gone = draw(random, 0, open.size() - 1);
      batch.close(open[gone].slot);
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(gone));
      ++seen.closed;
    }
    if (draw(random, 0, 7) == 0) {
      member& back = open[draw(random, 0, open.size() - 1)];
      const std::size_t committed = batch.committed(back.slot), kept = committed - draw(random, 0, (std::min)(committed, std::size_t{6}));
      if (batch.truncate(back.slot, kept)) {
        back.known = back.known && kept == committed;
        ++seen.went_back;
      } else {
        CHECK(back.longest - kept > 6);
      }
    }

    std::vector<std::vector<token_id>> rows(open.size());
    std::vector<sequence_rows> entries;
    std::vector<std::size_t> who, right;  // by entry: the member, how many leading rows are its text
    std::size_t total = 0, prompts = 0, stopped = 0;
    std::shuffle(open.begin(), open.end(), random);
    for (std::size_t i = 0; i < open.size(); ++i) {
      const std::size_t committed = batch.committed(open[i].slot), left = length - committed;
      const bool prompt = committed == 0 || draw(random, 0, 3) == 0;
      if (left == 0 || draw(random, 0, 3) == 0) continue;
      const std::size_t verified = batch.max_draft() + 1;
      const std::size_t count = draw(random, 1, (std::min)({left, prompt ? batch.prompt_chunk() : verified, batch.max_rows()}));
      if (total + count > batch.max_rows()) continue;
      total += count;
      const auto text = std::span(open[i].text->tokens).subspan(committed, count);
      rows[i].assign(text.begin(), text.end());
      std::size_t true_rows = count;
      if (!prompt && draw(random, 0, 1) == 0) {
        true_rows = draw(random, 1, count);
        for (std::size_t r = true_rows; r < count; ++r) rows[i][r] = (rows[i][r] + 1) % static_cast<token_id>(vocabulary);
      }
      const std::size_t wanted = !prompt ? count : draw(random, 0, 1) == 0 ? 0 : draw(random, 0, (std::min)(count, verified));
      entries.push_back({open[i].slot, rows[i], wanted, prompt});
      who.push_back(i);
      right.push_back(true_rows);
      prompts += prompt ? 1u : 0u;
      stopped += wanted != count ? 1u : 0u;
    }
    if (entries.empty()) continue;
    batch.forward(entries);
    ++seen.passes;
    seen.ragged += std::any_of(entries.begin(), entries.end(), [&](const auto& e) { return e.tokens.size() != entries[0].tokens.size(); });
    seen.prompts_beside_others += prompts != 0 && prompts != entries.size() ? 1u : 0u;
    seen.stopped_beside_others += stopped != 0 && entries.size() > 1 ? 1u : 0u;
    seen.sat_out += open.size() - entries.size();

    std::size_t wrong = 0;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const member& m = open[who[i]];
      const std::size_t committed = batch.committed(m.slot), unwanted = entries[i].tokens.size() - entries[i].wanted;
      REQUIRE(batch.logits(i).rows == entries[i].wanted);
      REQUIRE(batch.hidden(i).rows == entries[i].wanted);
      for (std::size_t r = unwanted; r < right[i]; ++r) {
        wrong += !same_bits(copy_of(batch.logits(i).slice_rows(r - unwanted, 1)), m.text->logits[committed + r]);
        wrong += !same_bits(copy_of(batch.hidden(i).slice_rows(r - unwanted, 1)), m.text->hidden[committed + r]);
      }
    }
    CHECK(wrong == 0);

    for (std::size_t i = 0; i < entries.size(); ++i) {
      member& m = open[who[i]];
      m.longest = (std::max)(m.longest, batch.committed(m.slot) + entries[i].tokens.size());
      if (draw(random, 0, 7) == 0) {
        ++seen.given_up;
        continue;
      }
      const std::size_t kept = entries[i].prompt ? right[i] : draw(random, 1, right[i]);
      batch.commit(m.slot, kept);
      m.known = kept > entries[i].tokens.size() - entries[i].wanted;
      seen.rejected += entries[i].tokens.size() - kept;
    }
    for (const member& m : open) {
      const auto slot = batch.target(m.slot);
      const std::size_t committed = batch.committed(m.slot);
      CHECK(slot.committed() == committed);
      CHECK(std::ranges::equal(slot.tokens(), std::span(m.text->tokens).first(committed)));
      REQUIRE(slot.hidden().rows == (m.known ? 1 : 0));
      if (m.known) CHECK(same_bits(copy_of(slot.hidden()), m.text->hidden[committed - 1]));
    }
  }
  for (const member& m : open) {
    const auto slot = batch.target(m.slot);
    if (slot.committed() == 0) continue;
    gemma4::session<B, Kv> session(target, ctx, {.max_positions = length});
    session.prefill(slot.tokens());
    CHECK(same_bits(seen_keys(slot.keys(), window, slot.committed()), seen_keys(session.keys(), window, slot.committed())));
  }
}

TEST_CASE_TEMPLATE("every sequence of a batch has the bits it has alone, whoever is beside it", B, OUTRIDER_TESTED_BACKENDS) {
  met seen;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    for (const char* name : {"e2b", "e4b", "dense31b", "moe26b"}) live_together<B, float>(name, seed, seen);
    live_together<B, bf16>("e2b", seed, seen);
  }
  CHECK(seen.passes > 1500);
  CHECK(seen.ragged > 500);
  CHECK(seen.prompts_beside_others > 300);
  CHECK(seen.stopped_beside_others > 300);
  CHECK(seen.sat_out > 1000);
  CHECK(seen.rejected > 500);
  CHECK(seen.given_up > 300);
  CHECK(seen.forks > 50);
  CHECK(seen.closed > 50);
  CHECK(seen.went_back > 100);
}

TEST_CASE_TEMPLATE("the recorded left-padded batch, padding stripped: its texts and its logits", B, OUTRIDER_TESTED_BACKENDS) {
  const models::golden expected("left_padding_batch");
  const std::vector<token_id> ids = expected.ids("ids"), mask = expected.ids("mask"), greedy = expected.ids("greedy");
  const std::vector<float> logits = expected.floats("logits");
  const std::size_t count = expected.shape("ids").at(0), new_tokens = expected.shape("greedy").at(1);
  const auto prompts = strip_left_padding_rows(ids, mask, count);

  context_of<B> ctx{models::one_thread};
  const auto target = gemma4::load_model<B>(golden_directory / "e2b/target");
  const std::size_t vocabulary = target.config().vocab_size;
  gemma4::batch<B> batch(target, ctx, {.max_sequences = count, .max_rows = 64, .max_draft = 0, .prompt_chunk = 32, .max_positions = 100});
  std::vector<std::vector<token_id>> texts(count);
  std::vector<sequence_rows> entries;
  for (const auto& prompt : prompts) entries.push_back({batch.add(), prompt, 1, true});
  for (std::size_t n = 0; n < new_tokens; ++n) {
    batch.forward(entries);
    for (std::size_t i = 0; i < count; ++i) {
      if (n == 0)
        models::check_close("logits", copy_of(batch.logits(i)),
                            {logits.begin() + static_cast<std::ptrdiff_t>(i * vocabulary),
                             logits.begin() + static_cast<std::ptrdiff_t>((i + 1) * vocabulary)},
                            vocabulary, expected.tolerance("logits"),
                            models::roundings_per_layer * static_cast<double>(target.config().layer_count() + 2));
      batch.commit(entries[i].slot, entries[i].tokens.size());
      pointwise_ops<B>::argmax(ctx, &texts[i].emplace_back(), batch.logits(i), {});
    }
    for (std::size_t i = 0; i < count; ++i) entries[i] = {entries[i].slot, std::span(texts[i]).last(1), 1, false};
  }
  for (std::size_t i = 0; i < count; ++i) {
    CAPTURE(i);
    CHECK(std::ranges::equal(texts[i], std::span(greedy).subspan(i * new_tokens, new_tokens)));
  }
}

TEST_CASE_TEMPLATE("a drafter guesses behind a slot what it guesses behind a session, after passes of others too", B,
                   OUTRIDER_TESTED_BACKENDS) {
  std::mt19937_64 random(7);
  for (const char* name : {"e2b", "dense31b"}) {
    CAPTURE(name);
    models::model_pair<B> pair(golden_directory / name);
    const std::size_t vocabulary = pair.target.config().vocab_size;
    gemma4::session<B> session(pair.target, pair.ctx, {.max_draft = 4, .prompt_chunk = 8, .max_positions = 100});
    gemma4::batch<B> batch(pair.target, pair.ctx, {.max_sequences = 3, .max_draft = 4, .prompt_chunk = 8, .max_positions = 100});
    assistant_drafter<B> drafter(pair.assistant, pair.ctx);
    const std::size_t other = batch.add(), slot = batch.add();
    const auto pass = [&](std::size_t to, std::span<const token_id> tokens, std::size_t wanted) {
      const sequence_rows entry{to, tokens, wanted, true};
      batch.forward(std::span(&entry, 1));
      batch.commit(to, tokens.size());
    };
    std::vector<token_id> text = random_tokens(random, 30, vocabulary);
    session.prefill(std::span(text).first(29));
    for (std::size_t begin = 0; begin < 29; begin += 5)
      pass(slot, std::span(text).subspan(begin, (std::min)(std::size_t{5}, 29 - begin)), 1);
    pass(other, random_tokens(random, 8, vocabulary), 1);
    const std::size_t fork = batch.fork(slot);
    pass(other, random_tokens(random, 8, vocabulary), 0);

    draft_request request;
    request.text = text;
    std::vector<token_id> expected(4), guessed(4);
    REQUIRE(drafter.propose(session, request, expected) == 4);
    for (const std::size_t one : {slot, fork}) {
      const auto view = batch.target(one);
      drafter.check(view);
      CHECK(drafter.propose(view, request, guessed) == 4);
      CHECK(guessed == expected);
    }
  }
}

}  // namespace batches
