// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once

namespace outrider::testing {

/// Whether a sanitizer watches: some twenty times slower, so what is long only to be thorough is made shorter.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool is_instrumented = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool is_instrumented = true;
#else
inline constexpr bool is_instrumented = false;
#endif
#else
inline constexpr bool is_instrumented = false;
#endif

}  // namespace outrider::testing
