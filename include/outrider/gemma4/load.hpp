// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <filesystem>
#include <memory>
#include <utility>

#include "outrider/gemma4/assistant.hpp"
#include "outrider/gemma4/config_json.hpp"
#include "outrider/gemma4/model.hpp"
#include "outrider/io/safetensors.hpp"

namespace outrider::gemma4 {

/// The target in a Hugging Face directory: config.json, generation_config.json if there is one (its ends of text replace the config's), and
/// model.safetensors, or shards with their index. Weights stay in the mapped files.
/// Errors: file_not_found, file_malformed, config_invalid, model_unsupported, tensor_missing, tensor_mismatch.
template <backend_tag B>
[[nodiscard]] model<B> load_model(const std::filesystem::path& directory) {
  text_config config = read_target_config(directory / "config.json");
  generation_config generation = read_generation_config(directory, config.vocab_size);
  if (!generation.eos.empty()) config.eos = std::move(generation.eos);
  config.suppress = std::move(generation.suppress);
  return model<B>(std::move(config), std::make_shared<const io::tensor_set>(io::load_safetensors(directory)));
}

/// The assistant in a Hugging Face directory. Errors as load_model.
template <backend_tag B>
[[nodiscard]] assistant<B> load_assistant(const std::filesystem::path& directory) {
  assistant_config config = read_assistant_config(directory / "config.json");
  return assistant<B>(std::move(config), std::make_shared<const io::tensor_set>(io::load_safetensors(directory)));
}

}  // namespace outrider::gemma4
