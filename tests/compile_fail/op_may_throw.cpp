// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// An op that is not noexcept: the decode loop relies on it.
// expect: outrider: this backend lacks attention_ops<B, Kv>::append\(ctx, cache, k, v, first\) noexcept for an element type of kv_types
#include "outrider/backend/reference.hpp"

struct mine {};

template <>
struct outrider::backend_traits<mine> : outrider::backend_traits<outrider::reference> {};
template <class W>
struct outrider::linear_ops<mine, W> : outrider::linear_ops<outrider::reference, W> {};
template <>
struct outrider::pointwise_ops<mine> : outrider::pointwise_ops<outrider::reference> {};
template <class Kv>
struct outrider::attention_ops<mine, Kv> : outrider::attention_ops<outrider::reference, Kv> {
#if defined(OUTRIDER_TWIN)
#define MAY_NOT_THROW noexcept
#else
#define MAY_NOT_THROW
#endif
  static void append(reference_context&, kv_view<Kv>, matrix_view<const float>, matrix_view<const float>, std::size_t) MAY_NOT_THROW {}
};

static_assert(outrider::check_backend<mine>());
