// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// SIMD on the CPU, for the instruction set the compiler was told to use. Portable programs use highway_dispatch.hpp instead.
// A translation unit with a foreach_target.h of its own includes that first.
#pragma once

// One target only. Without this, Highway would also look at targets above the compiler's (and 1.0.3 refuses some -march=native).
#if !defined(HWY_HIGHWAY_INCLUDED) && !defined(HWY_TARGETS) && !defined(HWY_COMPILE_ONLY_STATIC) && !defined(HWY_COMPILE_ONLY_SCALAR) && \
    !defined(HWY_COMPILE_ONLY_EMU128)
#define HWY_COMPILE_ONLY_STATIC
#if defined(__ARM_FEATURE_SVE) && !defined(HWY_DISABLED_TARGETS)
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)  // the kernels want vectors of a fixed size: NEON
#endif
#endif
#include <hwy/detect_targets.h>

#if HWY_STATIC_TARGET == HWY_SCALAR || HWY_STATIC_TARGET == HWY_EMU128 || (HWY_ARCH_X86 && HWY_STATIC_TARGET > HWY_AVX2)
#error \
    "outrider: the compiler's target has no AVX2 (NEON on Arm): compile with -march=native (x86-64 since 2013: -mavx2 -mfma -mf16c -mbmi -mbmi2 -maes -mpclmul; -march=haswell and -march=x86-64-v3 need -maes -mpclmul too), or choose the instruction set at run time with outrider/backend/highway_dispatch.hpp and one dispatch translation unit (CMake: link outrider::highway_dispatch)"
#else

#include <cstdint>
#include <string_view>

#include "outrider/backend/concepts.hpp"
#include "outrider/backend/highway/attention_ops.hpp"
#include "outrider/backend/highway/int8_ops.hpp"
#include "outrider/backend/highway/ops.hpp"
#include "outrider/backend/highway/table-inl.h"
#include "outrider/backend/parallel.hpp"
#include "outrider/backend/traits.hpp"

namespace outrider {

/// SIMD for one Highway target, on threads by the policy Parallel. The target is part of the type, so that translation units compiled for
/// different instruction sets share no code.
template <std::int64_t Target, class Parallel>
struct basic_highway {};

template <std::int64_t Target, class Parallel>
class basic_highway_context {
 public:
  /// error_code::argument_invalid for more than 1024 threads; std::system_error if the system gives none.
  explicit basic_highway_context(execution how = {}) : team_(detail::threads_for<Parallel>(how)) {}
  [[nodiscard]] unsigned threads() const noexcept { return team_.threads(); }
  [[nodiscard]] Parallel& team() noexcept { return team_; }
  [[nodiscard]] detail::attention_parts& attention() noexcept { return attention_; }
  [[nodiscard]] static const detail::kernel_table& kernels() noexcept { return *HWY_NAMESPACE::kernels(); }

 private:
  Parallel team_;
  detail::attention_parts attention_;
};

template <std::int64_t Target, class Parallel>
struct backend_traits<basic_highway<Target, Parallel>> {
  static_assert(Target == HWY_STATIC_TARGET,
                "outrider: basic_highway exists for HWY_STATIC_TARGET only; other targets need highway_dispatch.hpp");
  using space = host_space;
  using context = basic_highway_context<Target, Parallel>;
  static constexpr bool int8_products = true;
  static constexpr std::string_view name() noexcept { return "highway"; }
  static std::string_view simd() noexcept { return context::kernels().target(); }
};

template <std::int64_t Target, class Parallel, listed_weight W>
struct linear_ops<basic_highway<Target, Parallel>, W> : detail::simd_linear<basic_highway_context<Target, Parallel>, W> {};
template <std::int64_t Target, class Parallel, listed_group G>
struct linear_ops<basic_highway<Target, Parallel>, G> : detail::simd_int8<basic_highway_context<Target, Parallel>, G> {};
template <std::int64_t Target, class Parallel>
struct pointwise_ops<basic_highway<Target, Parallel>> : detail::simd_pointwise<basic_highway_context<Target, Parallel>> {};
template <std::int64_t Target, class Parallel, listed_kv Kv>
struct attention_ops<basic_highway<Target, Parallel>, Kv> : detail::simd_attention<basic_highway_context<Target, Parallel>, Kv> {};

/// On the calling thread.
using highway_serial = basic_highway<HWY_STATIC_TARGET, serial>;
static_assert(check_backend<highway_serial>());

/// On threads that stay.
using highway = basic_highway<HWY_STATIC_TARGET, thread_pool>;
static_assert(check_backend<highway>());

}  // namespace outrider

#endif
