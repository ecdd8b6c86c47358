// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What bench/device.cpp measures of a pair: passes of one row and of several, draft steps, rounds, a prompt, and what it costs to get a pass
// to the device. For any backend; a backend in host memory has nothing to send.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "device_model.hpp"
#include "machine.hpp"
#include "outrider/backend/traits.hpp"
#include "outrider/core/space_copy.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/session.hpp"

namespace bench {

using ids = std::vector<token_id>;

inline constexpr std::array<std::size_t, 4> rows_timed{1, 2, 4, 8};
inline constexpr std::size_t drafts_timed = 3;      // of a round and of a timed proposal
inline constexpr std::size_t runs_of_a_sample = 3;  // whose median it is, behind one that does not count
inline constexpr std::size_t tokens_compared = 32, drafts_compared = 4;
inline constexpr std::size_t most_tokens_of_a_round = 128;  // in the cache behind the prompt, when a round of samples is over

/// What it costs to get a pass to the device.
struct send_samples {
  std::vector<double> queue_ms, pass_ms;  // until the host has asked for everything and waits; until all is done
};

/// A sample of every figure a round.
struct device_samples {
  std::vector<double> prompt;                                     // tokens/s
  std::map<std::size_t, std::vector<double>> pass_ms, pass_cost;  // by rows, also in plain passes; choosing included
  std::vector<double> draft_ms, draft_cost;                       // a step, also in plain passes
  std::vector<double> round_ms, round_cost;                       // of drafts_timed drafts, as speculative_decoder does it
  std::size_t launches = 0;                                       // of a plain pass
  send_samples graphs, singly;                                    // a plain pass whose launches go out as a graph, or one by one
};

/// A pair with one sequence. Not movable: its parts point to each other.
template <class B, class Kv>
struct random_pair {
  context_of<B> ctx;
  gemma4::model<B> model;
  gemma4::assistant<B> assistant;
  gemma4::session<B, Kv> session;
  assistant_drafter<B> drafter;

  random_pair(const pair_config& config, const random_tensors& tensors, std::size_t context)
      : model(config.target, tensors.target),
        assistant(config.assistant, tensors.assistant),
        session(model, ctx, {.max_positions = context + most_tokens_of_a_round}),
        drafter(assistant, ctx) {}
  random_pair(const random_pair&) = delete;
  random_pair& operator=(const random_pair&) = delete;
};

/// `count` ids spread over the vocabulary.
inline ids prompt_of(std::size_t count, std::size_t vocab_size) {
  ids prompt(count);
  for (std::size_t i = 0; i < count; ++i) prompt[i] = static_cast<token_id>((7919 + i * 104729) % vocab_size);
  return prompt;
}

/// Refuses to go on where logits are no numbers, or where speculation changes the text.
template <class B, class Kv>
void check_text(random_pair<B, Kv>& pair, const ids& prompt) {
  const generate_options options{.max_new_tokens = tokens_compared, .draft = drafts_compared};
  ids plain, speculative;
  const auto into = [](ids& text) { return [&text](token_id token) { text.push_back(token); }; };
  pair.session.clear();
  generate(pair.session, prompt, options, into(plain));
  const auto logits = pair.session.logits();
  std::vector<float> row(logits.cols);
  copy_across(matrix_view<float>{row.data(), 1, row.size(), row.size()}, logits.slice_rows(0, 1));
  if (!std::all_of(row.begin(), row.end(), [](float logit) { return std::isfinite(logit); }))
    throw std::runtime_error("logits that are no finite numbers; no figures from such a program");
  pair.session.clear();
  speculative_decoder(pair.session, pair.drafter, greedy{}, fixed<drafts_compared>{}).generate(prompt, options, into(speculative));
  if (plain != speculative) throw std::runtime_error("speculation changes the text; no figures from such a program");
}

/// Writes a text and takes the times of its parts.
template <class B, class Kv>
class pass_timer {
 public:
  pass_timer(random_pair<B, Kv>& pair, ids prompt) : pair_(pair), session_(pair.session), prompt_(std::move(prompt)) {}

