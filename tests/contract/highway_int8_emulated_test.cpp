// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Dot products and tiles of bytes with the instructions replaced by plain arithmetic, so that they are checked on machines without them.
#define OUTRIDER_EMULATED_VNNI
#define OUTRIDER_EMULATED_AMX
#include "int8_ways.hpp"
