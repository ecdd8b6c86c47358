// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <stdexcept>

/// What programs say that are asked for a backend they do not have.
inline std::runtime_error built_without_cuda() {
  return std::runtime_error("this program was built without CUDA; `cmake --preset cuda && cmake --build --preset cuda` builds one with it");
}
