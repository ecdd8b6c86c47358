// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>

#if defined(__GNUC__) && __cplusplus < 202002L
#error "outrider: needs C++20, -std=c++20 (Meson: default_options: 'cpp_std=c++20'; a .cu under CMake before 3.26: -std=c++20 as an option)"
#endif

/// Marks a function that device code may call as well: core formulas shared by host and device carry it.
#if defined(__CUDACC__)
#define OUTRIDER_HD __host__ __device__
#else
#define OUTRIDER_HD
#endif

/// Checks a precondition of the caller. Off by default, because ops are noexcept and hot; define it before the first include to hook in
/// your own, the same way in all translation units,
/// for example `#define OUTRIDER_ASSERT(condition) assert(condition)`.
#if !defined(OUTRIDER_ASSERT)
#define OUTRIDER_ASSERT(condition) static_cast<void>(0)
#endif

namespace outrider {

/// The most drafts a round may have.
inline constexpr std::size_t max_draft_length = 16;

}  // namespace outrider
