// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The host follows the table of blocks of a device's keys.
// expect: host_accessible
// expect: device_space
#include "outrider/core/kv_view.hpp"

#if defined(OUTRIDER_TWIN)
using space = outrider::host_space;
#else
using space = outrider::device_space;
#endif

const float* first(outrider::kv_view<const float, space> keys) { return keys.key(0, 0); }
