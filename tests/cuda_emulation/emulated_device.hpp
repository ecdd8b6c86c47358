// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// How much slower than a device the one under test is, for tests that then do less: a prime. They also run on devices, where it is 1.
#pragma once
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define OUTRIDER_UNDER_SANITIZER
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define OUTRIDER_UNDER_SANITIZER
#endif

#if !defined(OUTRIDER_EMULATED_DEVICE)
#define OUTRIDER_DEVICE_SLOWNESS 1
#elif !defined(OUTRIDER_UNDER_SANITIZER)
#define OUTRIDER_DEVICE_SLOWNESS 7
#else
#define OUTRIDER_DEVICE_SLOWNESS 41
#endif
