// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/backend/cpu.hpp"
#define OUTRIDER_TESTED_BACKENDS outrider::cpu
#include "int8_golden.hpp"
