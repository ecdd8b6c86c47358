// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "outrider/core/blocks.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/storage.hpp"
#include "outrider/io/dtype_of.hpp"
#include "outrider/io/tensors.hpp"
#include "outrider/layers/linear.hpp"

namespace outrider::gemma4 {

static_assert(std::endian::native == std::endian::little, "outrider: weights are used as they lie in the file, which is little-endian");

/// The tensors of a model, checked against what its configuration asks for and handed out as weights of backend B. Matrices stay in the
/// file's mapping wherever their alignment allows it (no copy); vectors are widened to float once. Owns what the handed-out views point to; move-only.
template <backend_tag B>
class weight_store {
  static_assert(host_accessible<space_of<B>>, "outrider: weights are read in place, which needs a backend in host memory");

 public:
  explicit weight_store(std::shared_ptr<const io::tensor_set> tensors) : tensors_(std::move(tensors)) {}

  [[nodiscard]] const std::string& source() const noexcept { return tensors_->source(); }
  [[nodiscard]] bool has(std::string_view name) const noexcept { return tensors_->find(name) != nullptr; }

  /// A matrix [rows, cols], of any type of weight_types. Errors: tensor_missing; tensor_mismatch for another shape or type.
  [[nodiscard]] weight<B> matrix(std::string_view name, std::size_t rows, std::size_t cols) { return load(name, {rows, cols}, rows, cols); }
  /// `count` matrices [rows, cols] in one tensor [count, rows, cols], stacked to [count · rows, cols].
  [[nodiscard]] weight<B> stacked(std::string_view name, std::size_t count, std::size_t rows, std::size_t cols) {
    return load(name, {count, rows, cols}, count * rows, cols);
  }

  /// A vector [n] of F32, BF16 or F16 as floats.
  [[nodiscard]] const float* vector(std::string_view name, std::size_t n) {
    const io::tensor& t = find(name, {n});
    buffer<float, space_of<B>> values(n);
    for (std::size_t i = 0; i < n; ++i) values.data()[i] = read_float(t, i);
    floats_.push_back(std::move(values));
    return floats_.back().data();
  }
  [[nodiscard]] float scalar(std::string_view name) { return *vector(name, 1); }

  /// Floats the model computes itself (frequencies), kept with its weights.
  [[nodiscard]] const float* keep(const std::vector<float>& values) {
    buffer<float, space_of<B>> copy(values.size());
    std::copy(values.begin(), values.end(), copy.data());
    floats_.push_back(std::move(copy));
    return floats_.back().data();
  }

  /// A permutation of 0 … n - 1, stored as I32, I64 or whole F32 numbers in a tensor [n], viewed as [rows, n / rows].
  [[nodiscard]] matrix_for<const token_id, B> permutation(std::string_view name, std::size_t n, std::size_t rows) {
    const io::tensor& t = find(name, {n});
    buffer<token_id, space_of<B>> ids(n);
    std::vector<bool> seen(n, false);
    for (std::size_t i = 0; i < n; ++i) {
      const std::int64_t id = read_integer(t, i);
      if (id < 0 || static_cast<std::size_t>(id) >= n || seen[static_cast<std::size_t>(id)])
        throw error(error_code::tensor_mismatch, t.file + ": tensor '" + t.name + "' is no permutation of 0 to " + std::to_string(n - 1) +
                                                     ": element " + std::to_string(i) + " is " + std::to_string(id) +
                                                     ", out of range or a second time");
      seen[static_cast<std::size_t>(id)] = true;
      ids.data()[i] = static_cast<token_id>(id);
    }
    ids_.push_back(std::move(ids));
    return {ids_.back().data(), rows, n / rows, n / rows};
  }

 private:
  const io::tensor& find(std::string_view name, const std::vector<std::size_t>& shape) const {
    const io::tensor& t = tensors_->at(name);
    if (t.shape != shape)
      throw error(error_code::tensor_mismatch,
                  t.file + ": tensor '" + t.name + "' has shape " + text(t.shape) + ", the configuration asks for " + text(shape));
    return t;
  }

  weight<B> load(std::string_view name, const std::vector<std::size_t>& shape, std::size_t rows, std::size_t cols) {
    const io::tensor& t = find(name, shape);
    std::optional<weight<B>> loaded;
    std::string allowed;
    for_each_weight_type([&]<class W>() {
      if (t.type == io::dtype_of<W>) loaded = in_place<W>(t, rows, cols);
      allowed += (allowed.empty() ? "" : ", ") + std::string(io::name_of(io::dtype_of<W>));
    });
    if (!loaded) throw wrong_type(t, allowed);
    return *std::move(loaded);
  }

  template <class Body>
  static void for_each_weight_type(Body&& body) {
    [&]<class... W>(type_list<W...>) { (body.template operator()<W>(), ...); }(weight_types{});
  }

  template <class W>
  weight<B> in_place(const io::tensor& t, std::size_t rows, std::size_t cols) {
    static_assert(io::describe(io::dtype_of<W>).bytes == sizeof(W) && io::describe(io::dtype_of<W>).elements == elements_of<W>);
    const std::byte* data = t.bytes.data();
    if (reinterpret_cast<std::uintptr_t>(data) % alignof(W) != 0) {  // legal in a file, not for the processor
      buffer<std::byte, space_of<B>> aligned(t.bytes.size());
      std::memcpy(aligned.data(), data, t.bytes.size());
      bytes_.push_back(std::move(aligned));
      data = bytes_.back().data();
    }
    return weight_for<W, B>{reinterpret_cast<const W*>(data), rows, cols, cols / elements_of<W>};
  }

  template <class T>
  static T element(const io::tensor& t, std::size_t i) noexcept {
    T value;
    std::memcpy(&value, t.bytes.data() + i * sizeof(T), sizeof(T));
    return value;
  }
  static float read_float(const io::tensor& t, std::size_t i) {
    switch (t.type) {
      case io::dtype::f32:
        return element<float>(t, i);
      case io::dtype::bf16:
        return to_float(element<bf16>(t, i));
      case io::dtype::f16:
        return to_float(element<f16>(t, i));
      default:
        throw wrong_type(t, "F32, BF16 or F16");
    }
  }
  static std::int64_t read_integer(const io::tensor& t, std::size_t i) {
    switch (t.type) {
      case io::dtype::i64:
        return element<std::int64_t>(t, i);
      case io::dtype::i32:
        return element<std::int32_t>(t, i);
      case io::dtype::f32: {
        const float value = element<float>(t, i);
        return value >= 0 && value < 0x1p31f && value == static_cast<float>(static_cast<std::int64_t>(value))
                   ? static_cast<std::int64_t>(value)
                   : -1;
      }
      default:
        throw wrong_type(t, "I32, I64 or F32");
    }
  }
  static error wrong_type(const io::tensor& t, const std::string& allowed) {
    return {error_code::tensor_mismatch,
            t.file + ": tensor '" + t.name + "' has elements of type " + std::string(io::name_of(t.type)) + ", allowed are " + allowed};
  }
  static std::string text(const std::vector<std::size_t>& shape) {
    std::string out = "[";
    for (std::size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
    return out + "]";
  }

  std::shared_ptr<const io::tensor_set> tensors_;
  std::vector<buffer<float, space_of<B>>> floats_;
  std::vector<buffer<token_id, space_of<B>>> ids_;
  std::vector<buffer<std::byte, space_of<B>>> bytes_;
};

}  // namespace outrider::gemma4
