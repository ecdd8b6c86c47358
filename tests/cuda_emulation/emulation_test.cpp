// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What the emulation computes: orders, warp operations, tiles, arithmetic.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cuda_emulation/emulation.hpp"
#include "cuda_emulation/launch_for_message.hpp"
#include "outrider/backend/cuda/device.cuh"

namespace {

using cuda_emulation_test::for_each_seed;
using cuda_emulation_test::message_of;
using cuda_emulation_test::own_index;
using cuda_emulation_test::says;
using outrider::device::mma_s8;
namespace emu = outrider::cuda_emulation;

}  // namespace

// ---------------------------------------------------------------- order

namespace {
__global__ void note_order(std::vector<unsigned>* order) {
  order->push_back(blockIdx.x * 1000 + threadIdx.x);
  __syncthreads();
  order->push_back(blockIdx.x * 1000 + threadIdx.x);
}
std::vector<unsigned> order_of(std::uint64_t seed) {
  std::vector<unsigned> order;
  emu::settings.seed = seed;
  emu::run(5, 96, 0, [&] { note_order(&order); });
  emu::settings.seed = 0;
  return order;
}
}  // namespace

TEST_CASE("seed 0 is index order; any other seed is an order of its own, of blocks and of threads, and always the same") {
  std::vector<unsigned> expected;
  for (unsigned block = 0; block < 5; ++block)
    for (int pass = 0; pass < 2; ++pass)
      for (unsigned t = 0; t < 96; ++t) expected.push_back(block * 1000 + t);
  CHECK(order_of(0) == expected);
  const auto one = order_of(1), two = order_of(2);
  CHECK(one == order_of(1));
  CHECK(one != expected);
  CHECK(one != two);
  CHECK(std::vector(one.begin(), one.begin() + 96) != std::vector(one.begin() + 96, one.begin() + 192));
  std::vector<unsigned> sorted = one, sorted_expected = expected;
  std::sort(sorted.begin(), sorted.end());
  std::sort(sorted_expected.begin(), sorted_expected.end());
  CHECK(sorted == sorted_expected);
  std::array<std::vector<unsigned>, 4> blocks;
  for (std::uint64_t seed = 0; seed < 4; ++seed)
    for (const auto order = order_of(seed); const unsigned place : order)
      if (blocks[seed].empty() || blocks[seed].back() != place / 1000) blocks[seed].push_back(place / 1000);
  CHECK(blocks[0] == std::vector<unsigned>{0, 1, 2, 3, 4});
  CHECK((blocks[1] != blocks[0] || blocks[2] != blocks[0] || blocks[3] != blocks[0]));
}

TEST_CASE("threads know where they are") {
  std::vector<std::array<unsigned, 6>> seen;
  emu::run(dim3(2, 3, 2), dim3(4, 3, 2), 0, [&] {
    seen.push_back({blockIdx.z, blockIdx.y, blockIdx.x, threadIdx.z, threadIdx.y, threadIdx.x});
  });
  CHECK(seen.size() == 12 * 24);
  CHECK(std::is_sorted(seen.begin(), seen.end()));
  CHECK(seen.back() == std::array<unsigned, 6>{1, 2, 1, 1, 2, 3});
}

TEST_CASE("launches that no device takes") {
  int threads = 0;
  const auto refused = [&](dim3 grid, dim3 block) {
    try {
      emu::run(grid, block, 0, [&] { ++threads; });
    } catch (const emu::error&) {
      return true;
    }
    return false;
  };
  CHECK(refused(0, 1));
  CHECK(refused(1, 0));
  CHECK(refused(1, 1025));
  CHECK(threads == 0);
  CHECK_FALSE(refused(2, dim3(32, 32)));
  CHECK(threads == 2048);
}

// ---------------------------------------------------------------- warp operations

TEST_CASE("shuffles, votes and reductions") {
  for_each_seed([] {
    std::array<std::array<int, 12>, 32> got{};
    emu::run(1, 32, 0, [&] {
      const int lane = own_index();
      got[threadIdx.x] = {__shfl_sync(~0u, lane, 5),
                          __shfl_sync(~0u, lane, 5, 8),
                          __shfl_up_sync(~0u, lane, 3),
                          __shfl_down_sync(~0u, lane, 3),
                          __shfl_down_sync(~0u, lane, 3, 8),
                          __shfl_xor_sync(~0u, lane, 17),
                          static_cast<int>(__ballot_sync(~0u, lane % 3 == 0)),
                          __any_sync(~0u, lane == 7),
                          __all_sync(~0u, lane != 7),
                          __reduce_add_sync(~0u, lane - 20),
                          static_cast<int>(__reduce_min_sync(~0u, static_cast<unsigned>(lane + 4))),
                          static_cast<int>(__reduce_max_sync(~0u, static_cast<unsigned>(lane ^ 9)))};
    });
    for (int lane = 0; lane < 32; ++lane) {
      CAPTURE(lane);
      const std::array<int, 12> expected{5,
                                         lane / 8 * 8 + 5,
                                         lane < 3 ? lane : lane - 3,
                                         lane > 28 ? lane : lane + 3,
                                         lane % 8 > 4 ? lane : lane + 3,
                                         lane ^ 17,
                                         0x49249249,
                                         1,
                                         0,
                                         31 * 16 - 20 * 32,
                                         4,
                                         31};
      CHECK(got[static_cast<std::size_t>(lane)] == expected);
    }
  });
}

