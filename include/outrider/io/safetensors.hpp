// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "outrider/core/extents.hpp"
#include "outrider/error.hpp"
#include "outrider/io/json.hpp"
#include "outrider/io/json_file.hpp"
#include "outrider/io/mapped_file.hpp"
#include "outrider/io/tensors.hpp"

namespace outrider::io {

namespace detail {

[[noreturn]] inline void refuse_safetensors(const std::string& file, const std::string& what) {
  throw error(error_code::file_malformed, file + ": " + what);
}

/// Reads the header of one safetensors file:
///   8 bytes, n little-endian | n bytes of JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}, …} | the data, to the end of the file
/// Offsets count from the start of the data; the ranges must cover it without overlap or hole. Touches the header only.
class safetensors_reader {
 public:
  static constexpr std::size_t max_header = 100'000'000;  // the limit of the format's own library

  /// The tensors' bytes will lie in `bytes`; `file` is for messages.
  safetensors_reader(std::span<const std::byte> bytes, std::string file) : bytes_(bytes), file_(std::move(file)) {}

  /// The tensors in the order of their names.
  std::vector<tensor> read() {
    const nlohmann::json header = parse_json(take_header(), file_);
    std::vector<tensor> tensors;
    tensors.reserve(header.size());
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__")
        check_metadata(entry);
      else
        tensors.push_back(read_tensor(name, entry));
    }
    check_cover(tensors);
    return tensors;
  }

 private:
  /// Splits the file into header and data.
  std::string_view take_header() {
    constexpr std::size_t prefix = 8;
    if (bytes_.size() < prefix)
      refuse_safetensors(file_, "a safetensors file begins with 8 bytes of header length, but this one has only " +
                                    std::to_string(bytes_.size()) + " bytes");
    std::uint64_t length = 0;
    for (std::size_t i = prefix; i-- > 0;) length = length << 8 | std::to_integer<std::uint64_t>(bytes_[i]);
    if (length > max_header)
      refuse_safetensors(file_,
                         "the header length is " + std::to_string(length) + ", allowed are " + std::to_string(max_header) + " bytes");
    if (length > bytes_.size() - prefix)
      refuse_safetensors(file_, "the header of " + std::to_string(length) + " bytes does not fit into the file of " +
                                    std::to_string(bytes_.size()) + " bytes");
    const std::span<const std::byte> header = bytes_.subspan(prefix, static_cast<std::size_t>(length));
    if (header.empty() || header[0] != std::byte{'{'})
      refuse_safetensors(file_, "the header is not a JSON object: it does not begin with '{'");
    data_ = bytes_.subspan(prefix + header.size());
    return {reinterpret_cast<const char*>(header.data()), header.size()};
  }

  void check_metadata(const nlohmann::json& metadata) const {
    if (!metadata.is_object())
      refuse_safetensors(file_, std::string("'__metadata__' is of type ") + metadata.type_name() + ", allowed is an object of strings");
    for (const auto& [key, value] : metadata.items())
      if (!value.is_string())
        refuse_safetensors(file_, "'__metadata__': '" + key + "' is of type " + value.type_name() + ", allowed is a string");
  }

  tensor read_tensor(const std::string& name, const nlohmann::json& entry) const {
    if (!entry.is_object()) refuse(name, std::string("is described by JSON of type ") + entry.type_name() + ", allowed is an object");
    tensor result;
    result.name = name;
    result.type = read_dtype(name, entry);
    result.shape = read_sizes(name, entry, "shape");
    result.file = file_;

    const std::vector<std::size_t> offsets = read_sizes(name, entry, "data_offsets");
    if (offsets.size() != 2) refuse(name, "data_offsets has " + std::to_string(offsets.size()) + " numbers, allowed are 2: begin and end");
    const std::size_t begin = offsets[0], end = offsets[1];
    if (begin > end) refuse(name, "data_offsets begin at " + std::to_string(begin) + ", behind their end at " + std::to_string(end));
    if (end > data_.size())
      refuse(name,
             "data_offsets end at " + std::to_string(end) + ", but the file has only " + std::to_string(data_.size()) + " bytes of data");

    const std::optional<std::size_t> size = byte_size(result.type, result.shape);
    if (!size) refuse(name, "shape " + entry.at("shape").dump() + " has more elements than fit into memory");
    if (*size != end - begin)
      refuse(name, "data_offsets span " + std::to_string(end - begin) + " bytes, but " + std::string(name_of(result.type)) + " of shape " +
                       entry.at("shape").dump() + " takes " + std::to_string(*size));
    result.bytes = data_.subspan(begin, *size);
    return result;
  }

  dtype read_dtype(const std::string& name, const nlohmann::json& entry) const {
    const nlohmann::json& value = member(name, entry, "dtype");
    if (!value.is_string()) refuse(name, std::string("dtype is of type ") + value.type_name() + ", allowed is a string");
    std::string allowed;
    for (const dtype type : {dtype::f64, dtype::f32, dtype::f16, dtype::bf16, dtype::i64, dtype::i32, dtype::i16, dtype::i8, dtype::u64,
                             dtype::u32, dtype::u16, dtype::u8, dtype::boolean}) {
      if (value.get_ref<const std::string&>() == name_of(type)) return type;
      allowed += (allowed.empty() ? "" : ", ") + std::string(name_of(type));
    }
    refuse(name, "dtype is " + value.dump() + ", allowed are " + allowed);
  }

