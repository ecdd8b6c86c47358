// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A conversation with a Gemma 4 model, from the keyboard or through a pipe. Without arguments: the tiny pair of examples/data.
#include <exception>
#include <iostream>

#include "chat_command_line.hpp"
#include "chat_run.hpp"
#include "outrider/backend/cpu.hpp"
#include "outrider/backend/reference.hpp"

int main(int argc, char** argv) try {
  const chat_arguments args = parse_command_line(argc, argv);
  if (args.backend == "cuda")
    run_on_cuda(args);
  else if (args.backend == "reference")
    run_on<outrider::reference>(args);
  else
    run_on<outrider::cpu>(args);
} catch (const std::exception& problem) {
  std::cerr << "chat: " << problem.what() << "\n";
  return 1;
}
