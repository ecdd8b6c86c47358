// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The kernels of pointwise.cuh on the CPU: against the reference, and gelu_mul_quantize against the ops it stands for.
#include "row_fixture.hpp"
//
#include <vector>

#include "outrider/backend/cuda/pointwise.cuh"

namespace {

using namespace kernel_test;
using outrider::pointwise_ops;
using outrider::reference;

/// Row lengths with every kind of end: short of a vector of four, of a warp's step (128 columns) and of a block's (1024, 4096).
constexpr std::size_t widths[] = {0, 1, 3, 4, 5, 31, 32, 33, 127, 128, 129, 511, 512, 513, 1024, 1027, 4096, 4097};

}  // namespace

// ------------------------------------------------------------------------------------------------ element by element

TEST_CASE("add, scale and copy are exact for every width and stride, in place too") {
  constexpr std::uint64_t seed = 2101;
  CAPTURE(seed);
  random_numbers random(seed);
  for (const std::size_t n : widths)
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t extra : sizes{0, 3, 4}) {
        INFO("n = ", n, ", m = ", m, ", extra = ", extra);
        const auto x = padded<float>(m, n, extra).fill(random.uniforms()), y = padded<float>(m, n, extra).fill(random.uniforms(1000));
        padded<float> sum(m, n), product(m, n);
        for (std::size_t r = 0; r < m; ++r)
          for (std::size_t c = 0; c < n; ++c) {
            sum(r, c) = x(r, c) + y(r, c);
            product(r, c) = x(r, c) * 0.7f;
          }
        const padded<float> blank(m, n, extra);
        check_same(result_of(blank, [&](auto& q, auto& out) { device::add(q, on_device(out), on_device(x), on_device(y)); }), sum);
        check_same(result_of(x, [&](auto& q, auto& out) { device::add(q, on_device(out), on_device(out), on_device(y)); }), sum);
        check_same(result_of(y, [&](auto& q, auto& out) { device::add(q, on_device(out), on_device(x), on_device(out)); }), sum);
        check_same(result_of(x, [&](auto& q, auto& out) { device::scale(q, on_device(out), on_device(out), 0.7f); }), product);
        check_same(result_of(blank, [&](auto& q, auto& out) { device::copy(q, on_device(out), on_device(x)); }), x);
      }
}

TEST_CASE("gelu_mul and softcap are as close to the reference as their roundings allow") {
  // gelu: the inner polynomial 5·u, damped by tanh below 3·u, tanh 8·u, five more roundings. softcap: 8·u for tanh, four more.
  constexpr std::uint64_t seed = 2102;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t n : widths)
    for (const std::size_t extra : sizes{0, 3, 4}) {
      constexpr std::size_t m = 2;
      INFO("n = ", n, ", extra = ", extra);
      auto gate = padded<float>(m, n, extra).fill(random.uniforms(6)), up = padded<float>(m, n, extra).fill(random.uniforms(3));
      if (n > 4) gate(0, 0) = 1e15f, gate(0, 1) = -1e15f, gate(0, 2) = 0, gate(0, 3) = 1e-30f;
      padded<float> want(m, n);
      pointwise_ops<reference>::gelu_mul(plain, want.view(), gate.read(), up.read());
      const auto gelu = result_of(padded<float>(m, n, extra),
                                  [&](auto& q, auto& out) { device::gelu_mul(q, on_device(out), on_device(gate), on_device(up)); });
      check_within(gelu, want, [&](std::size_t r, std::size_t c) { return 16 * u * std::abs(double{gate(r, c)} * double{up(r, c)}); });
      check_same(result_of(up, [&](auto& q, auto& out) { device::gelu_mul(q, on_device(out), on_device(gate), on_device(out)); }), gelu);

      const auto logits = padded<float>(m, n, extra).fill(random.uniforms(80));
      pointwise_ops<reference>::softcap(plain, want.view(), logits.read(), 30);
      check_within(result_of(logits, [&](auto& q, auto& out) { device::softcap(q, on_device(out), on_device(out), 30); }), want,
                   [](std::size_t, std::size_t) { return 12 * u * 30; });
    }
}

