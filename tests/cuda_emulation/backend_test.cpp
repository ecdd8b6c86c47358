// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What the CUDA backend has beside the ops that every backend has: pairs of ops in one, lists of launches that come again, threads. Emulated, and
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

// ------------------------------------------------------------------------------------------------ pairs of ops

TEST_CASE("norm_add has the bits of rms_norm and add") {
  constexpr std::uint64_t seed = 2501;
  CAPTURE(seed);
  random_numbers random(seed);
  cuda_context ctx;
  for (const std::size_t n : sizes{1, 31, 256, 1536, 5376})
    for (const std::size_t m : sizes{0, 1, 5})
      for (const bool weighted : {false, true}) {
        INFO("n = ", n, ", m = ", m, ", weighted = ", weighted);
        const auto h = padded<float>(m, n, n % 2 == 0 ? 4 : 3).fill(random.uniforms()), x = padded<float>(m, n).fill(random.uniforms(3));
        const auto weight = padded<float>(1, n).fill(random.uniforms(2));
        list_there<float> device_weight(weighted ? weight.data() : nullptr, n);
        there<const float> device_x(x.read());
        outrider::matrix<float, device_space> normed(m, n);
        const auto both = result_of(ctx, h, [&](auto out) { ops::norm_add(ctx, out, device_x.view(), device_weight.data(), 1e-6f); });
        check_same(both, result_of(ctx, h, [&](auto out) {
                     ops::rms_norm(ctx, normed.view(), device_x.view(), device_weight.data(), 1e-6f);
                     ops::add(ctx, out, out, normed.view());
                   }));
      }
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
