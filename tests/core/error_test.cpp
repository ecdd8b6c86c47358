// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <string>

#include "outrider/error.hpp"

using outrider::error;
using outrider::error_code;

TEST_CASE("an error is one line, whatever names a file puts into it") {
  CHECK(std::string(error(error_code::file_malformed, "tensor 'a\nb\x1b[31m' is there twice").what()) ==
        "tensor 'a?b?[31m' is there twice");
}

TEST_CASE("an error is short enough to read, whatever names a file puts into it") {
  const std::string sentence = error(error_code::file_malformed, std::string(100'000, 'x')).what();
  CHECK(sentence.size() < 2010);
  CHECK(sentence.ends_with("…"));
}
