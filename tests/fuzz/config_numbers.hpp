// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include "fuzz/finding.hpp"
#include "outrider/gemma4/config.hpp"

namespace outrider::testing {

/// What every accepted configuration promises, whatever file it came from.
inline void check_numbers(const gemma4::text_config& t) {
  require(t.layer_count() > 0 && t.layers.back() == gemma4::attention_kind::full, "the last layer is full");
  require(t.hidden_size > 0 && t.intermediate_size > 0 && t.vocab_size > 0 && t.window > 0, "sizes are positive");
  require(t.kv_shared_layers <= t.layer_count(), "no more layers share than there are");
  for (const gemma4::attention_kind kind : t.layers) {
    const gemma4::attention_shape& shape = t.shape(kind);
    require(shape.head_dim > 0 && shape.head_dim % 2 == 0, "a head consists of pairs");
    require(shape.kv_heads > 0 && t.heads % shape.kv_heads == 0, "key-value heads divide the query heads");
    require(shape.rope.frequencies(shape.head_dim).size() == shape.head_dim / 2, "a head has a frequency per pair");
  }
}

}  // namespace outrider::testing
