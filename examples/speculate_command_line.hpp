// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The command line of speculate.cpp.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "model_options.hpp"
#include "outrider/core/scalar.hpp"

struct arguments : model_options {
  std::string prompt = "In the beginning God created";
  std::optional<std::string> prompt_file, id_list;
  std::vector<outrider::token_id> prompt_ids;
  bool json = false, compare = false, quiet = false;
};

/// The options of the command line. Ends the program for --help, and with exit code 2 for wrong usage.
arguments parse_command_line(int argc, char** argv);
