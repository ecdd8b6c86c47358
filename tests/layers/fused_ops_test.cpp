// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Layers of a backend that has the optional ops: which they take, and that the results are those of a backend without them.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "outrider/backend/reference.hpp"
#include "outrider/core/grouped.hpp"
#include "outrider/layers/attention.hpp"
#include "outrider/layers/linear.hpp"
#include "outrider/layers/mlp.hpp"
#include "outrider/layers/moe.hpp"

namespace outrider::testing {

/// The reference with the optional ops, each the ops it stands for; it notes what it is asked for.
struct fusing {
  static inline std::string asked;
};

}  // namespace outrider::testing

namespace outrider {

template <>
struct backend_traits<testing::fusing> : backend_traits<reference> {
  static constexpr std::string_view name() noexcept { return "fusing"; }
};
template <class W>
struct linear_ops<testing::fusing, W> : linear_ops<reference, W> {};
template <>
struct pointwise_ops<testing::fusing> : pointwise_ops<reference> {
  using host = pointwise_ops<reference>;
  using context = context_of<reference>;
  template <class T>
  using rows = matrix_view<T>;
  static void note(std::string_view op) noexcept { (testing::fusing::asked += op) += ' '; }

  static void quantize(context& ctx, rows<int8_block> out, rows<const float> x) noexcept {
    note("quantize");
    host::quantize(ctx, out, x);
  }
  static void rms_norm(context& ctx, rows<float> out, rows<const float> x, const float* weight, float eps) noexcept {
    note("rms_norm");
    host::rms_norm(ctx, out, x, weight, eps);
  }
  static void norm_quantize(context& ctx, rows<float> out, rows<int8_block> blocks, rows<const float> x, const float* weight,
                            float eps) noexcept {
    note("norm_quantize");
    host::rms_norm(ctx, out, x, weight, eps);
    if (blocks.data) host::quantize(ctx, blocks, out);
  }
  static void norm_add(context& ctx, rows<float> h, rows<int8_block> blocks, rows<const float> x, const float* weight, float eps,
                       float factor) noexcept {
    note("norm_add");
    add_normed(ctx, h, x, weight, eps);
    host::scale(ctx, h, h, factor);
    if (blocks.data) host::quantize(ctx, blocks, h);
  }
  static void norm_add_norm(context& ctx, rows<float> h, rows<float> out, rows<int8_block> blocks, rows<const float> x, const float* weight,
                            float eps, const float* next_weight, float next_eps) noexcept {
    note(blocks.data ? "norm_add_norm_quantize" : "norm_add_norm");
    add_normed(ctx, h, x, weight, eps);
    host::rms_norm(ctx, out, h, next_weight, next_eps);
    if (blocks.data) host::quantize(ctx, blocks, out);
  }
  static void gelu_mul_quantize(context& ctx, rows<int8_block> out, rows<const float> gate, rows<const float> up) noexcept {
    note("gelu_mul_quantize");
    std::vector<float> product(gate.rows * gate.cols);
    const rows<float> view{product.data(), gate.rows, gate.cols, gate.cols};
    host::gelu_mul(ctx, view, gate, up);
    host::quantize(ctx, out, view);
  }

 private:
  static void add_normed(context& ctx, rows<float> h, rows<const float> x, const float* weight, float eps) noexcept {
    std::vector<float> normed(x.rows * x.cols);
    const rows<float> view{normed.data(), x.rows, x.cols, x.cols};
    host::rms_norm(ctx, view, x, weight, eps);
    host::add(ctx, h, h, view);
  }
};
template <class Kv>
struct attention_ops<testing::fusing, Kv> : attention_ops<reference, Kv> {
  static void norm_append(context_of<reference>& ctx, kv_view<Kv> cache, matrix_view<const float> k, matrix_view<const float> v,
                          const float* weight, float eps, matrix_view<const float> cos, matrix_view<const float> sin,
                          std::size_t first) noexcept {
    pointwise_ops<testing::fusing>::note("norm_append");
    using pointwise = pointwise_ops<reference>;
    std::vector<float> keys(k.rows * k.cols), values(v.rows * v.cols);
    const matrix_view<float> key_rows{keys.data(), k.rows, k.cols, k.cols}, value_rows{values.data(), v.rows, v.cols, v.cols};
    pointwise::copy(ctx, key_rows, k);
    pointwise::copy(ctx, value_rows, v);
    const auto key_heads = key_rows.split_cols(cache.head_dim), value_heads = value_rows.split_cols(cache.head_dim);
    pointwise::rms_norm(ctx, key_heads, key_heads, weight, eps);
    pointwise::rope(ctx, key_heads, cos, sin);
    pointwise::rms_norm(ctx, value_heads, value_heads, nullptr, eps);
    attention_ops<reference, Kv>::append(ctx, cache, key_rows, value_rows, first);
  }
};

static_assert(check_backend<testing::fusing>());

}  // namespace outrider

