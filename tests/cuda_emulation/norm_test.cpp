// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The norms of norm.cuh on the CPU: against the reference, and the fused ops against the ops they stand for.
#include "row_fixture.hpp"
//
#include <vector>

#include "outrider/backend/cuda/norm.cuh"
#include "outrider/backend/cuda/pointwise.cuh"

namespace {

using namespace kernel_test;
using outrider::pointwise_ops;
using outrider::reference;

constexpr float eps = 1e-6f;

/// Row lengths with every kind of end: short of a vector of four, of a warp's step (128 columns), of a block's (4096), and of what a kernel
/// keeps in registers (256 columns of a warp, 8192 of a block).
constexpr std::size_t widths[] = {0,   1,   3,   4,   5,   31,   32,   33,   64,   127,  128,  129,  256,  257,
                                  320, 511, 512, 513, 544, 1024, 1027, 1536, 4096, 4097, 5376, 8192, 8196, 8224};

/// As in the contract: (n + 1)·u for the mean, half of it in the root, and eight roundings.
double rms_norm_bound(float want, std::size_t n) { return (static_cast<double>(n) / 2 + 8) * u * std::abs(double{want}); }

/// 1 / √(mean(x²) + eps) in the order of norm_rows: of each team of 32 threads, or of 1024 where a row is longer than 512, a thread sums every
/// step-th four columns; then the sums of a warp are added as a butterfly, and those of the warps in turn.
float inverse_root(const float* x, std::size_t n) {
  const std::size_t team = n <= 512 ? 32 : 1024;
  std::vector<float> sums(team);
  for (std::size_t c = 0; c < n; ++c) {
    float& sum = sums[c / 4 % team];
    sum = std::fma(x[c], x[c], sum);
  }
  for (std::size_t step = 16; step > 0; step /= 2) {
    const std::vector<float> before = sums;
    for (std::size_t i = 0; i < team; ++i) sums[i] = before[i] + before[i ^ step];
  }
  float sum = sums[0];
  for (std::size_t warp = 1; warp < team / 32; ++warp) sum += sums[32 * warp];
  return 1 / std::sqrt(sum / static_cast<float>(n) + eps);
}

/// What a chain of norms leaves.
struct norm_results {
  padded<float> h, out;
  block_rows blocks;
  bool same_elements(const norm_results& other) const {
    return h.same_elements(other.h) && out.same_elements(other.out) && blocks.same_elements(other.blocks);
  }
  bool padding_untouched() const { return h.padding_untouched() && out.padding_untouched() && blocks.padding_untouched(); }
};

}  // namespace

// ------------------------------------------------------------------------------------------------ norms

TEST_CASE("rms_norm agrees with the reference for every width, and has the bits of its own order of summation") {
  constexpr std::uint64_t seed = 2103;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t n : widths)
    for (const std::size_t m : sizes{0, 1, 5})
      for (const std::size_t extra : sizes{0, 3})
        for (const bool weighted : {false, true}) {
          if (m == 5 && n > 1024) continue;
          INFO("n = ", n, ", m = ", m, ", extra = ", extra, ", weighted = ", weighted);
          const auto x = padded<float>(m, n, extra).fill(random.uniforms(30));
          const auto weights = padded<float>(1, n).fill(random.uniforms(2));
          const float* weight = weighted ? weights.data() : nullptr;
          padded<float> want(m, n), exactly(m, n);
          pointwise_ops<reference>::rms_norm(plain, want.view(), x.read(), weight, eps);
          for (std::size_t r = 0; r < m; ++r) {
            const float inverse = inverse_root(x.row(r), n);
            for (std::size_t c = 0; c < n; ++c) exactly(r, c) = x(r, c) * inverse * (weighted ? weights(0, c) : 1.0f);
          }

          const auto norm = result_of(padded<float>(m, n, extra),
                                      [&](auto& q, auto& out) { device::rms_norm(q, on_device(out), on_device(x), weight, eps); });
          check_within(norm, want, [&](std::size_t r, std::size_t c) { return rms_norm_bound(want(r, c), n); });
          check_same(norm, exactly);
          check_same(result_of(x, [&](auto& q, auto& out) { device::rms_norm(q, on_device(out), on_device(out), weight, eps); }), norm);
        }
}

