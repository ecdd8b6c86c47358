// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// speculate.cpp on backend cuda, in programs that are built with it (cmake --preset cuda).
#if defined(OUTRIDER_CUDA)
#include <iomanip>
#include <iostream>
#include <stdexcept>
#include <vector>

#include "outrider/backend/cuda.hpp"
#include "speculate_run.hpp"

void run_on_cuda(const arguments& args) {
  if (args.kv == "bf16")
    run<outrider::cuda, outrider::bf16>(args);
  else if (args.kv == "f16")
    run<outrider::cuda, outrider::f16>(args);
  else if (args.kv == "q8_0")
    run<outrider::cuda, outrider::q8_0>(args);
  else
    run<outrider::cuda, float>(args);
}

void print_devices() {
  const std::vector<outrider::cuda_device> devices = outrider::cuda_devices();
  for (std::size_t i = 0; i < devices.size(); ++i) {
    const outrider::cuda_device& d = devices[i];
    std::cout << i << ": " << d.name << ", compute capability " << d.major << "." << d.minor << ", " << d.multiprocessors
              << " multiprocessors, " << std::fixed << std::setprecision(1) << static_cast<double>(d.memory) / (1 << 30) << " GiB\n";
  }
  if (!std::cout.flush()) throw std::runtime_error("standard output cannot be written");
}

#else
#include "built_without_cuda.hpp"
#include "speculate_command_line.hpp"

void run_on_cuda(const arguments&) { throw built_without_cuda(); }
void print_devices() { throw built_without_cuda(); }

#endif
