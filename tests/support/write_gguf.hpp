// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "outrider/io/gguf.hpp"

namespace outrider::testing {

/// A tensor of a GGUF file. What is wrong on purpose goes into the optional members; the rest is then written as it is.
struct gguf_tensor {
  std::string name;
  io::dtype type = io::dtype::f32;
  std::vector<std::size_t> shape;  // outermost first
  std::vector<std::byte> bytes;
  std::optional<std::uint32_t> type_id = {};  // instead of the number of `type`
  std::vector<std::int64_t> extents = {};     // instead of `shape` unless empty; innermost first as in the file
  std::optional<std::uint64_t> offset = {};   // instead of the place behind the tensor before
};

/// Builds a small GGUF file, right or wrong:
///   gguf_builder b;
///   b.pair("a.count", std::uint32_t{3}).pair("a.name", "x").array<std::string>("a.tokens", {"<pad>", "<eos>"});
///   b.tensor({"t", io::dtype::f32, {2, 3}, bytes});
///   b.write(path);
/// The type of a pair is that of its C++ type; texts are strings. Nothing is checked.
class gguf_builder {
 public:
  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::optional<std::int64_t> tensor_count = {}, pair_count = {};  // instead of the true ones
  std::size_t alignment = 32;  // of the data; the key general.alignment is a pair like any other, align() sets both

  template <class T>
  gguf_builder& pair(std::string_view key, const T& value) {
    begin_pair(key);
    append(pairs_, type_id_of<T>());
    append_value(pairs_, value);
    return *this;
  }
  template <class T>
  gguf_builder& array(std::string_view key, const std::vector<T>& values) {
    begin_pair(key);
    append(pairs_, std::uint32_t{9});
    append(pairs_, type_id_of<T>());
    append(pairs_, std::uint64_t{values.size()});
    for (const T& value : values) append_value(pairs_, value);
    return *this;
  }
  /// A pair of any type number with any bytes behind it.
  gguf_builder& raw_pair(std::string_view key, std::uint32_t type_id, std::string_view bytes) {
    begin_pair(key);
    append(pairs_, type_id);
    pairs_ += bytes;
    return *this;
  }
  gguf_builder& align(std::uint32_t bytes) {
    alignment = bytes;
    return pair("general.alignment", bytes);
  }
  gguf_builder& tensor(gguf_tensor tensor) {
    tensors_.push_back(std::move(tensor));
    return *this;
  }

  /// The header, up to the padding before the data.
  [[nodiscard]] std::string header() const {
    std::string file = magic;
    append(file, version);
    append(file, tensor_count.value_or(static_cast<std::int64_t>(tensors_.size())));
    append(file, pair_count.value_or(static_cast<std::int64_t>(pairs_written_)));
    file += pairs_;
    std::uint64_t end = 0;
    for (const gguf_tensor& t : tensors_) {
      append_value(file, t.name);
      const std::vector<std::int64_t> extents = t.extents.empty() ? std::vector<std::int64_t>(t.shape.rbegin(), t.shape.rend()) : t.extents;
      append(file, static_cast<std::uint32_t>(extents.size()));
      for (const std::int64_t extent : extents) append(file, extent);
      append(file, t.type_id.value_or(number_of(t.type)));
      append(file, t.offset.value_or(end));
      end += padded(t.bytes.size());
    }
    return file;
  }
  /// The whole file. Its last tensor is padded like the others.
  [[nodiscard]] std::string file() const {
    std::string file = header();
    if (!tensors_.empty()) file.resize(padded(file.size()));
    for (const gguf_tensor& t : tensors_) {
      file.append(reinterpret_cast<const char*>(t.bytes.data()), t.bytes.size());
      file.append(padded(t.bytes.size()) - t.bytes.size(), '\0');
    }
    return file;
  }
  void write(const std::filesystem::path& path) const {
    const std::string contents = file();
    std::ofstream stream(path, std::ios::binary);
    stream.write(contents.data(), static_cast<std::streamsize>(contents.size()));
    if (!stream.flush()) throw std::runtime_error("cannot write " + path.string());
  }

  /// A number as it lies in a file, for raw bytes.
  template <class T>
  [[nodiscard]] static std::string raw(T number) {
    std::string bytes;
    append(bytes, number);
    return bytes;
  }
  /// A string as it lies in a file: length and text.
  [[nodiscard]] static std::string raw_string(std::string_view text) { return raw(std::uint64_t{text.size()}).append(text); }
  /// The number an element type has in a file.
  [[nodiscard]] static std::uint32_t number_of(io::dtype type) {
    for (const auto& [number, known] : io::detail::gguf_dtypes)
      if (known == type) return number;
    throw std::runtime_error("GGUF has no element type " + std::string(io::name_of(type)));
  }

 private:
  template <class T>
  static constexpr std::uint32_t type_id_of() {
    if constexpr (std::same_as<T, std::uint8_t>) return 0;
    if constexpr (std::same_as<T, std::int8_t>) return 1;
    if constexpr (std::same_as<T, std::uint16_t>) return 2;
    if constexpr (std::same_as<T, std::int16_t>) return 3;
    if constexpr (std::same_as<T, std::uint32_t>) return 4;
    if constexpr (std::same_as<T, std::int32_t>) return 5;
    if constexpr (std::same_as<T, float>) return 6;
    if constexpr (std::same_as<T, bool>) return 7;
    if constexpr (std::convertible_to<T, std::string_view>) return 8;
    if constexpr (std::same_as<T, std::uint64_t>) return 10;
    if constexpr (std::same_as<T, std::int64_t>) return 11;
    if constexpr (std::same_as<T, double>) return 12;
  }
  template <class T>
  static void append(std::string& to, const T& number) {
    static_assert(std::is_arithmetic_v<T>);
    char bytes[sizeof(T)];
    std::memcpy(bytes, &number, sizeof(T));
    to.append(bytes, sizeof(T));
  }
  template <class T>
  static void append_value(std::string& to, const T& value) {
    if constexpr (std::convertible_to<T, std::string_view>) {
      const std::string_view text = value;
      append(to, std::uint64_t{text.size()});
      to += text;
    } else {
      append(to, value);
    }
  }
  void begin_pair(std::string_view key) {
    append_value(pairs_, key);
    ++pairs_written_;
  }
  [[nodiscard]] std::size_t padded(std::size_t size) const noexcept {
    return alignment == 0 ? size : (size + alignment - 1) / alignment * alignment;
  }

  std::string pairs_;
  std::size_t pairs_written_ = 0;
  std::vector<gguf_tensor> tensors_;
};

}  // namespace outrider::testing
