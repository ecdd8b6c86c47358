// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What core/quantize.hpp promises. Compiled twice: for any machine, and for this one, where a compiler may fuse multiplications with
// additions and vectorise, and not a byte may change.
#pragma once
#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "outrider/core/dequantize.hpp"
#include "outrider/core/quantize.hpp"
#include "outrider/io/gguf.hpp"
#include "outrider/io/safetensors.hpp"

namespace {

using namespace outrider;

const std::string root = OUTRIDER_SOURCE_DIR;

template <class Block>
std::string hex_of(const Block& block) {
  std::string text;
  const auto* const bytes = reinterpret_cast<const unsigned char*>(&block);
  for (std::size_t i = 0; i < sizeof block; ++i)
    for (const int shift : {4, 0}) text += "0123456789abcdef"[bytes[i] >> shift & 15];
  return text;
}

std::array<float, 256> golden_input() {
  std::array<float, 256> x;
  for (std::size_t i = 0; i < 256; ++i) x[i] = (static_cast<float>(i * 37 % 101) - 50) / 32;
  return x;
}

template <class Block>
std::string golden_hex() {
  Block block;
  CHECK(quantize(golden_input().data(), block));
  return hex_of(block);
}

/// Root of the mean squared difference between n values and what their blocks stand for.
template <class Block>
double error_of(const float* x, std::size_t n, const Block* blocks) {
  double sum = 0;
  std::array<float, Block::elements> back;
  for (std::size_t i = 0; i < n; ++i) {
    if (i % Block::elements == 0) dequantize(blocks[i / Block::elements], back.data());
    const double difference = double{x[i]} - double{back[i % Block::elements]};
    sum += difference * difference;
  }
  return std::sqrt(sum / static_cast<double>(n));
}

struct counts {
  std::size_t equal = 0, all = 0;
};
/// How many blocks of `file`, written by llama.cpp, are what quantize() makes of the BF16 weights they were made from.
template <class Block>
counts compare_blocks(const io::gguf_file& file, io::dtype type, const io::gguf_file& source) {
  counts found;
  for (const io::tensor& t : file.tensors)
    for (const io::tensor& s : source.tensors) {
      if (t.type != type || s.name != t.name) continue;
      REQUIRE(s.type == io::dtype::bf16);
      for (std::size_t b = 0; b < t.bytes.size() / sizeof(Block); ++b, ++found.all) {
        std::array<float, Block::elements> x;
        for (std::size_t i = 0; i < x.size(); ++i) {
          bf16 value;
          std::memcpy(&value, s.bytes.data() + 2 * (b * x.size() + i), sizeof value);
          x[i] = to_float(value);
        }
        Block block;
        CHECK(quantize(x.data(), block));
        found.equal += std::memcmp(&block, t.bytes.data() + b * sizeof block, sizeof block) == 0;
      }
    }
  return found;
}
template <class Block>
void check_file(const char* name, io::dtype type) {
  const std::string tiny = root + "/examples/data/tiny-kjv/gguf/";
  const counts found = compare_blocks<Block>(io::open_gguf(tiny + name), type, io::open_gguf(tiny + "target-bf16.gguf"));
  CAPTURE(name);
  CHECK(found.all > 0);
  CHECK(found.equal == found.all);
}

template <class Block>
void check_fixture(const char* name) {
  const io::tensor_set set = io::load_safetensors(root + "/tests/golden/quantised/quantizers.safetensors");
  const io::tensor &x = set.at("x"), &want = set.at(name);
  const std::size_t blocks = want.bytes.size() / sizeof(Block);
  REQUIRE(blocks * Block::elements * sizeof(float) == x.bytes.size());
  for (std::size_t b = 0; b < blocks; ++b) {
    std::array<float, Block::elements> in;
    std::memcpy(in.data(), x.bytes.data() + b * sizeof in, sizeof in);
    Block block, expected;
    std::memcpy(static_cast<void*>(&expected), want.bytes.data() + b * sizeof block, sizeof block);
    CAPTURE(b);
    CHECK(quantize(in.data(), block));
    CHECK(hex_of(block) == hex_of(expected));
  }
}

template <class Block>
void check_bad_values() {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    std::array<float, 256> x = golden_input(), with_zero = golden_input();
    x[7] = bad;
    with_zero[7] = 0;
    Block block, expected;
    CHECK_FALSE(quantize(x.data(), block));
    CHECK(quantize(with_zero.data(), expected));
    CHECK(hex_of(block) == hex_of(expected));
  }
}

