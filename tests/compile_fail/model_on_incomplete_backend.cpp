// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A backend whose author forgot an op and the static_assert(check_backend): the model says the same sentence.
// expect: outrider: this backend lacks attention_ops<B, Kv>::attend\(ctx, out, q, cache, window\) noexcept
#include "outrider/backend/reference.hpp"
#include "outrider/gemma4/model.hpp"

struct mine {};

template <>
struct outrider::backend_traits<mine> : outrider::backend_traits<outrider::reference> {};
template <class W>
struct outrider::linear_ops<mine, W> : outrider::linear_ops<outrider::reference, W> {};
template <>
struct outrider::pointwise_ops<mine> : outrider::pointwise_ops<outrider::reference> {};
template <class Kv>
struct outrider::attention_ops<mine, Kv> : outrider::attention_ops<outrider::reference, Kv> {
#if !defined(OUTRIDER_TWIN)
  static void attend() = delete;
#endif
};

static_assert(sizeof(outrider::gemma4::model<mine>) > 0);
