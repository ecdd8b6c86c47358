// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace outrider::io {

static_assert(std::endian::native == std::endian::little, "outrider: GGUF files are little-endian and read as they lie");

/// Types of GGUF values, with their numbers in a file.
enum class gguf_type : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };
inline constexpr std::uint32_t gguf_type_count = 13;

/// "UINT32", "STRING", … as the format's own tools print them.
[[nodiscard]] constexpr std::string_view name_of(gguf_type type) noexcept {
  constexpr std::string_view names[] = {"UINT8", "INT8",   "UINT16", "INT16",  "UINT32", "INT32",  "FLOAT32",
                                        "BOOL",  "STRING", "ARRAY",  "UINT64", "INT64",  "FLOAT64"};
  return names[static_cast<std::size_t>(type)];
}
/// Bytes of a scalar; the least a string takes, its length; 0 for an array.
[[nodiscard]] constexpr std::size_t size_of(gguf_type type) noexcept {
  constexpr std::uint8_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 8, 0, 8, 8, 8};
  return sizes[static_cast<std::size_t>(type)];
}

/// The value of a GGUF key where it lies in the mapped file. The reader made sure that its bytes are all there and that string lengths fit;
/// nothing is copied until somebody asks. Borrows the file; safe to share between threads. A boolean is true if its byte is not zero.
struct gguf_value {
  gguf_type type = gguf_type::u8;  // of the value, or of an array's elements
  bool is_array = false;
  std::size_t count = 1;             // elements of an array
  std::span<const std::byte> bytes;  // the elements, without the array's own header

  /// A whole number of any integer type; nothing for another type or what does not fit.
  [[nodiscard]] std::optional<std::int64_t> integer() const noexcept { return is_array ? std::nullopt : integer_at(0); }
  /// A number of any integer or floating type.
  [[nodiscard]] std::optional<double> number() const noexcept { return is_array ? std::nullopt : number_at(0); }
  [[nodiscard]] std::optional<bool> boolean() const noexcept {
    return !is_array && type == gguf_type::boolean ? std::optional(bytes[0] != std::byte{0}) : std::nullopt;
  }
  [[nodiscard]] std::optional<std::string_view> text() const noexcept {
    if (is_array || type != gguf_type::string) return std::nullopt;
    return string_at(0);
  }

  // Elements of an array; nothing if this is no array, if its elements are of another type, or if one of them does not fit.
  [[nodiscard]] std::optional<std::vector<std::int64_t>> integers() const {
    return elements<std::int64_t>(is_integer(type), [this](std::size_t i) { return integer_at(i); });
  }
  [[nodiscard]] std::optional<std::vector<double>> numbers() const {
    return elements<double>(is_number(type), [this](std::size_t i) { return number_at(i); });
  }
  [[nodiscard]] std::optional<std::vector<bool>> booleans() const {
    return elements<bool>(type == gguf_type::boolean, [this](std::size_t i) { return std::optional(bytes[i] != std::byte{0}); });
  }
  [[nodiscard]] std::optional<std::vector<std::string_view>> texts() const {
    if (!is_array || type != gguf_type::string) return std::nullopt;
    std::vector<std::string_view> all;
    all.reserve(count);
    for (std::size_t i = 0, offset = 0; i < count; ++i) {
      all.push_back(string_at(offset));
      offset += sizeof(std::uint64_t) + all.back().size();
    }
    return all;
  }

  /// The same type and the same bytes.
  [[nodiscard]] bool operator==(const gguf_value& other) const noexcept {
    return type == other.type && is_array == other.is_array && count == other.count && std::ranges::equal(bytes, other.bytes);
  }

 private:
  [[nodiscard]] static constexpr bool is_number(gguf_type type) noexcept {
    return type != gguf_type::boolean && type != gguf_type::string && type != gguf_type::array;
  }
  [[nodiscard]] static constexpr bool is_integer(gguf_type type) noexcept {
    return is_number(type) && type != gguf_type::f32 && type != gguf_type::f64;
  }
  template <class T>
  [[nodiscard]] T load(std::size_t offset) const noexcept {
    T value;
    std::memcpy(&value, bytes.data() + offset, sizeof(T));
    return value;
  }
  template <class T>
  [[nodiscard]] T at(std::size_t i) const noexcept {
    return load<T>(i * sizeof(T));
  }
  [[nodiscard]] std::string_view string_at(std::size_t offset) const noexcept {
    return {reinterpret_cast<const char*>(bytes.data()) + offset + sizeof(std::uint64_t),
            static_cast<std::size_t>(load<std::uint64_t>(offset))};
  }
  [[nodiscard]] std::optional<std::int64_t> integer_at(std::size_t i) const noexcept {
    switch (type) {
      case gguf_type::u8:
        return at<std::uint8_t>(i);
      case gguf_type::i8:
        return at<std::int8_t>(i);
      case gguf_type::u16:
        return at<std::uint16_t>(i);
      case gguf_type::i16:
        return at<std::int16_t>(i);
      case gguf_type::u32:
        return at<std::uint32_t>(i);
      case gguf_type::i32:
        return at<std::int32_t>(i);
      case gguf_type::u64:
        return std::in_range<std::int64_t>(at<std::uint64_t>(i)) ? std::optional(static_cast<std::int64_t>(at<std::uint64_t>(i)))
                                                                 : std::nullopt;
      case gguf_type::i64:
        return at<std::int64_t>(i);
      default:
        return std::nullopt;
    }
  }
  [[nodiscard]] std::optional<double> number_at(std::size_t i) const noexcept {
    if (type == gguf_type::f32) return at<float>(i);
    if (type == gguf_type::f64) return at<double>(i);
    const auto whole = integer_at(i);
    return whole ? std::optional(static_cast<double>(*whole)) : std::nullopt;
  }
  template <class T, class Element>
  [[nodiscard]] std::optional<std::vector<T>> elements(bool right_type, const Element& element) const {
    if (!is_array || !right_type) return std::nullopt;
    std::vector<T> all;
    all.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      const std::optional<T> value = element(i);
      if (!value) return std::nullopt;
      all.push_back(*value);
    }
    return all;
  }
};

}  // namespace outrider::io
