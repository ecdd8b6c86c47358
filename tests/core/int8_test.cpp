// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/core/int8.hpp"

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace {

using outrider::int8_block;
using outrider::quantize;

constexpr double u = 0x1p-24;

int8_block block_of(const float (&x)[32]) {
  int8_block out;
  quantize(out, x);
  return out;
}

TEST_CASE("the largest magnitude becomes 127 and ties go to even") {
  float x[32] = {127, -127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 3.49f, 3.51f};
  const int8_block b = block_of(x);
  CHECK(b.d == 1.0f);
  const int want[] = {127, -127, 0, 2, 2, 0, -2, -2, 3, 4};
  for (std::size_t k = 0; k < 10; ++k) CHECK(b.q[k] == want[k]);
  CHECK(b.q[31] == 0);
}

TEST_CASE("the sums are those of the integers") {
  float x[32];
  for (int k = 0; k < 32; ++k) x[k] = static_cast<float>(k - 4);  // largest 27
  const int8_block b = block_of(x);
  int halves[2] = {};
  for (std::size_t k = 0; k < 32; ++k) halves[k / 16] += b.q[k];
  CHECK(b.half_sum[0] == halves[0]);
  CHECK(b.half_sum[1] == halves[1]);
  CHECK(b.offset == -8 * (halves[0] + halves[1]));
  CHECK(b.sum == b.d * static_cast<float>(halves[0] + halves[1]));
}

TEST_CASE("a block of zeros, of either sign, is all zero bits") {
  float x[32] = {};
  x[3] = -0.0f;
  CHECK(std::bit_cast<std::array<std::uint8_t, sizeof(int8_block)>>(block_of(x)) == std::array<std::uint8_t, sizeof(int8_block)>{});
}

TEST_CASE("a block too small for 127 / max |x| counts as zero and keeps its scale") {
  float x[32] = {1e-30f, -0x1p-149f};
  const int8_block b = block_of(x);
  for (const std::int8_t q : b.q) CHECK(q == 0);
  CHECK(b.d == 1e-30f / 127);
  CHECK(b.sum == 0);
  x[0] = 1.1e-30f;
  CHECK(block_of(x).q[0] == 127);
}

TEST_CASE("a number that is not finite makes the block NaN") {
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN()}) {
    float x[32] = {1, 2, 3};
    x[20] = bad;
    const int8_block b = block_of(x);
    CHECK(std::isnan(b.d));
    CHECK(std::isnan(b.sum));
    for (const std::int8_t q : b.q) CHECK(q == 0);
  }
}

/// q is x · (127 / m), off by two roundings of at most 127·u each and by half a step at most; d is m / 127, rounded once.
TEST_CASE("d · q is within half a step of x, and q within ±127") {
  constexpr std::uint64_t seed = 31;
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 2000; ++round) {
    float x[32];
    const double scale = std::ldexp(1.0, static_cast<int>(random() % 160) - 80);
    for (float& v : x) v = static_cast<float>(scale * (static_cast<double>(random() >> 11) * 0x1p-52 - 1));
    const int8_block b = block_of(x);
    for (std::size_t k = 0; k < 32; ++k) {
      CAPTURE(k);
      REQUIRE(b.q[k] >= -127);
      REQUIRE(std::abs(double{x[k]} - double{b.d} * b.q[k]) <= double{b.d} * (0.5 + 3 * 127 * u));
    }
  }
}

}  // namespace
