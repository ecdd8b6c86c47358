// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A weight of a storage type the backend has no products for.
// expect: (incomplete type|implicit instantiation of undefined template).*linear_ops<outrider::reference, (packed|packed_weight)>
#include "outrider/backend/reference.hpp"

#if defined(OUTRIDER_TWIN)
using packed = outrider::bf16;
#else
struct packed {
  unsigned char bits;
};
#endif

void project(outrider::reference_context& ctx, outrider::matrix_view<float> y, outrider::matrix_view<const float> x,
             outrider::weight_view<packed> w) {
  outrider::linear_ops<outrider::reference, packed>::matmul(ctx, y, x, w);
}
