// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <array>
#include <charconv>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/error.hpp"
#include "outrider/gemma4/config.hpp"
#include "outrider/gemma4/config_object.hpp"
#include "outrider/io/json_file.hpp"
#include "outrider/io/mapped_file.hpp"

namespace outrider::gemma4 {

namespace detail {

/// Which configuration class a text stack belongs to, and what it is used as.
struct stack_kind {
  bool unified;    // the 12B: no per-layer embeddings, no experts, other defaults
  bool assistant;  // every layer reads the target's keys and values
};

inline std::vector<attention_kind> read_layers(const config_object& c, bool assistant) {
  const std::size_t count = c.integer("num_hidden_layers", {1, most_layers}, 30);
  std::vector<attention_kind> layers(count, attention_kind::sliding);
  if (!c.is_set("layer_types")) {
    for (std::size_t i = 5; i < count; i += 6) layers[i] = attention_kind::full;
  } else {
    const std::vector<std::string> names = c.texts("layer_types");
    if (names.size() != count)
      c.refuse("layer_types", "a list of " + std::to_string(names.size()), "one entry per layer, " + std::to_string(count) + " of them");
    for (std::size_t i = 0; i < count; ++i) {
      if (names[i] == "full_attention")
        layers[i] = attention_kind::full;
      else if (names[i] != "sliding_attention")
        c.refuse("layer_types", "a list with " + config_object::quote(names[i]), "\"sliding_attention\" and \"full_attention\"");
    }
  }
  // The reference makes the last layer full whatever the file says. For an assistant that would hide a wrong file: its last layer is full.
  if (assistant && c.is_set("layer_types") && layers.back() != attention_kind::full)
    c.refuse("layer_types", "a list that ends with \"sliding_attention\"", "an assistant ends with \"full_attention\"");
  layers.back() = attention_kind::full;
  return layers;
}

/// head_dim and kv_heads per attention kind, from the flat keys or from per_layer_config; the flat ones are not even read beside it.
inline void read_head_sizes(const config_object& c, text_config& t) {
  const auto head_dim = [](const config_object& from, const char* key, std::optional<std::size_t> fallback = {}) {
    const std::size_t value = from.integer(key, {2, most_heads}, fallback);
    if (value % 2 != 0) from.refuse(key, "an even number, because rotation works on pairs");
    return value;
  };
  const auto kv_heads = [&t](const config_object& from, const char* key, std::optional<std::size_t> fallback = {}) {
    const std::size_t value = from.integer(key, {1, most_heads}, fallback);
    if (t.heads % value != 0)
      from.refuse(key, std::to_string(value), "a divisor of num_attention_heads, which is " + std::to_string(t.heads));
    return value;
  };

  struct sizes {
    std::size_t head_dim, kv_heads;
    bool operator==(const sizes&) const = default;
  };
  std::vector<sizes> layers(t.layer_count(), sizes{head_dim(c, "head_dim", 256), kv_heads(c, "num_key_value_heads", 4)});
  if (!c.has("per_layer_config")) {
    sizes full{head_dim(c, "global_head_dim", 512), layers[0].kv_heads};
    if (t.k_eq_v && c.is_set("num_global_key_value_heads")) full.kv_heads = kv_heads(c, "num_global_key_value_heads");
    for (std::size_t i = 0; i < layers.size(); ++i)
      if (t.layers[i] == attention_kind::full) layers[i] = full;
  } else if (c.is_set("per_layer_config")) {
    const config_object overrides = c.object("per_layer_config");
    std::set<std::size_t> seen;
    for (const std::string& key : overrides.keys()) {
      std::size_t layer = 0;  // the key is a number in decimal digits, padded with zeros to the width of the largest
      const auto [end, failure] = std::from_chars(key.data(), key.data() + key.size(), layer);
      if (failure != std::errc{} || end != key.data() + key.size() || layer >= layers.size())
        c.refuse("per_layer_config", "an object with the key " + config_object::quote(key),
                 "layer numbers from 0 to " + std::to_string(layers.size() - 1));
      if (!seen.insert(layer).second)
        c.refuse("per_layer_config", "an object with layer " + std::to_string(layer) + " twice", "each layer once");
      const config_object entry = overrides.object(key.c_str());
      for (const std::string& field : entry.keys())
        if (field != "head_dim" && field != "num_key_value_heads")
          overrides.refuse(key.c_str(), "an object with the key " + config_object::quote(field), "head_dim and num_key_value_heads");
      if (entry.has("head_dim")) layers[layer].head_dim = head_dim(entry, "head_dim");
      if (entry.has("num_key_value_heads")) layers[layer].kv_heads = kv_heads(entry, "num_key_value_heads");
    }
  }

  for (const attention_kind kind : attention_kinds) {
    std::size_t first = 0;
    while (first < layers.size() && t.layers[first] != kind) ++first;
    if (first == layers.size()) continue;
    for (std::size_t i = first + 1; i < layers.size(); ++i)
      if (t.layers[i] == kind && layers[i] != layers[first]) {
        const auto of = [&](std::size_t l) {
          return std::to_string(layers[l].head_dim) + " and " + std::to_string(layers[l].kv_heads) + " for layer " + std::to_string(l);
        };
        c.refuse("per_layer_config", "uneven: head_dim and num_key_value_heads are " + of(first) + " but " + of(i),
                 std::string("the same sizes in all ") + name_of(kind) + " layers");
      }
    attention_shape& shape = t.attention[static_cast<std::size_t>(kind)];
    shape.head_dim = layers[first].head_dim;
    shape.kv_heads = layers[first].kv_heads;
  }
}

inline rope_parameters read_rope(const config_object& c) {
  rope_parameters rope;
  const char* const key = c.has("rope_type") || !c.has("type") ? "rope_type" : "type";  // the older spelling
  constexpr const char* types = "\"default\" or \"proportional\"";
  const std::string type = c.text(key, types, "default");
  if (type != "default" && type != "proportional") c.refuse(key, types, error_code::model_unsupported);
  rope.theta = c.number("rope_theta", 1, 1e30);
  if (type == "proportional") {  // the default type rotates the whole head, whatever fraction and factor stand beside it
    rope.fraction = c.number("partial_rotary_factor", 0, 1, 1);
    rope.factor = c.number("factor", 1e-30, 1e30, 1);
  }
  return rope;
}

inline void read_ropes(const config_object& c, text_config& t) {
  constexpr std::array keys{"sliding_attention", "full_attention"};
  t.attention[0].rope = {.theta = 1e4, .fraction = 1, .factor = 1};
  t.attention[1].rope = {.theta = 1e6, .fraction = 0.25, .factor = 1};
  if (!c.is_set("rope_parameters")) return;
  const config_object ropes = c.object("rope_parameters");
  for (std::size_t kind = 0; kind < keys.size(); ++kind)
    if (ropes.has(keys[kind]) || t.attention[kind].head_dim != 0) t.attention[kind].rope = read_rope(ropes.object(keys[kind]));
}

inline void read_attention_mask(const config_object& c, text_config& t, bool unified) {
  t.window = c.integer("sliding_window", {1, most_tokens}, unified ? 1024 : 512);
  constexpr const char *key = "use_bidirectional_attention", *modes = "null, \"vision\" or \"all\"";
  if (c.is_null(key)) return;
  const std::string mode = c.text(key, modes, "vision");  // without images "vision" is the causal mask, as is null
  if (mode != "vision" && mode != "all") c.refuse(key, modes);
  if (mode == "all") {
    t.causal = false;
    t.window = t.window / 2 + 1;  // W counts both sides in such a file
  }
}

inline void read_sharing(const config_object& c, text_config& t, bool assistant) {
  const std::size_t count = t.layer_count();
  t.kv_shared_layers = c.integer("num_kv_shared_layers", {0, assistant ? count : count - 1}, 0);
  if (assistant) {
    if (t.kv_shared_layers != 0 && t.kv_shared_layers != count)
      c.refuse("num_kv_shared_layers", "0 or " + std::to_string(count) + ": all layers of an assistant read the target's keys and values");
    t.kv_shared_layers = count;
    return;
  }
  for (const attention_kind kind : t.layers)
    if (t.donor(kind) == count)
      c.refuse("num_kv_shared_layers",
               std::to_string(t.kv_shared_layers) + ", which leaves no " + name_of(kind) + " layer with keys and values of its own",
               "a count that leaves one layer of each kind in layer_types");
}

inline void read_ple(const config_object& c, text_config& t, stack_kind kind) {
  constexpr const char *width = "hidden_size_per_layer_input", *rows = "vocab_size_per_layer_input";
  if (kind.unified) {  // the class has no such fields: files that carry them have 0 or null
    if (c.is_set(width)) t.ple_width = c.integer(width, {0, 0});
    if (c.is_set(rows) && kind.assistant) static_cast<void>(c.integer(rows, {0, 0}));
    return;
  }
  t.ple_width = c.integer(width, {0, kind.assistant ? 0 : most_width}, 256);
  if (t.ple_width != 0)
    t.ple_vocab_size = c.integer(rows, {t.vocab_size, most_tokens}, 262144);
  else
    static_cast<void>(c.integer(rows, {0, kind.assistant ? 0 : most_tokens}, 262144));  // no table, but still a number
}

inline void read_experts(const config_object& c, text_config& t, stack_kind kind) {
  constexpr const char* flag = "enable_moe_block";
  if (kind.unified && c.is_null(flag)) return;
  if (!c.boolean(flag, false)) return;
  if (kind.unified || kind.assistant) c.refuse(flag, "false in this kind of model");
  t.experts = c.integer("num_experts", {1, most_heads});
  t.experts_per_token = c.integer("top_k_experts", {1, t.experts});
  t.expert_width = c.integer("moe_intermediate_size", {1, most_width});
}

inline text_config read_text(const config_object& c, stack_kind kind) {
  text_config t;
  t.vocab_size = c.integer("vocab_size", {1, most_tokens}, 262144);
  t.hidden_size = c.integer("hidden_size", {1, most_width}, 2304);
  t.intermediate_size = c.integer("intermediate_size", {1, most_width}, 9216);
  t.heads = c.integer("num_attention_heads", {1, most_heads}, 8);
  t.layers = read_layers(c, kind.assistant);
  t.k_eq_v = c.boolean("attention_k_eq_v", false);
  read_head_sizes(c, t);
  read_ropes(c, t);
  read_attention_mask(c, t, kind.unified);
  read_sharing(c, t, kind.assistant);
  t.double_wide_mlp = c.boolean("use_double_wide_mlp", false);
  if (kind.assistant && t.double_wide_mlp) c.refuse("use_double_wide_mlp", "false in an assistant");
  t.rms_norm_eps = c.number("rms_norm_eps", 1e-30, 1, 1e-6);
  if (c.is_set("final_logit_softcapping")) t.softcap = c.number("final_logit_softcapping", 1e-6, 1e30);
  if (kind.assistant) t.softcap = 0;  // an assistant never caps its logits
  read_ple(c, t, kind);
  read_experts(c, t, kind);
  t.tied_head = c.boolean("tie_word_embeddings", true);
  t.eos = c.ids("eos_token_id", t.vocab_size, true, {1});
  t.max_positions = c.integer("max_position_embeddings", {1, most_positions}, kind.unified ? 262144 : 131072);
  constexpr const char* activation = "gelu_pytorch_tanh";
  if (c.text("hidden_activation", activation, activation) != activation)
    c.refuse("hidden_activation", activation, error_code::model_unsupported);
  if (c.boolean("attention_bias", false)) c.refuse("attention_bias", "false", error_code::model_unsupported);
  return t;
}

/// The text stack of a file that wraps one. The head's tie is a matter of the whole model: the outer key decides where there is one.
inline text_config read_wrapped_text(const config_object& outer, stack_kind kind) {
  const config_object inner = outer.object("text_config");
  const std::string expected = kind.unified ? "gemma4_unified_text" : "gemma4_text";
  if (inner.text("model_type", expected, expected) != expected) inner.refuse("model_type", expected, error_code::model_unsupported);
  text_config t = read_text(inner, kind);
  t.tied_head = outer.boolean("tie_word_embeddings", t.tied_head);
  return t;
}

inline constexpr const char* target_types = "gemma4_text, gemma4_unified_text, gemma4 or gemma4_unified";
inline constexpr const char* assistant_types = "gemma4_assistant or gemma4_unified_assistant";

inline bool is_assistant(std::string_view model_type) noexcept {
  return model_type == "gemma4_assistant" || model_type == "gemma4-assistant" || model_type == "gemma4_unified_assistant";
}
inline bool is_target(std::string_view model_type) noexcept {
  return model_type == "gemma4_text" || model_type == "gemma4_unified_text" || model_type == "gemma4" || model_type == "gemma4_unified";
}

}  // namespace detail

/// The text stack of a target's config.json: gemma4_text, gemma4_unified_text, or the multimodal files gemma4 and gemma4_unified that wrap
/// one. Absent fields have the defaults of the reference. error_code::config_invalid for values of a wrong type or outside what is allowed,
/// model_unsupported for another family, an assistant, or a variant this library does not run, file_not_found, file_malformed.
/// A document in memory goes by the name `file` in errors.
[[nodiscard]] inline text_config read_target_config(const nlohmann::json& document, const std::string& file) {
  const detail::config_object top(document, file);
  const std::string type = top.text("model_type", detail::target_types);
  const bool drafter = detail::is_assistant(type);
  if (drafter || !detail::is_target(type))
    top.refuse("model_type", detail::config_object::quote(type) + (drafter ? ", a drafter, not a target" : ""), detail::target_types,
               error_code::model_unsupported);
  const detail::stack_kind kind{.unified = type.starts_with("gemma4_unified"), .assistant = false};
  return type.ends_with("_text") ? detail::read_text(top, kind) : detail::read_wrapped_text(top, kind);
}
[[nodiscard]] inline text_config read_target_config(const std::filesystem::path& file) {
  return read_target_config(io::read_json_file(file), file.string());
}

/// An assistant's config.json: gemma4_assistant or gemma4_unified_assistant. The reference demands certain text settings (no per-layer
/// embeddings, no experts, no double-wide MLP, all layers shared) of the first class only; here they hold for both. Errors as for a target.
[[nodiscard]] inline assistant_config read_assistant_config(const nlohmann::json& document, const std::string& file) {
  const detail::config_object top(document, file);
  const std::string type = top.text("model_type", detail::assistant_types);
  const bool target = detail::is_target(type);
  if (target || !detail::is_assistant(type))
    top.refuse("model_type", detail::config_object::quote(type) + (target ? ", a target, not a drafter" : ""), detail::assistant_types,
               error_code::model_unsupported);

  const bool unified = type == "gemma4_unified_assistant";
  assistant_config a;
  a.text = detail::read_wrapped_text(top, {.unified = unified, .assistant = true});
  a.backbone_hidden_size = top.integer("backbone_hidden_size", {1, detail::most_width}, unified ? 3840 : 1536);
  a.centroid_head = top.boolean("use_ordered_embeddings", false);
  const std::size_t centroids = top.integer("num_centroids", {0, detail::most_tokens}, 2048);
  const std::size_t top_k = top.integer("centroid_intermediate_top_k", {0, detail::most_tokens}, 32);
  if (!a.centroid_head) return a;  // the numbers stand in files that do not use them
  if (centroids == 0 || a.text.vocab_size % centroids != 0)
    top.refuse("num_centroids", std::to_string(centroids), "a divisor of vocab_size, which is " + std::to_string(a.text.vocab_size));
  if (top_k == 0 || top_k > centroids)
    top.refuse("centroid_intermediate_top_k", std::to_string(top_k),
               "a whole number from 1 to num_centroids, which is " + std::to_string(centroids));
  a.centroids = centroids;
  a.centroid_top_k = top_k;
  return a;
}
[[nodiscard]] inline assistant_config read_assistant_config(const std::filesystem::path& file) {
  return read_assistant_config(io::read_json_file(file), file.string());
}

/// Whether a config.json names one of the assistants' model types; neither is checked further. error_code::config_invalid where it names none.
[[nodiscard]] inline bool is_assistant_config(const std::filesystem::path& file) {
  const nlohmann::json document = io::read_json_file(file);
  const detail::config_object top(document, file.string());
  return detail::is_assistant(top.text("model_type", std::string(detail::target_types) + ", " + detail::assistant_types));
}

/// generation_config.json of a model directory; defaults if the directory has none. vocab_size is the model's: an id outside it is refused.
/// error_code::config_invalid, file_malformed.
[[nodiscard]] inline generation_config read_generation_config(const std::filesystem::path& directory, std::size_t vocab_size) {
  const std::filesystem::path file = directory / "generation_config.json";
  if (!io::is_there(file)) return {};
  const nlohmann::json document = io::read_json_file(file);
  const detail::config_object top(document, file.string());
  generation_config g;
  g.eos = top.ids("eos_token_id", vocab_size, true);
  g.suppress = top.ids("suppress_tokens", vocab_size, false);
  return g;
}

}  // namespace outrider::gemma4
