// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "outrider/core/extents.hpp"
#include "outrider/error.hpp"
#include "outrider/io/gguf_value.hpp"
#include "outrider/io/mapped_file.hpp"
#include "outrider/io/tensors.hpp"

namespace outrider::io {

struct gguf_pair {
  std::string_view key;
  gguf_value value;
};

/// A GGUF file or a split set of them: its pairs and tensors in the order of the file. Everything in it points into the mapped files, which
/// live as long as a copy of `keep_alive`. Immutable once read, so safe to share between threads.
struct gguf_file {
  std::string source;  // the path it was opened by
  std::uint32_t version = 3;
  std::size_t alignment = 32;    // of tensor data, bytes
  std::size_t data_offset = 0;   // where tensor data begins, bytes from the start of the (first) file
  std::vector<gguf_pair> pairs;  // of a split set: the first file's
  std::vector<tensor> tensors;   // shapes outermost first, which is the reverse of the file's order of extents
  std::shared_ptr<const void> keep_alive;

  /// The value of a key, or null.
  [[nodiscard]] const gguf_value* find(std::string_view key) const noexcept {
    for (const gguf_pair& pair : pairs)
      if (pair.key == key) return &pair.value;
    return nullptr;
  }
};

namespace detail {

/// The numbers GGUF files give to element types, and what they mean here.
inline constexpr auto gguf_dtypes = std::to_array<std::pair<std::uint32_t, dtype>>({
    {0, dtype::f32},     {1, dtype::f16},    {2, dtype::q4_0},     {3, dtype::q4_1},    {6, dtype::q5_0},     {7, dtype::q5_1},
    {8, dtype::q8_0},    {9, dtype::q8_1},   {10, dtype::q2_k},    {11, dtype::q3_k},   {12, dtype::q4_k},    {13, dtype::q5_k},
    {14, dtype::q6_k},   {15, dtype::q8_k},  {16, dtype::iq2_xxs}, {17, dtype::iq2_xs}, {18, dtype::iq3_xxs}, {19, dtype::iq1_s},
    {20, dtype::iq4_nl}, {21, dtype::iq3_s}, {22, dtype::iq2_s},   {23, dtype::iq4_xs}, {24, dtype::i8},      {25, dtype::i16},
    {26, dtype::i32},    {27, dtype::i64},   {28, dtype::f64},     {29, dtype::iq1_m},  {30, dtype::bf16},    {34, dtype::tq1_0},
    {35, dtype::tq2_0},  {39, dtype::mxfp4}, {40, dtype::nvfp4},   {41, dtype::q1_0},   {42, dtype::q2_0},
});

/// Reads the header of one GGUF file: magic, version, counts, pairs, tensor infos. Touches nothing behind them, and allocates no more than a
/// small multiple of the bytes that are there.
class gguf_reader {
 public:
  gguf_reader(std::span<const std::byte> bytes, std::string file) : bytes_(bytes), file_(std::move(file)) {}

  gguf_file read() {
    gguf_file result;
    result.source = file_;
    read_magic(result);
    const std::size_t tensors = count("tensors", 24), pairs = count("key-value pairs", 13);
    read_pairs(result, pairs);
    read_alignment(result);
    read_tensors(result, tensors);
    return result;
  }

 private:
  static constexpr std::size_t most_string = std::size_t{1} << 30, most_elements = std::size_t{1} << 30,
                               most_alignment = std::size_t{1} << 20;

  [[noreturn]] void refuse(const std::string& what) const { throw error(error_code::file_malformed, file_ + ": " + what); }
  [[nodiscard]] std::size_t left() const noexcept { return bytes_.size() - at_; }

  std::span<const std::byte> take(std::size_t n, const char* what) {
    if (n > left())
      refuse(std::string(what) + " needs " + std::to_string(n) + " bytes at byte " + std::to_string(at_) + ", the file ends after " +
             std::to_string(left()));
    at_ += n;
    return bytes_.subspan(at_ - n, n);
  }
  template <class T>
  T number(const char* what) {
    T value;
    std::memcpy(&value, take(sizeof(T), what).data(), sizeof(T));
    return value;
  }
  std::string_view string(const char* what) {
    const auto length = number<std::uint64_t>(what);
    if (length > most_string || length > left())
      refuse(std::string(what) + " at byte " + std::to_string(at_) + " has a length of " + std::to_string(length) + " bytes, allowed are " +
             std::to_string((std::min)(most_string, left())));
    const auto text = take(static_cast<std::size_t>(length), what);
    return {reinterpret_cast<const char*>(text.data()), text.size()};
  }

