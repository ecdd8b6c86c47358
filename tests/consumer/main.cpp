// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Somebody else's program, built against an installed or embedded outrider in each supported way; see scripts/check_consumers.sh.
// Loads the configuration of the model directory argv[1] and runs one op. Exit code 0 if the op is right.
#include <cstdio>
#include <string>

#include "outrider/backend/parallel.hpp"
#include "outrider/core/storage.hpp"
#include "outrider/gemma4/config_json.hpp"
#include "outrider/version.hpp"
#if defined(OUTRIDER_HIGHWAY_DISPATCH)
#include "outrider/backend/highway_dispatch.hpp"
using my_backend = outrider::highway_dispatch;
#else
#include "outrider/backend/reference.hpp"
using my_backend = outrider::reference;
#endif
#if !defined(_OPENMP)
#error "OpenMP did not reach the consumer"
#endif

int main(int argc, char** argv) {
  using namespace outrider;
  if (argc != 2) return 2;
  const auto config = gemma4::read_target_config(std::string(argv[1]) + "/config.json");
  context_of<my_backend> ctx(execution{2});
  matrix<float, host_space> x(2, 3), w(4, 3), y(2, 4);
  for (std::size_t c = 0; c < 3; ++c) x.view()(1, c) = w.view()(2, c) = static_cast<float>(c);
  linear_ops<my_backend, float>::matmul(ctx, y.view(), x.view(), {w.view().data, 4, 3, 3});
  std::printf("outrider %s, %s (%s), vocabulary %zu, 0·0 + 1·1 + 2·2 = %g\n", OUTRIDER_VERSION, backend_traits<my_backend>::name().data(),
              backend_traits<my_backend>::simd().data(), config.vocab_size, static_cast<double>(y.view()(1, 2)));
  return y.view()(1, 2) == 5.0f ? 0 : 1;
}
