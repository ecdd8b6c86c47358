// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What speculate.cpp says about a text it has written.
#pragma once
#include <cstddef>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "outrider/decode/generate.hpp"
#include "speculate_command_line.hpp"

/// A text with speculation, and with --compare the same without.
struct outcome {
  std::vector<outrider::token_id> written, plain_written;
  outrider::generation result;
  outrider::statistics plain;
  double load_seconds = 0;
  std::string simd;
  bool int8_activations = false;
  unsigned threads = 0;

  [[nodiscard]] bool is_identical() const { return written == plain_written; }
};

inline nlohmann::json report_as_json(const arguments& args, const outcome& o, const std::string& text) {
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

inline void print_report(const arguments& args, const outcome& o) {
  const outrider::statistics& s = o.result.stats;
  std::printf("\n%zu tokens, %zu rounds (and %zu plain passes), %zu drafted, %zu accepted: %.0f %%, %.2f tokens per target pass\n",
              s.tokens, s.rounds(), s.plain_passes(), s.drafted(), s.accepted(), 100 * s.acceptance_rate(), s.tokens_per_pass());
  std::printf("%.0f tokens/s", s.tokens_per_second());
  if (args.compare)
    std::printf(" with, %.0f without; identical to plain decoding: %s", o.plain.tokens_per_second(), o.is_identical() ? "yes" : "no");
  std::printf("\nbackend %s, SIMD %s, threads %u, %s activations\n", args.backend.c_str(), o.simd.c_str(), o.threads,
              o.int8_activations ? "int8" : "float");
}

/// The end of the program's output; `text` is what was written, decoded, or "". Throws if it cannot be written, or --compare found a difference.
inline void report(const arguments& args, const outcome& o, const std::string& text) {
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