TEST_CASE("rms_norm of small rows: eps is added below the root") {
  // mean(x²) = 1e-6 in every row, so the root is that of 2e-6.
  for (const std::size_t n : sizes{5, 600}) {
    const auto x = padded<float>(1, n).fill([] { return -1e-3f; });
    const auto want = padded<float>(1, n).fill([] { return static_cast<float>(-std::sqrt(0.5)); });
    const auto norm =
        result_of(x, [&](auto& q, auto& out) { device::rms_norm(q, on_device(out), on_device(std::as_const(out)), nullptr, eps); });
    // Beside the bound of other rows: u of 1e-3f twice, in its square, and of eps, each half in the root, and u of x itself.
    check_within(norm, want, [&](std::size_t, std::size_t) { return rms_norm_bound(1, n) + 3 * u; });
  }
}

TEST_CASE("rms_norm of large residuals is finite and of zeros is zero") {
  for (const std::size_t n : sizes{300, 2000}) {
    CAPTURE(n);
    const auto large = padded<float>(1, n).fill([] { return 1e15f; }), zeros = padded<float>(1, n).fill([] { return 0.0f; });
    const auto norm = [&](const padded<float>& x) {
      return result_of(x, [&](auto& q, auto& out) { device::rms_norm(q, on_device(out), on_device(out), nullptr, eps); });
    };
    check_within(norm(large), padded<float>(1, n).fill([] { return 1.0f; }),
                 [&](std::size_t, std::size_t) { return rms_norm_bound(1, n); });
    check_same(norm(zeros), zeros);
  }
}

TEST_CASE("norm_quantize, norm_add and norm_add_norm have the bits of the ops they stand for") {
  constexpr std::uint64_t seed = 2115;
  CAPTURE(seed);
  random_numbers random(seed);
  for (const std::size_t n : widths)
    for (const std::size_t m : sizes{0, 1, 5})
      for (const std::size_t extra : sizes{0, 3})
        for (const bool weighted : {false, true})
          for (const bool next_weighted : {false, true})
            for (const bool with_blocks : {false, true}) {
              if ((with_blocks && n % 32 != 0) || (m == 5 && n > 1024) || (weighted != next_weighted && n > 1536)) continue;
              INFO("n = ", n, ", m = ", m, ", extra = ", extra, ", weighted = ", weighted, ", ", next_weighted);
              CAPTURE(with_blocks);
              const auto x = padded<float>(m, n, extra).fill(random.uniforms(30)), h = padded<float>(m, n, extra).fill(random.uniforms(3));
              const auto weights = padded<float>(2, n).fill(random.uniforms(2));
              const float *weight = weighted ? weights.row(0) : nullptr, *next_weight = next_weighted ? weights.row(1) : nullptr;
              constexpr float next_eps = 0.25f, factor = 0.7f;
              const norm_results blank{h, padded<float>(m, n, extra), block_rows(m, with_blocks ? n / 32 : 0, extra)};
              const auto blocks_of = [&](norm_results& r) {
                return with_blocks ? on_device(r.blocks.view()) : device::rows<outrider::int8_block>{};
              };
              const auto check_fused = [&](const norm_results& from, auto fused, auto composed) {
                const auto both = result_of(from, [&](auto& q, norm_results& r) { fused(q, r, blocks_of(r)); });
                const auto want =
                    result_of(from, [&](auto& q, norm_results& r) { composed(q, r, on_device(r.h), on_device(r.out), blocks_of(r)); }, {});
                CHECK(both.same_elements(want));
              };
              const auto rounded = [&](auto& q, auto blocks, auto of) {
                if (with_blocks) device::quantize(q, blocks, of);
              };

              const auto norm_then_blocks = [&](auto& q, norm_results&, auto, auto out, auto blocks) {
                device::rms_norm(q, out, on_device(x), weight, eps);
                rounded(q, blocks, out);
              };
              norm_results in_place = blank;
              in_place.out = x;
              check_fused(
                  blank,
                  [&](auto& q, auto& r, auto blocks) { device::norm_quantize(q, on_device(r.out), blocks, on_device(x), weight, eps); },
                  norm_then_blocks);
              check_fused(
                  in_place,
                  [&](auto& q, auto& r, auto blocks) { device::norm_quantize(q, on_device(r.out), blocks, on_device(r.out), weight, eps); },
                  norm_then_blocks);

              for (const float scale : {1.0f, factor})
                check_fused(
                    blank,
                    [&](auto& q, auto& r, auto blocks) { device::norm_add(q, on_device(r.h), blocks, on_device(x), weight, eps, scale); },
                    [&](auto& q, norm_results&, auto stream, auto, auto blocks) {
                      padded<float> normed(m, n);
                      device::rms_norm(q, on_device(normed), on_device(x), weight, eps);
                      device::add(q, stream, stream, on_device(normed));
                      device::scale(q, stream, stream, scale);
                      rounded(q, blocks, stream);
                    });

              const auto add_then_norm = [&](auto& q, norm_results&, auto stream, auto out, auto blocks) {
                padded<float> normed(m, n);
                device::rms_norm(q, on_device(normed), on_device(x), weight, eps);
                device::add(q, stream, stream, on_device(normed));
                device::rms_norm(q, out, stream, next_weight, next_eps);
                rounded(q, blocks, out);
              };
              check_fused(
                  blank,
                  [&](auto& q, auto& r, auto blocks) {
                    device::norm_add_norm(q, on_device(r.h), on_device(r.out), blocks, on_device(x), weight, eps, next_weight, next_eps);
                  },
                  add_then_norm);
              check_fused(
                  in_place,
                  [&](auto& q, auto& r, auto blocks) {
                    device::norm_add_norm(q, on_device(r.h), on_device(r.out), blocks, on_device(r.out), weight, eps, next_weight,
                                          next_eps);
                  },
                  add_then_norm);
            }
}