  void read_magic(gguf_file& result) {
    constexpr std::string_view magic = "GGUF";
    if (bytes_.size() < magic.size() || std::memcmp(bytes_.data(), magic.data(), magic.size()) != 0)
      refuse("does not begin with \"GGUF\": not a GGUF file");
    at_ = magic.size();
    result.version = number<std::uint32_t>("the version");
    if (result.version != 0 && (result.version & 0xffffu) == 0)
      refuse("is a big-endian GGUF file (its version reads " + std::to_string(result.version) + "), only little-endian ones are supported");
    if (result.version != 2 && result.version != 3)
      refuse("has GGUF version " + std::to_string(result.version) + ", supported are 2 and 3");
  }
  /// A number of things of which each takes at least `least` bytes.
  std::size_t count(const char* things, std::size_t least) {
    const auto n = number<std::int64_t>("the number of things in the file");
    if (n < 0 || static_cast<std::uint64_t>(n) > bytes_.size() / least)
      refuse("claims " + std::to_string(n) + " " + things + ", its " + std::to_string(bytes_.size()) + " bytes have room for " +
             std::to_string(bytes_.size() / least));
    return static_cast<std::size_t>(n);
  }

  void read_pairs(gguf_file& result, std::size_t n) {
    result.pairs.reserve(n);
    std::unordered_set<std::string_view> keys;
    for (std::size_t i = 0; i < n; ++i) {
      const std::string_view key = string("a key");
      if (key.empty()) refuse("key " + std::to_string(i) + " is empty");
      if (!keys.insert(key).second) refuse("key '" + std::string(key) + "' is there twice");
      result.pairs.push_back({key, read_value(std::string(key))});
    }
  }
  gguf_type value_type(const std::string& key) {
    const auto id = number<std::uint32_t>("the type of a value");
    if (id >= gguf_type_count) refuse("key '" + key + "' has a value of type " + std::to_string(id) + ", known are 0 to 12");
    return static_cast<gguf_type>(id);
  }
  gguf_value read_value(const std::string& key) {
    gguf_value value;
    value.type = value_type(key);
    value.is_array = value.type == gguf_type::array;
    if (value.is_array) {
      value.type = value_type(key);
      if (value.type == gguf_type::array) refuse("key '" + key + "' is an array of arrays, which is not supported");
      const auto n = number<std::uint64_t>("the length of an array");
      if (n > most_elements || n > left() / size_of(value.type))
        refuse("key '" + key + "' is an array of " + std::to_string(n) + " elements, the file has room for " +
               std::to_string((std::min)(most_elements, left() / size_of(value.type))));
      value.count = static_cast<std::size_t>(n);
    }
    const std::size_t begin = at_;
    if (value.type == gguf_type::string) {
      for (std::size_t i = 0; i < value.count; ++i) string(value.is_array ? "a string of an array" : "a string");
    } else {
      take(value.count * size_of(value.type), "a value");
    }
    value.bytes = bytes_.subspan(begin, at_ - begin);
    return value;
  }

  void read_alignment(gguf_file& result) const {
    constexpr const char* key = "general.alignment";
    const gguf_value* const value = result.find(key);
    if (!value) return;
    if (value->is_array || value->type != gguf_type::u32)
      refuse(std::string(key) + " is of type " + std::string(name_of(value->is_array ? gguf_type::array : value->type)) +
             ", allowed is UINT32");
    const auto alignment = static_cast<std::size_t>(*value->integer());
    if (!std::has_single_bit(alignment) || alignment > most_alignment)
      refuse(std::string(key) + " is " + std::to_string(alignment) + ", allowed are powers of two up to " + std::to_string(most_alignment));
    result.alignment = alignment;
  }

