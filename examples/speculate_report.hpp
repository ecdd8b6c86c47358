// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What speculate.cpp says about a text it has written.
#pragma once
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

/// The end of the program's output; `text` is what was written, decoded, or "". Throws if it cannot be written, or --compare found a difference.
void report(const arguments& args, const outcome& o, const std::string& text);
