// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What the numbers in a tensor are like, whatever format they are stored in.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "outrider/backend/concepts.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/dequantize.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/io/dtype_of.hpp"
#include "outrider/io/tensors.hpp"

namespace inspect {

namespace io = outrider::io;

struct value_survey {
  struct place {
    std::size_t row, column;
    float value;
  };
  std::size_t not_finite = 0;
  std::optional<place> first_not_finite;
  std::size_t zero_rows = 0, first_zero_row = 0;
};

namespace detail {

/// Calls visit.operator()<W>() for the C++ type W of a format of real numbers this library can read, if it is one.
template <class Visit>
void with_format(io::dtype type, const Visit& visit) {
  if (type == io::dtype::f64) visit.template operator()<double>();
  const auto visit_if_it_is = [&]<class W>() {
    if (type == io::dtype_of<W>) visit.template operator()<W>();
  };
  [&]<class... W>(outrider::type_list<W...>) { (visit_if_it_is.template operator()<W>(), ...); }(outrider::weight_types{});
}

/// Reads `count` objects of a row, which may lie at any address, as floats.
template <class W>
void widen(const std::byte* from, std::size_t count, float* out) {
  for (std::size_t i = 0; i < count; ++i) {
    W object;
    std::memcpy(&object, from + i * sizeof(W), sizeof(W));
    if constexpr (outrider::block_format<W>)
      outrider::dequantize(object, out + i * outrider::elements_of<W>);
    else
      out[i] = static_cast<float>(object);
  }
}

template <class W>
value_survey survey_as(const io::tensor& t) {
  constexpr std::size_t per_object = outrider::elements_of<W>, piece = 4096 / per_object;  // objects at a time
  const std::size_t columns = t.shape.empty() ? 1 : t.shape.back(), objects = t.bytes.size() / sizeof(W),
                    per_row = std::max<std::size_t>(columns / per_object, 1);
  std::vector<float> values(piece * per_object);
  value_survey survey;
  for (std::size_t row = 0; row * per_row < objects; ++row) {
    std::uint32_t bits_of_row = 0;  // all but signs
    for (std::size_t first = 0; first < per_row; first += piece) {
      const std::size_t count = std::min(piece, per_row - first) * per_object;
      widen<W>(t.bytes.data() + (row * per_row + first) * sizeof(W), count / per_object, values.data());
      std::uint32_t bits_of_piece = 0;
      std::size_t not_finite = 0;
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu;
        bits_of_piece |= bits;
        not_finite += bits >= 0x7f800000u ? 1 : 0;
      }
      bits_of_row |= bits_of_piece;
      survey.not_finite += not_finite;
      for (std::size_t i = 0; not_finite != 0 && !survey.first_not_finite; ++i)
        if (!std::isfinite(values[i])) survey.first_not_finite = {row, first * per_object + i, values[i]};
    }
    if (bits_of_row == 0 && survey.zero_rows++ == 0) survey.first_zero_row = row;
  }
  return survey;
}

}  // namespace detail

/// Reads every number of a tensor; nothing if its format is none of real numbers, or one that this library does not read.
[[nodiscard]] inline std::optional<value_survey> survey(const io::tensor& t) {
  std::optional<value_survey> result;
  detail::with_format(t.type, [&]<class W>() { result = detail::survey_as<W>(t); });
  return result;
}

/// What keeps a tensor from being a permutation of 0 … n - 1; "" if it is one. It may be stored as whole F32 numbers.
[[nodiscard]] inline std::string permutation_fault(const io::tensor& t) {
  const std::size_t n = t.bytes.size() / io::describe(t.type).bytes;
  std::vector<bool> seen(n, false);
  for (std::size_t i = 0; i < n; ++i) {
    const auto load = [&]<class T>(T number) {
      std::memcpy(&number, t.bytes.data() + i * sizeof(T), sizeof(T));
      return number;
    };
    std::int64_t id = -1;
    if (t.type == io::dtype::i32)
      id = load(std::int32_t{});
    else if (t.type == io::dtype::i64)
      id = load(std::int64_t{});
    else if (t.type == io::dtype::f32) {
      const float value = load(0.0f);
      if (!(value >= 0 && value < 0x1p31f && value == std::floor(value))) return "element " + std::to_string(i) + " is no whole number";
      id = static_cast<std::int64_t>(value);
    } else {
      return "elements of type " + std::string(io::name_of(t.type)) + " are no token ids";
    }
    if (id < 0 || static_cast<std::uint64_t>(id) >= n)
      return "element " + std::to_string(i) + " is " + std::to_string(id) + ", out of range";
    if (seen[static_cast<std::size_t>(id)]) return "element " + std::to_string(i) + " is " + std::to_string(id) + ", for the second time";
    seen[static_cast<std::size_t>(id)] = true;
  }
  return "";
}

}  // namespace inspect
