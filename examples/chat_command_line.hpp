// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The command line of chat.cpp.
#pragma once
#include <optional>
#include <string>

#include "model_options.hpp"

struct chat_arguments : model_options {
  std::optional<std::string> system;
  bool think = false, verbose = false;

  chat_arguments() { max_new_tokens = 512; }
};

/// The options of the command line. Ends the program for --help, and with exit code 2 for wrong usage.
chat_arguments parse_command_line(int argc, char** argv);
