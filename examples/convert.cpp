// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Converts Gemma 4 models and assistants between Hugging Face directories and GGUF files.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string>

#include "convert_command_line.hpp"
#include "outrider/gemma4/convert.hpp"
#include "progress_bar.hpp"

namespace {

volatile std::sig_atomic_t interrupted = 0;

/// From here on Ctrl-C ends the conversion at its next step, so that whatever it has begun is removed, and a file that outgrows a limit is
/// an error like a full disk. A hangup that is ignored stays so: nohup asks for that.
void catch_signals() {
  struct sigaction action = {}, before = {};
  action.sa_handler = [](int number) { interrupted = number; };
  action.sa_flags = SA_RESTART;  // or a slow file system would report the signal as a failed write
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    sigaction(number, &action, &before);
    if (number == SIGHUP && before.sa_handler == SIG_IGN) sigaction(number, &before, nullptr);
  }
  action.sa_handler = SIG_IGN;
  sigaction(SIGXFSZ, &action, nullptr);
}

struct interruption : std::runtime_error {
  interruption() : std::runtime_error("interrupted; nothing was written") {}
};

void report(const conversion_arguments& args, const outrider::gemma4::conversion_report& result) {
  std::printf("%s: %s\n", args.out.c_str(), readable(result.bytes).c_str());
  for (const auto& [type, total] : result.types)
    std::printf("  %-5s %5zu tensor%s %s\n", std::string(type).c_str(), total.tensors, total.tensors == 1 ? ", " : "s,",
                readable(total.bytes).c_str());
  if (!result.skipped.empty()) {
    std::printf("left out: %zu tensor%s, %s", result.skipped.size(), result.skipped.size() == 1 ? "" : "s", result.skipped.front().c_str());
    if (result.skipped.size() > 1) std::printf("%s %s", result.skipped.size() > 2 ? " …" : ",", result.skipped.back().c_str());
    std::puts("");
  }
  for (const std::string& note : result.notes) std::printf("note: %s\n", note.c_str());
}

}  // namespace

int main(int argc, char** argv) try {
  const conversion_arguments args = parse_command_line(argc, argv);
  if (!args.force && std::filesystem::symlink_status(args.out).type() != std::filesystem::file_type::not_found)
    throw std::runtime_error(args.out + ": is there already; --force replaces it");
  catch_signals();
  outrider::gemma4::conversion_options options = args.options;
  outrider::gemma4::conversion_report result;
  {
    progress_bar bar(!args.quiet);
    options.progress = [&](std::uint64_t done, std::uint64_t all) {
      if (interrupted) throw interruption();
      bar(done, all);
    };
    result = outrider::gemma4::convert(args.in, args.out, options);
  }
  if (!args.quiet) report(args, result);
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) throw std::runtime_error("standard output cannot be written");
} catch (const interruption& problem) {
  std::cerr << "convert: " << problem.what() << "\n";
  return 128 + static_cast<int>(interrupted);
} catch (const std::exception& problem) {
  std::cerr << "convert: " << problem.what() << "\n";
  return 1;
}
