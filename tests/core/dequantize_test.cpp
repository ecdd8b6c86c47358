// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/core/dequantize.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "outrider/backend/concepts.hpp"
#include "outrider/io/dtype_of.hpp"
#include "outrider/io/safetensors.hpp"

using outrider::dequantize;

namespace {

// The quantisation of x(i) = (((i · 37) mod 101) − 50) / 32, i = 0 …, by the reference implementation of each format.
constexpr std::string_view q8_0_hex = "4d2281df3d9af856b41270cd2b89e745a2005ebb1977d53390ee4caa0866c3217fdc";
constexpr std::string_view q4_0_hex = "4032e046acf258bd1379df358be046acf268";
constexpr std::string_view q4_1_hex = "ab3240bed0369bf257bd1369ce258ae0469cf258";
constexpr std::string_view q5_0_hex = "402ea4a52d6dc07c38f3bf6b26e2ae5a15d18d49f4c0";
constexpr std::string_view q5_1_hex = "742e40bea4a52d6db07b37e3af6a26d29d5905c18c48f4b0";
constexpr std::string_view iq4_nl_hex = "5522e035acf147ce1269df249bf036bdf158";
constexpr std::string_view mxfp4_hex = "7d6fdb257ec946fea267ec146fda357eb0";
constexpr std::string_view q2_k_hex =
    "dedecddffedeffcedebcdeeedcefbeef68b1d66cb11b6c861bb1c66cb1d66cb21b6d861b71c628b1d76cb61b6d861bb11b7d862b71c62c"
    "b1db6c861b718628b1db6cb51b6c861ba1c66cb1db6cb61b6c012c9d2e";
constexpr std::string_view q3_k_hex =
    "86dc2bc6fd23d67923dc3986fc2bd6fda451fe045bae05fbae51fba459fe045b4827e28d7823de897722dd8877e29d785df2b79c2db68b"
    "5de2f7485d22b7882dfd6297c82d528bf8225688fd2e578b3de2c7787dd29bbc2d968b7de2d7787dd2b69ab69a653aa600303ff033dea3";
constexpr std::string_view q4_k_hex =
    "de1a2c26fefffffcfffdfefecfdcfffea0156bc1278cd3489e045ab0167bc2378de349ae056ab1267cd2389de459af15268ce248ad0459"
    "b0157bd1379ce348ae046ac0267bd2379df359be156ac1268c9df359be157ac1268ce248ad0459b0157bd1379ce348ae046ac0267bd237"
    "9df3156ac1268cd2489df459b0157bc1378ce348ae046ab0267bd2379de359ae156a";
constexpr std::string_view q5_k_hex =
    "8e165326fffdfdfdfffcfeffdfeffdcf326c9936cc9366c9b36499324c9926cc9366c9336c99364c9b66cdb366d9336c702be7a35f1ad6"
    "824d09c5813cf8b46f2be7935e1ad6824d09c5703cf8a36f2b5e1ad5914d09c4803cf8b36f2be6a25e1ad5914d09c4703cf7b36f2be6a2"
    "5e1a3be8b36e2be6925e19c5814c08b4703cf7a36f2ad6925d19c5814c08b4703be71bd7824e0ab5713de9a4602cd8935f1bc6824e0ab5"
    "713de9a4601cd7935f1bc6";
constexpr std::string_view q6_k_hex =
    "d158bf37be25ad048b047bf37ad159d0c941ea63eb74fb741d951ea72fc841c9bf35ad169b048df26be069d147cf38bd1a922c840d85ed"
    "77ff57d038b04aa22b67df58c139b22aa22b931c85fd76ee57ce5ad137b31a902c830f86ec78ff55d1c841da62eb63fc840d951ea63fb8"
    "40c9d129b30b931c74fe86de67ff47d129b118b1c66cb11b6c861b71c61cb1c76cb22453f9248ef9138ef4538d2452f9248ed4a209d47e"
    "09a37e14a349d4ae09d77ec863be1463c9147ec923bec463bd1463807f897a867a84877f737d7a81877c89758e";
constexpr std::string_view iq4_xs_hex =
    "ab8e0ccfe021fff2e035acf157ce1369df249be136adf258630fc942fea721ec751fda530eb842fd47be1269df248be035adf157ce137a"
    "df0269df138be035adf147ce1269df249b31ec8520db641fb942fda731ec751fda8520db641fc942fea731ec851fda630e259cf147be02"
    "69df138be035adf147ce1fc952fea731ec8520db641fb942fda7";

constexpr int digit(char c) { return c <= '9' ? c - '0' : c - 'a' + 10; }

template <class W>
W block_of(std::string_view hex) {
  REQUIRE(hex.size() == 2 * sizeof(W));
  std::byte bytes[sizeof(W)];
  for (std::size_t i = 0; i < sizeof(W); ++i) bytes[i] = static_cast<std::byte>(16 * digit(hex[2 * i]) + digit(hex[2 * i + 1]));
  W block;
  std::memcpy(&block, bytes, sizeof(W));
  return block;
}

template <class W>
std::vector<float> weights_of(const W& block) {
  std::vector<float> weights(W::elements);
  dequantize(block, weights.data());
  return weights;
}

/// Printed with ten decimals, of which the last may be a half rounded up.
bool is(float value, double printed) { return std::abs(double{value} - printed) <= 0.5e-10 + 1e-15; }

template <class W>
void check_block_of_32(std::string_view hex, double w0, double w1, double w2, double w3) {
  const std::vector<float> weights = weights_of(block_of<W>(hex));
  CHECK(is(weights[0], w0));
  CHECK(is(weights[1], w1));
  CHECK(is(weights[2], w2));
  CHECK(is(weights[3], w3));
}

template <class W>
void check_block_of_256(std::string_view hex, double w0, double w1, double w100, double w255, double rms_error) {
  const std::vector<float> weights = weights_of(block_of<W>(hex));
  CHECK(is(weights[0], w0));
  CHECK(is(weights[1], w1));
  CHECK(is(weights[100], w100));
  CHECK(is(weights[255], w255));
  double squares = 0;
  for (std::size_t i = 0; i < 256; ++i) {
    const double source = (static_cast<double>(i * 37 % 101) - 50) / 32, error = double{weights[i]} - source;
    squares += error * error;
  }
  CHECK(std::abs(std::sqrt(squares / 256) - rms_error) <= 0.5e-5);  // printed with five decimals
}

/// Whether the weights of all blocks of the fixture have the bits that the gguf package gave them.
template <class W>
bool agrees_with_fixture(const outrider::io::tensor_set& fixture) {
  const std::string name(outrider::io::name_of(outrider::io::dtype_of<W>));
  const auto &blocks = fixture.at(name + ".blocks"), &weights = fixture.at(name + ".weights");
  const std::size_t count = blocks.bytes.size() / sizeof(W);
  REQUIRE(count >= 6);
  REQUIRE(weights.bytes.size() == count * W::elements * sizeof(float));
  for (std::size_t i = 0; i < count; ++i) {
    W block;
    std::memcpy(&block, blocks.bytes.data() + i * sizeof(W), sizeof(W));
    if (std::memcmp(weights_of(block).data(), weights.bytes.data() + i * W::elements * sizeof(float), W::elements * sizeof(float)) != 0)
      return false;
  }
  return true;
}

}  // namespace

