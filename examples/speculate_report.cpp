// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "speculate_report.hpp"

#include <cstddef>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>

using outrider::max_draft_length;
using outrider::statistics;

/// Of all texts together.
static statistics sum_of(const outcome& o) {
  statistics sum;
  for (const sample& s : o.samples) sum += s.result.stats;
  return sum;
}

/// [m]: rounds with m drafts accepted, up to the largest number that was drafted.
static std::vector<std::size_t> histogram_of(const statistics& s) {
  std::vector<std::size_t> rounds;
  for (std::size_t k = 1; k <= max_draft_length; ++k)
    for (std::size_t m = 0; m <= k; ++m) {
      if (s.drafted_at(k) != 0 && rounds.size() <= k) rounds.resize(k + 1);
      if (s.passes[k][m] != 0) rounds[m] += s.passes[k][m];
    }
  return rounds;
}

static nlohmann::json report_as_json(const arguments& args, const outcome& o) {
  const statistics s = sum_of(o);
  std::vector<std::size_t> accepted_at;
  for (std::size_t i = 1; i <= max_draft_length && s.drafted_at(i) != 0; ++i) accepted_at.push_back(s.accepted_at(i));
  const sample& first = o.samples.front();
  nlohmann::json out{{"tokens", first.tokens},
                     {"text", first.text},
                     {"finish", name_of(first.result.finish)},
                     {"prompt_tokens", first.result.stats.prompt_tokens},
                     {"drafter", args.drafter},
                     {"rounds", s.rounds()},
                     {"plain_passes", s.plain_passes()},
                     {"drafted", s.drafted()},
                     {"accepted", s.accepted()},
                     {"accepted_per_position", accepted_at},
                     {"accepted_per_round", histogram_of(s)},
                     {"tokens_per_round", s.tokens_per_round()},
                     {"tokens_per_pass", s.tokens_per_pass()},
                     {"seconds",
                      {{"load", o.load_seconds},
                       {"prefill", s.prefill_seconds},
                       {"draft", s.draft_seconds},
                       {"verify", s.verify_seconds},
                       {"decode", s.decode_seconds}}},
                     {"seed", args.sampling.seed},
                     {"backend", args.backend},
                     {"simd", o.simd},
                     {"activations", o.int8_activations ? "int8" : "float"},
                     {"threads", o.threads}};
  if (o.samples.size() > 1)
    for (const sample& each : o.samples)
      out["samples"].push_back({{"tokens", each.tokens}, {"text", each.text}, {"finish", name_of(each.result.finish)}});
  if (args.compare) out["plain_seconds"] = o.plain_seconds, out["identical"] = o.is_identical();
  return out;
}

static void print_report(const arguments& args, const outcome& o) {
  const statistics s = sum_of(o);
  std::printf("\n%zu tokens, %zu rounds (and %zu plain passes), %zu drafted, %zu accepted: %.0f %%, %.2f tokens per target pass\n",
              s.tokens, s.rounds(), s.plain_passes(), s.drafted(), s.accepted(), 100 * s.acceptance_rate(), s.tokens_per_pass());
  if (const std::vector<std::size_t> rounds = histogram_of(s); !rounds.empty()) {
    std::printf("rounds by accepted drafts:");
    for (std::size_t m = 0; m < rounds.size(); ++m) std::printf("%s %zu: %zu", m == 0 ? "" : ",", m, rounds[m]);
    std::printf("\n");
  }
  std::printf("%.0f tokens/s", s.tokens_per_second());
  if (args.compare)
    std::printf(" with, %.0f without; identical to plain decoding: %s",
                o.plain_seconds > 0 ? static_cast<double>(s.tokens - s.texts) / o.plain_seconds : 0, o.is_identical() ? "yes" : "no");
  std::printf("\nbackend %s, SIMD %s, threads %u, %s activations\n", args.backend.c_str(), o.simd.c_str(), o.threads,
              o.int8_activations ? "int8" : "float");
}

void report(const arguments& args, const outcome& o) {
  if (args.json)
    std::cout << report_as_json(args, o).dump() << std::endl;
  else if (!args.quiet)
    print_report(args, o);
  const statistics s = sum_of(o);
  if (!args.quiet && args.drafter == "assistant" && s.rounds() >= 8 && 5 * s.accepted_at(1) < s.rounds())
    std::cerr << "speculate: few drafts were accepted; is this the assistant of this very model?\n";
  if (!args.quiet && o.samples.front().result.finish == outrider::finish_reason::context_full)
    std::cerr << "speculate: the text ended because the model's context is full\n";
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) throw std::runtime_error("standard output cannot be written");
  if (args.compare && !o.is_identical()) throw std::runtime_error("the text differs from plain decoding, which must not happen");
}
