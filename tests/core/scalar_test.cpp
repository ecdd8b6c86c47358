// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/core/scalar.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

using outrider::bf16;
using outrider::f16;

namespace {

/// A storage format with `fraction` explicit bits and exponents from `lowest` (of the smallest normal) to `highest`.
struct format {
  int fraction, lowest, highest;
};
constexpr format bf16_format{7, -126, 127}, f16_format{10, -14, 15};

/// `value` rounded to nearest, ties to even, by scaling to units of the last place in double: slow, and shares nothing with the code it
/// checks.
double rounded(float value, format f) {
  if (value == 0 || !std::isfinite(value)) return value;
  int exponent = 0;
  std::frexp(double{value}, &exponent);  // |value| = [0.5, 1) · 2^exponent
  const int unit = std::max(exponent - 1, f.lowest) - f.fraction;
  const double scaled = std::ldexp(double{value}, -unit), below = std::floor(scaled), rest = scaled - below;
  const bool up = rest > 0.5 || (rest == 0.5 && std::fmod(below, 2) != 0);
  const double result = std::ldexp(up ? below + 1 : below, unit);
  const double largest = std::ldexp(2 - std::ldexp(1.0, -f.fraction), f.highest);
  if (std::abs(result) > largest) return std::copysign(std::numeric_limits<double>::infinity(), result);
  return result == 0 ? std::copysign(0.0, double{value}) : result;
}

template <class T>
bool rounds_like(float value, format f) {
  const double got = static_cast<double>(T(value)), want = rounded(value, f);
  return std::isnan(value) ? std::isnan(got) : got == want && std::signbit(got) == std::signbit(want);
}

/// Floats of every magnitude, and the neighbourhoods where rounding turns: ties, borders of subnormals, of overflow and of binades.
std::vector<float> sample(std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<float> values;
  for (int i = 0; i < 200'000; ++i) values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(engine())));
  const auto add_around = [&](std::uint32_t word) {
    for (std::uint32_t offset = 0; offset < 5; ++offset)
      for (const std::uint32_t sign : {0u, 0x80000000u}) values.push_back(std::bit_cast<float>((word + offset - 2) ^ sign));
  };
  for (int i = 0; i < 20'000; ++i) {
    const auto word = static_cast<std::uint32_t>(engine()) & 0x7fffffffu;
    add_around((word & 0xffff0000u) | 0x8000u);                                                // halfway between two bf16
    add_around((0x38800000u + word % 0x0f000000u) & 0xffffe000u);                              // a normal f16
    add_around(((0x38800000u + word % 0x0f000000u) & 0xffffe000u) | 0x1000u);                  // halfway between two of them
    add_around(std::bit_cast<std::uint32_t>(static_cast<float>(word % 4096) * 0x1p-25f) + 2);  // subnormal f16 and halfway
  }
  for (const float edge :
       {0.0f, 0x1p-149f, 0x1p-126f, 0x1p-14f, 0x1p-24f, 0x1p-25f, 65504.0f, 65520.0f, 65536.0f, 0x1.fep127f, 0x1.ffp127f})
    add_around(std::bit_cast<std::uint32_t>(edge) + 2);
  add_around(0x7f800000u);  // infinity and its neighbours
  return values;
}

}  // namespace

TEST_CASE("every bf16 becomes the same bf16 through float") {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = std::bit_cast<bf16>(static_cast<std::uint16_t>(bits));
    const bool nan = (bits & 0x7fffu) > 0x7f80u;
    wrong += bf16(static_cast<float>(half)).bits != (nan ? bits | 0x40u : bits);  // a NaN comes back quiet
    wrong += nan != std::isnan(static_cast<float>(half));
  }
  CHECK(wrong == 0);
}

TEST_CASE("every f16 becomes the same f16 through float") {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = std::bit_cast<f16>(static_cast<std::uint16_t>(bits));
    const bool nan = (bits & 0x7fffu) > 0x7c00u;
    wrong += f16(static_cast<float>(half)).bits != (nan ? bits | 0x200u : bits);
    wrong += nan != std::isnan(static_cast<float>(half));
  }
  CHECK(wrong == 0);
}

TEST_CASE("every finite f16 has the value of its sign, exponent and fraction") {
  int wrong = 0;
  for (int exponent = 0; exponent < 31; ++exponent)
    for (int fraction = 0; fraction < 1024; ++fraction) {
      const auto bits = static_cast<std::uint16_t>(exponent << 10 | fraction);
      const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
      wrong += static_cast<double>(std::bit_cast<f16>(bits)) != magnitude;
      wrong += static_cast<double>(std::bit_cast<f16>(static_cast<std::uint16_t>(bits | 0x8000u))) != -magnitude;
    }
  CHECK(wrong == 0);
  CHECK(std::signbit(static_cast<float>(std::bit_cast<f16>(std::uint16_t{0x8000}))));
}

TEST_CASE("float to bf16 rounds to nearest, ties to even, like slow arithmetic in double") {
  constexpr std::uint64_t seed = 101;
  CAPTURE(seed);
  for (const float value : sample(seed))
    if (!rounds_like<bf16>(value, bf16_format)) FAIL_CHECK("bf16 of ", std::bit_cast<std::uint32_t>(value), " is ", bf16(value).bits);
}

TEST_CASE("float to f16 rounds to nearest, ties to even, like slow arithmetic in double") {
  constexpr std::uint64_t seed = 102;
  CAPTURE(seed);
  for (const float value : sample(seed))
    if (!rounds_like<f16>(value, f16_format)) FAIL_CHECK("f16 of ", std::bit_cast<std::uint32_t>(value), " is ", f16(value).bits);
}

TEST_CASE("NaN stays NaN in both formats, also one whose payload lies in the lost bits") {
  for (const std::uint32_t word : {0x7f800001u, 0xff800001u, 0x7fc00000u, 0x7fffffffu, 0xffffffffu}) {
    CAPTURE(word);
    CHECK(std::isnan(static_cast<float>(bf16(std::bit_cast<float>(word)))));
    CHECK(std::isnan(static_cast<float>(f16(std::bit_cast<float>(word)))));
    CHECK((bf16(std::bit_cast<float>(word)).bits >> 15) == (word >> 31));
    CHECK((f16(std::bit_cast<float>(word)).bits >> 15) == (word >> 31));
  }
}

TEST_CASE("pitfall 34: embedding factors round to bf16 as the reference does") {
  CHECK(static_cast<float>(bf16(std::sqrt(1536.0f))) == 39.25f);
  CHECK(static_cast<float>(bf16(std::sqrt(2560.0f))) == 50.5f);
  CHECK(static_cast<float>(bf16(std::sqrt(3840.0f))) == 62.0f);
  CHECK(static_cast<float>(bf16(std::sqrt(2816.0f))) == 53.0f);
  CHECK(static_cast<float>(bf16(std::sqrt(5376.0f))) == 73.5f);
}

TEST_CASE("conversions are usable in constant expressions") {
  static_assert(bf16(1.0f).bits == 0x3f80);
  static_assert(f16(1.0f).bits == 0x3c00);
  static_assert(static_cast<float>(f16(-2.5f)) == -2.5f);
  static_assert(outrider::to_float(bf16(3.0f)) == 3.0f);
  static_assert(sizeof(bf16) == 2 && sizeof(f16) == 2);
  CHECK(true);
}
