// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/backend/highway.hpp"
#include "support/finest.hpp"

namespace {
using highway_cut_finest = outrider::basic_highway<HWY_STATIC_TARGET, outrider::testing::finest>;
}
#define OUTRIDER_TESTED_BACKENDS highway_cut_finest
#include "ops_contract.hpp"
