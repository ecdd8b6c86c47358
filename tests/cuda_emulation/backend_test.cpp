// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What the CUDA backend has beside the ops that every backend has: several ops in one, lists of launches that come again, threads. Emulated, and
// on a device where there is one.
#include "contract/fixture.hpp"
#include "emulated_device.hpp"
//
#include <thread>

#include "outrider/backend/cuda.hpp"
#include "outrider/core/storage.hpp"
#include "support/on_device.hpp"

namespace {

using namespace contract;
using outrider::cuda;
using outrider::cuda_context;
using outrider::device_space;
using outrider::int8_block;
using ops = outrider::pointwise_ops<cuda>;

template <class T>
using there = outrider::testing::matrix_there<T, device_space>;
template <class T>
using list_there = outrider::testing::elements_there<const T, device_space>;

/// What op(matrix on the device) makes of x.
template <class Op>
padded<float> result_of(cuda_context& ctx, padded<float> x, Op op) {
  there<float> device_x(x.view());
  op(device_x.view());
  ctx.wait();
  device_x.back();
  CHECK(x.padding_untouched());
  return x;
}

// ------------------------------------------------------------------------------------------------ several ops in one

/// What a chain of norms leaves.
struct norm_results {
  padded<float> h, out;
  std::vector<int8_block> blocks;
};
/// The same on the device, as an op takes it.
struct norm_operands {
  outrider::matrix_view<float, device_space> h, out;
  outrider::matrix_view<int8_block, device_space> blocks;  // null data where a row is no whole number of them
};

/// What op(operands) makes of h, and of rows that are empty.
template <class Op>
norm_results norms_of(cuda_context& ctx, const padded<float>& h, Op op) {
  const std::size_t m = h.rows(), n = h.cols();
  norm_results results{h, padded<float>(m, n, 4), std::vector<int8_block>(n % 32 == 0 ? m * (n / 32) : 0)};
  there<float> stream(results.h.view()), out(results.out.view());
  there<int8_block> blocks({results.blocks.data(), m, n / 32, n / 32});
  op(norm_operands{stream.view(), out.view(), results.blocks.empty() ? decltype(blocks.view()){} : blocks.view()});
  ctx.wait();
  stream.back(), out.back();
  if (!results.blocks.empty()) blocks.back();
  CHECK(results.h.padding_untouched());
  CHECK(results.out.padding_untouched());
  return results;
}
void check_same(const norm_results& got, const norm_results& want) {
  contract::check_same(got.h, want.h);
  contract::check_same(got.out, want.out);
  CHECK(same_bits(got.blocks, want.blocks));
}

TEST_CASE("norm_quantize, norm_add and norm_add_norm have the bits of the ops they stand for") {
  constexpr std::uint64_t seed = 2501;
  CAPTURE(seed);
  random_numbers random(seed);
  cuda_context ctx;
  for (const std::size_t n : sizes{1, 31, 32, 256, 544, 1536, 5376})
    for (const std::size_t m : sizes{0, 1, 5})
      for (const bool weighted : {false, true}) {
        INFO("n = ", n, ", m = ", m, ", weighted = ", weighted);
        const auto h = padded<float>(m, n, n % 2 == 0 ? 4 : 3).fill(random.uniforms()), x = padded<float>(m, n).fill(random.uniforms(3));
        const auto weights = padded<float>(2, n).fill(random.uniforms(2));
        list_there<float> weight(weighted ? weights.row(0) : nullptr, n), next_weight(weighted ? weights.row(1) : nullptr, n);
        there<const float> device_x(x.read());
        outrider::matrix<float, device_space> normed(m, n);
        const auto add_norm = [&](auto stream) {
          ops::rms_norm(ctx, normed.view(), device_x.view(), weight.data(), 1e-6f);
          ops::add(ctx, stream, stream, normed.view());
        };
        const auto quantize = [&](auto blocks, auto of) {
          if (blocks.data) ops::quantize(ctx, blocks, of);
        };

        check_same(
            norms_of(ctx, h,
                     [&](const norm_operands& o) { ops::norm_quantize(ctx, o.out, o.blocks, device_x.view(), weight.data(), 1e-6f); }),
            norms_of(ctx, h, [&](const norm_operands& o) {
              ops::rms_norm(ctx, o.out, device_x.view(), weight.data(), 1e-6f);
              quantize(o.blocks, o.out);
            }));
        check_same(
            norms_of(ctx, h,
                     [&](const norm_operands& o) { ops::norm_add(ctx, o.h, o.blocks, device_x.view(), weight.data(), 1e-6f, 0.7f); }),
            norms_of(ctx, h, [&](const norm_operands& o) {
              add_norm(o.h);
              ops::scale(ctx, o.h, o.h, 0.7f);
              quantize(o.blocks, o.h);
            }));
        check_same(norms_of(ctx, h,
                            [&](const norm_operands& o) {
                              ops::norm_add_norm(ctx, o.h, o.out, o.blocks, device_x.view(), weight.data(), 1e-6f, next_weight.data(),
                                                 1e-5f);
                            }),
                   norms_of(ctx, h, [&](const norm_operands& o) {
                     add_norm(o.h);
                     ops::rms_norm(ctx, o.out, o.h, next_weight.data(), 1e-5f);
                     quantize(o.blocks, o.out);
                   }));
      }
}

TEST_CASE("norm_append has the bits of norm_rope, rms_norm and append") {
  constexpr std::uint64_t seed = 2504;
  CAPTURE(seed);
  random_numbers random(seed);
  cuda_context ctx;
  constexpr std::size_t heads = 3, slots = 8, first = 5;  // a ring, which rows go round
  for_each_type(outrider::kv_types{}, [&]<class Kv>() {
    for (const std::size_t head_dim : sizes{32, 64, 256, 512})
      for (const std::size_t m : sizes{0, 1, 5})
        for (const bool k_is_v : {false, true}) {
          INFO("head_dim = ", head_dim, ", m = ", m, ", k_is_v = ", k_is_v);
          auto k = padded<float>(m, heads * head_dim).fill(random.uniforms(3)), v = padded<float>(m, heads * head_dim);
          if (k_is_v)
            v = k;
          else
            v.fill(random.uniforms());
          const auto cos = padded<float>(m, head_dim / 2).fill(random.uniforms()),
                     sin = padded<float>(m, head_dim / 2).fill(random.uniforms());
          const auto weights = padded<float>(1, head_dim).fill(random.uniforms(2));
          list_there<float> weight(weights.data(), head_dim);
          there<const float> device_cos(cos.read()), device_sin(sin.read());
          const auto stored = [&](auto op) {
            std::vector<Kv> memory(2 * heads * slots * head_dim / outrider::elements_of<Kv>);
            Kv* const table[] = {memory.data()};
            there<float> device_k(k.view()), device_v(v.view());
            outrider::testing::cache_there<Kv, device_space> cache({table, slots, slots, heads, head_dim}, slots);
            op(cache.view(), device_k.view(), device_v.view());
            ctx.wait();
            cache.back();
            return memory;
          };
          using attention = outrider::attention_ops<cuda, Kv>;
          CHECK(same_bits(stored([&](auto cache, auto keys, auto values) {
                            attention::norm_append(ctx, cache, keys, k_is_v ? keys : values, weight.data(), 1e-6f, device_cos.view(),
                                                   device_sin.view(), first);
                          }),
                          stored([&](auto cache, auto keys, auto values) {
                            const auto key_heads = keys.split_cols(head_dim), value_heads = values.split_cols(head_dim);
                            ops::norm_rope(ctx, key_heads, weight.data(), 1e-6f, device_cos.view(), device_sin.view());
                            ops::rms_norm(ctx, value_heads, value_heads, nullptr, 1e-6f);
                            attention::append(ctx, cache, keys, values, first);
                          })));
        }
  });
}

TEST_CASE("norm_rope has the bits of rms_norm and rope") {
  constexpr std::uint64_t seed = 2502;
  CAPTURE(seed);
  random_numbers random(seed);
  cuda_context ctx;
  for (const std::size_t half : sizes{1, 32, 128, 256})
    for (const std::size_t heads : sizes{1, 3, 8})
      for (const std::size_t m : sizes{0, 1, 4})
        for (const bool weighted : {false, true}) {
          INFO("half = ", half, ", heads = ", heads, ", m = ", m, ", weighted = ", weighted);
          const auto x = padded<float>(m * heads, 2 * half, 4).fill(random.uniforms(3));
          const auto cos = padded<float>(m, half).fill(random.uniforms()), sin = padded<float>(m, half).fill(random.uniforms());
          const auto weight = padded<float>(1, 2 * half).fill(random.uniforms(2));
          list_there<float> device_weight(weighted ? weight.data() : nullptr, 2 * half);
          there<const float> device_cos(cos.read()), device_sin(sin.read());
          const auto both = result_of(
              ctx, x, [&](auto out) { ops::norm_rope(ctx, out, device_weight.data(), 1e-6f, device_cos.view(), device_sin.view()); });
          check_same(both, result_of(ctx, x, [&](auto out) {
                       ops::rms_norm(ctx, out, out, device_weight.data(), 1e-6f);
                       ops::rope(ctx, out, device_cos.view(), device_sin.view());
                     }));
        }
}

TEST_CASE("gelu_mul_quantize has the bits of gelu_mul and quantize") {
  constexpr std::uint64_t seed = 2503;
  CAPTURE(seed);
  random_numbers random(seed);
  cuda_context ctx;
  for (const std::size_t n : sizes{32, 96, 6144})
    for (const std::size_t m : sizes{0, 1, 5}) {
      INFO("n = ", n, ", m = ", m);
      const auto gate = padded<float>(m, n, 4).fill(random.uniforms(4)), up = padded<float>(m, n, 4).fill(random.uniforms(4));
      there<const float> device_gate(gate.read()), device_up(up.read());
      outrider::matrix<float, device_space> product(m, n);
      const auto blocks = [&](auto op) {
        std::vector<int8_block> result(m * (n / 32));
        there<int8_block> out({result.data(), m, n / 32, n / 32});
        op(out.view());
        ctx.wait();
        out.back();
        return result;
      };
      CHECK(same_bits(blocks([&](auto out) { ops::gelu_mul_quantize(ctx, out, device_gate.view(), device_up.view()); }),
                      blocks([&](auto out) {
                        ops::gelu_mul(ctx, product.view(), device_gate.view(), device_up.view());
                        ops::quantize(ctx, out, product.view());
                      })));
    }
}

// ------------------------------------------------------------------------------------------------ lists and threads

/// Something like a small network, several times over in one context, so that its launches become graphs: for inputs, number of rows and weights
/// that follow from the seed. The same list comes again with other arguments.
class work {
 public:
  explicit work(std::uint64_t seed)
      : random_(seed), m_(1 + seed % 5), weights_(padded<bf16>(width, width).fill(random_.grids())), x_(m_, width) {
    x_.fill(random_.uniforms());
  }