TEST_CASE("numbers that are not finite spoil their own row alone") {
  constexpr std::size_t m = 3, n = 96;
  random_numbers random(2116);
  auto x = padded<float>(m, n).fill(random.uniforms());
  x(1, 40) = not_a_number;
  const auto h = padded<float>(m, n).fill(random.uniforms());
  const auto results = result_of(norm_results{h, padded<float>(m, n), block_rows(m, n / 32, 0)},
                                 [&](auto& q, auto& r) {
                                   device::norm_add_norm(q, on_device(r.h), on_device(r.out), on_device(r.blocks.view()), on_device(x),
                                                         nullptr, eps, nullptr, eps);
                                 },
                                 {});
  for (std::size_t r = 0; r < m; ++r)
    for (std::size_t c = 0; c < n; ++c) {
      INFO("r = ", r, ", c = ", c);
      CHECK(std::isnan(results.h(r, c)) == (r == 1));
      CHECK(std::isnan(results.out(r, c)) == (r == 1));
      CHECK(std::isnan(results.blocks(r, c / 32).d) == (r == 1));
    }
}

// ------------------------------------------------------------------------------------------------ what bits may not depend on

TEST_CASE("a row has the same bits whatever its alignment, its place and the rows beside it") {
  constexpr std::uint64_t seed = 2117;
  CAPTURE(seed);
  random_numbers random(seed);
  for (const std::size_t n : sizes{32, 384, 512, 1056}) {
    CAPTURE(n);
    std::vector<padded<float>> rows;  // a row to write, one to read, two weights, cosines and sines
    for (int i = 0; i < 4; ++i) rows.push_back(padded<float>(1, n).fill(random.uniforms(4)));
    for (int i = 0; i < 2; ++i) rows.push_back(padded<float>(1, n / 2).fill(random.uniforms()));
    const auto check = [&](auto op) {
      check_company_does_not_matter(rows, [&](auto& q, auto& on, std::size_t place) {
        block_rows blocks(on[0].rows, n / 32, 1);
        op(q, on, on[2].row(place), on[3].row(place), on_device(blocks.view()));
        q.wait();
        widen(on[2], blocks);  // by what was there before where the op makes none
      });
    };
    check([](auto& q, auto& on, auto* w, auto*, auto) { device::rms_norm(q, on[0], on[0], w, eps); });
    check([](auto& q, auto& on, auto* w, auto*, auto blocks) { device::norm_quantize(q, on[0], blocks, on[1], w, eps); });
    check([](auto& q, auto& on, auto* w, auto*, auto blocks) { device::norm_add(q, on[0], blocks, on[1], w, eps, 0.7f); });
    check([](auto& q, auto& on, auto* w, auto* next, auto blocks) {
      device::norm_add_norm(q, on[0], on[1], blocks, on[1], w, eps, next, eps);
    });
    check([](auto& q, auto& on, auto*, auto*, auto) { device::rope(q, on[0], on[4], on[5]); });
    check([](auto& q, auto& on, auto* w, auto*, auto) { device::norm_rope(q, on[0], w, eps, on[4], on[5]); });
  }
}

