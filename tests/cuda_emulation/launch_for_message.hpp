// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What the tests of the emulation share: every order of threads, and what the emulation says of a launch.
#pragma once
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "cuda_emulation/emulation.hpp"

namespace cuda_emulation_test {

namespace emu = outrider::cuda_emulation;

/// Runs the body once for every order of threads.
template <class Body>
void for_each_seed(Body body) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    CAPTURE(seed);
    emu::settings.seed = seed;
    body();
  }
  emu::settings.seed = 0;
}

/// What the emulation says of a launch, or nothing.
template <class... Parameters>
std::string message_of(void (*kernel)(Parameters...), unsigned threads, std::size_t shared_bytes,
                       std::type_identity_t<Parameters>... arguments) {
  try {
    emu::run(1, threads, shared_bytes, [&] { kernel(arguments...); });
  } catch (const emu::error& e) {
    return e.what();
  }
  return "";
}
/// Whether one of the parts is in the text.
template <class... Parts>
bool says(const std::string& text, Parts... parts) {
  const bool found = ((text.find(parts) != std::string::npos) || ...);
  if (!found) MESSAGE("said: ", text);
  return found;
}

__device__ inline int own_index() { return static_cast<int>(threadIdx.x); }

}  // namespace cuda_emulation_test
