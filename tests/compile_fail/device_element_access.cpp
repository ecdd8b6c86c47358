// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The host reads an element of a device's matrix.
// expect: host_accessible
// expect: device_space
#include "outrider/core/view.hpp"

#if defined(OUTRIDER_TWIN)
using space = outrider::host_space;
#else
using space = outrider::device_space;
#endif

float first(outrider::matrix_view<const float, space> m) { return m(0, 0); }
