// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A device's matrix is given to an op of a host backend.
// expect: cannot convert|could not convert|no viable conversion
// expect: device_space
#include "outrider/backend/reference.hpp"

#if defined(OUTRIDER_TWIN)
using space = outrider::host_space;
#else
using space = outrider::device_space;
#endif

void double_up(outrider::reference_context& ctx, outrider::matrix_view<float, space> x) {
  outrider::pointwise_ops<outrider::reference>::scale(ctx, x, x, 2);
}