  /// The result of every round.
  std::vector<padded<float>> done(cuda_context& ctx) const {
    outrider::testing::weight_there<bf16, device_space> weights(weights_.weight());
    outrider::matrix<float, device_space> x(m_, width), y(m_, width);
    std::vector<padded<float>> results;
    for (int round = 0; round < rounds; ++round) {
      outrider::space_copy<outrider::host_space, device_space>::copy(x.view().data, x_.data(), m_ * width);
      for (int layer = 0; layer < 5; ++layer) {
        ops::rms_norm(ctx, y.view(), x.view(), nullptr, 1e-6f);
        outrider::linear_ops<cuda, bf16>::matmul(ctx, x.view(), y.view(), weights.view());
        ops::scale(ctx, x.view(), x.view(), static_cast<float>(round % 3 + 1));
      }
      ctx.wait();
      auto& result = results.emplace_back(m_, width);
      outrider::space_copy<device_space, outrider::host_space>::copy(result.view().data, x.view().data, m_ * width);
    }
    return results;
  }

 private:
  static constexpr std::size_t width = 64;
  static constexpr int rounds = 6;
  random_numbers random_;
  std::size_t m_;
  padded<bf16> weights_;
  padded<float> x_;
};

bool same(const std::vector<padded<float>>& a, const std::vector<padded<float>>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) { return x.same_elements(y); });
}

