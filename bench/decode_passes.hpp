// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The parts of decoding one by one, for bench/decode.cpp: a prompt, passes of 1 to 17 rows, choosing a token, draft steps, rounds.
#pragma once
#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "decode_pair.hpp"
#include "machine.hpp"

namespace bench {

inline constexpr std::size_t most_rows = max_draft_length + 1;
inline constexpr std::array<std::size_t, 13> rows_timed{1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 14, 16, most_rows};
inline constexpr std::array<std::size_t, 6> lengths_timed{1, 2, 3, 4, 6, 8};  // drafts of a round; a pass has one row more
inline constexpr std::size_t drafts_timed = 4;                                // steps of a timed proposal
inline constexpr std::size_t most_samples = 5;                                // of a figure in a round; their median counts

/// A sample of every figure per round.
struct pass_samples {
  std::vector<double> prefill;                                      // tokens/s
  std::vector<double> choose_ms;                                    // a token from its logits
  std::vector<double> draft_ms, draft_cost;                         // a draft step, also in plain passes
  std::map<std::size_t, std::vector<double>> pass_ms, pass_cost;    // by rows, also in plain passes; choosing included
  std::map<std::size_t, std::vector<double>> round_ms, round_cost;  // by drafts: all steps, the pass, choosing and comparing
};

/// The median of up to most_samples runs of `work`, fewer where they take longer than `seconds` together. The runs that are timed follow one
/// like them, whatever was measured before.
template <class Work>
double median_ms(double seconds, Work&& work) {
  std::vector<double> ms;
  work();
  for (double spent = 0; ms.size() < most_samples && (ms.empty() || spent + ms.back() <= 1000 * seconds); spent += ms.back())
    ms.push_back(milliseconds(work));
  return summary(ms).median;
}

/// `count` ids that look like a text: the prompts over and over.
inline ids long_text(const std::vector<ids>& texts, std::size_t count) {
  ids text;
  while (text.size() < count)
    for (const ids& prompt : texts) text.insert(text.end(), prompt.begin(), prompt.end());
  text.resize(count);
  return text;
}

/// How many experts the rows of a pass choose, each counted once a layer, by rows; empty for models without experts.
template <class B, class Kv>
std::map<std::size_t, std::size_t> count_chosen_experts(loaded_pair<B, Kv>& pair, const ids& context) {
  const gemma4::text_config& c = pair.model.config();
  std::map<std::size_t, std::size_t> chosen;
  if (c.experts == 0) return chosen;
  gemma4::workspace<B> workspace(c, most_rows, most_rows);
  kv_cache<B, Kv> cache(pair.model.kv_layers(), most_rows, context.size() + most_rows);
  const auto pass = [&](std::span<const token_id> tokens, auto&& observe) {
    pair.model.forward(pair.ctx, workspace, cache, tokens, tokens.size(), row_kind::decode, observe);
  };
  for (std::size_t begin = 0; begin < context.size(); begin += most_rows) {
    const auto tokens = std::span(context).subspan(begin, (std::min)(most_rows, context.size() - begin));
    pass(tokens, gemma4::no_observer{});
    cache.commit(tokens.size());
  }
  for (const std::size_t m : rows_timed) {
    pass(std::span(context).first(m), [&]<class View>(gemma4::stage stage, std::size_t, const View& view) {
      if constexpr (std::same_as<View, matrix_for<std::int32_t, B>>) {
        if (stage != gemma4::stage::experts) return;
        std::set<std::int32_t> distinct;
        for (std::size_t r = 0; r < view.rows; ++r) distinct.insert(view.row(r), view.row(r) + view.cols);
        chosen[m] += distinct.size();
      }
    });
    cache.rollback();
  }
  return chosen;
}

/// A prompt, then passes and draft steps behind it. Nothing is committed, so each of them meets the same cache.
template <class B, class Kv>
void measure_passes(loaded_pair<B, Kv>& pair, const arguments& args, const ids& context, pass_samples& s) {
  auto& session = pair.session;
  session.clear();
  s.prefill.push_back(1000 * static_cast<double>(context.size()) / milliseconds([&] { session.prefill(context); }));

  // Draft steps first: they read the state that the prompt left, which a pass replaces by its own.
  std::array<token_id, most_rows> guesses{}, picks{};
  const auto propose = [&](std::size_t k) { pair.drafter.propose(std::as_const(session), {context, {}, {}}, std::span(guesses).first(k)); };
  const double step = median_ms(args.seconds, [&] { propose(drafts_timed); }) / drafts_timed;
  const auto choose = [&] { greedy{}.pick<B>(pair.ctx, session.logits(), context, picks.data()); };
  s.choose_ms.push_back(median_ms(args.seconds, choose));

  const auto verify = [&](std::size_t m) {
    session.verify(std::span(context).first(m));
    choose();
  };
  std::map<std::size_t, double> pass;
  for (const std::size_t m : rows_timed) pass[m] = median_ms(args.seconds, [&] { verify(m); });
  const double plain = pass.at(1);
  for (const auto& [m, ms] : pass) s.pass_ms[m].push_back(ms), s.pass_cost[m].push_back(ms / plain);
  s.draft_ms.push_back(step), s.draft_cost.push_back(step / plain);

  for (const std::size_t k : lengths_timed) {
    const double ms = median_ms(args.seconds, [&] {
      propose(k);
      verify(k + 1);
      static_cast<void>(count_accepted(guesses.data(), picks.data(), k));
    });
    s.round_ms[k].push_back(ms), s.round_cost[k].push_back(ms / plain);
  }
}

/// Plain passes with `positions` in the cache: milliseconds, and what part of them the positions behind the first args.context cost, in percent.
struct long_pass {
  std::size_t positions = 0;
  std::vector<double> ms, share;
};

/// Plain passes with a quarter, half and all of args.long_context in the cache, each beside one with args.context positions.
template <class B, class Kv>
std::vector<long_pass> measure_long_context(loaded_pair<B, Kv>& pair, const arguments& args, const std::vector<ids>& texts, progress& say) {
  constexpr std::size_t part = 1024, pairs = 15;  // of the prompt, between two words about it
  auto& session = pair.session;
  const ids text = long_text(texts, args.long_context);
  gemma4::session<B, Kv> short_one(pair.model, pair.ctx);
  short_one.prefill(std::span(text).first((std::min)(args.context, text.size())));
  session.clear();
  const auto pass = [&](auto& of) {
    token_id pick = 0;
    of.verify(std::span(text).first(1));
    greedy{}.pick<B>(pair.ctx, of.logits(), of.tokens(), &pick);
  };
  std::vector<long_pass> passes;
  for (const std::size_t end : {text.size() / 4, text.size() / 2, text.size()}) {
    while (session.committed() < end) {
      const std::size_t begin = session.committed();
      session.prefill(std::span(text).subspan(begin, (std::min)(part, end - begin)));
      say("a prompt of " + std::to_string(text.size()) + " tokens, " + std::to_string(session.committed()) + " done");
    }
    std::vector<double> ms, share;
    for (std::size_t i = 0; i < pairs; ++i) {
      const double base = milliseconds([&] { pass(short_one); });
      ms.push_back(milliseconds([&] { pass(session); }));
      share.push_back(100 * (1 - base / ms.back()));
    }
    passes.push_back({end, ms, share});
  }
  return passes;
}

}  // namespace bench
