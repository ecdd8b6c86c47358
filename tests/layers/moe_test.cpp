// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/layers/moe.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "outrider/backend/reference.hpp"
#include "outrider/core/blocks.hpp"

using outrider::reference;
using outrider::weight_view;

namespace {

constexpr std::size_t hidden = 64, width = 32, experts = 3, per_token = 2, rows = 4;

/// Random blocks of ordinary size.
std::vector<outrider::q8_0> random_blocks(std::mt19937& random, std::size_t weights) {
  std::vector<outrider::q8_0> blocks(weights / 32);
  for (outrider::q8_0& block : blocks) {
    block.d = outrider::f16(1.0f / 256);
    for (std::int8_t& q : block.qs) q = static_cast<std::int8_t>(static_cast<int>(random() % 255) - 127);
  }
  return blocks;
}

std::vector<float> output_of(const outrider::mixture_of_experts<reference>& layer, const std::vector<float>& u) {
  outrider::context_of<reference> ctx;
  outrider::moe_scratch<reference> scratch(rows, hidden, experts, per_token, width);
  outrider::product_scratch<reference> products(rows, hidden);
  std::vector<std::int32_t> chosen = {0, 1, 2, 0, 1, 2, 1, 0};
  std::vector<float> weights = {0.75f, 0.25f, 0.5f, 0.5f, 1.0f, 2.0f, 0.125f, 0.875f}, out(rows * hidden);
  outrider::product_rows<reference> input = products.rows({u.data(), rows, hidden, hidden});
  layer.forward(ctx, scratch, {out.data(), rows, hidden, hidden}, input,
                {{chosen.data(), rows, per_token, per_token}, {weights.data(), rows, per_token, per_token}});
  return out;
}

}  // namespace

TEST_CASE("pitfall 116: gate and up in one tensor, gate rows first, or in two give the same bits") {
  constexpr std::uint32_t seed = 801;
  CAPTURE(seed);
  std::mt19937 random(seed);
  const auto gate = random_blocks(random, experts * width * hidden), up = random_blocks(random, experts * width * hidden),
             down = random_blocks(random, experts * hidden * width);
  std::vector<outrider::q8_0> both;  // expert by expert: its gate, then its up
  for (std::size_t e = 0; e < experts; ++e)
    for (const auto* part : {&gate, &up}) {
      const std::size_t blocks = width * hidden / 32;
      both.insert(both.end(), part->data() + e * blocks, part->data() + (e + 1) * blocks);
    }
  std::vector<float> u(rows * hidden);
  for (float& x : u) x = static_cast<float>(random() % 256) / 128 - 1;

  outrider::mixture_of_experts<reference> layer;
  layer.experts = experts;
  layer.per_token = per_token;
  layer.width = width;
  layer.down = weight_view<outrider::q8_0>{down.data(), experts * hidden, width, width / 32};
  layer.gate_up = weight_view<outrider::q8_0>{both.data(), experts * 2 * width, hidden, hidden / 32};
  const std::vector<float> fused = output_of(layer, u);

  layer.gate_up = weight_view<outrider::q8_0>{gate.data(), experts * width, hidden, hidden / 32};
  layer.up = weight_view<outrider::q8_0>{up.data(), experts * width, hidden, hidden / 32};
  CHECK(output_of(layer, u) == fused);

  std::swap(layer.gate_up, *layer.up);
  CHECK(output_of(layer, u) != fused);
}