template <class Block>
void check_random_blocks(std::uint32_t seed) {
  INFO("seed " << seed);
  std::mt19937 random(seed);
  std::uniform_int_distribution<std::uint32_t> bits;
  for (int round = 0; round < 200; ++round) {
    std::array<float, 256> x;
    const std::uint32_t exponents = round % 2 ? 0xffu : 0x0fu;  // all floats there are, or those of similar size
    for (float& v : x) {
      const std::uint32_t b = bits(random);
      v = std::bit_cast<float>((b & 0x807fffffu) | ((120 + (b >> 23 & exponents)) % 255) << 23);
    }
    Block block;
    static_cast<void>(quantize(x.data(), block));  // the sanitisers watch
    std::array<float, Block::elements> back;
    dequantize(block, back.data());
  }
}

}  // namespace

TEST_CASE("golden blocks: x_i = (37 i mod 101 - 50) / 32") {
  CHECK(golden_hex<q8_0>() == "4d2281df3d9af856b41270cd2b89e745a2005ebb1977d53390ee4caa0866c3217fdc");
  CHECK(golden_hex<q4_0>() == "4032e046acf258bd1379df358be046acf268");
  CHECK(golden_hex<q4_1>() == "ab3240bed0369bf257bd1369ce258ae0469cf258");
  CHECK(golden_hex<q5_0>() == "402ea4a52d6dc07c38f3bf6b26e2ae5a15d18d49f4c0");
  CHECK(golden_hex<q5_1>() == "742e40bea4a52d6db07b37e3af6a26d29d5905c18c48f4b0");
  CHECK(golden_hex<mxfp4>() == "7d6fdb257ec946fea267ec146fda357eb0");
  CHECK(golden_hex<q4_k>() ==
        "de1a2c26fefffffcfffdfefecfdcfffea0156bc1278cd3489e045ab0167bc2378de349ae056ab1267cd2389de459af15268ce248ad0459b0157bd137"
        "9ce348ae046ac0267bd2379df359be156ac1268c9df359be157ac1268ce248ad0459b0157bd1379ce348ae046ac0267bd2379df3156ac1268cd2489d"
        "f459b0157bc1378ce348ae046ab0267bd2379de359ae156a");
  CHECK(golden_hex<q5_k>() ==
        "8e165326fffdfdfdfffcfeffdfeffdcf326c9936cc9366c9b36499324c9926cc9366c9336c99364c9b66cdb366d9336c702be7a35f1ad6824d09c581"
        "3cf8b46f2be7935e1ad6824d09c5703cf8a36f2b5e1ad5914d09c4803cf8b36f2be6a25e1ad5914d09c4703cf7b36f2be6a25e1a3be8b36e2be6925e"
        "19c5814c08b4703cf7a36f2ad6925d19c5814c08b4703be71bd7824e0ab5713de9a4602cd8935f1bc6824e0ab5713de9a4601cd7935f1bc6");
  CHECK(golden_hex<q6_k>() ==
        "d158bf37be25ad048b047bf37ad159d0c941ea63eb74fb741d951ea72fc841c9bf35ad169b048df26be069d147cf38bd1a922c840d85ed77ff57d038"
        "b04aa22b67df58c139b22aa22b931c85fd76ee57ce5ad137b31a902c830f86ec78ff55d1c841da62eb63fc840d951ea63fb840c9d129b30b931c74fe"
        "86de67ff47d129b118b1c66cb11b6c861b71c61cb1c76cb22453f9248ef9138ef4538d2452f9248ed4a209d47e09a37e14a349d4ae09d77ec863be14"
        "63c9147ec923bec463bd1463807f897a867a84877f737d7a81877c89758e");
}

TEST_CASE("pitfall 108: blocks of the gguf package, to the byte") {
  check_fixture<q4_0>("q4_0");
  check_fixture<q4_1>("q4_1");
  check_fixture<q5_0>("q5_0");
  check_fixture<q5_1>("q5_1");
  check_fixture<q8_0>("q8_0");
  check_fixture<mxfp4>("mxfp4");
}

