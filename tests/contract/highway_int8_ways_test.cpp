// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#define OUTRIDER_INSTRUMENTED 0  // tiles of every size, in a sanitised build too
#include "int8_ways.hpp"