TEST_CASE("lists of launches give the same singly and as graphs") {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    CAPTURE(seed);
    cuda_context singly, as_graphs;
    singly.queue().use_graphs(false);
    const work some(seed);
    const auto want = some.done(singly);
    CHECK(same(some.done(as_graphs), want));
    CHECK(same(some.done(as_graphs), want));
  }
}

TEST_CASE("threads with contexts of their own do not disturb each other") {
  constexpr std::uint64_t threads = 4;
  std::vector<work> all;
  std::vector<std::vector<padded<float>>> want;
  cuda_context alone;
  for (std::uint64_t seed = 0; seed < threads; ++seed) want.push_back(all.emplace_back(seed).done(alone));
  std::vector<std::vector<padded<float>>> got(threads);
  {
    std::vector<std::jthread> team;
    for (std::size_t i = 0; i < threads; ++i)
      team.emplace_back([&, i] {
        cuda_context own;
        for (int times = 0; times < 3; ++times) got[i] = all[i].done(own);
      });
  }
  for (std::size_t i = 0; i < threads; ++i) {
    CAPTURE(i);
    CHECK(same(got[i], want[i]));
  }
}

TEST_CASE("a context goes to another thread after wait()") {
  const work some(7);
  cuda_context ctx;
  const auto want = some.done(ctx);
  std::vector<padded<float>> got;
  std::jthread([&] { got = some.done(ctx); }).join();
  CHECK(same(got, want));
  CHECK(same(some.done(ctx), want));
}

}  // namespace
