// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "outrider/error.hpp"
#include "outrider/gemma4/config.hpp"
#include "outrider/gemma4/gguf_names.hpp"
#include "outrider/gemma4/gguf_object.hpp"
#include "outrider/io/gguf.hpp"

namespace outrider::gemma4 {

namespace detail {

/// The value that all layers for which `counts` have; nothing if there is no such layer, refused if they differ.
template <class Layers>
std::optional<std::size_t> same_in(const gguf_object& c, std::string_view key, const std::vector<std::size_t>& values, const Layers& counts,
                                   const std::string& which) {
  std::optional<std::size_t> first;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!counts(i)) continue;
    if (first && values[*first] != values[i])
      c.refuse(key,
               "uneven: " + std::to_string(values[*first]) + " for layer " + std::to_string(*first) + " but " + std::to_string(values[i]) +
                   " for layer " + std::to_string(i),
               "the same number in all " + which + "layers");
    if (!first) first = i;
  }
  return first ? std::optional(values[*first]) : std::nullopt;
}

inline std::vector<attention_kind> read_layers(const gguf_object& c) {
  constexpr const char* key = "attention.sliding_window_pattern";
  const std::size_t count = c.integer("block_count", {1, most_layers});
  std::vector<attention_kind> layers;
  for (const bool sliding : c.flag_per_layer(key, count)) layers.push_back(sliding ? attention_kind::sliding : attention_kind::full);
  if (layers.back() != attention_kind::full) c.refuse(key, "an array that ends with true", "an array that ends with false, a full layer");
  return layers;
}

inline void read_sharing(const gguf_object& c, text_config& t, bool assistant) {
  constexpr const char* key = "attention.shared_kv_layers";
  const std::size_t count = t.layer_count();
  t.kv_shared_layers = c.integer(key, {0, count}, assistant ? count : 0);
  if (assistant) {
    if (t.kv_shared_layers != 0 && t.kv_shared_layers != count)
      c.refuse(key, "0 or " + std::to_string(count) + ": all layers of an assistant read the target's keys and values");
    t.kv_shared_layers = count;
    return;
  }
  if (t.kv_shared_layers == count)
    c.refuse(key, std::to_string(count) + ", which is all layers, as in a drafter", "a number below block_count for a target",
             error_code::model_unsupported);
  for (const attention_kind kind : t.layers)
    if (t.donor(kind) == count)
      c.refuse(key, std::to_string(t.kv_shared_layers) + ", which leaves no " + name_of(kind) + " layer with keys and values of its own",
               "a number that leaves one layer of each kind in attention.sliding_window_pattern");
}

inline void read_head_sizes(const gguf_object& c, text_config& t) {
  const std::size_t count = t.layer_count();
  const auto all = [](std::size_t) { return true; };
  t.heads = *same_in(c, "attention.head_count", c.per_layer("attention.head_count", count, {1, most_heads}), all, "");
  constexpr const char* kv_key = "attention.head_count_kv";
  const std::vector<std::size_t> kv_heads = c.per_layer(kv_key, count, {1, most_heads});

  struct kind_keys {
    const char *key_length, *value_length, *dimensions;
  };
  constexpr std::array<kind_keys, 2> keys{kind_keys{"attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"},
                                          kind_keys{"attention.key_length", "attention.value_length", "rope.dimension_count"}};
  for (const attention_kind kind : attention_kinds) {
    const auto of_kind = [&](std::size_t i) { return t.layers[i] == kind; };
    const auto heads = same_in(c, kv_key, kv_heads, of_kind, std::string(name_of(kind)) + " ");
    if (!heads) continue;  // no such layer
    if (t.heads % *heads != 0)
      c.refuse(kv_key, std::to_string(*heads), "divisors of attention.head_count, which is " + std::to_string(t.heads));
    attention_shape& shape = t.attention[static_cast<std::size_t>(kind)];
    shape.kv_heads = *heads;
    const kind_keys& k = keys[static_cast<std::size_t>(kind)];
    shape.head_dim = c.integer(k.key_length, {2, most_heads});
    if (shape.head_dim % 2 != 0) c.refuse(k.key_length, "an even number, because rotation works on pairs");
    // One size serves keys, values and the rotation, whose idle pairs are marked in rope_freqs instead.
    for (const char* same : {k.value_length, k.dimensions})
      static_cast<void>(c.integer(same, {shape.head_dim, shape.head_dim}, shape.head_dim));
  }
}

