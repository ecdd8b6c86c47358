// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/backend/reference.hpp"
#define OUTRIDER_TESTED_BACKENDS outrider::reference
#include "rewind.hpp"
