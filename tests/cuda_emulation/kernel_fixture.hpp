// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What tests of kernels share that compare them with the contract's matrices. To be included before the kernels under test.
#pragma once
#include "immediate_queue.hpp"
//
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "contract/fixture.hpp"

namespace kernel_test {

using namespace contract;
using outrider::device_space;
namespace device = outrider::device;

inline constexpr float infinity = std::numeric_limits<float>::infinity(), not_a_number = std::numeric_limits<float>::quiet_NaN();

/// The same memory as the device sees it. A vector made in one piece has no room beyond its end, so AddressSanitizer sees overruns.
template <class T>
matrix_view<T, device_space> on_device(matrix_view<T> v) {
  return {v.data, v.rows, v.cols, v.stride};
}
template <class T>
matrix_view<T, device_space> on_device(padded<T>& p) {
  return on_device(p.view());
}
template <class T>
matrix_view<const T, device_space> on_device(const padded<T>& p) {
  return on_device(p.view());
}

/// One queue for all: its scratch memory is large.
inline device::queue& the_queue() {
  static device::queue q;
  return q;
}

/// What op(queue, out) leaves in `out`, the same under every order of threads and blocks.
template <class Out, class Op>
Out result_of(const Out& out, Op op, std::initializer_list<std::uint64_t> seeds = {1, 2, 3}) {
  const auto once = [&](std::uint64_t seed) {
    outrider::cuda_emulation::settings.seed = seed;
    Out result = out;
    device::queue& q = the_queue();
    op(q, result);
    q.wait();
    outrider::cuda_emulation::settings.seed = 0;
    return result;
  };
  const Out first = once(0);
  for (const std::uint64_t seed : seeds) {
    CAPTURE(seed);
    CHECK(once(seed).same_elements(first));
  }
  CHECK(first.padding_untouched());
  return first;
}

/// The same elements in rows that are `extra` further apart.
inline padded<float> restrided(const padded<float>& from, std::size_t extra) {
  padded<float> copy(from.rows(), from.cols(), extra);
  for (std::size_t r = 0; r < from.rows(); ++r)
    for (std::size_t c = 0; c < from.cols(); ++c) copy(r, c) = from(r, c);
  return copy;
}

}  // namespace kernel_test
