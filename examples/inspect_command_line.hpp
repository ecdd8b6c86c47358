// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The command line of inspect.cpp.
#pragma once
#include <string>
#include <vector>

namespace inspect {

struct arguments {
  std::string path;
  std::vector<std::string> pair;  // two paths, or none
  bool json = false, check = false, no_tensors = false, full = false;
};

/// The options of the command line. Ends the program for --help, and with exit code 2 for wrong usage.
arguments parse_command_line(int argc, char** argv);

}  // namespace inspect
