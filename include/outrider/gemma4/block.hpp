// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "outrider/gemma4/config.hpp"
#include "outrider/gemma4/weights.hpp"
#include "outrider/layers/attention.hpp"
#include "outrider/layers/mlp.hpp"
#include "outrider/layers/moe.hpp"

namespace outrider::gemma4 {

/// What an observer of a forward pass is shown, [m, …] each; layer-wise stages come with their layer's number.
enum class stage : std::uint8_t {
  embedding,         // [m, H] scaled token embedding
  per_layer_inputs,  // [m, L · P] as the layers use them
  attention_output,  // [m, H] output of o_proj, before its norm
  experts,           // [m, s] chosen experts (integers)
  expert_weights,    // [m, s] their weights
  layer_output,      // [m, H] after layer_scalar
};

/// The observer that watches nothing, and costs nothing.
struct no_observer {
  template <class View>
  constexpr void operator()(stage, std::size_t /*layer*/, const View&) const noexcept {}
};

/// Intermediate rows of a decoder layer, shared by all layers of a model.
template <class B>
struct block_scratch {
  scratch<float, B> normed, branch, second, ple_gate;  // [m, H] three times, [m, P]
  product_scratch<B> products;                         // of normed, of the stream, of ple_gate
  attention_scratch<B> attention;
  mlp_scratch<B> mlp;
  moe_scratch<B> moe;

  block_scratch() = default;
  block_scratch(const text_config& c, std::size_t max_rows)
      : normed(max_rows, c.hidden_size),
        branch(max_rows, c.hidden_size),
        second(max_rows, c.hidden_size),
        ple_gate(max_rows, c.ple_width),
        products(max_rows, (std::max)(c.hidden_size, c.ple_width)) {
    std::size_t q_cols = 0, kv_cols = 0, width = 0;
    for (std::size_t i = 0; i < c.layer_count(); ++i) {
      q_cols = (std::max)(q_cols, c.heads * c.shape_of(i).head_dim);
      kv_cols = (std::max)(kv_cols, c.shape_of(i).kv_heads * c.shape_of(i).head_dim);
      width = (std::max)(width, c.mlp_width(i));
    }
    attention = attention_scratch<B>(max_rows, q_cols, kv_cols);
    mlp = mlp_scratch<B>(max_rows, width);
    if (c.experts != 0) moe = moe_scratch<B>(max_rows, c.hidden_size, c.experts, c.experts_per_token, c.expert_width);
  }
};

/// One Gemma 4 decoder layer, of a target or an assistant. The forward below is the model; everything else in this file finds its weights.
template <class B>
struct decoder_layer {
  struct expert_branch {
    mixture_of_experts<B> experts;
    norm<B> pre_norm, post_norm, post_mlp_norm;  // pre_feedforward_layernorm_2, post_feedforward_layernorm_2, post_feedforward_layernorm_1
  };
  struct per_layer_branch {
    linear<B> gate, projection;  // [P, H], [H, P]
    norm<B> post_norm;
  };

  std::size_t index = 0;
  attention_kind kind = attention_kind::sliding;
  bool owns_kv = false;  // else it reads the keys and values of another layer
  norm<B> input_norm, post_attention_norm, pre_mlp_norm, post_mlp_norm;
  attention<B> self_attention;
  mlp<B> dense;
  std::optional<expert_branch> moe;
  std::optional<per_layer_branch> per_layer;
  float layer_scalar = 1;

