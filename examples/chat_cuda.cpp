// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// chat.cpp on backend cuda, in programs that are built with it (cmake --preset cuda).
#if defined(OUTRIDER_CUDA)
#include "chat_run.hpp"
#include "outrider/backend/cuda.hpp"

void run_on_cuda(const chat_arguments& args) { run_on<outrider::cuda>(args); }

#else
#include "built_without_cuda.hpp"
#include "chat_command_line.hpp"

void run_on_cuda(const chat_arguments&) { throw built_without_cuda(); }

#endif
