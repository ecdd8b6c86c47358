// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "outrider/error.hpp"

namespace outrider::io {

/// Element types of stored tensors. Which of them a weight may have is decided by who reads it.
enum class dtype : std::uint8_t { f64, f32, f16, bf16, i64, i32, i16, i8, u64, u32, u16, u8, boolean };

/// Bytes per element.
[[nodiscard]] constexpr std::size_t size_of(dtype type) noexcept {
  switch (type) {
    case dtype::f64:
    case dtype::i64:
    case dtype::u64:
      return 8;
    case dtype::f32:
    case dtype::i32:
    case dtype::u32:
      return 4;
    case dtype::f16:
    case dtype::bf16:
    case dtype::i16:
    case dtype::u16:
      return 2;
    case dtype::i8:
    case dtype::u8:
    case dtype::boolean:
      return 1;
  }
  return 0;
}

[[nodiscard]] constexpr std::string_view name_of(dtype type) noexcept {
  switch (type) {
    case dtype::f64:
      return "F64";
    case dtype::f32:
      return "F32";
    case dtype::f16:
      return "F16";
    case dtype::bf16:
      return "BF16";
    case dtype::i64:
      return "I64";
    case dtype::i32:
      return "I32";
    case dtype::i16:
      return "I16";
    case dtype::i8:
      return "I8";
    case dtype::u64:
      return "U64";
    case dtype::u32:
      return "U32";
    case dtype::u16:
      return "U16";
    case dtype::u8:
      return "U8";
    case dtype::boolean:
      return "BOOL";
  }
  return "?";
}

/// A named range of a mapped file. The container checked that `bytes` lies inside the file and has exactly shape × size_of(type) bytes.
struct tensor {
  std::string name;
  dtype type = dtype::f32;
  std::vector<std::size_t> shape;    // outermost first
  std::span<const std::byte> bytes;  // alignment: whatever the file gave
  std::string file;                  // for error messages
};

/// All tensors of one model, from one file or several, with what keeps their bytes alive. Immutable once built, so safe to share between threads.
class tensor_set {
 public:
  /// `keep_alive` owns the memory behind the tensors' bytes.
  tensor_set(std::string source, std::vector<tensor> tensors, std::shared_ptr<const void> keep_alive)
      : source_(std::move(source)), keep_alive_(std::move(keep_alive)) {
    for (tensor& t : tensors) {
      std::string key = t.name;
      if (!tensors_.emplace(key, std::move(t)).second)
        throw error(error_code::file_malformed, source_ + ": tensor '" + key + "' is there twice");
    }
  }

  /// The tensor of that name, or null.
  [[nodiscard]] const tensor* find(std::string_view name) const noexcept {
    const auto it = tensors_.find(name);
    return it == tensors_.end() ? nullptr : &it->second;
  }
  /// The tensor of that name; error_code::tensor_missing if there is none.
  [[nodiscard]] const tensor& at(std::string_view name) const {
    if (const tensor* t = find(name)) return *t;
    throw error(error_code::tensor_missing, source_ + ": tensor '" + std::string(name) + "' is missing");
  }
  /// The file or directory the set was read from.
  [[nodiscard]] const std::string& source() const noexcept { return source_; }
  [[nodiscard]] std::size_t size() const noexcept { return tensors_.size(); }
  [[nodiscard]] auto begin() const noexcept { return tensors_.begin(); }
  [[nodiscard]] auto end() const noexcept { return tensors_.end(); }

 private:
  std::string source_;
  std::map<std::string, tensor, std::less<>> tensors_;
  std::shared_ptr<const void> keep_alive_;
};

}  // namespace outrider::io
