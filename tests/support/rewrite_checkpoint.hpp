// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "outrider/io/safetensors.hpp"
#include "support/write_safetensors.hpp"

namespace outrider::testing {

/// Writes the checkpoint in `from` to the new directory `to`, its tensors, in the order of their names, as `edit` leaves them.
inline void rewrite_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                               const std::function<void(std::vector<stored_tensor>&)>& edit) {
  std::filesystem::create_directory(to);
  std::filesystem::copy_file(from / "config.json", to / "config.json");
  const io::tensor_set source = io::load_safetensors(from);
  std::vector<stored_tensor> tensors;
  for (const auto& [name, t] : source)
    tensors.push_back({name, std::string(io::name_of(t.type)), t.shape, {t.bytes.begin(), t.bytes.end()}});
  edit(tensors);
  write_safetensors(to / "model.safetensors", tensors);
}

}  // namespace outrider::testing
