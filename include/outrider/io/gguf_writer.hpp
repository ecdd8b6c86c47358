// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "outrider/error.hpp"
#include "outrider/io/gguf.hpp"
#include "outrider/io/gguf_value.hpp"
#include "outrider/io/output_file.hpp"
#include "outrider/io/tensor_writer.hpp"
#include "outrider/io/tensors.hpp"

namespace outrider::io {

namespace detail {

template <class T>
inline constexpr std::optional<gguf_type> gguf_type_of = std::nullopt;
template <>
inline constexpr std::optional<gguf_type> gguf_type_of<std::uint8_t> = gguf_type::u8;
template <>
inline constexpr std::optional<gguf_type> gguf_type_of<std::uint16_t> = gguf_type::u16;
template <>
inline constexpr std::optional<gguf_type> gguf_type_of<std::uint32_t> = gguf_type::u32;
template <>
inline constexpr std::optional<gguf_type> gguf_type_of<std::uint64_t> = gguf_type::u64;
template <>
inline constexpr std::optional<gguf_type> gguf_type_of<std::int32_t> = gguf_type::i32;
template <>
inline constexpr std::optional<gguf_type> gguf_type_of<float> = gguf_type::f32;
template <>
inline constexpr std::optional<gguf_type> gguf_type_of<bool> = gguf_type::boolean;
template <>
inline constexpr std::optional<gguf_type> gguf_type_of<std::string> = gguf_type::string;
template <>
inline constexpr std::optional<gguf_type> gguf_type_of<std::string_view> = gguf_type::string;

}  // namespace detail

/// What a value of a GGUF file may be made from: the fixed-width integers listed above, float, bool, strings.
template <class T>
concept gguf_storable = detail::gguf_type_of<T>
.has_value();

/// What stands in a GGUF file before the tensors' data, in the order in which it was added: pairs, then tensors.
class gguf_header {
 public:
  /// A scalar or a string.
  template <gguf_storable T>
  void add(std::string key, const T& value) {
    pair& p = new_pair(std::move(key), *detail::gguf_type_of<T>, false, 1);
    append(p.bytes, value);
  }
  void add(std::string key, const char* text) { add(std::move(key), std::string_view(text)); }
  /// An array.
  template <gguf_storable T>
  void add(std::string key, const std::vector<T>& values) {
    pair& p = new_pair(std::move(key), *detail::gguf_type_of<T>, true, values.size());
    for (std::size_t i = 0; i < values.size(); ++i) append(p.bytes, static_cast<const T&>(values[i]));
  }
  /// A value of another file.
  void add(std::string key, const gguf_value& value) {
    new_pair(std::move(key), value.type, value.is_array, value.count).bytes.assign(value.bytes.begin(), value.bytes.end());
  }
  /// error_code::argument_invalid for a name that is too long or there already, more than four extents, a type that GGUF files do not have,
  /// or rows that are not made of whole blocks.
  void add(tensor_plan tensor) {
    constexpr std::size_t longest = 63, most_extents = 4;
    const auto refuse = [&](const std::string& what) {
      throw error(error_code::argument_invalid, "tensor '" + tensor.name + "' cannot be in a GGUF file: " + what);
    };
    if (tensor.name.size() > longest)
      refuse("its name has " + std::to_string(tensor.name.size()) + " bytes, allowed are " + std::to_string(longest));
    if (tensor.shape.size() > most_extents)
      refuse("it has " + std::to_string(tensor.shape.size()) + " extents, allowed are " + std::to_string(most_extents));
    if (!type_number(tensor.type)) refuse("the format has no elements of type " + std::string(name_of(tensor.type)));
    if (!tensor.bytes()) refuse("its rows are no multiple of a block of " + std::string(name_of(tensor.type)));
    if (!names_.insert(tensor.name).second) refuse("the name is there twice");
    tensors_.push_back(std::move(tensor));
  }

  [[nodiscard]] std::span<const tensor_plan> tensors() const noexcept { return tensors_; }

  static constexpr std::size_t alignment = 32;

  /// The bytes, up to where the data of the first tensor begins.
  [[nodiscard]] std::vector<std::byte> bytes() const {
    std::vector<std::byte> out;
    for (const char c : std::string_view("GGUF")) out.push_back(static_cast<std::byte>(c));
    append(out, std::uint32_t{3});
    append(out, std::uint64_t{tensors_.size()});
    append(out, std::uint64_t{pairs_.size()});
    for (const pair& p : pairs_) {
      append(out, p.key);
      if (p.is_array) append(out, static_cast<std::uint32_t>(gguf_type::array));
      append(out, static_cast<std::uint32_t>(p.type));
      if (p.is_array) append(out, std::uint64_t{p.count});
      out.insert(out.end(), p.bytes.begin(), p.bytes.end());
    }
    std::uint64_t offset = 0;
    for (const tensor_plan& t : tensors_) {
      append(out, t.name);
      append(out, static_cast<std::uint32_t>(t.shape.size()));
      for (std::size_t i = t.shape.size(); i-- > 0;) append(out, std::uint64_t{t.shape[i]});  // innermost first
      append(out, *type_number(t.type));
      append(out, offset);
      offset += (*t.bytes() + alignment - 1) / alignment * alignment;
    }
    out.resize((out.size() + alignment - 1) / alignment * alignment);
    return out;
  }

 private:
  struct pair {
    std::string key;
    gguf_type type;
    bool is_array;
    std::size_t count;
    std::vector<std::byte> bytes;
  };

  static std::optional<std::uint32_t> type_number(dtype type) noexcept {
    for (const auto& [number, known] : detail::gguf_dtypes)
      if (known == type) return number;
    return std::nullopt;
  }
  /// error_code::argument_invalid if the key is empty or there already.
  pair& new_pair(std::string key, gguf_type type, bool is_array, std::size_t count) {
    if (key.empty() || !keys_.insert(key).second)
      throw error(error_code::argument_invalid, "key '" + key + "' of a GGUF file is empty or there twice");
    return pairs_.emplace_back(pair{std::move(key), type, is_array, count, {}});
  }

  template <class T>
    requires std::is_arithmetic_v<T>
  static void append(std::vector<std::byte>& out, T value) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(&value);
    out.insert(out.end(), bytes, bytes + sizeof(T));
  }
  static void append(std::vector<std::byte>& out, std::string_view text) {
    append(out, std::uint64_t{text.size()});
    const auto bytes = std::as_bytes(std::span(text));
    out.insert(out.end(), bytes.begin(), bytes.end());
  }

  std::vector<pair> pairs_;
  std::vector<tensor_plan> tensors_;
  std::unordered_set<std::string> keys_, names_;
};

/// Writes a GGUF file, version 3: the header, then the data of its tensors as `source` hands it over. Holds the header's bytes and nothing
/// of the data. The file appears under its name when all of it is there; see output_file.
/// Returns the bytes of the file. Errors: file_not_written; argument_invalid if the source gives a tensor too few or too many bytes.
inline std::uint64_t write_gguf(const std::filesystem::path& path, const gguf_header& header, const tensor_source& source) {
  output_file file(path);
  file.write(header.bytes());
  detail::write_tensors(file, header.tensors(), gguf_header::alignment, source);
  file.commit();
  return file.size();
}

}  // namespace outrider::io
