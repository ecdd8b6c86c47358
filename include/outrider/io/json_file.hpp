// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <filesystem>

#include "outrider/io/json.hpp"
#include "outrider/io/mapped_file.hpp"

namespace outrider::io {

/// The document in a regular file; a pipe is refused, not waited for. Errors: those of mapped_file and parse_json.
[[nodiscard]] inline nlohmann::json read_json_file(const std::filesystem::path& path) {
  const mapped_file file(path);
  return parse_json(file.text(), path.string());
}

}  // namespace outrider::io
