// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <string_view>

#include "outrider/backend/reference.hpp"

namespace outrider::testing {

/// The reference, counting how often activations are quantised.
struct counting {
  static inline std::size_t quantised = 0;
};

}  // namespace outrider::testing

namespace outrider {

template <>
struct backend_traits<testing::counting> : backend_traits<reference> {
  static constexpr std::string_view name() noexcept { return "counting"; }
};
template <class W>
struct linear_ops<testing::counting, W> : linear_ops<reference, W> {};
template <>
struct pointwise_ops<testing::counting> : pointwise_ops<reference> {
  static void quantize(context_of<reference>& ctx, matrix_view<int8_block> out, matrix_view<const float> x) noexcept {
    ++testing::counting::quantised;
    pointwise_ops<reference>::quantize(ctx, out, x);
  }
};
template <class Kv>
struct attention_ops<testing::counting, Kv> : attention_ops<reference, Kv> {};

static_assert(check_backend<testing::counting>());

}  // namespace outrider