TEST_CASE("every operand may have a stride and an alignment of its own") {
  constexpr std::uint64_t seed = 2118;
  CAPTURE(seed);
  random_numbers random(seed);
  constexpr std::size_t m = 3, n = 64;
  const auto x = padded<float>(m, n).fill(random.uniforms(8)), h = padded<float>(m, n).fill(random.uniforms());
  const auto cos = padded<float>(m, n / 2).fill(random.uniforms()), sin = padded<float>(m, n / 2).fill(random.uniforms());
  const auto weights = padded<float>(1, n).fill(random.uniforms(2)), next_weights = padded<float>(1, n).fill(random.uniforms(2));
  /// Rows of h, x and out are so much longer than they have to be; the weights lie so far behind an aligned place.
  struct layout {
    std::size_t h, x, out, weight, next_weight;
  };
  const auto in_layout = [&](const layout& of) {
    padded<float> shifted(2, n + 4);  // rows are aligned
    for (std::size_t c = 0; c < n; ++c) shifted(0, of.weight + c) = weights(0, c), shifted(1, of.next_weight + c) = next_weights(0, c);
    const float *const weight = shifted.row(0) + of.weight, *const next_weight = shifted.row(1) + of.next_weight;
    const padded<float> left = restrided(x, of.x), cosines = restrided(cos, of.x), sines = restrided(sin, of.out);
    const norm_results blank{restrided(h, of.h), padded<float>(m, n, of.out), block_rows(m, n / 32, of.out)};
    std::vector<norm_results> all;
    const auto take = [&](auto op) { all.push_back(result_of(blank, op)); };
    take([&](auto& q, auto& r) { device::rms_norm(q, on_device(r.out), on_device(left), weight, eps); });
    take([&](auto& q, auto& r) { device::norm_quantize(q, on_device(r.out), on_device(r.blocks.view()), on_device(left), weight, eps); });
    take([&](auto& q, auto& r) { device::norm_add(q, on_device(r.h), on_device(r.blocks.view()), on_device(left), weight, eps, 0.7f); });
    take([&](auto& q, auto& r) {
      device::norm_add_norm(q, on_device(r.h), on_device(r.out), on_device(r.blocks.view()), on_device(left), weight, eps, next_weight,
                            eps);
    });
    take([&](auto& q, auto& r) { device::norm_rope(q, on_device(r.h), weight, eps, on_device(cosines), on_device(sines)); });
    return all;
  };
  const auto want = in_layout({});
  for (const std::size_t of_h : sizes{0, 3, 4})
    for (const std::size_t of_x : sizes{0, 3, 4})
      for (const std::size_t of_out : sizes{0, 3, 4})
        for (const std::size_t weight : sizes{0, 1})
          for (const std::size_t next_weight : sizes{0, 1}) {
            INFO("h: ", of_h, ", x: ", of_x, ", out: ", of_out, ", weight: ", weight, ", next weight: ", next_weight);
            const auto got = in_layout({of_h, of_x, of_out, weight, next_weight});
            for (std::size_t i = 0; i < want.size(); ++i) CHECK(got[i].same_elements(want[i]));
          }
}