using namespace outrider;
using testing::fusing;

namespace {

constexpr std::uint32_t seed = 807;
constexpr std::size_t rows = 3, width = 64;

using floats = std::vector<float>;
floats random_floats(std::mt19937& random, std::size_t count) {
  floats x(count);
  for (float& value : x) value = static_cast<float>(random() % 512) / 256 - 1;
  return x;
}
matrix_view<float> rows_of(floats& x, std::size_t m = rows) { return {x.data(), m, x.size() / m, x.size() / m}; }

/// Matrices [width, width], as stored and in groups.
struct fixture {
  std::mt19937 random{seed};
  floats weights = random_floats(random, width*width), norm_weight = random_floats(random, width),
         next_weight = random_floats(random, width);
  std::vector<grouped<q8_0>> groups;
  context_of<fusing> ctx;

  fixture() {
    std::vector<q8_0> blocks(width * width / 32);
    for (q8_0& block : blocks) {
      block.d = f16(1.0f / 256);
      for (std::int8_t& q : block.qs) q = static_cast<std::int8_t>(static_cast<int>(random() % 255) - 127);
    }
    const weight_view<q8_0> w{blocks.data(), width, width, width / 32};
    groups.resize(width / group_rows * w.stride);
    for (std::size_t first = 0; first < width; first += group_rows)
      group(groups.data() + first / group_rows * w.stride, w, first, group_rows);
    fusing::asked.clear();
  }
  [[nodiscard]] weight_view<float> stored() const { return {weights.data(), width, width, width}; }
  [[nodiscard]] weight_view<grouped<q8_0>> in_groups() const { return {groups.data(), width, width, width / 32}; }
  [[nodiscard]] std::string asked() { return std::exchange(fusing::asked, {}); }
};

/// What rows of each kind leave in the stream and in products with a matrix as stored and with one in groups.
template <class B>
std::vector<floats> products_of(const fixture& f, bool with_blocks) {
  std::mt19937 random(seed);
  context_of<B> ctx;
  product_scratch<B> room(rows, width);
  const norm<B> first{f.norm_weight.data(), 1e-6f}, next{f.next_weight.data(), 1e-5f};
  const linear<B> stored{f.stored()}, in_groups{f.in_groups()};
  floats h = random_floats(random, rows * width), x = random_floats(random, rows * width), out(rows * width), y(rows * width);
  std::vector<floats> results;
  const auto multiply = [&](product_rows<B> read) {
    for (const linear<B>* map : {&stored, &in_groups, &stored}) {  // whichever comes first
      map->forward(ctx, rows_of(y), read, row_kind::decode);
      results.push_back(y);
    }
    results.push_back(h);
  };
  multiply(room.normed(ctx, rows_of(out), first, rows_of(h), with_blocks));
  floats used = x;
  multiply(room.added(ctx, rows_of(h), first, rows_of(used), with_blocks));
  used = x;
  multiply(room.added_and_normed(ctx, rows_of(h), first, rows_of(used), rows_of(out), next, with_blocks));
  used = x;
  first.add_to(ctx, rows_of(h), rows_of(used), 0.7f);
  results.push_back(h);
  return results;
}

}  // namespace

TEST_CASE_FIXTURE(fixture, "rows made with their blocks, without them, and by a backend without fused ops give products the same bits") {
  CAPTURE(seed);
  const std::vector<floats> want = products_of<reference>(*this, true);
  CHECK(products_of<fusing>(*this, true) == want);
  CHECK(asked() == "norm_quantize norm_add norm_add_norm_quantize norm_add ");
  CHECK(products_of<fusing>(*this, false) == want);
  CHECK(asked() == "rms_norm quantize norm_add quantize norm_add_norm quantize norm_add ");
}

TEST_CASE_FIXTURE(fixture, "layers say whether a product of their rows reads blocks") {
  const weight<fusing> stored = this->stored(), in_groups = this->in_groups();
  attention<fusing> a;
  CHECK(!a.reads_blocks());
  a.q_proj.w = a.o_proj.w = stored;
  CHECK(!a.reads_blocks());
  a.o_proj.w = in_groups;  // reads other rows
  CHECK(!a.reads_blocks());
  for (linear<fusing>* map : {&a.q_proj, &a.k_proj, &a.v_proj}) {
    map->w = in_groups;
    CHECK(a.reads_blocks());
    map->w = stored;
  }
  CHECK(!mlp<fusing>{{stored}, linear<fusing>{stored}, {in_groups}, width}.reads_blocks());
  CHECK(mlp<fusing>{{in_groups}, linear<fusing>{stored}, {stored}, width}.reads_blocks());
  CHECK(mlp<fusing>{{stored}, linear<fusing>{in_groups}, {stored}, width}.reads_blocks());
}

