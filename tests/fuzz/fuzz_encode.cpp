// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
// Any bytes as a text for a trained tokenizer: nothing is lost, no marker is made up.
#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "fuzz/finding.hpp"
#include "fuzz/round_trip.hpp"
#include "outrider/text/tokenizer.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const outrider::tokenizer tokens =
      outrider::tokenizer::from_json_file(std::filesystem::path(OUTRIDER_SOURCE_DIR) / "examples/data/tiny-kjv/target/tokenizer.json");
  outrider::testing::check_round_trip(tokens, outrider::testing::as_text(data, size));
  return 0;
}
