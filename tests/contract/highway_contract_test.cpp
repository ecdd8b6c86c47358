// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/backend/highway.hpp"
#if defined(_OPENMP)
#define OUTRIDER_TESTED_BACKENDS outrider::highway, outrider::highway_serial
#else
#define OUTRIDER_TESTED_BACKENDS outrider::highway
#endif
#include "ops_contract.hpp"
