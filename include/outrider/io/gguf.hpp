// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <unordered_map>
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

/// One file of a set; most sets have one.
struct gguf_part {
  std::string file;
  std::span<const std::byte> bytes;  // the whole file
  std::size_t data_offset = 0;       // where tensor data begins, bytes from the start of the file; behind its end if there is none
};

/// A GGUF file or a split set of them: its pairs and tensors in the order of the file. Everything in it points into the mapped files, which
/// live as long as a copy of `keep_alive`. Immutable once read, so safe to share between threads.
struct gguf_file {
  std::string source;  // the path it was opened by
  std::uint32_t version = 3;
  std::size_t alignment = 32;    // of tensor data, bytes
  std::size_t data_offset = 0;   // of the first part
  std::vector<gguf_pair> pairs;  // of the first part
  std::vector<tensor> tensors;   // shapes outermost first, which is the reverse of the file's order of extents; `file` names the part
  std::vector<gguf_part> parts;  // in order
  std::shared_ptr<const void> keep_alive;

  /// The value of a key, or null.
  [[nodiscard]] const gguf_value* find(std::string_view key) const noexcept {
    for (const gguf_pair& pair : pairs)
      if (pair.key == key) return &pair.value;
    return nullptr;
  }
  /// The part a tensor of this file lies in; its data begins `tensor.bytes.data() - part.bytes.data()` bytes behind that part's start.
  [[nodiscard]] const gguf_part& part_of(const tensor& tensor) const noexcept {
    std::size_t i = 0;
    while (i + 1 < parts.size() && parts[i].file != tensor.file) ++i;
    return parts[i];
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
/// small multiple of the bytes it has read so far: a count is no reason to reserve.
class gguf_reader {
 public:
  /// `file` is for messages; what is read points into `bytes`.
  gguf_reader(std::span<const std::byte> bytes, std::string file) : bytes_(bytes), file_(std::move(file)) {}

  gguf_file read() {
    gguf_file result;
    result.source = file_;
    read_magic(result);
    const auto tensors = number<std::int64_t>("the number of tensors"), pairs = number<std::int64_t>("the number of key-value pairs");
    check_count(tensors, "tensors", 24);
    check_count(pairs, "key-value pairs", 13);
    read_pairs(result, static_cast<std::size_t>(pairs));
    read_alignment(result);
    read_tensors(result, static_cast<std::size_t>(tensors));
    result.parts.push_back({file_, bytes_, result.data_offset});
    return result;
  }

 private:
  static constexpr std::size_t longest_string = std::size_t{1} << 30, most_elements = std::size_t{1} << 30,
                               largest_alignment = std::size_t{1} << 20, longest_name = 63, most_dimensions = 4;

  [[noreturn]] void refuse(const std::string& what) const { throw error(error_code::file_malformed, file_ + ": " + what); }
  [[noreturn]] void refuse(const tensor& t, const std::string& what) const { refuse("tensor '" + t.name + "' " + what); }
  [[nodiscard]] std::size_t left() const noexcept { return bytes_.size() - at_; }

  std::span<const std::byte> take(std::size_t n, const char* what) {
    if (n > left())
      refuse(std::string("ends too early: ") + what + " at byte " + std::to_string(at_) + " takes " + std::to_string(n) + " bytes, only " +
             std::to_string(left()) + " are left");
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
    if (length > longest_string || length > left())
      refuse(std::string(what) + " at byte " + std::to_string(at_) + " has a length of " + std::to_string(length) + " bytes, allowed are " +
             std::to_string((std::min)(longest_string, left())));
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
  /// Each of the n things takes at least `least` bytes.
  void check_count(std::int64_t n, const char* things, std::size_t least) const {
    if (n < 0 || static_cast<std::uint64_t>(n) > left() / least)
      refuse("claims to have " + std::to_string(n) + " " + things + ", allowed are 0 to " + std::to_string(left() / least) +
             ", for which the rest of the file has room");
  }

  void read_pairs(gguf_file& result, std::size_t n) {
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
      const std::size_t room = (std::min)(most_elements, left() / size_of(value.type));
      if (n > room) refuse("key '" + key + "' is an array of " + std::to_string(n) + " elements, allowed are " + std::to_string(room));
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
    const std::string key = "general.alignment";
    const gguf_value* const value = result.find(key);
    if (!value) return;
    if (value->is_array || value->type != gguf_type::u32)
      refuse(key + " is of type " + std::string(name_of(value->is_array ? gguf_type::array : value->type)) + ", allowed is UINT32");
    const auto alignment = static_cast<std::size_t>(*value->integer());
    if (!std::has_single_bit(alignment) || alignment > largest_alignment)
      refuse(key + " is " + std::to_string(alignment) + ", allowed are powers of two up to " + std::to_string(largest_alignment));
    result.alignment = alignment;
  }

  void read_tensors(gguf_file& result, std::size_t n) {
    struct range {
      std::size_t offset, size;  // in the data
    };
    std::vector<range> ranges;
    std::unordered_set<std::string_view> names;
    std::size_t end = 0;  // of the data so far, padded
    for (std::size_t i = 0; i < n; ++i) {
      const std::string_view name = string("a tensor's name");
      if (name.size() > longest_name)
        refuse("the name of tensor " + std::to_string(i) + " has " + std::to_string(name.size()) + " bytes, at most " +
               std::to_string(longest_name) + " are allowed");
      tensor t;
      t.name = name;
      t.file = file_;
      if (!names.insert(name).second) refuse(t, "is there twice");
      t.shape = read_shape(t);
      t.type = read_dtype(t);
      const std::size_t size = size_of_data(t);
      const auto offset = number<std::uint64_t>("a tensor's offset");
      if (offset != end)
        refuse(t,
               "begins at offset " + std::to_string(offset) + ", allowed is " + std::to_string(end) + ", right behind the tensor before");
      ranges.push_back({end, size});
      const auto unpadded = checked_add(end, size);
      const auto next = unpadded ? round_up(*unpadded, result.alignment) : std::nullopt;
      if (!next) refuse(t, "ends behind 2^64 bytes of data");
      end = *next;
      result.tensors.push_back(std::move(t));
    }

    result.data_offset = round_up(at_, result.alignment).value();  // a header lies in memory, far from its end
    for (std::size_t i = 0; i < n; ++i) {
      const auto begin = checked_add(result.data_offset, ranges[i].offset),
                 last = begin ? checked_add(*begin, ranges[i].size) : std::nullopt;
      if (!last || *last > bytes_.size())
        refuse(result.tensors[i], "of " + std::to_string(ranges[i].size) + " bytes at offset " + std::to_string(ranges[i].offset) +
                                      " reaches beyond the end: the file has " + std::to_string(bytes_.size()) +
                                      " bytes, its data begins at byte " + std::to_string(result.data_offset));
      result.tensors[i].bytes = bytes_.subspan(*begin, ranges[i].size);
    }
  }
  std::vector<std::size_t> read_shape(const tensor& t) {
    const auto n = number<std::uint32_t>("a tensor's number of dimensions");
    if (n > most_dimensions)
      refuse(t, "has " + std::to_string(n) + " dimensions, at most " + std::to_string(most_dimensions) + " are allowed");
    std::vector<std::size_t> shape(n);
    std::optional<std::size_t> elements = 1;  // but for extents of zero: they must not hide a product that overflows elsewhere
    for (std::size_t i = n; i-- > 0;) {       // the file has the innermost extent first
      const auto extent = number<std::int64_t>("a tensor's extent");
      if (!std::in_range<std::size_t>(extent)) refuse(t, "has the extent " + std::to_string(extent) + ", allowed are 0 and more");
      shape[i] = static_cast<std::size_t>(extent);
      if (elements && extent != 0) elements = checked_multiply(*elements, shape[i]);
    }
    if (!elements || !std::in_range<std::int64_t>(*elements)) refuse(t, "has extents whose product exceeds 2^63 - 1");
    return shape;
  }
  dtype read_dtype(const tensor& t) {
    const auto id = number<std::uint32_t>("a tensor's type");
    for (const auto& [number, type] : gguf_dtypes)
      if (number == id) return type;
    refuse(t, "has the element type " + std::to_string(id) + ", which this library does not know");
  }
  [[nodiscard]] std::size_t size_of_data(const tensor& t) const {
    const dtype_description& d = describe(t.type);
    const std::size_t row = t.shape.empty() ? 1 : t.shape.back();
    if (row % d.elements != 0)
      refuse(t, "has rows of " + std::to_string(row) + " elements, " + std::string(d.name) + " allows multiples of " +
                    std::to_string(d.elements));
    const std::optional<std::size_t> size = byte_size(t.type, t.shape);
    if (!size) refuse(t, "has more elements than fit into memory");
    return *size;
  }
  /// The next multiple of a power of two, or nothing if it does not fit.
  static std::optional<std::size_t> round_up(std::size_t size, std::size_t alignment) noexcept {
    const auto beyond = checked_add(size, alignment - 1);
    return beyond ? std::optional(*beyond / alignment * alignment) : std::nullopt;
  }

  std::span<const std::byte> bytes_;
  std::string file_;
  std::size_t at_ = 0;
};

using gguf_mappings = std::vector<mapped_file>;

inline gguf_file open_gguf_part(const std::filesystem::path& path, gguf_mappings& mappings) {
  mappings.emplace_back(path);
  return gguf_reader(mappings.back().bytes(), path.string()).read();
}

/// Where one file stands in its set, as it says itself.
struct gguf_split {
  std::size_t number = 0, count = 1;  // from 0
};
inline gguf_split split_of(const gguf_file& part) {
  const auto read = [&](const char* key) {
    const gguf_value* const value = part.find(key);
    const auto found = value ? value->integer() : std::nullopt;
    if (!found || !std::in_range<std::uint16_t>(*found))
      throw error(error_code::file_malformed, part.source + ": " + key + " is missing or no integer from 0 to 65535");
    return static_cast<std::size_t>(*found);
  };
  gguf_split split;
  if (!part.find("split.count")) return split;
  split.count = read("split.count");
  if (split.count > 1) split.number = read("split.no");
  return split;
}

/// "-00002-of-00005.gguf"
inline std::string split_ending(gguf_split split) {
  const auto five = [](std::size_t n) {
    const std::string digits = std::to_string(n);
    return std::string(5 - (std::min<std::size_t>)(5, digits.size()), '0') + digits;
  };
  return "-" + five(split.number + 1) + "-of-" + five(split.count) + ".gguf";
}

/// The set that `opened` is a part of. What later parts say of the set must be what the first says.
inline gguf_file open_gguf_set(const std::filesystem::path& path, gguf_file opened, gguf_split split, gguf_mappings& mappings) {
  const std::string source = path.string(), ending = split_ending(split);
  if (split.number >= split.count || !source.ends_with(ending))
    throw error(error_code::file_malformed, source + ": says it is part " + std::to_string(split.number + 1) + " of " +
                                                std::to_string(split.count) + ", but its name does not end in " + ending +
                                                ": the other parts cannot be found");
  gguf_file set;
  std::unordered_map<std::string_view, const gguf_value*> first_pairs;  // every part may have as many keys as the first
  std::unordered_map<std::string, std::string> parts_by_tensor;
  for (gguf_split at{0, split.count}; at.number < at.count; ++at.number) {
    const std::string file = source.substr(0, source.size() - ending.size()) + split_ending(at);
    const auto refuse = [&](error_code code, const std::string& what) {
      throw error(code, file + ": part " + std::to_string(at.number + 1) + " of " + std::to_string(at.count) + " of a split file " + what);
    };
    std::error_code unknown;
    if (!std::filesystem::exists(file, unknown) && !unknown) refuse(error_code::file_not_found, "is missing");
    gguf_file part = at.number == split.number ? std::move(opened) : open_gguf_part(file, mappings);
    const gguf_split own = split_of(part);
    if (own.number != at.number || own.count != at.count)
      refuse(error_code::file_malformed, "says it is part " + std::to_string(own.number + 1) + " of " + std::to_string(own.count));
    for (const tensor& t : part.tensors)
      if (const auto [other, is_new] = parts_by_tensor.emplace(t.name, file); !is_new)
        refuse(error_code::file_malformed, "has tensor '" + t.name + "', which is in " + other->second + " too");
    if (at.number == 0) {
      set = std::move(part);
      for (const gguf_pair& pair : set.pairs) first_pairs.emplace(pair.key, &pair.value);
      continue;
    }
    for (const gguf_pair& pair : part.pairs) {
      const auto first = first_pairs.find(pair.key);
      if (first != first_pairs.end() && pair.key != "split.no" && !(*first->second == pair.value))
        refuse(error_code::file_malformed, "has another value of '" + std::string(pair.key) + "' than the first");
    }
    std::move(part.tensors.begin(), part.tensors.end(), std::back_inserter(set.tensors));
    std::move(part.parts.begin(), part.parts.end(), std::back_inserter(set.parts));
  }
  const gguf_value* const stated = set.find("split.tensors.count");
  const auto tensors = stated ? stated->integer() : std::nullopt;
  if (!tensors || !std::cmp_equal(*tensors, set.tensors.size()))
    throw error(error_code::file_malformed, set.source + ": split.tensors.count is " + (tensors ? std::to_string(*tensors) : "no integer") +
                                                ", but the parts have " + std::to_string(set.tensors.size()) + " tensors");
  set.source = source;
  return set;
}

}  // namespace detail

/// Opens a GGUF file, version 2 or 3, little-endian: mapped, not copied, and only its header is read, so a large model opens as fast as a
/// small one. Any part of a split set (…-00001-of-00005.gguf) stands for the whole set; pairs are then those of the first part.
/// Errors: file_not_found for what is missing or no regular file, with the part; file_malformed with the file, the key or tensor, what was
/// found and what is allowed; out_of_memory.
[[nodiscard]] inline gguf_file open_gguf(const std::filesystem::path& path) {
  try {
    const auto mappings = std::make_shared<detail::gguf_mappings>();
    gguf_file result = detail::open_gguf_part(path, *mappings);
    if (const detail::gguf_split split = detail::split_of(result); split.count > 1)
      result = detail::open_gguf_set(path, std::move(result), split, *mappings);
    result.keep_alive = mappings;
    return result;
  } catch (const std::bad_alloc&) {
    throw error(error_code::out_of_memory, path.string() + ": the header does not fit into memory");
  }
}

}  // namespace outrider::io
