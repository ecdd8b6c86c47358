// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Compiled several times with different -m flags and linked into one program, see scripts/check_odr.sh. Reports which instruction set its
// kernels ran on, and the bits they gave: if the linker merged kernels of two units, one of them would change.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

#include "outrider/core/grouped.hpp"
#include "outrider/core/kv_view.hpp"
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

  // Grouped weights of any bits, and a query over the rows of x as keys and values.
  constexpr std::size_t width = 96;
  buffer<grouped<q4_0>, host_space> groups(width / 32);
  for (std::size_t i = 0; i < groups.size(); ++i)
    for (std::size_t r = 0; r < group_rows; ++r) {
      for (auto& codes : groups.data()[i].codes) codes[r] = static_cast<std::uint32_t>(2654435761u * (16 * i + r + 1));
      groups.data()[i].d[r] = f16(0.25f);
    }
  matrix<int8_block, host_space> blocks(rows, width / 32);
  matrix<float, host_space> products(rows, group_rows), mixed(rows, width);
  pointwise_ops<tested>::quantize(ctx, blocks.view(), x.view().slice_cols(0, width));
  linear_ops<tested, grouped<q4_0>>::matmul(ctx, products.view(), blocks.view(), {groups.data(), group_rows, width, width / 32});
  buffer<float, host_space> keys(2 * rows * width);
  float* const block = keys.data();
  const kv_view<float> cache{&block, rows, 0, 1, width};
  attention_ops<tested, float>::append(ctx, cache, x.view().slice_cols(0, width), x.view().slice_cols(width, width), 0);
  attention_ops<tested, float>::attend(ctx, mixed.view(), x.view().slice_cols(0, width), cache, {1, key_window::unlimited});

  std::string line = OUTRIDER_UNIT;
  line += ": " + std::string(backend_traits<tested>::simd());
  for (const matrix_view<const float> results :
       {matrix_view<const float>(y.view()), matrix_view<const float>(products.view()), matrix_view<const float>(mixed.view())})
    for (std::size_t r = 0; r < results.rows; ++r)
      for (std::size_t c = 0; c < results.cols; ++c) {
        char word[16];
        std::snprintf(word, sizeof word, " %08x", std::bit_cast<std::uint32_t>(results(r, c)));
        line += word;
      }
  return line;
}

const bool reported = (report(run()), true);

}  // namespace
