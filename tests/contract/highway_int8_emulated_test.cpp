// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The tiles for dot products of bytes with the instruction replaced by plain arithmetic, so that they are checked on machines without it.
#define OUTRIDER_EMULATED_VNNI
#include "int8_ways.hpp"
