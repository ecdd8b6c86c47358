// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What lies in the files behind a path, in the order of the files and whatever it means.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "outrider/error.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/io/gguf.hpp"
#include "outrider/io/json_file.hpp"
#include "outrider/io/mapped_file.hpp"
#include "outrider/io/safetensors.hpp"

namespace inspect {

namespace io = outrider::io;
using json = nlohmann::json;

/// One key of a file. `value` of an array holds its first elements: all of them, or six.
struct key_value {
  std::string key, type;
  bool is_array = false;
  std::size_t count = 1;
  json value;
};

/// The keys of one file.
struct key_values {
  std::string of;  // "", or which of a directory's files
  std::vector<key_value> rows;
};

struct stored_tensor {
  io::tensor tensor;
  std::size_t offset = 0;  // from the start of its file's data, bytes
};

enum class file_format : std::uint8_t { gguf, safetensors, directory };

struct contents {
  std::filesystem::path path;  // of the file or directory itself, where a directory around GGUF files was given
  file_format format = file_format::gguf;
  std::optional<io::gguf_file> gguf;      // of a GGUF file
  std::optional<io::tensor_set> weights;  // of the two others
  std::vector<key_values> keys;
  std::vector<stored_tensor> tensors;  // file by file, in the order of offsets
  std::vector<std::string> files;      // parts or shards
};

namespace detail {

inline constexpr std::size_t shown_elements = 6;

/// Element i of a value whose elements are no strings.
inline json element(const io::gguf_value& value, std::size_t i) {
  const auto load = [&]<class T>(T number) {
    std::memcpy(&number, value.bytes.data() + i * sizeof(T), sizeof(T));
    return number;
  };
  switch (value.type) {
    case io::gguf_type::u8:
      return load(std::uint8_t{});
    case io::gguf_type::i8:
      return load(std::int8_t{});
    case io::gguf_type::u16:
      return load(std::uint16_t{});
    case io::gguf_type::i16:
      return load(std::int16_t{});
    case io::gguf_type::u32:
      return load(std::uint32_t{});
    case io::gguf_type::i32:
      return load(std::int32_t{});
    case io::gguf_type::f32:
      return double{load(0.0f)};
    case io::gguf_type::boolean:
      return load(std::uint8_t{}) != 0;
    case io::gguf_type::u64:
      return load(std::uint64_t{});
    case io::gguf_type::i64:
      return load(std::int64_t{});
    case io::gguf_type::f64:
      return load(0.0);
    case io::gguf_type::string:
    case io::gguf_type::array:
      break;
  }
  return nullptr;
}

inline key_value row_of(const io::gguf_pair& pair, bool full) {
  const io::gguf_value& value = pair.value;
  key_value row{std::string(pair.key), std::string(name_of(value.type)), value.is_array, value.count, {}};
  if (!value.is_array) {
    const auto text = value.text();
    row.value = text ? json(std::string(*text)) : element(value, 0);
    return row;
  }
  row.value = json::array();
  const std::size_t shown = full ? value.count : std::min(value.count, shown_elements);
  const auto texts = value.texts();
  for (std::size_t i = 0; i < shown; ++i) row.value.push_back(texts ? json(std::string((*texts)[i])) : element(value, i));
  return row;
}

/// A document as rows, one for every scalar and array in it; keys of inner objects stand behind those around them.
inline void append_rows(const nlohmann::json& value, const std::string& key, bool full, std::vector<key_value>& rows) {
  if (value.is_object() && !value.empty()) {
    for (const auto& item : value.items()) append_rows(item.value(), key + (key.empty() ? "" : ".") + item.key(), full, rows);
    return;
  }
  const auto type = [](const nlohmann::json& of) {
    std::string name = of.is_number_float() ? "float" : of.is_number() ? "integer" : of.type_name();
    std::transform(name.begin(), name.end(), name.begin(), [](char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c; });
    return name;
  };
  key_value row{key, value.is_array() && !value.empty() ? type(value[0]) : type(value), value.is_array(), 1, json(value)};
  if (value.is_array()) {
    row.count = value.size();
    row.value = json::array();
    for (std::size_t i = 0; i < (full ? row.count : std::min(row.count, shown_elements)); ++i) row.value.push_back(json(value[i]));
  }
  rows.push_back(std::move(row));
}

/// The keys of a JSON file of a directory; nothing if it is not there.
inline void append_json_file(contents& all, const char* name, bool full) {
  std::error_code failure;  // a link to nowhere is there, and refused when it is opened
  const auto file = all.path / name;
  if (std::filesystem::symlink_status(file, failure).type() == std::filesystem::file_type::not_found) return;
  key_values keys{name, {}};
  append_rows(io::read_json_file(file), "", full, keys.rows);
  all.keys.push_back(std::move(keys));
}

inline void open_gguf(contents& all, bool full) {
  all.gguf = io::open_gguf(all.path);
  const io::gguf_file& file = *all.gguf;
  key_values keys;
  const auto is_virtual = [&](const char* key, const char* type, std::size_t value) { keys.rows.push_back({key, type, false, 1, value}); };
  is_virtual("GGUF.version", "UINT32", file.version);
  is_virtual("GGUF.tensor_count", "UINT64", file.tensors.size());
  is_virtual("GGUF.kv_count", "UINT64", file.pairs.size());
  for (const io::gguf_pair& pair : file.pairs) keys.rows.push_back(row_of(pair, full));
  all.keys.push_back(std::move(keys));
  const std::byte* data = nullptr;
  for (const io::tensor& t : file.tensors) {
    if (all.tensors.empty() || all.tensors.back().tensor.file != t.file) data = t.bytes.data();  // a file's first tensor has offset 0
    all.tensors.push_back({t, static_cast<std::size_t>(t.bytes.data() - data)});
  }
}

inline void open_safetensors(contents& all, bool full) {
  all.weights = io::load_safetensors(all.path);
  std::map<std::string, std::map<std::string, std::size_t>> offsets;  // by file and name, of all its tensors: an index may leave some out
  for (const auto& [name, t] : *all.weights) {
    auto& of_file = offsets[t.file];
    if (of_file.empty()) {
      const io::tensor_set file = io::load_safetensors(t.file);
      const std::byte* data = file.begin()->second.bytes.data();
      for (const auto& entry : file) data = std::min(data, entry.second.bytes.data());
      for (const auto& entry : file) of_file[entry.first] = static_cast<std::size_t>(entry.second.bytes.data() - data);
    }
    all.tensors.push_back({t, of_file[name]});
  }
  std::stable_sort(all.tensors.begin(), all.tensors.end(), [](const stored_tensor& a, const stored_tensor& b) {
    return std::pair(std::string_view(a.tensor.file), a.offset) < std::pair(std::string_view(b.tensor.file), b.offset);
  });
  if (all.format == file_format::directory) {
    for (const char* name : {"config.json", "generation_config.json"}) append_json_file(all, name, full);
    return;
  }
  const io::mapped_file file(all.path);
  std::uint64_t header = 0;  // its length was checked
  std::memcpy(&header, file.bytes().data(), sizeof header);
  const auto document = io::parse_json(file.text().substr(sizeof header, static_cast<std::size_t>(header)), all.path.string());
  key_values keys{"__metadata__", {}};
  if (const auto metadata = document.find("__metadata__"); metadata != document.end()) append_rows(*metadata, "", full, keys.rows);
  all.keys.push_back(std::move(keys));
}

}  // namespace detail

/// Opens what lies at `path`; arrays are shortened unless `full`. Errors: those of the readers, and file_malformed for what is neither.
inline contents open(const std::filesystem::path& path, bool full) {
  contents all;
  all.path = outrider::gemma4::locate_model(path);
  std::error_code ignored;
  if (std::filesystem::is_directory(all.path, ignored)) {
    all.format = file_format::directory;
  } else {
    const io::mapped_file file(all.path);
    const std::string_view begin = file.text().substr(0, 9);
    if (begin.starts_with("GGUF") || all.path.extension() == ".gguf")
      all.format = file_format::gguf;
    else if (begin.ends_with('{') || all.path.extension() == ".safetensors")
      all.format = file_format::safetensors;
    else
      throw outrider::error(outrider::error_code::file_malformed, all.path.string() + ": neither a GGUF file nor a safetensors file");
  }
  all.format == file_format::gguf ? detail::open_gguf(all, full) : detail::open_safetensors(all, full);
  if (all.gguf)
    for (const io::gguf_part& part : all.gguf->parts) all.files.push_back(part.file);
  else
    for (const stored_tensor& t : all.tensors)
      if (all.files.empty() || all.files.back() != t.tensor.file) all.files.push_back(t.tensor.file);
  return all;
}

}  // namespace inspect