  void read_tensors(gguf_file& result, std::size_t n) {
    result.tensors.reserve(n);
    std::vector<std::size_t> offsets;
    offsets.reserve(n);
    std::unordered_set<std::string_view> names;
    std::size_t end = 0;  // of the data so far, padded
    for (std::size_t i = 0; i < n; ++i) {
      const std::string_view name = string("a tensor's name");
      constexpr std::size_t longest = 63;
      if (name.size() > longest)
        refuse("the name of tensor " + std::to_string(i) + " has " + std::to_string(name.size()) + " bytes, at most " +
               std::to_string(longest) + " are allowed");
      if (!names.insert(name).second) refuse("tensor '" + std::string(name) + "' is there twice");
      tensor t;
      t.name = name;
      t.file = file_;
      const auto refuse_tensor = [&](const std::string& what) { refuse("tensor '" + t.name + "' " + what); };
      t.shape = read_shape(t.name);
      t.type = read_dtype(t.name);
      const auto size = byte_size(t.type, t.shape);
      if (!size) refuse_size(t);
      const auto offset = number<std::uint64_t>("a tensor's offset");
      if (offset != end)
        refuse_tensor("begins at offset " + std::to_string(offset) + ", expected " + std::to_string(end) +
                      ", right behind the tensor before it");
      const auto padded = checked_add(*size, result.alignment - 1);
      const auto next = padded ? checked_add(end, *padded / result.alignment * result.alignment) : std::nullopt;
      if (!next) refuse_tensor("is larger than memory can be");
      offsets.push_back(end);
      end = *next;
      result.tensors.push_back(std::move(t));
    }
    const auto padded = checked_add(at_, result.alignment - 1);
    result.data_offset = padded ? *padded / result.alignment * result.alignment : at_;
    for (std::size_t i = 0; i < n; ++i) {
      tensor& t = result.tensors[i];
      const std::size_t size = *byte_size(t.type, t.shape);
      const auto begin = checked_add(result.data_offset, offsets[i]), last = begin ? checked_add(*begin, size) : std::nullopt;
      if (!last || *last > bytes_.size())
        refuse("tensor '" + t.name + "' of " + std::to_string(size) + " bytes at offset " + std::to_string(offsets[i]) +
               " reaches beyond the file's end: " + std::to_string(bytes_.size()) + " bytes, of which the header takes " +
               std::to_string(result.data_offset));
      t.bytes = bytes_.subspan(*begin, size);
    }
  }
  std::vector<std::size_t> read_shape(const std::string& name) {
    constexpr std::uint32_t most = 4;
    const auto n = number<std::uint32_t>("a tensor's number of dimensions");
    if (n > most)
      refuse("tensor '" + name + "' has " + std::to_string(n) + " dimensions, at most " + std::to_string(most) + " are allowed");
    std::vector<std::size_t> shape(n);
    for (std::size_t i = n; i-- > 0;) {  // the file has the innermost extent first
      const auto extent = number<std::int64_t>("a tensor's extent");
      if (extent < 0) refuse("tensor '" + name + "' has the extent " + std::to_string(extent) + ", allowed are 0 and more");
      shape[i] = static_cast<std::size_t>(extent);
    }
    return shape;
  }
  dtype read_dtype(const std::string& name) {
    const auto id = number<std::uint32_t>("a tensor's type");
    for (const auto& [number, type] : gguf_dtypes)
      if (number == id) return type;
    refuse("tensor '" + name + "' has the element type " + std::to_string(id) + ", which this library does not know");
  }
  [[noreturn]] void refuse_size(const tensor& t) const {
    const dtype_description& d = describe(t.type);
    const std::size_t inner = t.shape.empty() ? 1 : t.shape.back();
    if (inner % d.elements != 0)
      refuse("tensor '" + t.name + "' has rows of " + std::to_string(inner) + " elements, " + std::string(d.name) + " needs multiples of " +
             std::to_string(d.elements));
    refuse("tensor '" + t.name + "' is larger than memory can be");
  }

  std::span<const std::byte> bytes_;
  std::string file_;
  std::size_t at_ = 0;
};

}  // namespace detail

/// Opens a GGUF file, version 2 or 3, little-endian: mapped, not copied, and only its header is read, so a large model opens as fast as a
/// small one. Errors: file_not_found; file_malformed with the file, the key or tensor, what was found and what is allowed.
[[nodiscard]] inline gguf_file open_gguf(const std::filesystem::path& path) {
  const auto file = std::make_shared<const mapped_file>(path);
  gguf_file result = detail::gguf_reader(file->bytes(), path.string()).read();
  result.keep_alive = file;
  return result;
}

}  // namespace outrider::io
