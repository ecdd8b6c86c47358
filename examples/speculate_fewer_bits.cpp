// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// speculate.cpp with keys and values in bf16, f16 or q8_0.
#include "outrider/backend/cpu.hpp"
#include "speculate_run.hpp"

void run_with_fewer_bits(const arguments& args) {
  if (args.kv == "bf16")
    run<outrider::cpu, outrider::bf16>(args);
  else if (args.kv == "f16")
    run<outrider::cpu, outrider::f16>(args);
  else
    run<outrider::cpu, outrider::q8_0>(args);
}
