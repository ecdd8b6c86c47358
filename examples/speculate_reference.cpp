// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// speculate.cpp on backend reference, apart because a backend takes its time to compile.
#include "outrider/backend/reference.hpp"

#include "speculate_run.hpp"

void run_on_reference(const arguments& args) { run_on<outrider::reference>(args); }
