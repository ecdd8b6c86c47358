// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/layers/linear.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "../support/counting_backend.hpp"
#include "outrider/core/grouped.hpp"
#include "outrider/layers/mlp.hpp"
#include "outrider/layers/moe.hpp"

using namespace outrider;
using testing::counting;

namespace {

constexpr std::uint32_t seed = 805;
constexpr std::size_t rows = 3, width = 64;

/// A random matrix [n, width], as stored and in groups.
struct both_forms {
  std::vector<q8_0> blocks;
  std::vector<grouped<q8_0>> records;
  std::size_t n;

  both_forms(std::mt19937& random, std::size_t n_, std::size_t cols = width) : blocks(n_ * cols / 32), n(n_) {
    for (q8_0& block : blocks) {
      block.d = f16(1.0f / 256);
      for (std::int8_t& q : block.qs) q = static_cast<std::int8_t>(static_cast<int>(random() % 255) - 127);
    }
    const weight_view<q8_0> w{blocks.data(), n, cols, cols / 32};
    records.resize((n + group_rows - 1) / group_rows * w.stride);
    for (std::size_t first = 0; first < n; first += group_rows)
      group(records.data() + first / group_rows * w.stride, w, first, (std::min)(group_rows, n - first));
  }

  [[nodiscard]] weight_view<q8_0> stored() const { return {blocks.data(), n, blocks.size() / n * 32, blocks.size() / n}; }
  [[nodiscard]] weight_view<grouped<q8_0>> in_groups() const { return {records.data(), n, stored().cols, stored().stride}; }
};

matrix<float, host_space> random_rows(std::mt19937& random) {
  matrix<float, host_space> x(rows, width);
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t k = 0; k < width; ++k) x.view()(r, k) = static_cast<float>(random() % 512) / 256 - 1;
  return x;
}

/// Counts the quantisations from here on.
struct count {
  std::size_t before = counting::quantised;
  [[nodiscard]] std::size_t now() const { return counting::quantised - before; }
};

struct linear_fixture {
  std::mt19937 random{seed};
  context_of<counting> ctx;
  matrix<float, host_space> x = random_rows(random), y{rows, width};
  product_scratch<counting> scratch{rows, width};
  both_forms w{random, width};
};

}  // namespace

TEST_CASE_FIXTURE(linear_fixture, "products with grouped weights share one quantisation of their rows") {
  CAPTURE(seed);
  const linear<counting> first{w.in_groups()}, second{w.in_groups()};
  const count quantised;
  product_rows<counting> shared = scratch.rows(x.view());
  CHECK(quantised.now() == 0);
  first.forward(ctx, y.view(), shared, row_kind::decode);
  second.forward(ctx, y.view(), shared, row_kind::prompt);
  CHECK(quantised.now() == 1);
  product_rows<counting> others = scratch.rows(x.view());
  first.forward(ctx, y.view(), others, row_kind::decode);
  CHECK(quantised.now() == 2);
}

TEST_CASE_FIXTURE(linear_fixture, "a product with a weight as stored quantises nothing") {
  const linear<counting> stored{w.stored()};
  const count quantised;
  product_rows<counting> shared = scratch.rows(x.view());
  for (const row_kind kind : {row_kind::decode, row_kind::prompt}) stored.forward(ctx, y.view(), shared, kind);
  CHECK(quantised.now() == 0);
}

TEST_CASE_FIXTURE(linear_fixture, "a grouped weight has the product of its ops, for decoded rows and those of a prompt alike") {
  CAPTURE(seed);
  matrix<int8_block, host_space> blocks(rows, width / 32);
  matrix<float, host_space> want(rows, width);
  pointwise_ops<reference>::quantize(ctx, blocks.view(), x.view());
  linear_ops<reference, grouped<q8_0>>::matmul(ctx, want.view(), blocks.view(), w.in_groups());
  for (const row_kind kind : {row_kind::decode, row_kind::prompt}) {
    product_rows<counting> shared = scratch.rows(x.view());
    linear<counting>{w.in_groups()}.forward(ctx, y.view(), shared, kind);
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t i = 0; i < width; ++i) CHECK(y.view()(r, i) == want.view()(r, i));
  }
}

TEST_CASE_FIXTURE(linear_fixture, "a gated MLP quantises its rows once for gate and up, and once what down reads") {
  const mlp<counting> layer{{w.in_groups()}, linear<counting>{w.in_groups()}, {w.in_groups()}, width};
  mlp_scratch<counting> room(rows, width);
  const count quantised;
  product_rows<counting> shared = scratch.rows(x.view());
  layer.forward(ctx, room, y.view(), shared, row_kind::decode);
  CHECK(quantised.now() == 2);
}

TEST_CASE_FIXTURE(linear_fixture, "experts quantise their rows once for gate and up, and once what down reads") {
  constexpr std::size_t experts = 2, per_token = 2;
  const both_forms stacked(random, experts * width);
  mixture_of_experts<counting> layer;
  layer.experts = experts;
  layer.per_token = per_token;
  layer.width = width;
  layer.gate_up = layer.down = stacked.in_groups();
  layer.up = weight<counting>(stacked.in_groups());
  moe_scratch<counting> room(rows, width, experts, per_token, width);
  std::vector<std::int32_t> chosen = {0, 1, 1, 0, 0, 1};
  std::vector<float> factors(rows * per_token, 0.5f);
  const count quantised;
  product_rows<counting> shared = scratch.rows(x.view());
  layer.forward(ctx, room, y.view(), shared, {{chosen.data(), rows, per_token, per_token}, {factors.data(), rows, per_token, per_token}});
  CHECK(quantised.now() == 2);
}
