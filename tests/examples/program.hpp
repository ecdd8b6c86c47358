// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>

#include "support/temporary_directory.hpp"

namespace outrider::testing {

/// What a program did: its exit code (128 + signal if one ended it) and what it printed.
struct outcome {
  int code = 0;
  std::string out, err;
};

/// Runs a command line through the shell, with `input` as its standard input. `arguments` are the caller's and must be quoted as the shell
/// wants them.
inline outcome run_program(const std::string& program, const std::string& arguments, std::string_view input = {}) {
  const temporary_directory directory;
  const auto in = directory.write("in", input), out = directory.path() / "out", err = directory.path() / "err";
  const std::string line = "'" + program + "' " + arguments + " >'" + out.string() + "' 2>'" + err.string() + "' <'" + in.string() + "'";
  const int status = std::system(line.c_str());
  const auto text = [](const std::filesystem::path& file) {
    std::ostringstream content;
    content << std::ifstream(file, std::ios::binary).rdbuf();
    return content.str();
  };
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), text(out), text(err)};
}

}  // namespace outrider::testing
