// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Compiled several times with different -m flags and linked into one program, see scripts/check_odr.sh. Reports which instruction set its
// kernels ran on, and the bits they gave: if the linker merged kernels of two units, one of them would change.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

#include "outrider/core/scalar.hpp"
#include "outrider/core/storage.hpp"
#include "report.hpp"

#if defined(OUTRIDER_UNIT_DISPATCH)
#include "outrider/backend/highway_dispatch.hpp"
using tested = outrider::highway_dispatch_serial;
#else
#include "outrider/backend/highway.hpp"
using tested = outrider::highway_serial;
#endif

namespace {

std::string run() {
  using namespace outrider;
  constexpr std::size_t rows = 3, inner = 1003, outer = 5;  // no multiple of any vector
  context_of<tested> ctx(execution{1});
  matrix<float, host_space> x(rows, inner), y(rows, outer);
  buffer<bf16, host_space> w(outer * inner);
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < inner; ++c) x.view()(r, c) = 1.0f / static_cast<float>(1 + r + c);
  for (std::size_t i = 0; i < w.size(); ++i) w.data()[i] = bf16(1.0f / static_cast<float>(3 + i % 101));
  linear_ops<tested, bf16>::matmul(ctx, y.view(), x.view(), {w.data(), outer, inner, inner});
  pointwise_ops<tested>::softcap(ctx, y.view(), y.view(), 30);

  std::string line = OUTRIDER_UNIT;
  line += ": " + std::string(backend_traits<tested>::simd());
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < outer; ++c) {
      char word[16];
      std::snprintf(word, sizeof word, " %08x", std::bit_cast<std::uint32_t>(y.view()(r, c)));
      line += word;
    }
  return line;
}

const bool reported = (report(run()), true);

}  // namespace
