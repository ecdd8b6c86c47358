// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Somebody else's program for the CUDA backend; see scripts/check_cuda.sh. Runs one op. Exit code 0 if the op is right, 3 without a device.
#include <cstdio>

#include "outrider/backend/cuda.hpp"
#include "outrider/core/space_copy.hpp"
#include "outrider/core/storage.hpp"

int main() try {
  using namespace outrider;
  cuda_context ctx;
  matrix<float, host_space> values(1, 3);
  for (std::size_t c = 0; c < 3; ++c) values.view()(0, c) = static_cast<float>(c);
  matrix<float, device_space> x(1, 3);
  copy_across(x.view(), values.view());
  pointwise_ops<cuda>::scale(ctx, x.view(), x.view(), 2);
  copy_across(values.view(), x.view());
  std::printf("2 · 2 = %g on %s\n", static_cast<double>(values.view()(0, 2)), backend_traits<cuda>::simd().data());
  return values.view()(0, 2) == 4.0f ? 0 : 1;
} catch (const outrider::error& e) {
  std::printf("%s\n", e.what());
  return e.code() == outrider::error_code::device_unavailable ? 3 : 1;
}
