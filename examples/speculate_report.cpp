// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "speculate_report.hpp"

#include <cstddef>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>

static nlohmann::json report_as_json(const arguments& args, const outcome& o, const std::string& text) {
  const outrider::statistics& s = o.result.stats;
  std::vector<std::size_t> accepted_at;
  for (std::size_t i = 1; i <= (args.assistant.empty() ? 0 : args.draft); ++i) accepted_at.push_back(s.accepted_at(i));
  nlohmann::json out{{"tokens", o.written},
                     {"text", text},
                     {"finish", name_of(o.result.finish)},
                     {"prompt_tokens", s.prompt_tokens},
                     {"rounds", s.rounds()},
                     {"plain_passes", s.plain_passes()},
                     {"drafted", s.drafted()},
                     {"accepted", s.accepted()},
                     {"accepted_per_position", accepted_at},
                     {"tokens_per_round", s.tokens_per_round()},
                     {"seconds", {{"load", o.load_seconds}, {"prefill", s.prefill_seconds}, {"decode", s.decode_seconds}}},
                     {"backend", args.backend},
                     {"simd", o.simd},
                     {"activations", o.int8_activations ? "int8" : "float"},
                     {"threads", o.threads}};
  if (args.compare) out["plain_seconds"] = o.plain.decode_seconds, out["identical"] = o.is_identical();
  return out;
}

static void print_report(const arguments& args, const outcome& o) {
  const outrider::statistics& s = o.result.stats;
  std::printf("\n%zu tokens, %zu rounds (and %zu plain passes), %zu drafted, %zu accepted: %.0f %%, %.2f tokens per target pass\n",
              s.tokens, s.rounds(), s.plain_passes(), s.drafted(), s.accepted(), 100 * s.acceptance_rate(), s.tokens_per_pass());
  std::printf("%.0f tokens/s", s.tokens_per_second());
  if (args.compare)
    std::printf(" with, %.0f without; identical to plain decoding: %s", o.plain.tokens_per_second(), o.is_identical() ? "yes" : "no");
  std::printf("\nbackend %s, SIMD %s, threads %u, %s activations\n", args.backend.c_str(), o.simd.c_str(), o.threads,
              o.int8_activations ? "int8" : "float");
}

void report(const arguments& args, const outcome& o, const std::string& text) {
  if (args.json)
    std::cout << report_as_json(args, o, text).dump() << std::endl;
  else if (std::puts(""); !args.quiet)
    print_report(args, o);
  const outrider::statistics& s = o.result.stats;
  if (!args.quiet && s.rounds() >= 8 && 5 * s.accepted_at(1) < s.rounds())
    std::cerr << "speculate: few drafts were accepted; is this the assistant of this very model?\n";
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) throw std::runtime_error("standard output cannot be written");
  if (args.compare && !o.is_identical()) throw std::runtime_error("the text differs from plain decoding, which must not happen");
}
