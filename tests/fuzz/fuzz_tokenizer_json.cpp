// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
// tokenizer.json: an accepted tokenizer gives back every text, its own file among them.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "fuzz/finding.hpp"
#include "fuzz/round_trip.hpp"
#include "outrider/text/tokenizer.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using outrider::error_code;
  const std::string_view text = outrider::testing::as_text(data, size);
  outrider::testing::accepts("tokenizer.json: ", {error_code::file_malformed, error_code::tokenizer_malformed},
                             [&] { outrider::testing::check_round_trips(outrider::tokenizer::from_json(text, "tokenizer.json"), text); });
  return 0;
}
