// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
// The tokenizer in a GGUF file: an accepted one gives back every text, its own file among them.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "fuzz/finding.hpp"
#include "fuzz/round_trip.hpp"
#include "outrider/io/gguf.hpp"
#include "outrider/text/tokenizer.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using outrider::error_code;
  outrider::testing::accepts("input.gguf: ", {error_code::file_malformed, error_code::tokenizer_malformed}, [&] {
    const outrider::io::gguf_file file = outrider::io::detail::gguf_reader(std::as_bytes(std::span(data, size)), "input.gguf").read();
    outrider::testing::check_round_trips(outrider::tokenizer::from_gguf(file), outrider::testing::as_text(data, size));
  });
  return 0;
}