/// The rotation of the full layers from its pair factors: leading ones that are equal divide the frequencies, 1e30 behind them stops a pair.
inline void read_rope_factors(const io::tensor& t, std::size_t head_dim, rope_parameters& rope) {
  const std::size_t half = head_dim / 2;
  const std::string subject = t.file + ": tensor '" + t.name + "'";
  if (t.type != io::dtype::f32)  // in half precision a factor of 1e30 is infinite
    throw error(error_code::tensor_mismatch, subject + " has elements of type " + std::string(io::name_of(t.type)) + ", allowed is F32");
  if (t.bytes.size() != half * sizeof(float))
    throw error(error_code::tensor_mismatch, subject + " has " + std::to_string(t.bytes.size() / sizeof(float)) +
                                                 " elements, the key length of the full layers asks for " + std::to_string(half));
  std::vector<float> factors(half);
  std::memcpy(factors.data(), t.bytes.data(), t.bytes.size());
  constexpr float stopped = 1e30f;
  std::size_t live = 0;
  while (live < half && factors[live] == factors[0] && factors[live] > 1e-30f && factors[live] < stopped) ++live;
  for (std::size_t i = live; i < half; ++i)
    if (factors[i] != stopped)
      throw error(error_code::model_unsupported, subject + " has the factor " + decimal(double{factors[i]}) + " at pair " +
                                                     std::to_string(i) +
                                                     "; allowed: equal factors from 1e-30 to 1e30 followed by factors of 1e30");
  rope.factor = live == 0 ? 1 : double{factors[0]};
  rope.fraction = static_cast<double>(live) / static_cast<double>(half);
  // frequencies() cuts the count off, so that it must not fall below a whole number.
  if (static_cast<std::size_t>(rope.fraction * static_cast<double>(head_dim) / 2) < live)
    rope.fraction = std::nextafter(rope.fraction, 1.0);
}

inline void read_ropes(const gguf_object& c, const io::gguf_file& file, text_config& t) {
  t.attention[0].rope = {.theta = c.number("rope.freq_base_swa", 1, 1e30, 1e4), .fraction = 1, .factor = 1};
  t.attention[1].rope = {.theta = c.number("rope.freq_base", 1, 1e30, 1e6), .fraction = 0.25, .factor = 1};
  if (const io::tensor* const factors = find_tensor(file, rope_factors_name))
    read_rope_factors(*factors, t.shape(attention_kind::full).head_dim, t.attention[1].rope);
}

inline void read_mlp_widths(const gguf_object& c, text_config& t, bool assistant) {
  constexpr const char* key = "feed_forward_length";
  const std::vector<std::size_t> widths = c.per_layer(key, t.layer_count(), {1, most_width});
  const auto own = same_in(
      c, key, widths, [&](std::size_t i) { return t.owns_kv(i); }, "unshared ");
  const auto shared = same_in(
      c, key, widths, [&](std::size_t i) { return !t.owns_kv(i); }, "shared ");
  t.intermediate_size = own ? *own : *shared;
  t.double_wide_mlp = !assistant && shared && *shared != *own;
  if (t.double_wide_mlp && *shared != 2 * *own)
    c.refuse(key, std::to_string(*own) + " and, in layers that share keys and values, " + std::to_string(*shared),
             "the same or twice as much in those");
}

/// Whether values start from the key projection, which such a file shows by having no other in its full layers.
inline bool reads_k_as_v(const io::gguf_file& file, const text_config& t) {
  std::vector<bool> has_v(t.layer_count(), false);
  for (const io::tensor& tensor : file.tensors) {
    const auto name = split_layer(tensor.name, "blk.");
    if (!name || name->layer >= t.layer_count()) continue;
    const auto [head_dim, kv_heads, rope] = t.shape_of(name->layer);
    const bool fused = name->rest == "attn_qkv.weight" && rows_of(tensor) == (t.heads + 2 * kv_heads) * head_dim;
    if (fused || name->rest == "attn_v.weight") has_v[name->layer] = true;
  }
  const std::size_t last = t.donor(attention_kind::full);
  for (std::size_t i = 0; i < last && last < t.layer_count(); ++i)
    if (t.layers[i] == attention_kind::full && has_v[i] != has_v[last])
      throw error(error_code::tensor_missing, file.source + ": tensor 'blk." + std::to_string(has_v[i] ? last : i) +
                                                  ".attn_v.weight' is missing, unlike in layer " + std::to_string(has_v[i] ? i : last) +
                                                  "; allowed: in all full layers with keys of their own or in none");
  return last < t.layer_count() && !has_v[last];
}

