// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "outrider/core/scalar.hpp"

namespace outrider::gemma4 {

enum class attention_kind : std::uint8_t { sliding = 0, full = 1 };
inline constexpr std::array attention_kinds{attention_kind::sliding, attention_kind::full};

[[nodiscard]] constexpr const char* name_of(attention_kind kind) noexcept { return kind == attention_kind::sliding ? "sliding" : "full"; }

/// Rotary embedding of one attention kind.
struct rope_parameters {
  double theta = 10000;  // base
  double fraction = 1;   // share of the head's pairs that rotate; the others keep frequency 0
  double factor = 1;     // divides every frequency

  bool operator==(const rope_parameters&) const = default;

  /// [head_dim / 2] radians per position: theta^(−2i / head_dim) / factor for i < ⌊fraction · head_dim / 2⌋, then 0. The denominator is the
  /// whole head, not its rotated share.
  [[nodiscard]] std::vector<float> frequencies(std::size_t head_dim) const {
    std::vector<float> f(head_dim / 2, 0.0f);
    const auto live = static_cast<std::size_t>(fraction * static_cast<double>(head_dim) / 2);
    for (std::size_t i = 0; i < live && i < f.size(); ++i)
      f[i] = static_cast<float>(std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim)) / factor);
    return f;
  }
};

/// What layers of one attention kind have in common.
struct attention_shape {
  std::size_t head_dim = 0;
  std::size_t kv_heads = 0;
  rope_parameters rope;
};

/// The text stack of a target or an assistant, validated: every number is consistent with every other one.
struct text_config {
  std::size_t vocab_size = 0;
  std::size_t hidden_size = 0;        // H
  std::size_t intermediate_size = 0;  // I of the dense MLP; mlp_width(layer) knows the double-wide layers
  std::size_t heads = 0;              // query heads, the same in all layers
  std::vector<attention_kind> layers;
  std::array<attention_shape, 2> attention{};  // by attention_kind
  std::size_t window = 0;                      // W: a sliding layer's query sees W positions, itself included
  bool causal = true;                          // false: queries look ahead too, which model refuses to run
  std::size_t kv_shared_layers = 0;            // the last n layers read the keys and values of an earlier one
  bool k_eq_v = false;                         // full layers: values start from the raw key projection, there is no v_proj
  bool double_wide_mlp = false;                // layers that share keys and values have twice the MLP width
  double rms_norm_eps = 1e-6;
  double softcap = 0;                  // of the final logits; 0 = none
  std::size_t ple_width = 0;           // P, per-layer embeddings; 0 = none
  std::size_t ple_vocab_size = 0;      // rows of the per-layer table
  std::size_t experts = 0;             // 0 = no mixture of experts
  std::size_t experts_per_token = 0;   // active experts of a row
  std::size_t expert_width = 0;        // I of one expert
  bool tied_head = true;               // the head is the token embedding
  std::vector<token_id> eos;           // end of text; load_model prefers those of the generation config
  std::vector<token_id> suppress;      // ids never generated, from the generation config
  std::size_t max_positions = 131072;  // informative; RoPE has no table

  [[nodiscard]] std::size_t layer_count() const noexcept { return layers.size(); }
  /// The first layer that owns no keys and values; layer_count() if all own theirs, 0 in an assistant.
  [[nodiscard]] std::size_t first_shared() const noexcept { return layers.size() - kv_shared_layers; }
  [[nodiscard]] bool owns_kv(std::size_t layer) const noexcept { return layer < first_shared(); }
  [[nodiscard]] const attention_shape& shape(attention_kind kind) const noexcept { return attention[static_cast<std::size_t>(kind)]; }
  [[nodiscard]] const attention_shape& shape_of(std::size_t layer) const noexcept { return shape(layers[layer]); }
  /// The last layer of that kind with keys and values of its own: the donor of sharing layers and of the drafter. layer_count() if there is none.
  [[nodiscard]] std::size_t donor(attention_kind kind) const noexcept {
    for (std::size_t i = first_shared(); i-- > 0;)
      if (layers[i] == kind) return i;
    return layers.size();
  }
  [[nodiscard]] std::size_t mlp_width(std::size_t layer) const noexcept {
    return double_wide_mlp && !owns_kv(layer) ? 2 * intermediate_size : intermediate_size;
  }
};

/// A target's drafter: a text stack whose layers all read the target's keys and values.
struct assistant_config {
  text_config text;
  std::size_t backbone_hidden_size = 0;  // T, hidden size of the target
  bool centroid_head = false;            // use_ordered_embeddings: the flag decides, not the presence of a centroid count
  std::size_t centroids = 0;             // C, equal clusters of the vocabulary
  std::size_t centroid_top_k = 0;        // clusters searched per draft
};

namespace detail {
// Upper limits for all readers, far above every released model and so low that the bytes of any tensor made of these sizes fit into 64 bits.
inline constexpr std::size_t most_layers = std::size_t{1} << 12, most_heads = std::size_t{1} << 16, most_width = std::size_t{1} << 20,
                             most_tokens = std::size_t{1} << 24, most_positions = (std::size_t{1} << 31) - 1;
}  // namespace detail

/// What generation_config.json adds to a model.
struct generation_config {
  std::vector<token_id> eos;       // empty if the file names none
  std::vector<token_id> suppress;  // ids never generated
};

}  // namespace outrider::gemma4
