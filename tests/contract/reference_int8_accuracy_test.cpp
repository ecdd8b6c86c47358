// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "grouped_weights.hpp"
#include "outrider/backend/reference.hpp"

namespace contract {
namespace {

using outrider::linear_ops;
using outrider::reference;

/// An int8 product against one with the float activations themselves. With m = max |x|, q is x · (127 / m), off by two roundings of at most
/// 127·u each and by half a step, and d is m / 127, rounded: |x - d·q| <= d · (1/2 + 3·127·u), weighted by |w|. Then each part rounds a product
/// with d and an FMA for each scale, and d·Σq and an FMA for a minimum: at most 6 roundings of terms that sum to no more than
/// Σ (|scale·q| + |minimum|) · (|x| + d), each met by the FMAs of all parts behind it.
TEST_CASE("an int8 product is as far from the float product as half a step of its activations explains") {
  constexpr std::uint64_t seed = 711;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context ctx;
  for_each_grouped([&]<class W>() {
    const grouped_weights<W> w(random, 19, 3 * W::elements);
    padded<float> x(4, w.cols);
    x.fill(random.uniforms());
    const int8_rows blocks(x, 0);
    padded<float> got(4, w.rows);
    linear_ops<reference, grouped<W>>::matmul(ctx, got.view(), blocks.read(), w.view());
    for (std::size_t r = 0; r < got.rows(); ++r)
      for (std::size_t n = 0; n < w.rows; ++n) {
        double want = 0, bound = 0, magnitude = 0;
        outrider::for_each_weight(w.as_stored().row(n), w.cols, [&](std::size_t k, float weight) {
          const std::size_t p = k / 32;
          const auto part = outrider::part_of(w.view().group(n / 16)[p / grouped<W>::parts], n % 16, p % grouped<W>::parts);
          const double d = double{blocks.read()(r, p).d}, scaled = std::abs(double{part.scale[k % 32 / 16]} * part.q[k % 32]);
          want += double{weight} * double{x(r, k)};
          bound += std::abs(double{weight}) * d * (0.5 + 3 * 127 * u);
          magnitude += (scaled + std::abs(double{part.minimum})) * (std::abs(double{x(r, k)}) + d);
        });
        const double parts = static_cast<double>(w.cols) / 32;
        INFO("r = ", r, ", n = ", n, ", got = ", got(r, n), ", want = ", want);
        REQUIRE(std::abs(double{got(r, n)} - want) <= bound + 6 * parts * u * magnitude);
      }
  });
}

}  // namespace
}  // namespace contract
