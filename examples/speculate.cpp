// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Writes text with a Gemma 4 model and its assistant, and says what speculation did. Without arguments: the tiny pair of examples/data.
#include <exception>
#include <iostream>

#include "outrider/backend/cpu.hpp"
#include "speculate_command_line.hpp"
#include "speculate_run.hpp"

int main(int argc, char** argv) try {
  const arguments args = parse_command_line(argc, argv);
  if (args.devices)
    print_devices();
  else if (args.backend == "cuda")
    run_on_cuda(args);
  else if (args.backend == "reference")
    run_on_reference(args);
  else if (args.kv != "f32")
    run_with_fewer_bits(args);
  else
    run<outrider::cpu, float>(args);
} catch (const std::exception& problem) {
  std::cerr << "speculate: " << problem.what() << "\n";
  return 1;
}
