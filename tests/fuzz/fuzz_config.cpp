// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
// config.json: no file is a target and an assistant, and the numbers of an accepted one fit together.
#include <cstddef>
#include <cstdint>
#include <optional>

#include "fuzz/config_numbers.hpp"
#include "fuzz/finding.hpp"
#include "outrider/gemma4/config_json.hpp"
#include "outrider/io/json.hpp"

namespace gemma4 = outrider::gemma4;
using outrider::error_code;
using outrider::testing::accepts;
using outrider::testing::check_numbers;
using outrider::testing::require;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  nlohmann::json document;
  if (!accepts("config.json: ", {error_code::file_malformed},
               [&] { document = outrider::io::parse_json(outrider::testing::as_text(data, size), "config.json"); }))
    return 0;
  std::optional<gemma4::text_config> target;
  std::optional<gemma4::assistant_config> assistant;
  const auto refusals = {error_code::config_invalid, error_code::model_unsupported};
  accepts("config.json: ", refusals, [&] { target = gemma4::read_target_config(document, "config.json"); });
  accepts("config.json: ", refusals, [&] { assistant = gemma4::read_assistant_config(document, "config.json"); });
  require(!target || !assistant, "no file is a target and an assistant");
  if (target) check_numbers(*target);
  if (assistant) {
    check_numbers(assistant->text);
    require(assistant->text.kv_shared_layers == assistant->text.layer_count(), "all layers of an assistant share");
    require(!assistant->centroid_head || (assistant->centroids > 0 && assistant->text.vocab_size % assistant->centroids == 0 &&
                                          assistant->centroid_top_k <= assistant->centroids),
            "centroids divide the vocabulary");
  }
  return 0;
}
