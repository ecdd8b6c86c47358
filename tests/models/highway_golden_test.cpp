// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/backend/highway.hpp"
#include "support/finest.hpp"

namespace {
/// The static backend, with every op cut for the threads it is given: these models are too small for the cuts of outrider::highway.
using highway_cut_finest = outrider::basic_highway<HWY_STATIC_TARGET, outrider::testing::finest>;
}  // namespace
#define OUTRIDER_TESTED_BACKENDS highway_cut_finest
#include "golden.hpp"
