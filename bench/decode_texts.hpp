// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Whole texts end to end, for bench/decode.cpp: with what the assistant really guesses, and with an acceptance that is imposed.
#pragma once
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "decode_pair.hpp"
#include "decode_passes.hpp"
#include "outrider/decode/calibrate.hpp"

namespace bench {

/// A sample of every figure per round, by drafts a round; 0 = plain.
struct text_samples {
  std::map<std::size_t, std::vector<double>> tokens_per_second, speedup;
  std::map<std::size_t, statistics> counts;  // the same in every round
};

/// Every prompt with every number of drafts, one after the other.
template <class B, class Kv>
void measure_texts(loaded_pair<B, Kv>& pair, const arguments& args, const std::vector<ids>& texts, progress& say, text_samples& s) {
  std::map<std::size_t, double> seconds;
  std::map<std::size_t, statistics> counts;
  ids plain, text;
  const auto write = [&](const ids& prompt, std::size_t k, ids& out) {
    say("texts with " + std::to_string(k) + " drafts a round");
    const statistics stats = pair.write(prompt, k, args.new_tokens, out);
    seconds[k] += stats.decode_seconds;
    counts[k].tokens += stats.tokens - 1;  // the first one comes from the prompt's pass
    for (std::size_t d = 0; d <= max_draft_length; ++d)
      for (std::size_t a = 0; a <= d; ++a) counts[k].passes[d][a] += stats.passes[d][a];
  };
  for (const ids& prompt : texts) {
    write(prompt, 0, plain);
    for (const std::size_t k : lengths_timed) {
      write(prompt, k, text);
      require_same(text, plain, "with " + std::to_string(k) + " drafts a round", "plain decoding");
    }
  }
  for (const auto& [k, time] : seconds) {
    s.tokens_per_second[k].push_back(static_cast<double>(counts[k].tokens) / time);
    s.speedup[k].push_back(seconds[0] / time);
  }
  s.counts = counts;
}

/// Pays the assistant's steps and then knows better: of each round's drafts so many are right that every draft behind right ones is right with
/// probability `acceptance`. The rounds' counts are drawn in equal shares (van der Corput), so that a short text has the rate of a long one.
template <class B>
class imposed_drafter {
 public:
  static constexpr draft_needs needs = assistant_drafter<B>::needs;

  /// `text`: what plain decoding writes behind a prompt of `prompt_size` tokens, longer by max_draft_length than what is asked for.
  imposed_drafter(assistant_drafter<B>& assistant, double acceptance, std::size_t prompt_size, std::span<const token_id> text)
      : assistant_(&assistant), acceptance_(acceptance), prompt_size_(prompt_size), text_(text) {}

  template <class Target>
  std::size_t propose(const Target& target, const draft_request& request, std::span<token_id> out) {
    const std::size_t count = assistant_->propose(target, request, out), written = target.committed() + 1 - prompt_size_;
    double u = 0;
    for (std::uint32_t bits = ++rounds_, place = 1; bits != 0; bits >>= 1, ++place) u += std::ldexp(bits & 1, -static_cast<int>(place));
    double all_right = acceptance_;
    std::size_t right = 0;
    for (; right < count && u < all_right; ++right) all_right *= acceptance_;
    for (std::size_t j = 0; j < count; ++j) {
      const token_id token = text_[written + j];
      out[j] = j < right ? token : static_cast<token_id>((static_cast<std::size_t>(token) + 1) % target.vocab_size());
    }
    round_end_ = written + right + 1;
    return count;
  }

  /// Tokens of the text when the round that was drafted last is over.
  [[nodiscard]] std::size_t round_end() const noexcept { return round_end_; }

 private:
  assistant_drafter<B>* assistant_;
  double acceptance_;
  std::size_t prompt_size_;
  std::span<const token_id> text_;
  std::uint32_t rounds_ = 0;
  std::size_t round_end_ = 0;
};

inline constexpr std::array imposed_rates{0.79, 0.74, 0.56};  // as published for chat, code and prose

/// A sample per round of a fixed number of drafts at an imposed acceptance.
struct schedule_samples {
  std::vector<double> tokens_per_second, speedup;
  double tokens_per_pass = 0;
};
inline constexpr std::size_t adaptive_length = max_draft_length + 1;  // stands for: as many as the policy plans
struct schedules {
  std::vector<double> plain;                                           // tokens/s
  std::map<std::pair<double, std::size_t>, schedule_samples> imposed;  // by acceptance and drafts
};

/// One text at every imposed acceptance, without drafts and with every number of them; it is the text of plain decoding, whatever is accepted.
template <class B, class Kv>
void measure_schedules(loaded_pair<B, Kv>& pair, const arguments& args, const ids& prompt, progress& say, schedules& s) {
  ids plain, text;
  for (const double rate : imposed_rates) {
    say("a text without drafts");
    s.plain.push_back(pair.write(prompt, 0, args.new_tokens + most_rows, plain).tokens_per_second());
    std::vector<std::size_t> lengths(lengths_timed.begin(), lengths_timed.end());
    lengths.push_back(adaptive_length);
    for (const std::size_t k : lengths) {
      const bool adapts = k == adaptive_length;
      say(adapts ? "a text with adaptive drafts" : "a text with " + std::to_string(k) + " drafts a round");
      imposed_drafter<B> drafter(pair.drafter, rate, prompt.size(), plain);
      generate_options options;
      options.max_new_tokens = plain.size();
      if (!adapts) options.draft = k;
      pair.session.clear();
      text.clear();
      const auto write = [&](auto policy) {
        // The text ends with a round, so that every round has all its drafts.
        return speculative_decoder(pair.session, drafter, greedy{}, policy)
            .generate(prompt, options,
                      [&](token_id token) {
                        text.push_back(token);
                        return text.size() < args.new_tokens || text.size() != drafter.round_end();
                      })
            .stats;
      };
      const statistics stats =
          adapts ? write(adaptive(calibrate(pair.session, pair.drafter, max_draft_length))) : write(fixed<max_draft_length>{});
      require_same(text, {plain.begin(), plain.begin() + static_cast<std::ptrdiff_t>(text.size())}, "at an imposed acceptance",
                   "plain decoding");
      schedule_samples& here = s.imposed[{rate, k}];
      here.tokens_per_second.push_back(stats.tokens_per_second());
      here.speedup.push_back(stats.tokens_per_second() / s.plain.back());
      here.tokens_per_pass = stats.tokens_per_pass();
    }
  }
}

}  // namespace bench
