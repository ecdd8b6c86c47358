// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "outrider/error.hpp"
#include "outrider/gemma4/config.hpp"
#include "outrider/gemma4/gguf_names.hpp"
#include "outrider/io/gguf.hpp"
#include "outrider/io/tensors.hpp"

namespace outrider::gemma4 {

namespace detail {

/// Turns the tensors of a GGUF file into those of a Hugging Face file: names and shapes change, bytes stay where they are.
class tensor_translation {
 public:
  tensor_translation(const io::gguf_file& file, const text_config& config, const assistant_config* assistant)
      : file_(file), config_(config), assistant_(assistant), scaled_(config.layer_count(), false) {}

  io::tensor_set translate() {
    const io::tensor* const ignored = assistant_ ? target_table_of(file_, assistant_->backbone_hidden_size) : nullptr;
    for (const io::tensor& t : file_.tensors)
      if (&t != ignored && t.name != rope_factors_name) add(t);
    if (!assistant_) add_layer_scalars();
    io::tensor_set set(file_.source, std::move(tensors_), file_.keep_alive);
    check_complete(set);
    return set;
  }

 private:
  /// Left in a target's file by programs that keep image and sound encoders or a drafter in it, none of which changes its text.
  static constexpr std::array<std::string_view, 5> foreign{"v.", "a.", "mm.", "mtp.", "nextn."};

  [[noreturn]] static void refuse(const io::tensor& t, const std::string& what, error_code code = error_code::tensor_mismatch) {
    throw error(code, t.file + ": tensor '" + t.name + "' " + what);
  }

  void add(const io::tensor& t) {
    auto found = known(t.name);
    if (!found || (found->assistant_only && !assistant_)) {
      const auto begins = [&](std::string_view prefix) { return t.name.starts_with(prefix); };
      if (!assistant_ && (found || std::any_of(foreign.begin(), foreign.end(), begins))) return;
      if (t.name.ends_with(".scale") || t.name.ends_with(".input_scale"))
        refuse(t, "is a scale of NVFP4 weights, which are not supported", error_code::model_unsupported);
      refuse(t, std::string("is none that a Gemma 4 ") + (assistant_ ? "assistant" : "target") + " has", error_code::model_unsupported);
    }
    if (found->layer && *found->layer >= config_.layer_count())
      refuse(t, "is there, but there are only " + std::to_string(config_.layer_count()) + " layers");
    if (!is_used(found->part))
      refuse(t, std::string("is there, but the file's keys say that the model has no ") +
                    (found->part == tensor_part::experts ? "experts" : "per-layer embeddings"));
    io::tensor renamed = t;
    renamed.name = std::move(found->internal);
    renamed.file += ", " + t.name;  // so that a message about the tensor has both names
    while (renamed.shape.size() > found->rank && renamed.shape.front() == 1) renamed.shape.erase(renamed.shape.begin());
    while (renamed.shape.size() < found->rank) renamed.shape.insert(renamed.shape.begin(), 1);
    if (found->layer && renamed.name.ends_with(".layer_scalar")) scaled_[*found->layer] = true;
    if (t.name.ends_with(".attn_qkv.weight"))
      split(t, std::move(renamed), *found->layer);
    else
      tensors_.push_back(std::move(renamed));
  }

  [[nodiscard]] bool is_used(tensor_part part) const {
    return part == tensor_part::all || (part == tensor_part::experts ? config_.experts != 0 : config_.ple_width != 0);
  }