// ------------------------------------------------------------------------------------------------ quantize

TEST_CASE("quantize has the bits of the definition, whatever a block holds") {
  constexpr std::uint64_t seed = 2107;
  CAPTURE(seed);
  random_numbers random(seed);
  const std::vector<float> special{infinity, -infinity, not_a_number, 0x1p-149f, -0x1p-140f, 1e-31f,
                                   1e-30f,   1.1e-30f,  3e38f,        -3.4e38f,  -0.0f};
  for (const std::size_t blocks : sizes{0, 1, 3, 4, 15, 16, 17, 40})
    for (const std::size_t m : sizes{0, 1, 2, 14})
      for (const std::size_t extra : sizes{0, 1, 4}) {
        INFO("blocks = ", blocks, ", m = ", m, ", extra = ", extra);
        auto x = padded<float>(m, 32 * blocks, extra).fill(random.uniforms(100));
        for (std::size_t r = 2; blocks != 0 && r < m; ++r) {  // a special value among others, and alone
          x(r, random.below(32)) = special[(r - 2) % special.size()];
          const std::size_t last = 32 * (blocks - 1);
          for (std::size_t c = 0; c < 32; ++c) x(r, last + c) = c == r ? special[(r - 2) % special.size()] : 0.0f;
        }
        if (m > 1 && blocks > 1)  // ties: the factor is 1
          for (std::size_t c = 0; c < 32; ++c) x(1, 32 + c) = c == 5 ? -127.0f : static_cast<float>(c) - 15.5f;
        block_rows want(m, blocks, 0);
        for (std::size_t r = 0; r < m; ++r)
          for (std::size_t b = 0; b < blocks; ++b) outrider::quantize(want.view()(r, b), x.row(r) + 32 * b);
        const auto got =
            result_of(block_rows(m, blocks, extra), [&](auto& q, auto& out) { device::quantize(q, on_device(out.view()), on_device(x)); });
        CHECK(got.same_elements(want));
      }
}

TEST_CASE("gelu_mul_quantize has the bits of gelu_mul and quantize") {
  constexpr std::uint64_t seed = 2108;
  CAPTURE(seed);
  random_numbers random(seed);
  for (const std::size_t blocks : sizes{0, 1, 5, 18})
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t extra : sizes{0, 1}) {
        INFO("blocks = ", blocks, ", m = ", m, ", extra = ", extra);
        const auto gate = padded<float>(m, 32 * blocks, extra).fill(random.uniforms(6));
        const auto up = padded<float>(m, 32 * blocks, extra).fill(random.uniforms(3));
        const auto product = result_of(padded<float>(m, 32 * blocks, extra),
                                       [&](auto& q, auto& out) { device::gelu_mul(q, on_device(out), on_device(gate), on_device(up)); });
        const auto want = result_of(block_rows(m, blocks, extra),
                                    [&](auto& q, auto& out) { device::quantize(q, on_device(out.view()), on_device(product)); });
        const auto fused = result_of(block_rows(m, blocks, extra), [&](auto& q, auto& out) {
          device::gelu_mul_quantize(q, on_device(out.view()), on_device(gate), on_device(up));
        });
        CHECK(fused.same_elements(want));
      }
}

// ------------------------------------------------------------------------------------------------ sums and rows of others

TEST_CASE("weighted_sum agrees with the reference") {
  // s fused roundings at most, and one in the reference.
  constexpr std::uint64_t seed = 2109;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t n : widths)
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t s : sizes{0, 1, 2, 8})
        for (const std::size_t extra : sizes{0, 3}) {
          INFO("n = ", n, ", m = ", m, ", s = ", s, ", extra = ", extra);
          const auto x = padded<float>(m * s, n, extra).fill(random.uniforms()),
                     weights = padded<float>(m, s, extra).fill(random.uniforms());
          padded<float> want(m, n);
          pointwise_ops<reference>::weighted_sum(plain, want.view(), x.read(), weights.read());
          const auto got = result_of(padded<float>(m, n, extra), [&](auto& q, auto& out) {
            device::weighted_sum(q, on_device(out), on_device(x), on_device(weights));
          });
          check_within(got, want, [&](std::size_t r, std::size_t c) {
            double sum = 0;
            for (std::size_t j = 0; j < s; ++j) sum += std::abs(double{weights(r, j)} * double{x(r * s + j, c)});
            return static_cast<double>(s + 2) * u * sum;
          });
        }
}

