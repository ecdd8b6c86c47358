// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

#include "outrider/gemma4/assistant.hpp"
#include "outrider/gemma4/config_json.hpp"
#include "outrider/gemma4/gguf_config.hpp"
#include "outrider/gemma4/gguf_tensors.hpp"
#include "outrider/gemma4/model.hpp"
#include "outrider/io/gguf.hpp"
#include "outrider/io/safetensors.hpp"

namespace outrider::gemma4 {

/// Where the model behind a path is: a Hugging Face directory stays what it is, and so does a file; a directory without config.json that
/// holds one GGUF file, or one split set of them, stands for it.
[[nodiscard]] inline std::filesystem::path locate_model(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  std::error_code failure;
  if (!fs::is_directory(path, failure) || fs::symlink_status(path / "config.json", failure).type() != fs::file_type::not_found) return path;
  std::vector<fs::path> files;
  for (fs::directory_iterator entry(path, failure), end; !failure && entry != end; entry.increment(failure))
    if (entry->path().extension() == ".gguf") files.push_back(entry->path());
  if (files.empty()) return path;
  std::sort(files.begin(), files.end());
  // The parts of a set differ in their own number alone: name-00001-of-00003.gguf.
  const std::string first = files.front().filename().string(), tail = "-00001-of-";
  const std::size_t number = first.rfind(tail);
  const bool one_set = std::all_of(files.begin(), files.end(), [&](const fs::path& file) {
    std::string name = file.filename().string();
    return number != first.npos && name.size() == first.size() && name.replace(number, tail.size(), tail) == first;
  });
  if (files.size() > 1 && !one_set)
    throw error(error_code::argument_invalid,
                path.string() + ": holds no config.json but " + std::to_string(files.size()) + " GGUF files; name the one that is meant");
  return files.front();
}

namespace detail {

inline bool is_directory(const std::filesystem::path& path) {
  std::error_code failure;
  return std::filesystem::is_directory(path, failure);
}

/// The configuration of a target in a directory, with what generation_config.json adds: its ends of text replace the config's.
inline text_config read_target_directory(const std::filesystem::path& directory) {
  text_config config = read_target_config(directory / "config.json");
  generation_config generation = read_generation_config(directory, config.vocab_size);
  if (!generation.eos.empty()) config.eos = std::move(generation.eos);
  config.suppress = std::move(generation.suppress);
  return config;
}

}  // namespace detail

/// The configuration of the target or the assistant behind a path, without its weights: see load_model for paths and errors.
[[nodiscard]] inline std::variant<text_config, assistant_config> read_model_description(const std::filesystem::path& path) {
  const std::filesystem::path place = locate_model(path);
  if (!detail::is_directory(place)) {
    const io::gguf_file file = io::open_gguf(place);
    if (is_assistant(file)) return read_assistant_config(file);
    return read_target_config(file);
  }
  if (is_assistant_config(place / "config.json")) return read_assistant_config(place / "config.json");
  return detail::read_target_directory(place);
}

/// The target behind a path: a Hugging Face directory (config.json, generation_config.json if there is one, and model.safetensors, or shards
/// with their index), a GGUF file, or a part of a split set of them. Weights stay in the mapped files, but for quantised matrices that are
/// rearranged, see load_options.
/// Errors: file_not_found, file_malformed, config_invalid, model_unsupported, tensor_missing, tensor_mismatch, out_of_memory; argument_invalid
/// for a directory with several GGUF files.
template <backend_tag B>
[[nodiscard]] model<B> load_model(const std::filesystem::path& path, const load_options& options = {}) {
  const std::filesystem::path place = locate_model(path);
  if (detail::is_directory(place)) {
    text_config config = detail::read_target_directory(place);
    return model<B>(std::move(config), std::make_shared<const io::tensor_set>(io::load_safetensors(place)), options);
  }
  const io::gguf_file file = io::open_gguf(place);
  text_config config = read_target_config(file);
  auto tensors = std::make_shared<const io::tensor_set>(target_tensors(file, config));
  return model<B>(std::move(config), std::move(tensors), options);
}

/// The assistant behind a path. Paths and errors as for load_model.
template <backend_tag B>
[[nodiscard]] assistant<B> load_assistant(const std::filesystem::path& path, const load_options& options = {}) {
  const std::filesystem::path place = locate_model(path);
  if (detail::is_directory(place)) {
    assistant_config config = read_assistant_config(place / "config.json");
    return assistant<B>(std::move(config), std::make_shared<const io::tensor_set>(io::load_safetensors(place)), options);
  }
  const io::gguf_file file = io::open_gguf(place);
  assistant_config config = read_assistant_config(file);
  auto tensors = std::make_shared<const io::tensor_set>(assistant_tensors(file, config));
  return assistant<B>(std::move(config), std::move(tensors), options);
}

}  // namespace outrider::gemma4
