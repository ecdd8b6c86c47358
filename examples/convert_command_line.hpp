// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The command line of convert.cpp.
#pragma once
#include <string>

#include "outrider/gemma4/convert.hpp"

struct conversion_arguments {
  std::string in, out;
  outrider::gemma4::conversion_options options;
  bool force = false, quiet = false;
};

/// The options of the command line. Ends the program for --help, and with exit code 2 for wrong usage.
conversion_arguments parse_command_line(int argc, char** argv);