  /// h [m, H] in place; ple [m, P] are this layer's inputs (ignored without that branch); keys: a list of attention_part for the m rows.
  ///   h ← h + norm(Attention(norm(h)))
  ///   h ← h + norm(MLP(norm(h)))                                     or, with experts, h + norm(norm(MLP(norm(h))) + norm(MoE(h)))
  ///   h ← h + norm(Wp (gelu_tanh(Wg h) ⊙ ple))                       with per-layer embeddings
  ///   h ← h · layer_scalar                                           the whole stream, with the last of these additions
  template <class Parts, class Observer>
  void forward(context_of<B>& ctx, block_scratch<B>& s, matrix_for<float, B> h, matrix_for<const float, B> ple, const rope_rows<B>& rope,
               const Parts& keys, row_kind rows, Observer&& observe) const {
    const std::size_t m = h.rows, width = h.cols;
    const auto normed = s.normed.view(m, width), branch = s.branch.view(m, width);

    product_rows<B> attended = s.products.normed(ctx, normed, input_norm, h, self_attention.reads_blocks());
    if (owns_kv) self_attention.append(ctx, s.attention, keys, attended, rope, rows);
    self_attention.attend(ctx, s.attention, branch, keys, attended, rope, rows);
    observe(stage::attention_output, index, branch);

    product_rows<B> mixed = s.products.added_and_normed(ctx, h, post_attention_norm, branch, normed, pre_mlp_norm, dense.reads_blocks());
    dense.forward(ctx, s.mlp, branch, mixed, rows);
    if (moe) {
      moe->post_mlp_norm.forward(ctx, branch, branch);
      const expert_choice<B> choice = moe->experts.route(ctx, s.moe, h, rows);  // reads the stream itself, not its norm
      observe(stage::experts, index, choice.experts);
      observe(stage::expert_weights, index, choice.weights);
      const auto second = s.second.view(m, width);
      product_rows<B> routed = s.products.normed(ctx, normed, moe->pre_norm, h, moe->experts.reads_blocks());
      moe->experts.forward(ctx, s.moe, second, routed, choice);
      moe->post_norm.add_to(ctx, branch, second);
    }

    if (per_layer) {
      const auto gate = s.ple_gate.view(m, ple.cols);
      product_rows<B> stream = s.products.added(ctx, h, post_mlp_norm, branch, per_layer->gate.reads_blocks());
      per_layer->gate.forward(ctx, gate, stream, rows);
      product_rows<B> gated = s.products.gated(ctx, gate, ple, per_layer->projection.reads_blocks());
      per_layer->projection.forward(ctx, branch, gated, rows);
      per_layer->post_norm.add_to(ctx, h, branch, layer_scalar);
    } else {
      post_mlp_norm.add_to(ctx, h, branch, layer_scalar);
    }
    observe(stage::layer_output, index, h);
  }
};

/// Finds the weights of layer i; names begin with `prefix`, "model." for instance. Layers that share keys and values have no k_proj, v_proj and k_norm; where a file carries them they are dead.
template <class B>
decoder_layer<B> load_layer(weight_store<B>& store, const std::string& prefix, const text_config& c, std::size_t i) {
  const auto eps = static_cast<float>(c.rms_norm_eps);
  const std::string at = prefix + "layers." + std::to_string(i) + ".";
  const std::size_t H = c.hidden_size, P = c.ple_width, width = c.mlp_width(i);
  const auto [head_dim, kv_heads, rope] = c.shape_of(i);
  const auto norm_at = [&](const char* name, std::size_t n) { return norm<B>{store.vector(at + name + ".weight", n), eps}; };
  const auto linear_at = [&](const char* name, std::size_t out, std::size_t in) {
    return linear<B>{store.matrix(at + name + ".weight", out, in)};
  };

  decoder_layer<B> layer;
  layer.index = i;
  layer.kind = c.layers[i];
  layer.owns_kv = c.owns_kv(i);
  layer.input_norm = norm_at("input_layernorm", H);
  layer.post_attention_norm = norm_at("post_attention_layernorm", H);
  layer.pre_mlp_norm = norm_at("pre_feedforward_layernorm", H);
  layer.post_mlp_norm = norm_at("post_feedforward_layernorm", H);
  layer.layer_scalar = store.scalar(at + "layer_scalar");

  attention<B>& a = layer.self_attention;
  a.heads = c.heads;
  a.kv_heads = kv_heads;
  a.head_dim = head_dim;
  a.k_eq_v = c.k_eq_v && layer.kind == attention_kind::full;
  a.q_proj = linear_at("self_attn.q_proj", c.heads * head_dim, H);
  a.o_proj = linear_at("self_attn.o_proj", H, c.heads * head_dim);
  a.q_norm = norm_at("self_attn.q_norm", head_dim);
  if (layer.owns_kv) {
    a.k_proj = linear_at("self_attn.k_proj", kv_heads * head_dim, H);
    if (!a.k_eq_v) a.v_proj = linear_at("self_attn.v_proj", kv_heads * head_dim, H);
    a.k_norm = norm_at("self_attn.k_norm", head_dim);
  }

  const std::array<named_rows, 2> gate_and_up{{{at + "mlp.gate_proj.weight", width}, {at + "mlp.up_proj.weight", width}}};
  if (const auto both = store.joined(gate_and_up, H))
    layer.dense.gate_up = {*both};
  else
    layer.dense.gate_up = linear_at("mlp.gate_proj", width, H), layer.dense.up = linear_at("mlp.up_proj", width, H);
  layer.dense.down = linear_at("mlp.down_proj", H, width);
  layer.dense.width = width;

  if (c.experts != 0) {
    auto& moe = layer.moe.emplace();
    moe.pre_norm = norm_at("pre_feedforward_layernorm_2", H);
    moe.post_norm = norm_at("post_feedforward_layernorm_2", H);
    moe.post_mlp_norm = norm_at("post_feedforward_layernorm_1", H);
    mixture_of_experts<B>& e = moe.experts;
    e.router_norm = {store.vector(at + "router.scale", H), eps};
    e.router_factor = static_cast<float>(1 / std::sqrt(static_cast<double>(H)));
    e.router = linear_at("router.proj", c.experts, H);
    e.per_expert_scale = store.vector(at + "router.per_expert_scale", c.experts);
    if (store.has(at + "experts.gate_proj")) {  // some GGUF files have the halves apart
      e.gate_up = store.stacked(at + "experts.gate_proj", c.experts, c.expert_width, H);
      e.up = store.stacked(at + "experts.up_proj", c.experts, c.expert_width, H);
    } else {
      e.gate_up = store.stacked(at + "experts.gate_up_proj", c.experts, 2 * c.expert_width, H);
    }
    e.down = store.stacked(at + "experts.down_proj", c.experts, H, c.expert_width);
    e.experts = c.experts;
    e.per_token = c.experts_per_token;
    e.width = c.expert_width;
  }

  if (P != 0)
    layer.per_layer = {linear_at("per_layer_input_gate", P, H), linear_at("per_layer_projection", H, P),
                       norm_at("post_per_layer_input_norm", H)};
  return layer;
}

}  // namespace outrider::gemma4
