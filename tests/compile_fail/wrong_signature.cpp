// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// An op with its operands in another form than the contract's.
// expect: outrider: this backend lacks linear_ops<B, W>::matmul\(ctx, out, x, w\) noexcept for a weight type of weight_types
#include "outrider/backend/reference.hpp"

struct mine {};

template <>
struct outrider::backend_traits<mine> : outrider::backend_traits<outrider::reference> {};
template <class W>
struct outrider::linear_ops<mine, W> : outrider::linear_ops<outrider::reference, W> {};
namespace outrider {
template <listed_weight W>
struct linear_ops<mine, W> : linear_ops<reference, W> {
#if defined(OUTRIDER_TWIN)
  static void matmul(reference_context&, matrix_view<float>, matrix_view<const float>, weight_view<W>) noexcept {}
#else
  static void matmul(reference_context&, float*, const float*, const W*, std::size_t, std::size_t, std::size_t) noexcept {}
#endif
};
}  // namespace outrider
template <>
struct outrider::pointwise_ops<mine> : outrider::pointwise_ops<outrider::reference> {};
template <class Kv>
struct outrider::attention_ops<mine, Kv> : outrider::attention_ops<outrider::reference, Kv> {};

static_assert(outrider::check_backend<mine>());