TEST_CASE("gather_ids lays the table rows named side by side") {
  constexpr std::uint64_t seed = 2110;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t w : sizes{0, 1, 3, 33, 300})
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t s : sizes{0, 1, 4}) {
        INFO("w = ", w, ", m = ", m, ", s = ", s);
        const auto table = padded<token_id>(6, w, 2).fill(random.indexes(1000));
        const auto from = padded<std::int32_t>(m, s, 1).fill(random.indexes(6));
        padded<token_id> want(m, s * w);
        pointwise_ops<reference>::gather_ids(plain, want.view(), table.read(), from.read());
        check_same(result_of(padded<token_id>(m, s * w, 3),
                             [&](auto& q, auto& out) { device::gather_ids(q, on_device(out), on_device(table), on_device(from)); }),
                   want);
      }
}

TEST_CASE("scatter_logits fills with less than the least and puts every logit into its column") {
  constexpr std::uint64_t seed = 2111;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t n : sizes{1, 5, 64, 4095, 4096, 9001})
    for (const std::size_t c : sizes{1, 3, 300})
      for (const std::size_t m : sizes{0, 1, 3})
        for (const std::size_t extra : sizes{0, 3}) {
          if (c > n) continue;
          INFO("n = ", n, ", c = ", c, ", m = ", m, ", extra = ", extra);
          const auto x = padded<float>(m, c, extra).fill(random.uniforms(20));
          const std::size_t stride = n / c;
          const auto ids = padded<token_id>(m, c, extra).fill([&, i = std::size_t{0}]() mutable {
            return static_cast<token_id>((i++ % c) * stride + random.below(stride));  // distinct, all over the row
          });
          padded<float> want(m, n);
          pointwise_ops<reference>::scatter_logits(plain, want.view(), x.read(), ids.read());
          check_same(result_of(padded<float>(m, n, extra),
                               [&](auto& q, auto& out) { device::scatter_logits(q, on_device(out), on_device(x), on_device(ids)); }),
                     want);
        }
}

// ------------------------------------------------------------------------------------------------ what bits may not depend on

TEST_CASE("a row has the same bits whatever its alignment, its place and the rows beside it") {
  constexpr std::uint64_t seed = 2112;
  CAPTURE(seed);
  random_numbers random(seed);
  for (const std::size_t n : sizes{32, 512, 1056}) {
    CAPTURE(n);
    const std::vector<padded<float>> rows{padded<float>(1, n).fill(random.uniforms(8)), padded<float>(1, n).fill(random.uniforms(3))};
    const auto check = [&](auto op) {
      check_company_does_not_matter(rows, [&](auto& q, auto& operands, std::size_t) { op(q, operands[0], operands[1]); });
    };
    check([](auto& q, auto a, auto b) { device::add(q, a, a, b); });
    check([](auto& q, auto a, auto b) { device::gelu_mul(q, a, a, b); });
    check([](auto& q, auto a, auto) { device::softcap(q, a, a, 30); });
    check([](auto& q, auto a, auto b) {
      block_rows blocks(a.rows, a.cols / 32, 0);
      device::gelu_mul_quantize(q, on_device(blocks.view()), a, b);
      q.wait();
      widen(a, blocks);
    });
  }
}

