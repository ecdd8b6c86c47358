// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What speculate.cpp says about the texts it has written.
#pragma once
#include <string>
#include <vector>

#include "outrider/decode/generate.hpp"
#include "speculate_command_line.hpp"

/// A text with speculation, and with --compare the same without.
struct sample {
  std::vector<outrider::token_id> tokens, plain_tokens;
  std::string text;  // empty where the model has no tokenizer
  outrider::generation result;
};

struct outcome {
  std::vector<sample> samples;
  double load_seconds = 0;
  double plain_seconds = 0;  // of decoding, all texts
  std::string simd;
  bool int8_activations = false;
  unsigned threads = 0;

  [[nodiscard]] bool is_identical() const {
    for (const sample& s : samples)
      if (s.tokens != s.plain_tokens) return false;
    return true;
  }
};

/// The end of the program's output. Throws if it cannot be written, or --compare found a difference.
void report(const arguments& args, const outcome& o);
