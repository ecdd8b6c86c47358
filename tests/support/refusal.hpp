// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <doctest/doctest.h>

#include <string>

#include "outrider/error.hpp"

namespace outrider::testing {

/// The sentence of the outrider::error that `call` throws. A failed check, and no text, if it throws nothing or has another code.
template <class Call>
std::string refusal(error_code code, Call&& call) {
  try {
    call();
  } catch (const error& refused) {
    CAPTURE(refused.what());
    CHECK(static_cast<int>(refused.code()) == static_cast<int>(code));
    return refused.code() == code ? refused.what() : "";
  }
  FAIL_CHECK("no error was thrown");
  return "";
}

/// Whether `text` contains every one of `parts`.
template <class... Parts>
bool mentions(const std::string& text, const Parts&... parts) {
  return ((text.find(parts) != text.npos) && ...);
}

}  // namespace outrider::testing
