// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/core/grouped.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "outrider/core/dequantize.hpp"

namespace {

using namespace outrider;

/// Random bits, with a finite scale.
template <class W>
W random_block(std::mt19937_64& random) {
  std::uint8_t bytes[sizeof(W)];
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
  W block;
  std::memcpy(&block, bytes, sizeof(W));
  const auto finite = [&] { return f16(static_cast<float>(static_cast<int>(random() % 2001) - 1000) * 0x1p-9f); };
  block.d = finite();
  if constexpr (requires { block.dmin; }) block.dmin = finite();
  return block;
}

TEST_CASE_TEMPLATE("a group holds what its rows' blocks mean, bit for bit, and zeros for rows that are missing", W, q4_0, q8_0, q4_k, q5_k,
                   q6_k, iq4_nl, iq4_xs) {
  constexpr std::uint64_t seed = 41;
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  constexpr std::size_t blocks = 3, cols = blocks * W::elements;
  for (const std::size_t count : {std::size_t{1}, std::size_t{7}, std::size_t{16}}) {
    CAPTURE(count);
    std::vector<W> stored;
    for (std::size_t i = 0; i < (count + 2) * blocks; ++i) stored.push_back(random_block<W>(random));
    std::vector<grouped<W>> records(blocks);
    group(records.data(), weight_view<W>{stored.data(), count + 2, cols, blocks}, 2, count);
    for (std::size_t row = 0; row < group_rows; ++row)
      for (std::size_t b = 0; b < blocks; ++b) {
        float want[W::elements] = {};
        if (row < count) dequantize(stored[(row + 2) * blocks + b], want);
        for (std::size_t p = 0; p < grouped<W>::parts; ++p) {
          const int8_weights part = part_of(records[b], row, p);
          for (std::size_t k = 0; k < 32; ++k) {
            float got = part.scale[k / 16] * to_float(part.q[k]);
            if (has_minimum<W>) got += part.minimum;
            const bool same = std::memcmp(&got, &want[32 * p + k], sizeof(got)) == 0 || (row >= count && got == 0);
            INFO("row ", row, ", column ", b * W::elements + 32 * p + k, ": ", got, " instead of ", want[32 * p + k]);
            REQUIRE(same);
          }
        }
      }
  }
}

TEST_CASE("a view in groups counts logical rows, and slices at groups") {
  std::vector<grouped<q8_0>> records(4 * 2);
  const weight_view<grouped<q8_0>> w{records.data(), 53, 64, 2};
  CHECK(w.groups() == 4);
  CHECK(w.group(3) == records.data() + 6);
  const auto slice = w.slice_rows(16, 37);
  CHECK(slice.rows == 37);
  CHECK(slice.groups() == 3);
  CHECK(slice.group(0) == w.group(1));
}

}  // namespace
