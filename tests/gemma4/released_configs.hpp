// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace outrider::testing {

inline constexpr std::array released_names{"E2B", "E4B", "12B", "26B-A4B", "31B"};

/// layer_types of `count` layers, of which every `period`-th is full.
inline std::vector<std::string> layer_pattern(std::size_t count, std::size_t period) {
  std::vector<std::string> layers(count, "sliding_attention");
  for (std::size_t i = period - 1; i < count; i += period) layers[i] = "full_attention";
  return layers;
}

/// config.json of a released target, text only, with flat head sizes.
inline nlohmann::json released_target(const std::string& name) {
  nlohmann::json c{{"model_type", "gemma4_text"}, {"final_logit_softcapping", 30.0}};
  const auto sizes = [&](int hidden, int layers, int heads, int kv, int mlp) {
    c.update({{"hidden_size", hidden},
              {"num_hidden_layers", layers},
              {"num_attention_heads", heads},
              {"num_key_value_heads", kv},
              {"intermediate_size", mlp}});
  };
  const auto large = [&](int full_kv) {  // what 12B, 26B-A4B and 31B have in common
    c.update({{"attention_k_eq_v", true},
              {"num_global_key_value_heads", full_kv},
              {"sliding_window", 1024},
              {"max_position_embeddings", 262144},
              {"use_bidirectional_attention", "vision"}});
  };
  if (name == "E2B") {
    sizes(1536, 35, 8, 1, 6144);
    c.update({{"layer_types", layer_pattern(35, 5)}, {"num_kv_shared_layers", 20}, {"use_double_wide_mlp", true}});
  } else if (name == "E4B") {
    sizes(2560, 42, 8, 2, 10240);
    c.update({{"layer_types", layer_pattern(42, 6)}, {"num_kv_shared_layers", 18}});
  } else if (name == "12B") {
    sizes(3840, 48, 16, 8, 15360);
    large(1);
    c.update({{"model_type", "gemma4_unified_text"}});
  } else if (name == "26B-A4B") {
    sizes(2816, 30, 16, 8, 2112);
    large(2);
    c.update({{"hidden_size_per_layer_input", 0},
              {"enable_moe_block", true},
              {"num_experts", 128},
              {"top_k_experts", 8},
              {"moe_intermediate_size", 704}});
  } else {
    sizes(5376, 60, 32, 16, 21504);
    large(4);
    c.update({{"hidden_size_per_layer_input", 0}});
  }
  return c;
}

/// config.json of a released assistant, with flat head sizes.
inline nlohmann::json released_assistant(const std::string& name) {
  const bool edge = name == "E2B" || name == "E4B", unified = name == "12B";
  const nlohmann::json target = released_target(name);
  nlohmann::json text{{"model_type", target.at("model_type")},
                      {"hidden_size", edge ? 256 : 1024},
                      {"num_hidden_layers", 4},
                      {"layer_types", layer_pattern(4, 4)},
                      {"num_attention_heads", edge ? nlohmann::json(4) : target.at("num_attention_heads")},
                      {"num_key_value_heads", target.at("num_key_value_heads")},
                      {"intermediate_size", edge ? 2048 : 8192},
                      {"sliding_window", edge ? 512 : 1024},
                      {"hidden_size_per_layer_input", 0},
                      {"vocab_size_per_layer_input", 0}};
  if (!edge) text.update({{"attention_k_eq_v", true}, {"num_global_key_value_heads", target.at("num_global_key_value_heads")}});
  return {{"model_type", unified ? "gemma4_unified_assistant" : "gemma4_assistant"},
          {"backbone_hidden_size", target.at("hidden_size")},
          {"use_ordered_embeddings", edge},
          {"text_config", text}};
}

}  // namespace outrider::testing