  std::vector<std::size_t> read_sizes(const std::string& name, const nlohmann::json& entry, const char* key) const {
    const nlohmann::json& value = member(name, entry, key);
    if (!value.is_array()) refuse(name, std::string(key) + " is of type " + value.type_name() + ", allowed is an array of integers");
    std::vector<std::size_t> sizes;
    sizes.reserve(value.size());
    for (const nlohmann::json& element : value) {
      // The parser keeps "-1" signed and turns fractions, exponents and numbers above 64 bits into floats.
      if (!element.is_number_unsigned() || !std::in_range<std::size_t>(element.get<std::uint64_t>()))
        refuse(name, std::string(key) + " contains " + element.dump() + ", allowed are integers from 0 to 2^64 - 1");
      sizes.push_back(element.get<std::size_t>());
    }
    return sizes;
  }

  const nlohmann::json& member(const std::string& name, const nlohmann::json& entry, const char* key) const {
    const auto found = entry.find(key);
    if (found == entry.end()) refuse(name, std::string("has no ") + key);
    return *found;
  }

  /// Every byte of the data belongs to exactly one tensor. (Tensors without elements own none.)
  void check_cover(const std::vector<tensor>& tensors) const {
    std::vector<const tensor*> in_order;
    in_order.reserve(tensors.size());
    for (const tensor& t : tensors) in_order.push_back(&t);
    std::sort(in_order.begin(), in_order.end(), [this](const tensor* a, const tensor* b) {
      return std::pair(begin_of(*a), a->bytes.size()) < std::pair(begin_of(*b), b->bytes.size());
    });
    std::size_t covered = 0;
    const tensor* previous = nullptr;
    for (const tensor* t : in_order) {
      if (begin_of(*t) < covered) refuse(t->name, "overlaps tensor '" + previous->name + "'");
      if (begin_of(*t) > covered) refuse_gap(covered, begin_of(*t));
      covered = begin_of(*t) + t->bytes.size();
      previous = t;
    }
    if (covered < data_.size()) refuse_gap(covered, data_.size());
  }
  std::size_t begin_of(const tensor& t) const noexcept { return static_cast<std::size_t>(t.bytes.data() - data_.data()); }
  [[noreturn]] void refuse_gap(std::size_t begin, std::size_t end) const {
    refuse_safetensors(file_, "the data from byte " + std::to_string(begin) + " to " + std::to_string(end) + " belongs to no tensor");
  }
  [[noreturn]] void refuse(const std::string& name, const std::string& what) const {
    refuse_safetensors(file_, "tensor '" + name + "' " + what);
  }

  std::span<const std::byte> bytes_, data_;
  std::string file_;
};

using mapped_files = std::vector<mapped_file>;

inline std::vector<tensor> read_safetensors(const std::filesystem::path& path, mapped_files& files) {
  files.emplace_back(path);
  return safetensors_reader(files.back().bytes(), path.string()).read();
}

/// The tensors an index lists, each from the shard it names. What a shard holds beside them is checked but not part of the model.
inline std::vector<tensor> read_sharded_safetensors(const std::filesystem::path& index, mapped_files& files) {
  const std::string file = index.string();
  const nlohmann::json document = read_json_file(index);
  const auto weight_map = document.find("weight_map");
  if (weight_map == document.end() || !weight_map->is_object()) refuse_safetensors(file, "has no object 'weight_map'");

  std::map<std::string, std::vector<tensor>> shards;
  std::vector<tensor> tensors;
  for (const auto& [name, value] : weight_map->items()) {
    if (!value.is_string())
      refuse_safetensors(file, "weight_map: the shard of tensor '" + name + "' is of type " + value.type_name() + ", allowed is a string");
    const std::string& shard = value.get_ref<const std::string&>();
    // A downloaded index must not make us open files elsewhere.
    if (shard.empty() || shard == "." || shard == ".." || shard.find_first_of(std::string_view("/\\:\0", 4)) != shard.npos)
      refuse_safetensors(file,
                         "weight_map: tensor '" + name + "' is in " + value.dump() + ", allowed is the name of a file beside the index");
    const auto [loaded, is_new] = shards.try_emplace(shard);
    if (is_new) loaded->second = read_safetensors(index.parent_path() / shard, files);
    const auto found = std::lower_bound(loaded->second.begin(), loaded->second.end(), name,
                                        [](const tensor& t, const std::string& wanted) { return t.name < wanted; });
    if (found == loaded->second.end() || found->name != name)
      refuse_safetensors(file, "weight_map: tensor '" + name + "' is not in " + shard);
    tensors.push_back(*found);
  }
  return tensors;
}

}  // namespace detail

/// The tensors of a model, mapped, not copied: reads headers only, so a large model opens as fast as a small one. `path` is a safetensors
/// file, or a directory with model.safetensors or, if that is absent, model.safetensors.index.json and the shards it names.
/// error_code::file_not_found if a file is missing or unreadable; file_malformed, with the file, the tensor and what is wrong, for anything
/// but a well-formed file whose tensors cover its data exactly. No tensor reaches outside its file.
[[nodiscard]] inline tensor_set load_safetensors(const std::filesystem::path& path) {
  const auto files = std::make_shared<detail::mapped_files>();
  // What the system does not let us look at counts as there: opening it then fails with the reason.
  const auto is_there = [](const std::filesystem::path& file) {
    std::error_code failure;
    return std::filesystem::exists(file, failure) || failure;
  };
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) return {path.string(), detail::read_safetensors(path, *files), files};
  const std::filesystem::path single = path / "model.safetensors", index = path / "model.safetensors.index.json";
  if (is_there(single)) return {path.string(), detail::read_safetensors(single, *files), files};
  if (is_there(index)) return {path.string(), detail::read_sharded_safetensors(index, *files), files};
  throw error(error_code::file_not_found, path.string() + ": holds neither model.safetensors nor model.safetensors.index.json");
}

}  // namespace outrider::io
