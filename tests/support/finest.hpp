// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>

#include "outrider/backend/parallel.hpp"

namespace outrider::testing {

/// Threads for everything: work is cut wherever it can be, however small. Backends keep small work on one thread, so that the sizes of tests
/// would never be cut at all.
struct finest : thread_pool {
  using thread_pool::thread_pool;
  template <class Body>
  void for_ranges(std::size_t count, std::size_t /*grain*/, Body&& body) noexcept {
    thread_pool::for_ranges(count, 1, body);
  }
};

}  // namespace outrider::testing
