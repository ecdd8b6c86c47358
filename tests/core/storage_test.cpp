// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/core/storage.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string_view>
#include <type_traits>
#include <utility>

#include "outrider/core/scalar.hpp"

using outrider::buffer;
using outrider::host_space;
using outrider::matrix;

namespace {

constexpr std::size_t largest = std::numeric_limits<std::size_t>::max();

template <class Body>
outrider::error_code code_of(Body body) {
  try {
    body();
  } catch (const outrider::error& failure) {
    CHECK(std::string_view(failure.what()).starts_with("outrider: "));
    return failure.code();
  }
  FAIL("nothing was thrown");
  return {};
}

}  // namespace

TEST_CASE("a buffer is aligned to a cache line, whatever its size and type") {
  for (const std::size_t size : {1u, 3u, 63u, 1000u}) {
    CAPTURE(size);
    CHECK(reinterpret_cast<std::uintptr_t>(buffer<float, host_space>(size).data()) % 64 == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(buffer<outrider::bf16, host_space>(size).data()) % 64 == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(buffer<char, host_space>(size).data()) % 64 == 0);
  }
}

TEST_CASE("a buffer starts as zeros, also where dirty memory is used again") {
  for (int repeat = 0; repeat < 3; ++repeat) {
    buffer<std::int32_t, host_space> b(1000);
    CHECK(std::all_of(b.span().begin(), b.span().end(), [](std::int32_t value) { return value == 0; }));
    std::fill(b.span().begin(), b.span().end(), 77);
  }
}

TEST_CASE("an empty buffer owns nothing") {
  const buffer<float, host_space> none, zero(0);
  CHECK(none.data() == nullptr);
  CHECK(zero.data() == nullptr);
  CHECK(zero.size() == 0);
  CHECK(zero.span().empty());
}

TEST_CASE("moving a buffer moves its memory and leaves an empty one") {
  static_assert(!std::is_copy_constructible_v<buffer<float, host_space>>);
  static_assert(std::is_nothrow_move_constructible_v<buffer<float, host_space>>);
  buffer<float, host_space> a(5);
  float* const memory = a.data();
  memory[4] = 3;

  buffer<float, host_space> b(std::move(a));
  CHECK(b.data() == memory);
  CHECK(b.size() == 5);
  CHECK(a.data() == nullptr);
  CHECK(a.size() == 0);

  buffer<float, host_space> c(7);
  c = std::move(b);
  CHECK(c.data() == memory);
  CHECK(c.span()[4] == 3);
  CHECK(c.size() == 5);
  CHECK(b.data() == nullptr);
  CHECK(b.size() == 0);
}

TEST_CASE("a buffer too large to count in bytes is out_of_memory") {
  CHECK(code_of([] { buffer<float, host_space>{largest / 2}; }) == outrider::error_code::out_of_memory);
  CHECK(code_of([] { buffer<float, host_space>{largest / 4 + 1}; }) == outrider::error_code::out_of_memory);
}

TEST_CASE("a matrix has contiguous rows of zeros") {
  matrix<float, host_space> m(3, 5);
  CHECK(m.rows() == 3);
  CHECK(m.cols() == 5);
  CHECK(m.view().stride == 5);
  CHECK(m.view()(2, 4) == 0);
  m.view()(1, 2) = 9;
  CHECK(std::as_const(m).view().data[7] == 9);
  CHECK(m.first_rows(2).rows == 2);
}

TEST_CASE("a matrix whose extents overflow is out_of_memory, not a small matrix") {
  CHECK(code_of([] { matrix<float, host_space>{std::size_t{1} << 33, std::size_t{1} << 33}; }) == outrider::error_code::out_of_memory);
}

TEST_CASE("a matrix with a zero extent is empty and keeps its shape") {
  const matrix<float, host_space> m(0, 8);
  CHECK(m.rows() == 0);
  CHECK(m.cols() == 8);
  CHECK(m.view().data == nullptr);
}
