// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
// config.json: no file is a target and an assistant, and the numbers of an accepted one fit together.
#include <cstddef>
#include <cstdint>
#include <optional>

#include "fuzz/finding.hpp"
#include "outrider/gemma4/config_json.hpp"
#include "outrider/io/json.hpp"

namespace gemma4 = outrider::gemma4;
using outrider::error_code;
using outrider::testing::accepts;
using outrider::testing::require;

namespace {

void check(const gemma4::text_config& t) {
  require(t.layer_count() > 0 && t.layers.back() == gemma4::attention_kind::full, "the last layer is full");
  require(t.hidden_size > 0 && t.intermediate_size > 0 && t.vocab_size > 0 && t.window > 0, "sizes are positive");
  require(t.kv_shared_layers <= t.layer_count(), "no more layers share than there are");
  for (const gemma4::attention_kind kind : t.layers) {
    const gemma4::attention_shape& shape = t.attention[static_cast<std::size_t>(kind)];
    require(shape.head_dim > 0 && shape.head_dim % 2 == 0, "a head consists of pairs");
    require(shape.kv_heads > 0 && t.heads % shape.kv_heads == 0, "key-value heads divide the query heads");
    require(shape.rope.frequencies(shape.head_dim).size() == shape.head_dim / 2, "a head has a frequency per pair");
  }
}

}  // namespace

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
  if (target) check(*target);
  if (assistant) {
    check(assistant->text);
    require(assistant->text.kv_shared_layers == assistant->text.layer_count(), "all layers of an assistant share");
    require(!assistant->centroid_head || (assistant->centroids > 0 && assistant->text.vocab_size % assistant->centroids == 0 &&
                                          assistant->centroid_top_k <= assistant->centroids),
            "centroids divide the vocabulary");
  }
  return 0;
}
