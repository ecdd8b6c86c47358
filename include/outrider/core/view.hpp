// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <type_traits>

#include "outrider/config.hpp"
#include "outrider/core/space.hpp"

namespace outrider {

/// Borrowed rows × cols elements; row r starts at data + r * stride. Never owns, never allocates, trivially copyable.
template <class T, class Space = host_space>
struct matrix_view {
  T* data = nullptr;
  std::size_t rows = 0, cols = 0, stride = 0;  // stride >= cols, in elements

  /// A view of const elements is always available from one of mutable elements.
  template <class U>
    requires(!std::is_const_v<T> && std::is_same_v<U, const T>)
  OUTRIDER_HD constexpr operator matrix_view<U, Space>() const noexcept { return {data, rows, cols, stride}; }

  /// Element access exists only where the host may touch the memory: on a device view this is a compile error.
  [[nodiscard]] OUTRIDER_HD constexpr T& operator()(std::size_t r, std::size_t c) const noexcept requires host_accessible<Space> {
    OUTRIDER_ASSERT(r < rows && c < cols);
    return data[r * stride + c];
  }

  [[nodiscard]] OUTRIDER_HD constexpr T* row(std::size_t r) const noexcept { return data + r * stride; }

  /// Rows first … first + count - 1.
  [[nodiscard]] OUTRIDER_HD constexpr matrix_view slice_rows(std::size_t first, std::size_t count) const noexcept {
    OUTRIDER_ASSERT(first <= rows && count <= rows - first);
    return {data + first * stride, count, cols, stride};
  }
  [[nodiscard]] OUTRIDER_HD constexpr matrix_view first_rows(std::size_t count) const noexcept { return slice_rows(0, count); }
  [[nodiscard]] OUTRIDER_HD constexpr matrix_view last_rows(std::size_t count) const noexcept { return slice_rows(rows - count, count); }

  /// Columns first … first + count - 1, same rows.
  [[nodiscard]] OUTRIDER_HD constexpr matrix_view slice_cols(std::size_t first, std::size_t count) const noexcept {
    OUTRIDER_ASSERT(first <= cols && count <= cols - first);
    return {data + first, rows, count, stride};
  }

  /// The same elements as rows · (cols / width) rows of `width`, the heads of a projection for instance. Needs stride == cols.
  [[nodiscard]] OUTRIDER_HD constexpr matrix_view split_cols(std::size_t width) const noexcept {
    OUTRIDER_ASSERT(stride == cols && cols % width == 0);
    return {data, rows * (cols / width), width, width};
  }
};

/// A stored weight matrix: `rows` outputs of `cols` inputs, row r starting at data + r * stride. `rows` and `cols` count logical
/// elements; `stride` counts objects of the storage type W, which for block formats hold many elements each. Only a backend decodes W.
template <class W, class Space = host_space>
struct weight_view {
  const W* data = nullptr;
  std::size_t rows = 0, cols = 0, stride = 0;

  [[nodiscard]] OUTRIDER_HD constexpr const W* row(std::size_t r) const noexcept { return data + r * stride; }
  [[nodiscard]] OUTRIDER_HD constexpr weight_view slice_rows(std::size_t first, std::size_t count) const noexcept {
    OUTRIDER_ASSERT(first <= rows && count <= rows - first);
    return {data + first * stride, count, cols, stride};
  }
};

}  // namespace outrider