TEST_CASE_FIXTURE(fixture, "a gated MLP makes the rows that down reads with their blocks, if it reads blocks") {
  for (const bool grouped_down : {false, true}) {
    CAPTURE(grouped_down);
    const weight<fusing> down = grouped_down ? weight<fusing>(in_groups()) : weight<fusing>(stored());
    mlp<fusing> layer{{stored()}, linear<fusing>{stored()}, {down}, width};
    mlp_scratch<fusing> room(rows, width);
    product_scratch<fusing> products(rows, width);
    floats x = random_floats(random, rows * width), y(rows * width);
    product_rows<fusing> input = products.rows(rows_of(x));
    layer.forward(ctx, room, rows_of(y), input, row_kind::decode);
    CHECK(asked() == (grouped_down ? "gelu_mul_quantize " : ""));
  }
}

/// The output of a mixture of one expert, all of whose matrices are in groups, gate and up in two.
template <class B>
floats expert_output(const fixture& f) {
  std::mt19937 random(seed);
  context_of<B> ctx;
  mixture_of_experts<B> layer;
  layer.experts = layer.per_token = 1;
  layer.width = width;
  layer.gate_up = layer.down = f.in_groups();
  layer.up = weight<B>(f.in_groups());
  CHECK(layer.reads_blocks());
  moe_scratch<B> room(rows, width, 1, 1, width);
  product_scratch<B> products(rows, width);
  floats x = random_floats(random, rows * width), factors = random_floats(random, rows), y(rows * width);
  std::vector<std::int32_t> chosen(rows, 0);
  product_rows<B> input = products.rows(rows_of(x));
  layer.forward(ctx, room, rows_of(y), input, {{chosen.data(), rows, 1, 1}, rows_of(factors)});
  return y;
}

TEST_CASE_FIXTURE(fixture, "experts make the rows that down reads with their blocks") {
  CAPTURE(seed);
  const floats want = expert_output<reference>(*this);
  CHECK(expert_output<fusing>(*this) == want);
  CHECK(asked() == "quantize gelu_mul_quantize ");
}

/// The cache after rows of two sequences, one of them empty between the others, have been appended.
template <class B>
std::vector<float> appended(const fixture& f, bool k_eq_v) {
  constexpr std::size_t heads = 2, dim = width / heads, slots = 8, sequences = 3;
  std::mt19937 random(seed);
  context_of<B> ctx;
  floats x = random_floats(random, rows * width), cos = random_floats(random, rows * dim / 2), sin = random_floats(random, rows * dim / 2);
  floats memory(sequences * 2 * heads * slots * dim, -7.0f);
  float* tables[sequences];
  std::vector<attention_part<B, float>> parts(sequences);
  const std::size_t counts[sequences] = {2, 0, 1};
  for (std::size_t p = 0; p < sequences; ++p) {
    tables[p] = memory.data() + p * memory.size() / sequences;
    parts[p].rows = counts[p];
    parts[p].first = 3 + p;
    parts[p].own = {&tables[p], slots, 0, heads, dim};
  }
  attention<B> layer;
  layer.k_proj.w = f.stored();
  if (!k_eq_v) layer.v_proj.w = f.in_groups();
  layer.k_norm = {f.norm_weight.data(), 1e-6f};
  layer.heads = layer.kv_heads = heads;
  layer.head_dim = dim;
  layer.k_eq_v = k_eq_v;
  attention_scratch<B> room(rows, width, width);
  product_scratch<B> products(rows, width);
  product_rows<B> input = products.rows(rows_of(x));
  layer.append(ctx, room, parts, input, {rows_of(cos), rows_of(sin)}, row_kind::decode);
  return memory;
}

TEST_CASE_FIXTURE(fixture, "keys and values are written by one op for every sequence of a pass") {
  CAPTURE(seed);
  for (const bool k_eq_v : {false, true}) {
    CAPTURE(k_eq_v);
    const floats want = appended<reference>(*this, k_eq_v);
    CHECK(appended<fusing>(*this, k_eq_v) == want);
    CHECK(asked() == (k_eq_v ? "norm_append norm_append norm_append " : "quantize norm_append norm_append norm_append "));
  }
}
