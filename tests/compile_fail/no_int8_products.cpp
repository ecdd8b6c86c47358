// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A backend with products for weights as stored only.
// expect: outrider: this backend lacks linear_ops<B, grouped<W>>::matmul\(ctx, out, x, w\) noexcept for a type of grouped_types
#include "outrider/backend/reference.hpp"

struct mine {};

template <>
struct outrider::backend_traits<mine> : outrider::backend_traits<outrider::reference> {};
template <class W>
#if !defined(OUTRIDER_TWIN)
  requires outrider::listed_weight<W>
#endif
struct outrider::linear_ops<mine, W> : outrider::linear_ops<outrider::reference, W> {};
template <>
struct outrider::pointwise_ops<mine> : outrider::pointwise_ops<outrider::reference> {};
template <class Kv>
struct outrider::attention_ops<mine, Kv> : outrider::attention_ops<outrider::reference, Kv> {};

static_assert(outrider::check_backend<mine>());
