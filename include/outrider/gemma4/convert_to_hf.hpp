// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A GGUF file as a Hugging Face directory: its configuration files and the tensors of its model.safetensors.
#pragma once
#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/error.hpp"
#include "outrider/gemma4/config.hpp"
#include "outrider/gemma4/convert_values.hpp"
#include "outrider/gemma4/gguf_config.hpp"
#include "outrider/gemma4/gguf_names.hpp"
#include "outrider/gemma4/gguf_tensors.hpp"
#include "outrider/io/gguf.hpp"
#include "outrider/io/mapped_file.hpp"
#include "outrider/io/tensor_writer.hpp"
#include "outrider/io/tensors.hpp"

namespace outrider::gemma4::detail {

/// A number that a GGUF file has as a float, as the shortest decimal that stands for it: 1e-06, not 9.99999997e-07.
inline double shortest(double value) {
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), static_cast<float>(value)).ptr;
  double out = value;
  std::from_chars(text.data(), end, out);
  return out;
}

/// The fields of a text stack that the reference's configuration class has, all of them, so that no default matters.
inline nlohmann::ordered_json text_fields(const text_config& t) {
  const attention_shape &full = t.shape(attention_kind::full), &sliding = t.shape(attention_kind::sliding);
  const attention_shape& usual = sliding.head_dim != 0 ? sliding : full;
  nlohmann::ordered_json out;
  out["attention_bias"] = false;
  out["attention_k_eq_v"] = t.k_eq_v;
  out["enable_moe_block"] = t.experts != 0;
  out["eos_token_id"] = t.eos.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(t.eos.front());
  out["final_logit_softcapping"] = t.softcap != 0 ? nlohmann::ordered_json(shortest(t.softcap)) : nlohmann::ordered_json();
  out["head_dim"] = usual.head_dim;
  out["global_head_dim"] = full.head_dim;
  out["hidden_activation"] = "gelu_pytorch_tanh";
  out["hidden_size"] = t.hidden_size;
  out["hidden_size_per_layer_input"] = t.ple_width;
  out["intermediate_size"] = t.intermediate_size;
  nlohmann::ordered_json kinds = nlohmann::ordered_json::array();
  for (const attention_kind kind : t.layers) kinds.push_back(std::string(name_of(kind)) + "_attention");
  out["layer_types"] = kinds;
  out["max_position_embeddings"] = t.max_positions;
  out["model_type"] = "gemma4_text";
  out["num_attention_heads"] = t.heads;
  out["num_hidden_layers"] = t.layer_count();
  out["num_key_value_heads"] = usual.kv_heads;
  out["num_kv_shared_layers"] = t.kv_shared_layers;
  if (t.experts != 0) {
    out["num_experts"] = t.experts;
    out["top_k_experts"] = t.experts_per_token;
    out["moe_intermediate_size"] = t.expert_width;
  }
  if (full.kv_heads != usual.kv_heads && t.k_eq_v) out["num_global_key_value_heads"] = full.kv_heads;
  if (full.kv_heads != usual.kv_heads && !t.k_eq_v)  // the flat key counts only beside attention_k_eq_v
    for (std::size_t i = 0; i < t.layer_count(); ++i)
      if (t.layers[i] == attention_kind::full)
        out["per_layer_config"][std::to_string(i)] = {{"head_dim", full.head_dim}, {"num_key_value_heads", full.kv_heads}};
  out["rms_norm_eps"] = shortest(t.rms_norm_eps);
  nlohmann::ordered_json rope{
      {"rope_type", "proportional"}, {"rope_theta", shortest(full.rope.theta)}, {"partial_rotary_factor", full.rope.fraction}};
  if (full.rope.factor != 1) rope["factor"] = shortest(full.rope.factor);
  out["rope_parameters"] = {{"full_attention", rope},
                            {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", shortest(sliding.rope.theta)}}}};
  out["sliding_window"] = t.window;
  out["tie_word_embeddings"] = t.tied_head;
  out["use_double_wide_mlp"] = t.double_wide_mlp;
  out["vocab_size"] = t.vocab_size;
  out["vocab_size_per_layer_input"] = t.ple_vocab_size;
  return out;
}

/// What a GGUF file becomes.
class hf_plan {
 public:
  /// `type` is that of matrices: nothing for the one they have, BF16 for quantised ones.
  hf_plan(const io::gguf_file& file, std::optional<io::dtype> type) : file_(file), assistant_(gemma4::is_assistant(file)), type_(type) {
    if (assistant_)
      config_ = read_assistant_config(file);
    else
      config_.text = read_target_config(file);
    const io::tensor_set set = assistant_ ? assistant_tensors(file, config_) : target_tensors(file, config_.text);
    const io::tensor* const table = set.find("model.embed_tokens.weight");
    main_type_ = type_.value_or(table && io::describe(table->type).elements == 1 ? table->type : io::dtype::bf16);
    for (const auto& [name, t] : set) add(t);
    join_experts();
    sort_by_width();
  }

  [[nodiscard]] std::span<const io::tensor_plan> tensors() const noexcept { return planned_; }
  /// Hands over the bytes of tensor i.
  void produce(std::size_t i, const io::byte_sink& sink) const {
    const io::dtype type = planned_[i].type;
    for (const io::tensor& part : parts_[i]) {
      if (type == io::dtype::i64)
        convert_ids(part, type, sink);
      else
        convert_tensor(part, type, sink);
      io::release_pages(part.bytes);
    }
  }

  [[nodiscard]] nlohmann::ordered_json config() const {
    const char* const dtype = main_type_ == io::dtype::f32 ? "float32" : main_type_ == io::dtype::f16 ? "float16" : "bfloat16";
    nlohmann::ordered_json text = text_fields(config_.text), out;
    for (const auto& [key, role] : {std::pair("bos_token_id", "bos"), std::pair("pad_token_id", "padding")})
      if (const auto id = token(role)) text[key] = *id;
    if (!assistant_) {
      out["architectures"] = nlohmann::ordered_json::array({"Gemma4ForCausalLM"});
      out["dtype"] = dtype;
      out.update(text);
      return out;
    }
    out["architectures"] = nlohmann::ordered_json::array({"Gemma4AssistantForCausalLM"});
    out["model_type"] = "gemma4_assistant";
    out["dtype"] = dtype;
    out["backbone_hidden_size"] = config_.backbone_hidden_size;
    out["use_ordered_embeddings"] = config_.centroid_head;
    if (config_.centroid_head) {
      out["num_centroids"] = config_.centroids;
      out["centroid_intermediate_top_k"] = config_.centroid_top_k;
    }
    out["tie_word_embeddings"] = config_.text.tied_head;
    out["text_config"] = text;
    return out;
  }

  [[nodiscard]] nlohmann::ordered_json generation_config() const {
    nlohmann::ordered_json out;
    if (const auto id = token("bos")) out["bos_token_id"] = *id;
    if (!config_.text.eos.empty()) out["eos_token_id"] = config_.text.eos;
    if (const auto id = token("padding")) out["pad_token_id"] = *id;
    if (!config_.text.suppress.empty()) out["suppress_tokens"] = config_.text.suppress;
    const auto number = [&](const char* key, const char* name) {
      const io::gguf_value* const value = file_.find(key);
      if (const auto n = value ? value->number() : std::nullopt) out[name] = shortest(*n);
    };
    if (const io::gguf_value* const top_k = file_.find("general.sampling.top_k"); top_k && top_k->integer())
      out["top_k"] = *top_k->integer();
    number("general.sampling.top_p", "top_p");
    number("general.sampling.min_p", "min_p");
    number("general.sampling.temp", "temperature");
    if (out.contains("temperature") || out.contains("top_k") || out.contains("top_p")) out["do_sample"] = true;
    return out;
  }

 private:
  [[nodiscard]] std::optional<std::int64_t> token(const std::string& role) const {
    const io::gguf_value* const value = file_.find("tokenizer.ggml." + role + "_token_id");
    return value ? value->integer() : std::nullopt;
  }

  void add(const io::tensor& t) {
    planned_.push_back({t.name, type_of(t), t.shape});
    parts_.push_back({t});
  }
  /// GGUF files have norms, vectors and some more in F32 whatever the rest has. They get the type of the rest back where it has all their values.
  [[nodiscard]] io::dtype type_of(const io::tensor& t) const {
    if (t.name == token_ordering_name) return io::dtype::i64;
    const bool quantised = io::describe(t.type).elements > 1;
    if (t.type == main_type_) return main_type_;
    if (t.shape.size() > 1 && (quantised || type_)) return main_type_;
    if (t.type == io::dtype::f32 && is_exact_in(t, main_type_)) return main_type_;
    return quantised ? main_type_ : t.type;
  }
  /// Experts whose two halves are apart: one tensor, for each expert the rows of the gate first.
  void join_experts() {
    constexpr std::string_view half = "experts.gate_proj", other = "experts.up_proj", whole = "experts.gate_up_proj";
    for (std::size_t i = 0; i < planned_.size(); ++i) {
      if (!planned_[i].name.ends_with(half)) continue;
      const std::string stem = planned_[i].name.substr(0, planned_[i].name.size() - half.size());
      const auto is_up = [&](const io::tensor_plan& t) { return t.name == stem + std::string(other); };
      const auto up = static_cast<std::size_t>(std::find_if(planned_.begin(), planned_.end(), is_up) - planned_.begin());
      if (up == planned_.size() || planned_[up].shape != planned_[i].shape || planned_[i].shape.size() != 3)
        throw error(error_code::tensor_mismatch,
                    file_.source + ": the experts' gate and up tensors of '" + stem + "' do not belong together");
      std::vector<io::tensor> pieces;
      const std::size_t experts = planned_[i].shape[0];
      for (std::size_t e = 0; e < experts; ++e)
        for (const std::size_t from : {i, up}) {
          io::tensor piece = parts_[from].front();
          const std::size_t bytes = piece.bytes.size() / experts;
          piece.bytes = piece.bytes.subspan(e * bytes, bytes);
          pieces.push_back(std::move(piece));
        }
      parts_[i] = std::move(pieces);
      planned_[i].name = stem + std::string(whole);
      planned_[i].shape[1] *= 2;
      planned_.erase(planned_.begin() + static_cast<std::ptrdiff_t>(up));
      parts_.erase(parts_.begin() + static_cast<std::ptrdiff_t>(up));
    }
  }

  /// Wider elements first, then by name, as the format's own library writes them: every tensor is aligned then.
  void sort_by_width() {
    std::vector<std::size_t> order(planned_.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return io::describe(planned_[a].type).bytes > io::describe(planned_[b].type).bytes;
    });
    std::vector<io::tensor_plan> planned;
    std::vector<std::vector<io::tensor>> parts;
    for (const std::size_t i : order) {
      planned.push_back(std::move(planned_[i]));
      parts.push_back(std::move(parts_[i]));
    }
    planned_ = std::move(planned);
    parts_ = std::move(parts);
  }

  const io::gguf_file& file_;
  bool assistant_;
  std::optional<io::dtype> type_;
  io::dtype main_type_ = io::dtype::bf16;
  assistant_config config_;  // of a target only .text
  std::vector<io::tensor_plan> planned_;
  std::vector<std::vector<io::tensor>> parts_;  // of a tensor, one behind the other
};

}  // namespace outrider::gemma4::detail
