// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace outrider::testing {

struct stored_tensor {
  std::string name;
  std::string dtype;  // as in the file: "F32", "BF16", …
  std::vector<std::size_t> shape;
  std::vector<std::byte> bytes;
};

/// A whole safetensors file from a header, right or wrong, and its data.
inline std::string safetensors_file(std::string_view header, std::string_view data = {}) {
  std::string file;
  for (std::uint64_t rest = header.size(), i = 0; i < 8; ++i, rest >>= 8) file += static_cast<char>(rest & 0xff);
  return file.append(header).append(data);
}

/// The tensors as a safetensors file, their data in the given order. Writes what it is given, even if shape and bytes disagree.
inline void write_safetensors(const std::filesystem::path& path, const std::vector<stored_tensor>& tensors) {
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  for (const stored_tensor& t : tensors) {
    const std::size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(t.bytes.data()), t.bytes.size());
    header[t.name] = {{"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string file = safetensors_file(header.dump(), data);
  std::ofstream stream(path, std::ios::binary);
  stream.write(file.data(), static_cast<std::streamsize>(file.size()));
  if (!stream.flush()) throw std::runtime_error("cannot write " + path.string());
}

}  // namespace outrider::testing
