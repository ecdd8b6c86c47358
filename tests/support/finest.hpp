// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>

#include "outrider/backend/parallel.hpp"

namespace outrider::testing {

/// Threads for everything: work is cut wherever it can be, however small. Backends keep small work on one thread, so that the sizes of tests
/// would never be cut at all.
struct finest : openmp {
  template <class Body>
  static void for_ranges(unsigned threads, std::size_t count, std::size_t /*grain*/, Body&& body) noexcept {
    openmp::for_ranges(threads, count, 1, body);
  }
};

}  // namespace outrider::testing