TEST_CASE("every operand may have a stride and an alignment of its own") {
  constexpr std::uint64_t seed = 2114;
  CAPTURE(seed);
  random_numbers random(seed);
  constexpr std::size_t m = 3, n = 48;
  const auto x = padded<float>(m, n).fill(random.uniforms(8)), y = padded<float>(m, n).fill(random.uniforms());
  const auto in_layout = [&](std::size_t of_out, std::size_t of_x, std::size_t of_y) {
    const padded<float> blank(m, n, of_out), left = restrided(x, of_x), right = restrided(y, of_y);
    std::vector<padded<float>> all;
    const auto take = [&](const padded<float>& out, auto op) { all.push_back(result_of(out, op)); };
    take(blank, [&](auto& q, auto& out) { device::add(q, on_device(out), on_device(left), on_device(right)); });
    take(blank,
         [&](auto& q, auto& out) { device::weighted_sum(q, on_device(out), on_device(left), on_device(right.view().slice_cols(0, 1))); });
    return all;
  };
  const auto want = in_layout(0, 0, 0);
  for (const std::size_t of_out : sizes{0, 3, 4})
    for (const std::size_t of_x : sizes{0, 3, 4})
      for (const std::size_t of_y : sizes{0, 3, 4}) {
        INFO("of out = ", of_out, ", of x = ", of_x, ", of y = ", of_y);
        const auto got = in_layout(of_out, of_x, of_y);
        for (std::size_t i = 0; i < want.size(); ++i) check_same(got[i], want[i]);
      }
}

TEST_CASE("grids have as many rows as CUDA allows") {
  for (const std::size_t m : sizes{0, 1, 65535, 65536, std::size_t{1} << 40}) {
    const dim3 grid = device::grid_over(m, 1000, 256);
    CHECK(grid.x == 4);
    CHECK(grid.y == (std::min)(m, std::size_t{65535}));
  }
}

TEST_CASE("kernels take the rows beyond the end of their grid in turn") {
  constexpr std::uint64_t seed = 2113;
  CAPTURE(seed);
  random_numbers random(seed);
  constexpr std::size_t m = 7, n = 64;
  const dim3 grid(1, 3);
  const auto x = padded<float>(m, n, 4).fill(random.uniforms(8)), y = padded<float>(m, n, 4).fill(random.uniforms());
  const padded<float> blank(m, n, 4);
  check_same(result_of(blank,
                       [&](auto& q, auto& out) {
                         device::launch(q, &device::map_rows<device::sum_of_two, 256>, grid, 256, 0, on_device(out), on_device(x),
                                        on_device(y), device::sum_of_two{}, true);
                       }),
             result_of(blank, [&](auto& q, auto& out) { device::add(q, on_device(out), on_device(x), on_device(y)); }));

  const auto quantized = [&](auto op) { return result_of(block_rows(m, n / 32, 1), op); };
  CHECK(quantized([&](auto& q, auto& out) {
          device::launch(q, &device::quantize_rows<device::identity, 128>, grid, 128, 0, on_device(out.view()), on_device(x), on_device(x),
                         device::identity{}, true);
        }).same_elements(quantized([&](auto& q, auto& out) { device::quantize(q, on_device(out.view()), on_device(x)); })));

  const auto weights = padded<float>(m, 1).fill(random.uniforms());
  check_same(result_of(blank,
                       [&](auto& q, auto& out) {
                         device::launch(q, &device::weighted_sum_rows<256>, grid, 256, 0, on_device(out), on_device(x), on_device(weights),
                                        true);
                       }),
             result_of(blank, [&](auto& q, auto& out) { device::weighted_sum(q, on_device(out), on_device(x), on_device(weights)); }));

  const auto ids = padded<token_id>(m, 3).fill([i = 0]() mutable { return 5 * i++ % 64; });
  const auto logits = padded<float>(m, 3).fill(random.uniforms());
  check_same(result_of(blank,
                       [&](auto& q, auto& out) {
                         device::launch(q, &device::scatter_logit_rows<256, 4096>, grid, 256, 0, on_device(out), on_device(logits),
                                        on_device(ids), true);
                       }),
             result_of(blank, [&](auto& q, auto& out) { device::scatter_logits(q, on_device(out), on_device(logits), on_device(ids)); }));

  const auto from = padded<std::int32_t>(m, 2).fill(random.indexes(m));
  const padded<token_id> none(m, 6);
  check_same(result_of(none,
                       [&](auto& q, auto& out) {
                         device::launch(q, &device::gather_id_rows<256>, grid, 256, 0, on_device(out), on_device(ids), on_device(from));
                       }),
             result_of(none, [&](auto& q, auto& out) { device::gather_ids(q, on_device(out), on_device(ids), on_device(from)); }));
}