inline void read_ple(const gguf_object& c, const io::gguf_file& file, text_config& t, bool assistant) {
  constexpr const char *key = "embedding_length_per_layer_input", *table = "per_layer_token_embd.weight";
  t.ple_width = c.integer(key, {0, assistant ? 0 : most_width}, assistant ? std::optional<std::size_t>(0) : std::nullopt);
  if (t.ple_width == 0) return;
  const io::tensor* const rows = find_tensor(file, table);
  if (!rows) throw error(error_code::tensor_missing, file.source + ": tensor '" + table + "' is missing");
  t.ple_vocab_size = rows_of(*rows);
  if (t.ple_vocab_size < t.vocab_size || t.ple_vocab_size > most_tokens)
    throw error(error_code::tensor_mismatch, rows->file + ": tensor '" + rows->name + "' has " + std::to_string(t.ple_vocab_size) +
                                                 " rows, allowed are " + std::to_string(t.vocab_size) + " to " +
                                                 std::to_string(most_tokens));
}

inline void read_experts(const gguf_object& c, text_config& t, bool assistant) {
  t.experts = c.integer("expert_count", {0, assistant ? 0 : most_heads}, 0);
  if (t.experts == 0) return;
  t.experts_per_token = c.integer("expert_used_count", {1, t.experts});
  t.expert_width = c.integer("expert_feed_forward_length", {1, most_width});
}

/// The list of tokens decides; a file without one has a count or, at least, a table.
inline std::size_t read_vocab_size(const gguf_object& c, const io::gguf_file& file) {
  constexpr const char* key = "tokenizer.ggml.tokens";
  const gguf_object top(file, "");
  if (const io::gguf_value* const tokens = top.find(key)) {
    if (!tokens->is_array || tokens->type != io::gguf_type::string || tokens->count == 0 || tokens->count > most_tokens)
      top.refuse(key, "an array of 1 to " + std::to_string(most_tokens) + " strings");
    return tokens->count;
  }
  const io::tensor* const table = find_tensor(file, "token_embd.weight");
  return c.integer("vocab_size", {1, most_tokens}, table ? std::optional(rows_of(*table)) : std::nullopt);
}

/// Ends of text. A GGUF file names one or two, while Gemma's generation config has three: <eos>, <turn|> and <|tool_response>. So all of
/// these that are in the vocabulary count, found by their texts, whichever of them the file names; a model that never writes one loses nothing.
inline std::vector<token_id> read_eos(const io::gguf_file& file, std::size_t vocab_size) {
  const gguf_object c(file, "tokenizer.ggml.");
  std::vector<token_id> eos;
  const auto add = [&](std::size_t id) {
    const auto token = static_cast<token_id>(id);
    if (std::find(eos.begin(), eos.end(), token) == eos.end()) eos.push_back(token);
  };
  for (const char* key : {"eos_token_id", "eot_token_id"})
    if (c.has(key)) add(c.integer(key, {0, vocab_size - 1}));
  if (c.has("tokens")) {
    const auto tokens = *c.find("tokens")->texts();
    for (std::size_t id = 0; id < tokens.size(); ++id)
      if (tokens[id] == "<eos>" || tokens[id] == "<turn|>" || tokens[id] == "<|tool_response>") add(id);
  }
  return eos;
}

/// Ids beyond the vocabulary are left out: a file whose vocabulary was cut may still name them.
inline std::vector<token_id> read_suppressed(const io::gguf_file& file, std::size_t vocab_size) {
  constexpr const char *key = "suppress_tokens", *allowed = "an array of token ids, each 0 or more";
  const gguf_object c(file, "tokenizer.ggml.");
  if (!c.has(key)) return {};
  const auto ids = c.find(key)->integers();
  if (!ids) c.refuse(key, allowed);
  std::vector<token_id> suppress;
  for (const std::int64_t id : *ids) {
    if (id < 0) c.refuse(key, "an array with " + std::to_string(id), allowed);
    if (static_cast<std::uint64_t>(id) < vocab_size) suppress.push_back(static_cast<token_id>(id));
  }
  return suppress;
}

/// No Gemma 4 has these, but a file that says so would not write what its maker meant.
inline void refuse_variants(const gguf_object& c) {
  constexpr const char *scaling = "rope.scaling.type", *factor = "rope.scaling.factor", *causal = "attention.causal";
  constexpr const char* types = "\"none\" or \"linear\"";
  const std::string type = c.has(scaling) ? c.text(scaling, types) : "linear";
  if (type != "none" && type != "linear") c.refuse(scaling, types, error_code::model_unsupported);
  if (type == "linear" && c.number(factor, 0, 1e30, 1) != 1) c.refuse(factor, "1", error_code::model_unsupported);
  if (!c.boolean(causal, true)) c.refuse(causal, "true", error_code::model_unsupported);
}

