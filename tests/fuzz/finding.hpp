// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "outrider/error.hpp"

/// What libFuzzer calls, and replay.cpp: one input, whose end a sanitizer guards.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace outrider::testing {

/// Ends the run with the input that made `promise` untrue; `found` says more.
inline void require(bool holds, const char* promise, std::string_view found = {}) {
  if (holds) return;
  std::fprintf(stderr, "finding, this does not hold: %s\n%s\n", promise, std::string(found).c_str());
  std::abort();
}

/// Runs `call` on an input that may be refused: with one of these codes and one printable sentence that begins with `name`, its file.
/// Returns whether it was accepted.
template <class Call>
bool accepts(std::string_view name, std::initializer_list<error_code> codes, Call&& call) {
  try {
    call();
    return true;
  } catch (const error& refused) {
    const std::string_view sentence = refused.what();
    require(std::find(codes.begin(), codes.end(), refused.code()) != codes.end(), "an input is refused with the code that is documented",
            sentence);
    require(sentence.starts_with(name), "a refusal begins with the file's name", sentence);
    require(std::none_of(sentence.begin(), sentence.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }),
            "a refusal has no control characters", sentence);
    return false;
  }
}

/// `part` lies within `whole`.
template <class T>
bool is_inside(std::span<const T> part, std::span<const T> whole) {
  return part.data() >= whole.data() && part.data() + part.size() <= whole.data() + whole.size();
}

inline std::string_view as_text(const std::uint8_t* data, std::size_t size) { return {reinterpret_cast<const char*>(data), size}; }

}  // namespace outrider::testing
