// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "outrider/config.hpp"
#include "outrider/core/space.hpp"
#include "outrider/core/view.hpp"

namespace outrider {

/// How elements get from one memory space to another: one specialisation per ordered pair of spaces; a device backend adds its own.
///   copy(to, from, count)      `count` elements of any trivially copyable type, without overlap
/// and, where many short rows are better moved by one call,
///   copy_rows(to, to_stride, from, from_stride, rows, cols)      row r starts `stride` elements behind row r − 1, as in a matrix_view
/// Both are static templates over the element type. They see what the program's thread asked for before, be it still under way on a device,
/// and are complete when they return; so nobody waits for anything else.
template <class From, class To>
struct space_copy;

template <>
struct space_copy<host_space, host_space> {
  template <class T>
  static void copy(T* to, const T* from, std::size_t count) noexcept {
    static_assert(std::is_trivially_copyable_v<T>);
    std::copy_n(from, count, to);
  }
};

/// What a space says of its size, for who decides where something large goes: free_bytes(), about, in spaces that are small. The host's is
/// the system's business.
template <class Space>
struct space_limits {};

/// to [m, n] = from [m, n], across memory spaces.
template <class T, class To, class U, class From>
  requires std::is_same_v<T, std::remove_const_t<U>>
void copy_across(matrix_view<T, To> to, matrix_view<U, From> from) {
  OUTRIDER_ASSERT(to.rows == from.rows && to.cols == from.cols);
  using way = space_copy<From, To>;
  if constexpr (requires { way::copy_rows(to.data, to.stride, from.data, from.stride, to.rows, to.cols); })
    way::copy_rows(to.data, to.stride, from.data, from.stride, to.rows, to.cols);
  else
    for (std::size_t r = 0; r < to.rows; ++r) way::copy(to.row(r), static_cast<const T*>(from.row(r)), to.cols);
}

}  // namespace outrider