inline text_config read_text(const io::gguf_file& file, const gguf_object& c, bool assistant) {
  refuse_variants(c);
  text_config t;
  t.vocab_size = read_vocab_size(c, file);
  t.hidden_size = c.integer("embedding_length", {1, most_width});
  t.layers = read_layers(c);
  read_sharing(c, t, assistant);
  read_head_sizes(c, t);
  read_ropes(c, file, t);
  read_mlp_widths(c, t, assistant);
  t.window = c.integer("attention.sliding_window", {1, most_tokens});
  t.k_eq_v = reads_k_as_v(file, t);
  t.rms_norm_eps = c.number("attention.layer_norm_rms_epsilon", 1e-30, 1);
  if (c.has("final_logit_softcapping")) t.softcap = c.number("final_logit_softcapping", 1e-6, 1e30);
  if (assistant) t.softcap = 0;  // an assistant never caps its logits
  read_ple(c, file, t, assistant);
  read_experts(c, t, assistant);
  t.tied_head = find_tensor(file, "output.weight") == nullptr;
  t.eos = read_eos(file, t.vocab_size);
  t.suppress = read_suppressed(file, t.vocab_size);
  t.max_positions = c.integer("context_length", {1, most_positions}, t.max_positions);
  return t;
}

inline constexpr const char* assistant_architecture_names =
    "gemma4-assistant, gemma4_assistant, gemma4_mtp, or gemma4 with gemma4.assistant.type";

}  // namespace detail

/// The text stack of a target's GGUF file, with its ends of text and suppressed tokens. Limits are those of config.json; keys that every
/// converter writes must be there. error_code::config_invalid for values of a wrong type or outside what is allowed, model_unsupported for
/// another family, an assistant or a variant this library does not run, tensor_missing and tensor_mismatch for tensors that say how the
/// model is made.
[[nodiscard]] inline text_config read_target_config(const io::gguf_file& file) {
  constexpr const char* key = "general.architecture";
  const detail::gguf_object top(file, "");
  const std::string architecture = top.text(key, std::string(target_architecture));
  const bool drafter = is_assistant(file);
  if (drafter || architecture != target_architecture)
    top.refuse(key, detail::config_object::quote(architecture) + (drafter ? ", a drafter, not a target" : ""),
               std::string(target_architecture), error_code::model_unsupported);
  return detail::read_text(file, detail::gguf_object(file, architecture + "."), false);
}

/// An assistant's GGUF file, in any naming scheme. Its head is the one over centroids if their tensors are there, unless the file says no.
/// Errors as for a target.
[[nodiscard]] inline assistant_config read_assistant_config(const io::gguf_file& file) {
  constexpr const char* key = "general.architecture";
  const detail::gguf_object top(file, "");
  const std::string architecture = top.text(key, detail::assistant_architecture_names);
  if (!is_assistant(file))
    top.refuse(key, detail::config_object::quote(architecture) + (architecture == target_architecture ? ", a target, not a drafter" : ""),
               detail::assistant_architecture_names, error_code::model_unsupported);
  const detail::gguf_object c(file, architecture + ".");
  const auto scheme = scheme_of(file);
  if (!scheme) {
    std::string keys;
    for (const scheme_names& names : assistant_schemes)
      if (keys.find(names.target_width) == keys.npos) keys += (keys.empty() ? "" : ", ") + std::string(names.target_width);
    c.refuse(names_of(assistant_scheme::g).target_width, "the target's width under one of the keys " + keys);
  }

  assistant_config a;
  a.text = detail::read_text(file, c, true);
  const scheme_names &names = names_of(*scheme), &usual = names_of(assistant_scheme::g);
  a.backbone_hidden_size = c.integer(names.target_width, {1, detail::most_width});
  const io::tensor* const clusters = find_internal(file, "masked_embedding.centroids.weight");
  const io::tensor* const ordering = find_internal(file, "masked_embedding.token_ordering");
  // A dense head drafts nearly the same tokens, so a file whose converter dropped the tensors is as good with one, whatever its flag says.
  a.centroid_head = (clusters || ordering) && (names.ordered.empty() || c.boolean(names.ordered, true));
  if (!a.centroid_head) return a;
  const auto present = [&](std::string_view own, std::string_view other) { return !own.empty() && c.has(own) ? own : other; };
  const std::string_view count_key = present(names.centroids, usual.centroids), top_k_key = present(names.top_k, usual.top_k);
  if (!clusters)
    throw error(error_code::tensor_missing, file.source + ": the tensor of centroids is missing beside '" + ordering->name + "'");
  a.centroids = c.integer(count_key, {1, detail::most_tokens}, rows_of(*clusters));
  if (a.text.vocab_size % a.centroids != 0)
    c.refuse(count_key, std::to_string(a.centroids), "a divisor of the vocabulary size, which is " + std::to_string(a.text.vocab_size));
  a.centroid_top_k = c.integer(top_k_key, {1, a.centroids}, (std::min)(std::size_t{32}, a.centroids));
  return a;
}

}  // namespace outrider::gemma4
