// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "outrider/core/extents.hpp"
#include "outrider/error.hpp"

namespace outrider::io {

/// Element types of stored tensors, scalars and blocks of several elements; core/blocks.hpp has the layouts of those that weights may have.
enum class dtype : std::uint8_t {
  f64,
  f32,
  f16,
  bf16,
  i64,
  i32,
  i16,
  i8,
  u64,
  u32,
  u16,
  u8,
  boolean,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q8_1,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  q8_k,
  iq1_s,
  iq1_m,
  iq2_xxs,
  iq2_xs,
  iq2_s,
  iq3_xxs,
  iq3_s,
  iq4_nl,
  iq4_xs,
  tq1_0,
  tq2_0,
  mxfp4,
  nvfp4,
  q1_0,
  q2_0
};

struct dtype_description {
  dtype type;
  std::string_view name;
  std::size_t elements, bytes;  // of a block; scalars are blocks of one
};

/// In the order of the enumeration.
inline constexpr auto dtypes = std::to_array<dtype_description>({
    {dtype::f64, "F64", 1, 8},
    {dtype::f32, "F32", 1, 4},
    {dtype::f16, "F16", 1, 2},
    {dtype::bf16, "BF16", 1, 2},
    {dtype::i64, "I64", 1, 8},
    {dtype::i32, "I32", 1, 4},
    {dtype::i16, "I16", 1, 2},
    {dtype::i8, "I8", 1, 1},
    {dtype::u64, "U64", 1, 8},
    {dtype::u32, "U32", 1, 4},
    {dtype::u16, "U16", 1, 2},
    {dtype::u8, "U8", 1, 1},
    {dtype::boolean, "BOOL", 1, 1},
    {dtype::q4_0, "Q4_0", 32, 18},
    {dtype::q4_1, "Q4_1", 32, 20},
    {dtype::q5_0, "Q5_0", 32, 22},
    {dtype::q5_1, "Q5_1", 32, 24},
    {dtype::q8_0, "Q8_0", 32, 34},
    {dtype::q8_1, "Q8_1", 32, 36},
    {dtype::q2_k, "Q2_K", 256, 84},
    {dtype::q3_k, "Q3_K", 256, 110},
    {dtype::q4_k, "Q4_K", 256, 144},
    {dtype::q5_k, "Q5_K", 256, 176},
    {dtype::q6_k, "Q6_K", 256, 210},
    {dtype::q8_k, "Q8_K", 256, 292},
    {dtype::iq1_s, "IQ1_S", 256, 50},
    {dtype::iq1_m, "IQ1_M", 256, 56},
    {dtype::iq2_xxs, "IQ2_XXS", 256, 66},
    {dtype::iq2_xs, "IQ2_XS", 256, 74},
    {dtype::iq2_s, "IQ2_S", 256, 82},
    {dtype::iq3_xxs, "IQ3_XXS", 256, 98},
    {dtype::iq3_s, "IQ3_S", 256, 110},
    {dtype::iq4_nl, "IQ4_NL", 32, 18},
    {dtype::iq4_xs, "IQ4_XS", 256, 136},
    {dtype::tq1_0, "TQ1_0", 256, 54},
    {dtype::tq2_0, "TQ2_0", 256, 66},
    {dtype::mxfp4, "MXFP4", 32, 17},
    {dtype::nvfp4, "NVFP4", 64, 36},
    {dtype::q1_0, "Q1_0", 128, 18},
    {dtype::q2_0, "Q2_0", 64, 18},
});
static_assert([] {
  for (std::size_t i = 0; i < dtypes.size(); ++i)
    if (static_cast<std::size_t>(dtypes[i].type) != i) return false;
  return dtypes.back().type == dtype::q2_0;
}());

[[nodiscard]] constexpr const dtype_description& describe(dtype type) noexcept { return dtypes[static_cast<std::size_t>(type)]; }
[[nodiscard]] constexpr std::string_view name_of(dtype type) noexcept { return describe(type).name; }

/// The bytes of a tensor of that shape (outermost first), whose innermost extent is divided into blocks; nothing if it is no multiple of
/// the block's length, or if the size does not fit into memory: that of the other extents where one is zero, so that any product of extents
/// fits.
[[nodiscard]] inline std::optional<std::size_t> byte_size(dtype type, std::span<const std::size_t> shape) noexcept {
  const dtype_description& d = describe(type);
  const std::size_t row = shape.empty() ? 1 : shape.back();
  if (row % d.elements != 0) return std::nullopt;
  std::optional<std::size_t> size = d.bytes;
  bool is_empty = false;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const std::size_t extent = i + 1 == shape.size() ? row / d.elements : shape[i];
    is_empty = is_empty || extent == 0;
    if (size && extent != 0) size = checked_multiply(*size, extent);
  }
  if (size && is_empty) size = 0;
  return size;
}

/// A named range of a mapped file. The container checked that `bytes` lies inside the file and has exactly byte_size(type, shape) bytes.
struct tensor {
  std::string name;
  dtype type = dtype::f32;
  std::vector<std::size_t> shape;    // outermost first
  std::span<const std::byte> bytes;  // of a mapped_file, whose pages a loader may release; alignment: whatever the file gave
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