TEST_CASE("warps, and parts of a warp, meet without each other") {
  for_each_seed([] {
    std::array<unsigned, 64> sum{};
    emu::run(1, 64, 0, [&] {
      const unsigned mask = threadIdx.x % 2 ? 0xaaaaaaaau : 0x55555555u;
      for (unsigned turn = 0; turn <= threadIdx.x % 2 + threadIdx.x / 32; ++turn) {
        if (threadIdx.x % 2)
          sum[threadIdx.x] += __reduce_add_sync(mask, threadIdx.x);
        else
          sum[threadIdx.x] += __reduce_add_sync(mask, threadIdx.x);
      }
    });
    for (unsigned t = 0; t < 64; ++t) CHECK(sum[t] == (t % 2 + t / 32 + 1) * (15 * 16 + 16 * (t % 2) + 512 * (t / 32)));
  });
}

// ---------------------------------------------------------------- mma_s8

namespace {

struct tiles {  // of one warp
  std::array<std::array<std::int8_t, 32>, 16> a;
  std::array<std::array<std::int8_t, 8>, 32> b;
  std::array<std::array<int, 8>, 16> c;
};

template <bool All>
__global__ void multiply(tiles* of_warps) {
  tiles& own = of_warps[threadIdx.x / 32];
  const unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const auto word = [](auto element) {
    std::uint32_t bytes = 0;
    for (unsigned i = 0; i < 4; ++i) bytes |= std::uint32_t{static_cast<std::uint8_t>(element(i))} << 8 * i;
    return bytes;
  };
  const auto left = [&](unsigned row, unsigned k) { return word([&](unsigned i) { return own.a[row][k + i]; }); };
  const auto right = [&](unsigned k) { return word([&](unsigned i) { return own.b[k + i][g]; }); };
  const std::uint32_t a[4] = {left(g, 4 * t), left(g + 8, 4 * t), left(g, 16 + 4 * t), left(g + 8, 16 + 4 * t)};
  const std::uint32_t b[2] = {right(4 * t), right(16 + 4 * t)};
  int c[4] = {own.c[g][2 * t], own.c[g][2 * t + 1], own.c[g + 8][2 * t], own.c[g + 8][2 * t + 1]};
  if (All || threadIdx.x % 32 != 31) {
    mma_s8(c, a, b);
    mma_s8(c, a, b);
  }
  own.c[g][2 * t] = c[0], own.c[g][2 * t + 1] = c[1], own.c[g + 8][2 * t] = c[2], own.c[g + 8][2 * t + 1] = c[3];
}

}  // namespace

TEST_CASE("mma_s8 is a product of matrices, for every warp of a block") {
  std::mt19937 random(7);
  for_each_seed([&] {
    std::array<tiles, 3> got;
    for (tiles& t : got) {
      for (auto& row : t.a)
        for (auto& e : row) e = static_cast<std::int8_t>(random() & 255);
      for (auto& row : t.b)
        for (auto& e : row) e = static_cast<std::int8_t>(random() & 255);
      for (auto& row : t.c)
        for (auto& e : row) e = static_cast<int>(random() % 2000) - 1000;
    }
    got[2].a.fill({}), got[2].b.fill({});
    for (auto& row : got[2].a) row.fill(-128);
    for (auto& row : got[2].b) row.fill(-128);
    auto expected = got;
    for (tiles& t : expected)
      for (std::size_t row = 0; row < 16; ++row)
        for (std::size_t column = 0; column < 8; ++column)
          for (std::size_t k = 0; k < 32; ++k) t.c[row][column] += 2 * t.a[row][k] * t.b[k][column];
    CHECK(message_of(&multiply<true>, 96, 0, got.data()) == "");
    for (std::size_t w = 0; w < 3; ++w) CHECK(got[w].c == expected[w].c);
    CHECK(says(message_of(&multiply<false>, 96, 0, got.data()), "mma_s8 at emulation_test.cpp:"));
    CHECK(says(message_of(&multiply<true>, 80, 0, got.data()), "takes all 32 lanes of a warp"));
  });
}

// ---------------------------------------------------------------- arithmetic

TEST_CASE("widen: every half, by its definition") {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    outrider::f16 half;
    half.bits = static_cast<std::uint16_t>(bits);
    const int exponent = static_cast<int>(bits >> 10 & 31), fraction = static_cast<int>(bits & 1023);
    const float got = outrider::device::widen(half);
    if (exponent == 31 && fraction != 0) {
      if (!std::isnan(got)) FAIL_CHECK("not a NaN: ", bits);
      continue;
    }
    double expected = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25);
    if (exponent == 31) expected = HUGE_VAL;
    if (bits >> 15) expected = -expected;
    if (double{got} != expected || std::signbit(got) != (bits >> 15 != 0)) FAIL_CHECK("wrong: ", bits);
  }
}

TEST_CASE("integers and roundings") {
  CHECK(__dp4a(static_cast<int>(0x80ff7f01u), 0x01020380, 5) == 5 + 1 * -128 + 127 * 3 + -1 * 2 + -128 * 1);
  CHECK(__byte_perm(0x33221100, 0x77665544, 0x7052) == 0x77005522);
  CHECK(__float2int_rn(2.5f) == 2);
  CHECK(__float2int_rn(-3.5f) == -4);
  CHECK(__float2int_rn(3e9f) == INT32_MAX);
  CHECK(__float2int_rn(-3e9f) == INT32_MIN);
  CHECK(__float2int_rn(NAN) == 0);
  CHECK(__clz(1) == 31);
  CHECK(__ffs(8) == 4);
  CHECK(__ffs(0) == 0);
  CHECK(__popc(0xf0u) == 4);
  const float a = 1 + 0x1p-12f, exact = a * a;  // rounded: 1 + 2^-11
  CHECK(exact == 1 + 0x1p-11f);
  CHECK(__fadd_rn(__fmul_rn(a, a), -exact) == 0);
  CHECK(__fmaf_rn(a, a, -exact) == 0x1p-24f);
}
