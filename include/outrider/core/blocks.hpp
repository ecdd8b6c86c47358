// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Block formats of quantised weights: a block holds some tens of weights as small integers and the scales that turn them back into numbers.
// A block lies in memory as it lies in a GGUF file. dequantize.hpp says what its bits mean.
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/core/scalar.hpp"

namespace outrider {

struct q4_0 {
  static constexpr std::size_t elements = 32;
  f16 d;
  std::uint8_t qs[16];
};
struct q4_1 {
  static constexpr std::size_t elements = 32;
  f16 d, m;
  std::uint8_t qs[16];
};
struct q5_0 {
  static constexpr std::size_t elements = 32;
  f16 d;
  std::uint8_t qh[4], qs[16];
};
struct q5_1 {
  static constexpr std::size_t elements = 32;
  f16 d, m;
  std::uint8_t qh[4], qs[16];
};
struct q8_0 {
  static constexpr std::size_t elements = 32;
  f16 d;
  std::int8_t qs[32];
};
struct iq4_nl {
  static constexpr std::size_t elements = 32;
  f16 d;
  std::uint8_t qs[16];
};
struct mxfp4 {
  static constexpr std::size_t elements = 32;
  std::uint8_t e, qs[16];
};
struct q2_k {
  static constexpr std::size_t elements = 256;
  std::uint8_t scales[16], qs[64];
  f16 d, dmin;
};
struct q3_k {
  static constexpr std::size_t elements = 256;
  std::uint8_t hmask[32], qs[64], scales[12];
  f16 d;
};
struct q4_k {
  static constexpr std::size_t elements = 256;
  f16 d, dmin;
  std::uint8_t scales[12], qs[128];
};
struct q5_k {
  static constexpr std::size_t elements = 256;
  f16 d, dmin;
  std::uint8_t scales[12], qh[32], qs[128];
};
struct q6_k {
  static constexpr std::size_t elements = 256;
  std::uint8_t ql[128], qh[64];
  std::int8_t scales[16];
  f16 d;
};
struct iq4_xs {
  static constexpr std::size_t elements = 256;
  f16 d;
  std::uint8_t scales_h[2], scales_l[4], qs[128];
};

static_assert(sizeof(q4_0) == 18 && sizeof(q4_1) == 20 && sizeof(q5_0) == 22 && sizeof(q5_1) == 24 && sizeof(q8_0) == 34);
static_assert(sizeof(iq4_nl) == 18 && sizeof(mxfp4) == 17 && sizeof(q2_k) == 84 && sizeof(q3_k) == 110 && sizeof(q4_k) == 144);
static_assert(sizeof(q5_k) == 176 && sizeof(q6_k) == 210 && sizeof(iq4_xs) == 136);

/// Weights per stored object: the block length, or 1 for a scalar type.
template <class W>
inline constexpr std::size_t elements_of = 1;
template <class W>
  requires requires { W::elements; }
inline constexpr std::size_t elements_of<W> = W::elements;

/// Formats of several weights per stored object.
template <class W>
concept block_format = (elements_of<W> > 1);

}  // namespace outrider