TEST_CASE("pitfall 108: every block of the tiny model as llama.cpp quantised it, to the byte") {
  check_file<q8_0>("target-q8_0.gguf", io::dtype::q8_0);
  check_file<q4_0>("target-q4_0.gguf", io::dtype::q4_0);
  check_file<q6_k>("target-q4_0.gguf", io::dtype::q6_k);
  check_file<q4_k>("target-q4_k_m.gguf", io::dtype::q4_k);
  check_file<q5_0>("target-q4_k_m.gguf", io::dtype::q5_0);
  check_file<q6_k>("target-q4_k_m.gguf", io::dtype::q6_k);
  check_file<q8_0>("target-q4_k_m.gguf", io::dtype::q8_0);
}

TEST_CASE("the error of a golden block is the recorded one") {
  // Recorded with five decimals: half of the last one on top of the 0.1 % that another order of summation may cost.
  const auto check = [](auto block, double recorded) {
    const auto x = golden_input();
    CHECK(quantize(x.data(), block));
    CHECK(error_of(x.data(), 256, &block) <= 1.001 * recorded + 0.5e-5);
  };
  check(q4_k{}, 0.05427);
  check(q5_k{}, 0.02665);
  check(q6_k{}, 0.01278);
}

TEST_CASE("finer formats have smaller errors") {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 0.02f);
  std::vector<float> x(64 * 256);
  for (float& v : x) v = normal(random);
  const auto error = [&]<class Block>(Block) {
    std::vector<Block> blocks(x.size() / Block::elements);
    for (std::size_t b = 0; b < blocks.size(); ++b) REQUIRE(quantize(x.data() + b * Block::elements, blocks[b]));
    return error_of(x.data(), x.size(), blocks.data());
  };
  CHECK(error(q8_0{}) < error(q6_k{}));
  CHECK(error(q6_k{}) < error(q5_k{}));
  CHECK(error(q5_k{}) < error(q4_k{}));
  CHECK(error(q5_0{}) < error(q4_0{}));
  CHECK(error(q4_k{}) < error(q4_0{}));
}

TEST_CASE("what is no finite number counts as 0, and the caller is told") {
  check_bad_values<q8_0>();
  check_bad_values<q4_0>();
  check_bad_values<q4_1>();
  check_bad_values<q5_0>();
  check_bad_values<q5_1>();
  check_bad_values<mxfp4>();
  check_bad_values<q4_k>();
  check_bad_values<q5_k>();
  check_bad_values<q6_k>();
}

TEST_CASE("a block whose scale does not fit into 16 bits is reported") {
  std::array<float, 256> x = golden_input();
  x[3] = 1e20f;
  q8_0 bytes;
  CHECK_FALSE(quantize(x.data(), bytes));
  q4_1 affine;
  CHECK_FALSE(quantize(x.data(), affine));
  q4_k mixed;
  CHECK_FALSE(quantize(x.data(), mixed));
  mxfp4 powers;
  CHECK(quantize(x.data(), powers));  // its scale is a power of two of any size
}

TEST_CASE("zeros become blocks of zeros") {
  const auto check = [](auto block) {
    constexpr std::size_t n = decltype(block)::elements;
    const std::array<float, 256> zeros{};
    CHECK(quantize(zeros.data(), block));
    std::array<float, n> back;
    dequantize(block, back.data());
    for (const float v : back) CHECK(v == 0);
  };
  check(q8_0{}), check(q4_0{}), check(q4_1{}), check(q5_0{}), check(q5_1{}), check(mxfp4{}), check(q4_k{}), check(q5_k{}), check(q6_k{});
}

TEST_CASE("any floats give a defined block") {
  check_random_blocks<q8_0>(1);
  check_random_blocks<q4_0>(2);
  check_random_blocks<q4_1>(3);
  check_random_blocks<q5_0>(4);
  check_random_blocks<q5_1>(5);
  check_random_blocks<mxfp4>(6);
  check_random_blocks<q4_k>(7);
  check_random_blocks<q5_k>(8);
  check_random_blocks<q6_k>(9);
}
