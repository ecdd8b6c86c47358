// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace outrider {

// How a CPU backend spreads work: a policy with one function,
//   for_ranges(threads, count, grain, body)     calls body(begin, end) until 0 … count - 1 are covered, in pieces whose inner borders are multiples of grain.
// Pieces never share an output, so the split cannot change a result. This is the only file with an OpenMP directive.

/// Everything on the calling thread.
struct serial {
  static unsigned default_threads() noexcept { return 1; }
  template <class Body>
  static void for_ranges(unsigned /*threads*/, std::size_t count, std::size_t /*grain*/, Body&& body) noexcept {
    if (count != 0) body(std::size_t{0}, count);
  }
};

#if defined(_OPENMP)
/// One contiguous range per thread of an OpenMP team.
struct openmp {
  static unsigned default_threads() noexcept { return static_cast<unsigned>((std::max)(1, omp_get_num_procs())); }
  template <class Body>
  static void for_ranges(unsigned threads, std::size_t count, std::size_t grain, Body&& body) noexcept {
    const std::size_t pieces = count / grain, ranges = (std::min)(static_cast<std::size_t>(threads), pieces);
    if (ranges <= 1) {
      if (count != 0) body(std::size_t{0}, count);
      return;
    }
    // The team always has all threads, even if some find nothing to do: with another size libgomp would allocate and start a new one.
    // clang-format off
#pragma omp parallel for num_threads(static_cast<int>(threads)) schedule(static, 1)
    // clang-format on
    for (std::size_t t = 0; t < ranges; ++t) {
      const std::size_t begin = pieces * t / ranges * grain, end = t + 1 == ranges ? count : pieces * (t + 1) / ranges * grain;
      body(begin, end);
    }
  }
};
#endif

}  // namespace outrider