TEST_CASE("pitfall 108: blocks of 32 weights have the values of their formula") {
  check_block_of_32<outrider::q8_0>(q8_0_hex, -1.5628890991, -0.4061050415, 0.7506790161, -1.2552337646);
  check_block_of_32<outrider::q4_0>(q4_0_hex, -1.5625, -0.390625, 0.78125, -1.171875);
  check_block_of_32<outrider::q4_1>(q4_1_hex, -1.5625, -0.3122558594, 0.7296142578, -1.1457519531);
  check_block_of_32<outrider::q5_0>(q5_0_hex, -1.5625, -0.390625, 0.78125, -1.26953125);
  check_block_of_32<outrider::q5_1>(q5_1_hex, -1.5625, -0.4533691406, 0.7565917969, -1.2600097656);
  check_block_of_32<outrider::iq4_nl>(iq4_nl_hex, -1.5706405640, -0.4328536987, 0.6554641724, -1.2861938477);
  check_block_of_32<outrider::mxfp4>(mxfp4_hex, -1.5, -0.375, 0.75, -1.0);
}

TEST_CASE("pitfall 108: blocks of 256 weights have the values of their formula") {
  check_block_of_256<outrider::q2_k>(q2_k_hex, -1.3433227539, -0.4674682617, 0.3268432617, -0.5082397461, 0.23393);
  check_block_of_256<outrider::q3_k>(q3_k_hex, -1.5980224609, -0.3995056152, 0.3995056152, -0.4916992188, 0.12179);
  check_block_of_256<outrider::q4_k>(q4_k_hex, -1.5188598633, -0.4793930054, 0.5171203613, -0.2714996338, 0.05427);
  check_block_of_256<outrider::q5_k>(q5_k_hex, -1.5563507080, -0.4473667145, 0.3959732056, -0.2724380493, 0.02665);
  check_block_of_256<outrider::q6_k>(q6_k_hex, -1.5638122559, -0.4035644531, 0.4398221970, -0.2344930172, 0.01278);
  check_block_of_256<outrider::iq4_xs>(iq4_xs_hex, -1.6539688110, -0.4558181763, 0.4639577866, -0.3154098988, 0.06426);
}

TEST_CASE("random blocks of every format have the bits the gguf package gives them") {
  const auto fixture = outrider::io::load_safetensors(OUTRIDER_SOURCE_DIR "/tests/golden/quantised/quantised.safetensors");
  const auto check = [&]<class... W>(outrider::type_list<W...>) {
    const auto one = [&]<class Type>() {
      if constexpr (outrider::block_format<Type>) {
        INFO("format ", outrider::io::name_of(outrider::io::dtype_of<Type>));
        CHECK(agrees_with_fixture<Type>(fixture));
      }
    };
    (one.template operator()<W>(), ...);
  };
  check(outrider::weight_types{});
  CHECK(fixture.size() == 2 * 13);  // all of it was read
}

TEST_CASE("a row is walked in order, block by block or element by element") {
  const outrider::q4_0 blocks[] = {block_of<outrider::q4_0>(q4_0_hex), block_of<outrider::q4_0>(q4_0_hex)};
  const std::vector<float> block = weights_of(blocks[0]);
  std::vector<float> walked;
  outrider::for_each_weight(blocks, 64, [&](std::size_t i, float weight) {
    CHECK(i == walked.size());
    walked.push_back(weight);
  });
  std::vector<float> twice = block;
  twice.insert(twice.end(), block.begin(), block.end());
  CHECK(walked == twice);

  const outrider::bf16 scalars[] = {outrider::bf16(1.5f), outrider::bf16(-2.0f)};
  walked.clear();
  outrider::for_each_weight(scalars, 2, [&](std::size_t, float weight) { walked.push_back(weight); });
  CHECK(walked == std::vector{1.5f, -2.0f});
}

TEST_CASE("blocks can be read at compile time") {
  constexpr float last = [] {
    outrider::q8_0 block{outrider::f16(0.5f), {}};
    block.qs[31] = -3;
    float weights[32] = {};
    dequantize(block, weights);
    return weights[31];
  }();
  static_assert(last == -1.5f);
  CHECK(last == -1.5f);
}
