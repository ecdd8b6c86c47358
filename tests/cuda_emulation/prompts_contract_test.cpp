// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The products of the contract on cuda_gemm_prompts, whose prompts are cuBLASLt's.
#include "emulated_device.hpp"
#define OUTRIDER_CONTRACT_EVERY (OUTRIDER_DEVICE_SLOWNESS == 1 ? 1 : 3 * OUTRIDER_DEVICE_SLOWNESS + 2)
#include "outrider/backend/cuda.hpp"
#include "support/on_device.hpp"

namespace {
using gemm_prompts = outrider::testing::on_device<outrider::cuda_gemm_prompts>;
}
#define OUTRIDER_TESTED_BACKENDS gemm_prompts
#include "contract/linear_contract.hpp"

namespace contract {

TEST_CASE("rows of a prompt that go to the tensor cores in parts and pieces are as exact as sums in float") {
  // A product is three sums of k terms, over parts that make up x, each within 2⁻⁷ of the one before; two more roundings add them, one is the
  // reference's: less than k + 4 for k up to 100.
  constexpr std::uint64_t seed = 2401;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<gemm_prompts> ctx(execution{1});
  const weight_format<gemm_prompts> format = format_of<gemm_prompts, bf16>();
  for (const std::size_t k : sizes{8, 72})
    for (const std::size_t n : sizes{8, 24})
      for (const std::size_t m : sizes{16, 17, 128, 129, 300})
        for (const std::size_t extra : sizes{0, 8}) {
          INFO("k = ", k, ", n = ", n, ", m = ", m, ", extra = ", extra);
          auto x = padded<float>(m, k, extra).fill(random.uniforms());
          x(1, 3) = std::numeric_limits<float>::infinity();
          x(2, 5) = std::numeric_limits<float>::quiet_NaN();
          const stored_weights w = format.random_matrix(random, n, k, extra);
          padded<float> got(m, n, extra), want(m, n);
          format.matmul_prompt(ctx, got.view(), x.view(), w.view());
          for (std::size_t c = 0; c < n; ++c) {
            CHECK(std::isinf(got(1, c)));
            CHECK(std::isnan(got(2, c)));
            got(1, c) = got(2, c) = 0;
          }
          for (std::size_t c = 0; c < k; ++c) x(1, c) = x(2, c) = 0;
          for (std::size_t r = 0; r < m; ++r)
            for (std::size_t c = 0; c < n; ++c) want(r, c) = dot(x.row(r), w.values.row(c), k);
          check_within(got, want, [&](std::size_t r, std::size_t c) {
            double sum = 0;
            for (std::size_t i = 0; i < k; ++i) sum += std::abs(double{x(r, i)} * double{w.values(c, i)});
            return static_cast<double>(k + 4) * u * sum;
          });
        }
}

}  // namespace contract
