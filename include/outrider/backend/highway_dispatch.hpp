// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// SIMD on the CPU, for the best instruction set of the machine the program runs on. Needs no compiler flag and no Highway header here: the
// kernels live in one translation unit of the program, whose only line is
//   #include <outrider/backend/highway_dispatch_impl.inl>
// CMake has it ready made: link outrider::highway_dispatch.
#pragma once
#include <string_view>

#include "outrider/backend/concepts.hpp"
#include "outrider/backend/highway/attention_ops.hpp"
#include "outrider/backend/highway/int8_ops.hpp"
#include "outrider/backend/highway/ops.hpp"
#include "outrider/backend/parallel.hpp"
#include "outrider/backend/traits.hpp"
#include "outrider/error.hpp"

namespace outrider {

namespace detail {
/// The kernels for this machine's CPU; null if it has no instruction set that they were compiled for. If the linker misses this function, the
/// program lacks its dispatch translation unit: see above.
const kernel_table* best_kernels() noexcept;
}  // namespace detail

/// SIMD chosen at run time, on threads by the policy Parallel.
template <class Parallel>
struct basic_highway_dispatch {};

template <class Parallel>
class basic_highway_dispatch_context {
 public:
  /// error_code::argument_invalid for more than 1024 threads, and on a CPU without any of the instruction sets: slow scalar code is never chosen silently.
  explicit basic_highway_dispatch_context(execution how = {})
      : kernels_(detail::best_kernels()), team_(detail::threads_for<Parallel>(how)) {
    if (!kernels_)
      throw error(error_code::argument_invalid,
                  "outrider: backend highway_dispatch: this CPU has none of the vector instruction sets the program was built for "
                  "(x86-64: SSSE3, AVX2, AVX-512; Arm: NEON); use backend reference, which is slow");
  }
  [[nodiscard]] unsigned threads() const noexcept { return team_.threads(); }
  [[nodiscard]] Parallel& team() noexcept { return team_; }
  [[nodiscard]] detail::attention_parts& attention() noexcept { return attention_; }
  [[nodiscard]] const detail::kernel_table& kernels() const noexcept { return *kernels_; }

 private:
  const detail::kernel_table* kernels_;
  Parallel team_;
  detail::attention_parts attention_;
};

template <class Parallel>
struct backend_traits<basic_highway_dispatch<Parallel>> {
  using space = host_space;
  using context = basic_highway_dispatch_context<Parallel>;
  static constexpr bool int8_products = true;
  static constexpr std::string_view name() noexcept { return "highway_dispatch"; }
  static std::string_view simd() noexcept {
    const detail::kernel_table* kernels = detail::best_kernels();
    return kernels ? kernels->target() : "none";
  }
};

template <class Parallel, listed_weight W>
struct linear_ops<basic_highway_dispatch<Parallel>, W> : detail::simd_linear<basic_highway_dispatch_context<Parallel>, W> {};
template <class Parallel, listed_group G>
struct linear_ops<basic_highway_dispatch<Parallel>, G> : detail::simd_int8<basic_highway_dispatch_context<Parallel>, G> {};
template <class Parallel>
struct pointwise_ops<basic_highway_dispatch<Parallel>> : detail::simd_pointwise<basic_highway_dispatch_context<Parallel>> {};
template <class Parallel, listed_kv Kv>
struct attention_ops<basic_highway_dispatch<Parallel>, Kv> : detail::simd_attention<basic_highway_dispatch_context<Parallel>, Kv> {};

/// On the calling thread.
using highway_dispatch_serial = basic_highway_dispatch<serial>;
static_assert(check_backend<highway_dispatch_serial>());

/// On threads that stay.
using highway_dispatch = basic_highway_dispatch<thread_pool>;
static_assert(check_backend<highway_dispatch>());

}  // namespace outrider
