// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <doctest/doctest.h>

#include <cstdlib>
#include <optional>
#include <string>

namespace outrider::testing {

/// The path of Gemma 4's released vocabulary, or nothing, with a sentence, where it is not at hand. Too large to be part of the repository:
/// scripts/fetch_vocabulary.sh gets it, and the environment variable OUTRIDER_GEMMA4_VOCAB says where the .gguf is.
inline std::optional<std::string> released_vocabulary() {
  if (const char* const path = std::getenv("OUTRIDER_GEMMA4_VOCAB")) return path;
  MESSAGE("skipped: OUTRIDER_GEMMA4_VOCAB is not set; scripts/fetch_vocabulary.sh gets the file that it is to name");
  return std::nullopt;
}

}  // namespace outrider::testing
