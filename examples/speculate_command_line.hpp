// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The command line of speculate.cpp.
#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "model_options.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/decode/processors.hpp"

struct arguments : model_options {
  std::string prompt = "In the beginning God created";
  std::optional<std::string> prompt_file, id_list;
  std::vector<outrider::token_id> prompt_ids;
  outrider::sampling_options sampling;
  std::string drafter;  // assistant, ngram, cascade or none
  float min_confidence = 0;
  std::vector<std::string> stops;
  std::size_t samples = 1;
  std::optional<std::string> trace;
  bool chat = false, json = false, compare = false, quiet = false, devices = false;
};

/// The options of the command line. Ends the program for --help, and with exit code 2 for wrong usage.
arguments parse_command_line(int argc, char** argv);
