// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// speculate.cpp on backend reference, apart because a model takes its time to compile.
#include "outrider/backend/reference.hpp"

#include "speculate_run.hpp"

void run_on_reference(const arguments& args) {
  if (args.kv == "bf16")
    run<outrider::reference, outrider::bf16>(args);
  else if (args.kv == "f16")
    run<outrider::reference, outrider::f16>(args);
  else if (args.kv == "q8_0")
    run<outrider::reference, outrider::q8_0>(args);
  else
    run<outrider::reference, float>(args);
}
