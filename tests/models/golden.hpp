// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The recorded models of tests/golden and the tiny pair, as tests for any backend on host memory. A backend's test is three lines:
//   #include <its header>
//   #define OUTRIDER_TESTED_BACKENDS its_tag
//   #include "golden.hpp"
#pragma once

#if !defined(OUTRIDER_TESTED_BACKENDS)
#error "Define OUTRIDER_TESTED_BACKENDS as the backend tags to test before including golden.hpp."
#endif

#include "drafts_golden.hpp"
#include "forward_golden.hpp"
#include "rewritten_golden.hpp"
#include "speculation_golden.hpp"
#include "tiny_pair_golden.hpp"