  /// A fused projection into its parts: one behind the other, rows of q, k and v.
  void split(const io::tensor& t, io::tensor fused, std::size_t layer) {
    const attention_shape& shape = config_.shape_of(layer);
    const std::size_t q = config_.heads * shape.head_dim, kv = shape.kv_heads * shape.head_dim;
    const std::array<std::pair<const char*, std::size_t>, 3> parts{{{"q", q}, {"k", kv}, {"v", kv}}};
    std::size_t present = config_.k_eq_v && config_.layers[layer] == attention_kind::full ? 2 : 3;
    if (!config_.owns_kv(layer) && fused.shape[0] == q) present = 1;
    std::size_t rows = 0;
    for (std::size_t i = 0; i < present; ++i) rows += parts[i].second;
    if (fused.shape.size() != 2 || fused.shape[0] != rows)
      refuse(t, "has " + std::to_string(fused.shape[0]) + " rows, the configuration asks for " + std::to_string(rows));
    const std::size_t row_bytes = fused.bytes.size() / rows;
    for (std::size_t i = 0, done = 0; i < present; ++i) {
      const auto& [letter, count] = parts[i];
      io::tensor part = fused;
      part.name = "model.layers." + std::to_string(layer) + ".self_attn." + letter + "_proj.weight";
      part.shape[0] = count;
      part.bytes = fused.bytes.subspan(done * row_bytes, count * row_bytes);
      tensors_.push_back(std::move(part));
      done += count;
    }
  }

  /// Older targets have no scale of a layer's output, which then is 1.
  void add_layer_scalars() {
    static constexpr float one = 1;
    for (std::size_t i = 0; i < config_.layer_count(); ++i)
      if (!scaled_[i])
        tensors_.push_back(
            {"model.layers." + std::to_string(i) + ".layer_scalar", io::dtype::f32, {1}, std::as_bytes(std::span(&one, 1)), file_.source});
  }

  /// The model would notice what is missing too, but under another name than the file's.
  void check_complete(const io::tensor_set& set) const {
    const auto need = [&](std::string_view internal, std::string_view gguf) {
      if (!set.find(internal)) throw error(error_code::tensor_missing, file_.source + ": tensor '" + std::string(gguf) + "' is missing");
    };
    for (const tensor_names& names : model_tensor_names) {
      const bool head = names.internal == "lm_head.weight", table = names.internal == "model.embed_tokens.weight";
      if (is_used(names.part) && !(head && config_.tied_head) && !(table && assistant_ && !config_.tied_head))
        need(names.internal, names.gguf);
    }
    for (std::size_t i = 0; i < config_.layer_count(); ++i) {
      const std::string number = std::to_string(i), at = "model.layers." + number + ".";
      const bool fused_experts = set.find(at + "experts.gate_up_proj") != nullptr;
      for (const tensor_names& names : layer_tensor_names) {
        const std::string_view name = names.internal;
        const bool is_v = name == "self_attn.v_proj.weight", is_half = name == "experts.gate_proj" || name == "experts.up_proj";
        if (!is_used(names.part) || name == "self_attn.qkv_proj.weight") continue;
        if ((is_v || name == "self_attn.k_proj.weight" || name == "self_attn.k_norm.weight") && !config_.owns_kv(i)) continue;
        if (is_v && config_.k_eq_v && config_.layers[i] == attention_kind::full) continue;
        if (name == "experts.gate_up_proj" || (is_half && fused_experts)) continue;
        need(at + std::string(name), "blk." + number + "." + std::string(names.gguf));
      }
    }
    if (!assistant_) return;
    for (const scheme_tensor_names& tensor : assistant_tensor_names)
      if (tensor.internal.ends_with("_projection.weight") || assistant_->centroid_head)
        need(tensor.internal, names_of(scheme_of(file_).value_or(assistant_scheme::g)).*tensor.gguf);
  }

  const io::gguf_file& file_;
  const text_config& config_;
  const assistant_config* assistant_;
  std::vector<io::tensor> tensors_;
  std::vector<bool> scaled_;  // layers with a scale of their output
};

}  // namespace detail

/// The tensors of a target's GGUF file under their internal names, in place. Tensors of encoders and drafters are left out, and so are the
/// rotation's factors, which belong to the configuration; any other tensor the model does not read is refused.
/// Errors: tensor_missing and tensor_mismatch with the file's name of the tensor; model_unsupported; file_malformed for one that is there twice.
[[nodiscard]] inline io::tensor_set target_tensors(const io::gguf_file& file, const text_config& config) {
  return detail::tensor_translation(file, config, nullptr).translate();
}
/// The same of an assistant's file, in any naming scheme.
[[nodiscard]] inline io::tensor_set assistant_tensors(const io::gguf_file& file, const assistant_config& config) {
  return detail::tensor_translation(file, config.text, &config).translate();
}

}  // namespace outrider::gemma4
