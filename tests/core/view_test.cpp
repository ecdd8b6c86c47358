// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/core/view.hpp"

#include <doctest/doctest.h>

#include <array>
#include <concepts>
#include <numeric>
#include <type_traits>

#include "outrider/core/kv_view.hpp"

using outrider::device_space;
using outrider::key_window;
using outrider::kv_view;
using outrider::matrix_view;
using outrider::weight_view;

namespace {

/// 0 … 23 as three rows of 6, 8 apart.
struct numbers {
  std::array<int, 24> data{};
  numbers() { std::iota(data.begin(), data.end(), 0); }
  matrix_view<int> view() { return {data.data(), 3, 6, 8}; }
};

template <class View>
concept has_elements = requires(const View& view) {
  view(0, 0);
};

}  // namespace

TEST_CASE("a view finds row r at r times stride") {
  numbers n;
  CHECK(n.view()(0, 0) == 0);
  CHECK(n.view()(2, 5) == 21);
  CHECK(n.view().row(1) == n.data.data() + 8);
}

TEST_CASE("slices of rows and columns look at the same elements") {
  numbers n;
  const auto rows = n.view().slice_rows(1, 2);
  CHECK(rows.rows == 2);
  CHECK(rows(0, 0) == 8);
  const auto cols = rows.slice_cols(2, 3);
  CHECK(cols.rows == 2);
  CHECK(cols.cols == 3);
  CHECK(cols(1, 2) == 20);
  CHECK(n.view().first_rows(1).rows == 1);
  CHECK(n.view().last_rows(1)(0, 0) == 16);
  cols(1, 2) = -1;
  CHECK(n.data[20] == -1);
}

TEST_CASE("slices may be empty, also at the end") {
  numbers n;
  CHECK(n.view().slice_rows(3, 0).rows == 0);
  CHECK(n.view().slice_cols(6, 0).cols == 0);
  CHECK(matrix_view<int>{}.first_rows(0).rows == 0);
}

TEST_CASE("split_cols turns the heads of a row into rows") {
  numbers n;
  const matrix_view<int> dense{n.data.data(), 3, 8, 8};
  const auto heads = dense.split_cols(4);
  CHECK(heads.rows == 6);
  CHECK(heads.cols == 4);
  CHECK(heads(3, 1) == 13);  // row 1, head 1
}

TEST_CASE("a mutable view becomes a const one and never the reverse") {
  static_assert(std::convertible_to<matrix_view<int>, matrix_view<const int>>);
  static_assert(!std::convertible_to<matrix_view<const int>, matrix_view<int>>);
  static_assert(std::convertible_to<kv_view<float>, kv_view<const float>>);
  static_assert(!std::convertible_to<kv_view<const float>, kv_view<float>>);
  static_assert(std::is_trivially_copyable_v<matrix_view<int>>);
  CHECK(true);
}

TEST_CASE("only host memory has elements, and spaces do not mix") {
  static_assert(has_elements<matrix_view<int>>);
  static_assert(!has_elements<matrix_view<int, device_space>>);
  static_assert(!std::convertible_to<matrix_view<int, device_space>, matrix_view<int>>);
  CHECK(true);
}

TEST_CASE("a weight view slices rows by its stride") {
  numbers n;
  const weight_view<int> w{n.data.data(), 3, 6, 8};
  CHECK(*w.row(2) == 16);
  CHECK(w.slice_rows(1, 2).rows == 2);
  CHECK(*w.slice_rows(1, 2).row(1) == 16);
}

TEST_CASE("a growing cache view goes from block to block") {
  std::array<std::array<float, 2 * 2 * 4 * 3>, 2> blocks{};  // keys and values of 2 heads, 4 slots, 3 coordinates
  std::array<float*, 2> table{blocks[0].data(), blocks[1].data()};
  const kv_view<float> cache{table.data(), 4, 0, 2, 3};
  CHECK(cache.key(0, 0) == blocks[0].data());
  CHECK(cache.key(3, 1) == blocks[0].data() + (4 + 3) * 3);
  CHECK(cache.key(4, 0) == blocks[1].data());
  CHECK(cache.value(5, 1) == blocks[1].data() + (8 + 4 + 1) * 3);
  CHECK(cache.run(0, 8) == 4);
  CHECK(cache.run(5, 8) == 3);
  CHECK(cache.run(5, 6) == 1);
}

TEST_CASE("pitfall 47: a ring view finds absolute positions after any number of turns") {
  std::array<float, 2 * 5 * 3> block{};  // keys and values of 1 head, 5 slots, 3 coordinates
  std::array<float*, 1> table{block.data()};
  const kv_view<float> cache{table.data(), 5, 5, 1, 3};
  CHECK(cache.key(5003, 0) == block.data() + 3 * 3);
  CHECK(cache.value(5004, 0) == block.data() + (5 + 4) * 3);
  CHECK(cache.run(5003, 5008) == 2);
  CHECK(cache.run(5000, 5003) == 3);
}

TEST_CASE("pitfall 46: with a window of 4, query 3 sees 0-3, query 4 sees 1-4, query 9 sees 6-9") {
  constexpr key_window window{1, 4};  // row r is the query at position r
  CHECK(window.begin(3) == 0);
  CHECK(window.end(3) == 4);
  CHECK(window.begin(4) == 1);
  CHECK(window.end(4) == 5);
  CHECK(window.begin(9) == 6);
  CHECK(window.end(9) == 10);
  constexpr key_window all{1};
  CHECK(all.begin(1000) == 0);
}
