// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A backend of the library over one of the author's own that has no products for blocks.
// expect: outrider: this backend lacks linear_ops<B, W>::matmul\(ctx, out, x, w\) noexcept for a weight type of weight_types
#include "outrider/backend/eigen.hpp"

struct mine {};

template <>
struct outrider::backend_traits<mine> : outrider::backend_traits<outrider::reference> {};
template <class W>
#if !defined(OUTRIDER_TWIN)
  requires(!outrider::block_format<W>)
#endif
struct outrider::linear_ops<mine, W> : outrider::linear_ops<outrider::reference, W> {};
template <>
struct outrider::pointwise_ops<mine> : outrider::pointwise_ops<outrider::reference> {};
template <class Kv>
struct outrider::attention_ops<mine, Kv> : outrider::attention_ops<outrider::reference, Kv> {};

static_assert(outrider::check_backend<outrider::eigen_prompts<mine>>());
