// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What things are called in GGUF files. Internal names are those of Hugging Face files; matrices have the same bytes under both.
#pragma once
#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "outrider/io/gguf.hpp"

namespace outrider::gemma4 {

/// Which models have a tensor.
enum class tensor_part : std::uint8_t { all, per_layer_embeddings, experts };

struct tensor_names {
  std::string_view internal, gguf;
  std::size_t rank;  // extents of the tensor; GGUF files may have some of 1 more or less
  tensor_part part = tensor_part::all;
};

/// Tensors of the whole model.
inline constexpr auto model_tensor_names = std::to_array<tensor_names>({
    {"model.embed_tokens.weight", "token_embd.weight", 2},
    {"model.norm.weight", "output_norm.weight", 1},
    {"lm_head.weight", "output.weight", 2},  // a tied model has none
    {"model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight", 2, tensor_part::per_layer_embeddings},
    {"model.per_layer_model_projection.weight", "per_layer_model_proj.weight", 2, tensor_part::per_layer_embeddings},
    {"model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight", 1, tensor_part::per_layer_embeddings},
});

/// Tensors of layer N, behind "model.layers.N." and "blk.N.".
inline constexpr auto layer_tensor_names = std::to_array<tensor_names>({
    {"input_layernorm.weight", "attn_norm.weight", 1},
    {"self_attn.q_proj.weight", "attn_q.weight", 2},
    {"self_attn.k_proj.weight", "attn_k.weight", 2},
    {"self_attn.v_proj.weight", "attn_v.weight", 2},
    {"self_attn.qkv_proj.weight", "attn_qkv.weight", 2},  // rows of q, k, v in this order; split on load, so no Hugging Face file has it
    {"self_attn.o_proj.weight", "attn_output.weight", 2},
    {"self_attn.q_norm.weight", "attn_q_norm.weight", 1},
    {"self_attn.k_norm.weight", "attn_k_norm.weight", 1},
    {"post_attention_layernorm.weight", "post_attention_norm.weight", 1},
    {"pre_feedforward_layernorm.weight", "ffn_norm.weight", 1},
    {"mlp.gate_proj.weight", "ffn_gate.weight", 2},
    {"mlp.up_proj.weight", "ffn_up.weight", 2},
    {"mlp.down_proj.weight", "ffn_down.weight", 2},
    {"post_feedforward_layernorm.weight", "post_ffw_norm.weight", 1},
    {"layer_scalar", "layer_output_scale.weight", 1},
    {"per_layer_input_gate.weight", "inp_gate.weight", 2, tensor_part::per_layer_embeddings},
    {"per_layer_projection.weight", "proj.weight", 2, tensor_part::per_layer_embeddings},
    {"post_per_layer_input_norm.weight", "post_norm.weight", 1, tensor_part::per_layer_embeddings},
    {"router.proj.weight", "ffn_gate_inp.weight", 2, tensor_part::experts},
    {"router.scale", "ffn_gate_inp.scale", 1, tensor_part::experts},
    {"router.per_expert_scale", "ffn_down_exps.scale", 1, tensor_part::experts},
    {"pre_feedforward_layernorm_2.weight", "pre_ffw_norm_2.weight", 1, tensor_part::experts},
    {"post_feedforward_layernorm_1.weight", "post_ffw_norm_1.weight", 1, tensor_part::experts},
    {"post_feedforward_layernorm_2.weight", "post_ffw_norm_2.weight", 1, tensor_part::experts},
    {"experts.gate_up_proj", "ffn_gate_up_exps.weight", 3, tensor_part::experts},  // gate rows first
    {"experts.gate_proj", "ffn_gate_exps.weight", 3, tensor_part::experts},        // the two halves apart: GGUF only
    {"experts.up_proj", "ffn_up_exps.weight", 3, tensor_part::experts},
    {"experts.down_proj", "ffn_down_exps.weight", 3, tensor_part::experts},
});

/// Pair factors of the full layers' rotation, [head_dim / 2]: 1 rotates, 1e30 does not. Has no internal name: it is part of the configuration.
inline constexpr std::string_view rope_factors_name = "rope_freqs.weight";

/// Assistants were written with several sets of names before one became usual. a: llama.cpp's, without centroid tensors; b, c, d: of other
/// programs; e: a, with the target's embedding table beside the assistant's own; f: a, under the target's architecture; g: a, with centroid
/// tensors and their keys, which is what this library writes.
enum class assistant_scheme : std::uint8_t { a, b, c, d, e, f, g };

/// What is called differently in the schemes. Keys stand behind "architecture."; an empty one does not exist.
struct scheme_names {
  assistant_scheme scheme;
  std::string_view architecture;                             // as written; `assistant_architectures` are read
  std::string_view target_width, centroids, top_k, ordered;  // keys
  std::string_view pre_projection, post_projection;          // tensors
  std::string_view centroid_tensor, token_ordering;          // tensors; of e and f no such file is known, the names are those of g
};

inline constexpr auto assistant_schemes = std::to_array<scheme_names>({
    {assistant_scheme::a, "gemma4-assistant", "embedding_length_out", "", "", "", "nextn.pre_projection.weight",
     "nextn.post_projection.weight", "masked_embd_centroids.weight", "masked_embd_ordering"},
    {assistant_scheme::b, "gemma4-assistant", "backbone_hidden_size", "assistant.num_centroids", "assistant.centroid_intermediate_top_k",
     "assistant.use_ordered_embeddings", "assist_pre_proj.weight", "assist_post_proj.weight", "assist_embed_centroids.weight",
     "assist_token_ordering.weight"},
    {assistant_scheme::c, "gemma4_assistant", "n_embd_backbone", "n_centroids", "centroid_top_k", "use_ordered_embeddings",
     "mtp.pre_projection.weight", "mtp.post_projection.weight", "mtp.centroids.weight", "mtp.token_ordering.weight"},
    {assistant_scheme::d, "gemma4_mtp", "backbone_embedding_length", "centroid_count", "centroid_top_k", "", "mtp_pre_proj.weight",
     "mtp_post_proj.weight", "mtp_centroids.weight", "mtp_token_ordering.weight"},
    {assistant_scheme::e, "gemma4-assistant", "embedding_length_out", "", "", "", "nextn.pre_projection.weight",
     "nextn.post_projection.weight", "masked_embd_centroids.weight", "masked_embd_ordering"},
    {assistant_scheme::f, "gemma4", "assistant.backbone_hidden_size", "", "", "", "assistant.pre_projection.weight",
     "assistant.post_projection.weight", "masked_embd_centroids.weight", "masked_embd_ordering"},
    {assistant_scheme::g, "gemma4-assistant", "embedding_length_out", "masked_embedding.centroid_count", "masked_embedding.top_k", "",
     "nextn.pre_projection.weight", "nextn.post_projection.weight", "masked_embd_centroids.weight", "masked_embd_ordering"},
});

inline constexpr std::string_view target_architecture = "gemma4";
/// Those that only assistants have; scheme f shares its architecture with targets and says "mtp" under this key.
inline constexpr std::array<std::string_view, 3> assistant_architectures{"gemma4-assistant", "gemma4_assistant", "gemma4_mtp"};
inline constexpr std::string_view assistant_type_key = "gemma4.assistant.type";

[[nodiscard]] constexpr const scheme_names& names_of(assistant_scheme scheme) noexcept {
  return assistant_schemes[static_cast<std::size_t>(scheme)];
}
static_assert([] {
  for (std::size_t i = 0; i < assistant_schemes.size(); ++i)
    if (static_cast<std::size_t>(assistant_schemes[i].scheme) != i) return false;
  return assistant_schemes.back().scheme == assistant_scheme::g;
}());
/// 'A' … 'G', as people call them.
[[nodiscard]] constexpr char letter_of(assistant_scheme scheme) noexcept { return static_cast<char>('A' + static_cast<int>(scheme)); }

namespace detail {

inline constexpr std::string_view weight_suffix = ".weight";

[[nodiscard]] constexpr std::string_view without_suffix(std::string_view name) noexcept {
  return name.ends_with(weight_suffix) ? name.substr(0, name.size() - weight_suffix.size()) : name;
}

/// Splits "prefix12.rest" into 12 and "rest".
struct layer_name {
  std::size_t layer;
  std::string_view rest;
};
[[nodiscard]] inline std::optional<layer_name> split_layer(std::string_view name, std::string_view prefix) noexcept {
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  layer_name split{};
  const auto [end, failure] = std::from_chars(name.data(), name.data() + name.size(), split.layer);
  const auto digits = static_cast<std::size_t>(end - name.data());
  if (failure != std::errc{} || digits == name.size() || name[digits] != '.' || (digits > 1 && name[0] == '0')) return std::nullopt;
  split.rest = name.substr(digits + 1);
  return split;
}

}  // namespace detail

/// The tensors that only assistants have, by internal name.
struct scheme_tensor_names {
  std::string_view internal;
  std::string_view scheme_names::*gguf;
  std::size_t rank;
  std::string_view also;  // seen in single files
};
inline constexpr auto assistant_tensor_names = std::to_array<scheme_tensor_names>({
    {"pre_projection.weight", &scheme_names::pre_projection, 2, ""},
    {"post_projection.weight", &scheme_names::post_projection, 2, ""},
    {"masked_embedding.centroids.weight", &scheme_names::centroid_tensor, 2, "nextn.centroids"},
    {"masked_embedding.token_ordering", &scheme_names::token_ordering, 1, "nextn.token_ordering"},
});

/// A tensor of a GGUF file under its internal name.
struct known_tensor {
  std::string internal;
  std::size_t rank;
  std::optional<std::size_t> layer;
  tensor_part part;
  bool assistant_only;
};

/// What a tensor of a GGUF file is, in a target or in an assistant of any scheme: no name means two things in two of them. Nothing for a name
/// this library does not use. Some programs leave ".weight" out of an assistant's own names and of layer_output_scale.
[[nodiscard]] inline std::optional<known_tensor> known(std::string_view gguf) {
  for (const tensor_names& names : model_tensor_names)
    if (names.gguf == gguf) return known_tensor{std::string(names.internal), names.rank, {}, names.part, false};
  if (const auto split = detail::split_layer(gguf, "blk.")) {
    for (const tensor_names& names : layer_tensor_names)
      if (names.gguf == split->rest || (split->rest == "layer_output_scale" && names.internal == "layer_scalar"))
        return known_tensor{"model.layers." + std::to_string(split->layer) + "." + std::string(names.internal), names.rank, split->layer,
                            names.part, false};
    return std::nullopt;
  }
  const std::string_view bare = detail::without_suffix(gguf);
  for (const scheme_tensor_names& tensor : assistant_tensor_names)
    for (const scheme_names& names : assistant_schemes)
      if (!bare.empty() && (bare == detail::without_suffix(names.*tensor.gguf) || bare == tensor.also))
        return known_tensor{std::string(tensor.internal), tensor.rank, {}, tensor_part::all, true};
  return std::nullopt;
}
/// The internal name alone.
[[nodiscard]] inline std::optional<std::string> internal_name(std::string_view gguf) {
  if (auto tensor = known(gguf)) return std::move(tensor->internal);
  return std::nullopt;
}

/// What a tensor is called in a GGUF file; the scheme matters for an assistant's own tensors only. Takes the names of text-only files, and
/// those of multimodal ones, which begin with "model.language_model.". Nothing for other tensors: vision, audio.
[[nodiscard]] inline std::optional<std::string> gguf_name(std::string_view internal, assistant_scheme scheme = assistant_scheme::g) {
  constexpr std::string_view wrapped = "model.language_model.", plain = "model.";
  if (internal.starts_with(wrapped)) return gguf_name(std::string(plain) + std::string(internal.substr(wrapped.size())), scheme);
  for (const tensor_names& names : model_tensor_names)
    if (names.internal == internal) return std::string(names.gguf);
  if (const auto split = detail::split_layer(internal, "model.layers.")) {
    for (const tensor_names& names : layer_tensor_names)
      if (names.internal == split->rest) return "blk." + std::to_string(split->layer) + "." + std::string(names.gguf);
    return std::nullopt;
  }
  for (const scheme_tensor_names& tensor : assistant_tensor_names)
    if (tensor.internal == internal) return std::string(names_of(scheme).*tensor.gguf);
  return std::nullopt;
}

/// general.architecture, or "" where it is missing or no string.
[[nodiscard]] inline std::string_view architecture_of(const io::gguf_file& file) noexcept {
  const io::gguf_value* const value = file.find("general.architecture");
  return value ? value->text().value_or(std::string_view{}) : std::string_view{};
}

/// Whether the file calls itself an assistant, of any scheme.
[[nodiscard]] inline bool is_assistant(const io::gguf_file& file) {
  const std::string_view architecture = architecture_of(file);
  if (std::find(assistant_architectures.begin(), assistant_architectures.end(), architecture) != assistant_architectures.end()) return true;
  return architecture == target_architecture &&
         (file.find(assistant_type_key) || file.find("gemma4." + std::string(names_of(assistant_scheme::f).target_width)));
}

/// The rows of a matrix. Outer extents of 1 are as good as none.
[[nodiscard]] inline std::size_t rows_of(const io::tensor& t) noexcept {
  std::size_t rows = t.shape.empty() ? 0 : 1;
  for (std::size_t i = 0; i + 1 < t.shape.size(); ++i) rows *= t.shape[i];  // the reader made sure that the product fits
  return rows;
}

/// The tensor of that name in the file, or null.
[[nodiscard]] inline const io::tensor* find_tensor(const io::gguf_file& file, std::string_view gguf) noexcept {
  const auto found = std::find_if(file.tensors.begin(), file.tensors.end(), [&](const io::tensor& t) { return t.name == gguf; });
  return found == file.tensors.end() ? nullptr : &*found;
}

/// The first tensor of that internal name in the file, or null.
[[nodiscard]] inline const io::tensor* find_internal(const io::gguf_file& file, std::string_view internal) {
  const auto found =
      std::find_if(file.tensors.begin(), file.tensors.end(), [&](const io::tensor& t) { return internal_name(t.name) == internal; });
  return found == file.tensors.end() ? nullptr : &*found;
}

/// Scheme e's copy of the target's embedding table, which nobody needs, or null. Its name is not settled: a table of unknown name with a row
/// per token, of the target's width, or "token_embd.weight" where the assistant's own table is the head.
[[nodiscard]] inline const io::tensor* target_table_of(const io::gguf_file& file, std::size_t target_width) {
  const io::tensor *const table = find_tensor(file, "token_embd.weight"), *const head = find_tensor(file, "output.weight");
  if (!table || table->shape.size() != 2) return nullptr;
  const auto is_targets = [&](const io::tensor& t) {
    return t.shape == std::vector{table->shape[0], target_width} && (!known(t.name) || (&t == table && head));
  };
  const auto found = std::find_if(file.tensors.begin(), file.tensors.end(), is_targets);
  return found == file.tensors.end() ? nullptr : &*found;
}

/// The scheme of an assistant's file, by the key under which it states the target's width and, where that is not enough, by what else it
/// holds. Nothing if the file is no assistant or states no width.
[[nodiscard]] inline std::optional<assistant_scheme> scheme_of(const io::gguf_file& file) {
  if (!is_assistant(file)) return std::nullopt;
  const std::string prefix = std::string(architecture_of(file)) + ".";
  const auto find = [&](std::string_view key) { return key.empty() ? nullptr : file.find(prefix + std::string(key)); };
  const auto found = std::find_if(assistant_schemes.begin(), assistant_schemes.end(),
                                  [&](const scheme_names& names) { return find(names.target_width) != nullptr; });
  if (found == assistant_schemes.end()) return std::nullopt;
  if (found->scheme != assistant_scheme::a) return found->scheme;
  const scheme_names& g = names_of(assistant_scheme::g);
  if (find(g.centroids) || find(g.top_k)) return assistant_scheme::g;
  const auto width = find(g.target_width)->integer();
  if (width && *width > 0 && target_table_of(file, static_cast<std::size_t>(*width))) return assistant_scheme::e;
  return find_internal(file, "masked_embedding.centroids.weight") ? assistant_scheme::g : assistant_scheme::a;
}

}  // namespace outrider::gemma4