  /// One sample of every figure. What is compared is measured side by side.
  void round(device_samples& s) {
    session_.clear();
    text_ = prompt_;
    text_.reserve(prompt_.size() + most_tokens_of_a_round);
    session_.reserve(prompt_.size() + most_tokens_of_a_round);
    token_id next = 0;
    const double prompt_ms = milliseconds([&] {
      session_.prefill(prompt_);
      greedy{}.pick<B>(pair_.ctx, session_.logits(), text_, &next);
    });
    text_.push_back(next);
    s.prompt.push_back(1000 * static_cast<double>(prompt_.size()) / prompt_ms);

    const double step = sample([&] { draft(); }) / drafts_timed;
    std::map<std::size_t, double> pass;
    for (const std::size_t m : rows_timed) pass[m] = sample([&] { verify(m); });
    const double plain = pass.at(1), whole = rounds();
    for (const auto& [m, ms] : pass) s.pass_ms[m].push_back(ms), s.pass_cost[m].push_back(ms / plain);
    s.draft_ms.push_back(step), s.draft_cost.push_back(step / plain);
    s.round_ms.push_back(whole), s.round_cost.push_back(whole / plain);
    if constexpr (!host_accessible<space_of<B>>)
      if (session_.reads_ids_there()) send(s);
  }

 private:
  template <class Work>
  static double sample(Work&& work) {
    std::vector<double> ms;
    work();
    for (std::size_t i = 0; i < runs_of_a_sample; ++i) ms.push_back(milliseconds(work));
    return summary(ms).median;
  }

  /// A pass over the last token and m − 1 drafts, none of which holds.
  void verify(std::size_t m) {
    std::array<token_id, rows_timed.back()> rows{}, picks{};
    rows[0] = text_.back();
    std::copy_n(prompt_.begin(), m - 1, rows.begin() + 1);
    session_.verify(std::span<const token_id>(rows).first(m));
    greedy{}.pick<B>(pair_.ctx, session_.logits(), text_, picks.data());
    session_.commit(1);
    text_.push_back(picks[0]);
  }

  void draft() {
    std::array<token_id, drafts_timed> guesses{};
    pair_.drafter.propose(std::as_const(session_), {text_, {}, {}}, guesses);
  }

  /// Milliseconds of a round of drafts_timed drafts.
  double rounds() {
    std::vector<double> ms;
    const auto keep = [&](const round_record& r) {
      if (r.drafted == drafts_timed) ms.push_back(1000 * (r.draft_seconds + r.verify_seconds));
    };
    const generate_options options{.max_new_tokens = most_tokens_of_a_round / 2, .draft = drafts_timed, .on_pass = keep};
    const ids last{text_.back()};
    speculative_decoder(session_, pair_.drafter, greedy{}, fixed<drafts_timed>{}).generate(last, options, [&](token_id token) {
      text_.push_back(token);
      return ms.size() < runs_of_a_sample;
    });
    if (ms.size() < 2) throw std::runtime_error("the text of rounds ended before two of them had all their drafts");
    ms.erase(ms.begin());  // with what is done once
    return summary(ms).median;
  }

  /// Plain passes whose token the device takes from itself, so that the host waits once: with graphs and without.
  void send(device_samples& s) {
    auto& queue = pair_.ctx.queue();
    token_id* const exchange = pair_.ctx.exchange().data();
    for (const bool graphs : {true, false}) {
      queue.use_graphs(graphs);
      std::vector<double> queue_ms;
      const double pass_ms = sample([&] {
        queue_ms.push_back(milliseconds([&] {
          exchange[0] = text_.back();
          session_.verify_there(exchange, 1);
          greedy{}.pick_there<B>(pair_.ctx, session_.logits(), text_.size(), exchange + 1);
        }));
        s.launches = queue.launches();
        pair_.ctx.wait();
        session_.name(std::span<const token_id>(exchange, 1));
        session_.commit(1);
        text_.push_back(exchange[1]);
      });
      queue_ms.erase(queue_ms.begin());  // of the run that does not count
      send_samples& to = graphs ? s.graphs : s.singly;
      to.queue_ms.push_back(summary(queue_ms).median);
      to.pass_ms.push_back(pass_ms);
    }
    queue.use_graphs(true);
  }

  random_pair<B, Kv>& pair_;
  gemma4::session<B, Kv>& session_;
  ids prompt_, text_;  // text_: all tokens known, the last of them not yet processed
};

}  // namespace bench
