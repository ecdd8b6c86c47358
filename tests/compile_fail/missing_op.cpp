// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A backend whose author forgot an op.
// expect: outrider: this backend lacks pointwise_ops<B>::softcap\(ctx, out, x, cap\) noexcept
#include "outrider/backend/reference.hpp"

struct mine {};

template <>
struct outrider::backend_traits<mine> : outrider::backend_traits<outrider::reference> {};
template <class W>
struct outrider::linear_ops<mine, W> : outrider::linear_ops<outrider::reference, W> {};
template <>
struct outrider::pointwise_ops<mine> : outrider::pointwise_ops<outrider::reference> {
#if !defined(OUTRIDER_TWIN)
  static void softcap() = delete;
#endif
};
template <class Kv>
struct outrider::attention_ops<mine, Kv> : outrider::attention_ops<outrider::reference, Kv> {};

static_assert(outrider::check_backend<mine>());
