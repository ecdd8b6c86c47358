// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The backend to use on a CPU.
#pragma once
#include <string_view>

#include "outrider/backend/concepts.hpp"
#include "outrider/backend/traits.hpp"
#if defined(OUTRIDER_HIGHWAY_DISPATCH)
#include "outrider/backend/highway_dispatch.hpp"
#else
#include "outrider/backend/highway.hpp"
#endif

namespace outrider {

/// All ops of Simd, under a name of its own. Prompt rows take the same row-exact tiles as decoding, so that cutting a prompt into chunks
/// changes no bit. Speed is no reason to do otherwise. GFLOP/s of one Zen 4 core (g++ 12, -march=native), tiles / Eigen panels of eigen.hpp:
///             bf16 6144 × 1536   bf16 1536 × 6144   f32 6144 × 1536   f32 1536 × 6144
///   m = 16         86 / 37            88 / 38           58 / 40           62 / 37
///   m = 64         89 / 60            87 / 63           74 / 66           60 / 61
///   m = 128        89 / 66            89 / 64           73 / 74           63 / 66
/// f32 with hundreds of rows gains up to a quarter on AVX2: who needs that names basic_cpu<eigen_prompts<highway>>.
template <class Simd>
struct basic_cpu {};

template <class Simd>
struct backend_traits<basic_cpu<Simd>> : backend_traits<Simd> {
  static constexpr std::string_view name() noexcept { return "cpu"; }
};
template <class Simd, class W>
struct linear_ops<basic_cpu<Simd>, W> : linear_ops<Simd, W> {};
template <class Simd>
struct pointwise_ops<basic_cpu<Simd>> : pointwise_ops<Simd> {};
template <class Simd, class Kv>
struct attention_ops<basic_cpu<Simd>, Kv> : attention_ops<Simd, Kv> {};

/// Run-time dispatch where the program has its translation unit (OUTRIDER_HIGHWAY_DISPATCH, set by CMake's outrider::highway_dispatch), else the
/// compiler's own target.
#if defined(OUTRIDER_HIGHWAY_DISPATCH)
using cpu = basic_cpu<highway_dispatch>;
#else
using cpu = basic_cpu<highway>;
#endif
static_assert(check_backend<cpu>());

}  // namespace outrider
