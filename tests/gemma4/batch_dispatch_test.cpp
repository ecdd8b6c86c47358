// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/backend/highway_dispatch.hpp"
#define OUTRIDER_TESTED_BACKENDS outrider::highway_dispatch
#include "batch.hpp"
