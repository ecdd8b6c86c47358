// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The options of the programs that run a model: speculate.cpp and chat.cpp.
#pragma once
#include <cstddef>
#include <optional>
#include <string>

struct model_options {
  std::string target = OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/target",
              assistant = OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/assistant";
  std::string backend = "cpu", kv = "f32";
  std::size_t max_new_tokens = 128;
  std::optional<std::size_t> draft;  // drafts per round; not given: as many as pay
  unsigned threads = 0;
  bool exact_activations = false;
};
