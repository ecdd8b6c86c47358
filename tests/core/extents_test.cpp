// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/core/extents.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <limits>

using outrider::checked_add;
using outrider::checked_multiply;
using outrider::divide_up;

namespace {
constexpr std::size_t largest = std::numeric_limits<std::size_t>::max();
}

TEST_CASE("a product that fits is given, up to the last one") {
  CHECK(checked_multiply(6, 7) == 42u);
  CHECK(checked_multiply(largest, 1) == largest);
  CHECK(checked_multiply(1, largest) == largest);
  CHECK(checked_multiply(largest / 2, 2) == largest - 1);
  CHECK(checked_multiply(std::size_t{1} << 32, (std::size_t{1} << 32) - 1) == largest - (std::size_t{1} << 32) + 1);
}

TEST_CASE("a product with zero is zero") {
  CHECK(checked_multiply(0, largest) == 0u);
  CHECK(checked_multiply(largest, 0) == 0u);
}

TEST_CASE("a product that does not fit is nothing, whichever factor is large") {
  CHECK(!checked_multiply(largest, 2));
  CHECK(!checked_multiply(2, largest));
  CHECK(!checked_multiply(largest / 2 + 1, 2));
  CHECK(!checked_multiply(std::size_t{1} << 32, std::size_t{1} << 32));
}

TEST_CASE("a sum that fits is given and one that does not is nothing") {
  CHECK(checked_add(40, 2) == 42u);
  CHECK(checked_add(largest, 0) == largest);
  CHECK(checked_add(largest - 5, 5) == largest);
  CHECK(!checked_add(largest, 1));
  CHECK(!checked_add(1, largest));
}

TEST_CASE("divide_up rounds up") {
  CHECK(divide_up(0, 8) == 0);
  CHECK(divide_up(1, 8) == 1);
  CHECK(divide_up(8, 8) == 1);
  CHECK(divide_up(9, 8) == 2);
  static_assert(divide_up(17, 16) == 2);
}
