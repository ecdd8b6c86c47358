// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/core/rng.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

using outrider::noise;
using outrider::philox4x32;
using outrider::philox_words;

// The known answers of the authors' own distribution, Random123.
static_assert(philox4x32({{0, 0, 0, 0}}, 0, 0) == philox_words{{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
static_assert(philox4x32({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u) == philox_words{{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
static_assert(philox4x32({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0) ==
              philox_words{{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});

TEST_CASE("the known answers hold at run time as well") {
  volatile std::uint32_t zero = 0;
  CHECK((philox4x32({{zero, zero, zero, zero}}, zero, zero) == philox_words{{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}));
}

TEST_CASE("uniform numbers never reach 0 or 1, and Gumbel noise stays within 23") {
  CHECK(noise::uniform_of(0) > 0);
  CHECK(noise::uniform_of(~0u) < 1);
  CHECK(std::isfinite(noise::gumbel_of(0)));
  CHECK(noise::gumbel_of(~0u) < 22.88);
  CHECK(noise::gumbel_of(~0u) > 22.87);
}

TEST_CASE("four neighbouring ids share a block") {
  const noise source(7, 9);
  for (const outrider::token_id id : {0, 1, 2, 3, 4, 7, 262143, 0x7fffffff}) {
    const auto index = static_cast<std::uint32_t>(id);
    CHECK(source.gumbel(5, id) == noise::gumbel_of(source.words(5, index / 4).word[index % 4]));
  }
}

TEST_CASE("every seed, sequence, position, id and kind has a number of its own") {
  // Equal words among n of 32 bits are expected n²/2^33 times, 0.01 for these; doubles that differ in a word differ.
  std::vector<double> numbers;
  const auto add = [&](const noise& source, std::size_t position) {
    for (std::uint32_t i = 0; i < 64; ++i) {
      numbers.push_back(source.uniform(position, i));
      const philox_words words = source.words(position, i / 4);
      numbers.push_back(noise::uniform_of(words.word[i % 4]));
    }
  };
  for (const std::size_t position : {std::size_t{0}, std::size_t{1}, std::size_t{4096}, std::size_t{0xffffffff}}) {
    add({0, 0}, position);
    add({1, 0}, position);
    add({0, 1}, position);
    add({std::uint64_t{1} << 32, 0}, position);
    add({0, std::uint64_t{1} << 32}, position);
    add({~std::uint64_t{0}, ~std::uint64_t{0}}, position);
  }
  std::sort(numbers.begin(), numbers.end());
  CHECK(std::adjacent_find(numbers.begin(), numbers.end()) == numbers.end());
}

TEST_CASE("the moments of uniform numbers and of Gumbel noise are right") {
  // n independent numbers: a mean is off by more than 5 standard deviations with a chance below 1e-6.
  const noise source(2024, 0);
  constexpr int n = 100000;
  double uniform = 0, gumbel = 0, squares = 0;
  for (int i = 0; i < n; ++i) {
    uniform += source.uniform(static_cast<std::size_t>(i / 10), static_cast<std::uint32_t>(i % 10));
    const double g = source.gumbel(static_cast<std::size_t>(i / 10), i % 10);
    gumbel += g;
    squares += g * g;
  }
  constexpr double euler = 0.5772156649015329, variance = 1.6449340668482264;  // π²/6
  CHECK(std::abs(uniform / n - 0.5) < 5 * std::sqrt(1.0 / 12 / n));
  CHECK(std::abs(gumbel / n - euler) < 5 * std::sqrt(variance / n));
  // The fourth central moment is 27/5 of the variance squared; so (g − mean)² has variance 4.4 σ⁴.
  const double mean = gumbel / n;
  CHECK(std::abs(squares / n - mean * mean - variance) < 5 * std::sqrt(4.4 / n) * variance);
}

}  // namespace
