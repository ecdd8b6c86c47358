// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "outrider/error.hpp"
#include "outrider/gemma4/block.hpp"
#include "outrider/gemma4/config.hpp"
#include "outrider/gemma4/weights.hpp"
#include "outrider/layers/head.hpp"
#include "outrider/layers/kv_cache.hpp"

namespace outrider::gemma4 {

/// The target's keys and values as its drafter reads them: those of the last sliding and the last full layer that own some. Views: nothing
/// is copied. With c positions committed, the query stands at position c and both kinds of layers hold keys 0 … c - 1.
template <class Kv, class Space>
struct shared_kv {
  std::array<kv_view<const Kv, Space>, 2> layers;  // by attention_kind
  std::array<std::size_t, 2> ends{};               // one behind the last key, by attention_kind
  std::size_t position = 0;                        // of the query, for its rotation only
};

/// The keys and values that a drafter reads of a target's cache: what is committed now, in memory that lives as long as the cache's.
template <backend_tag B, class Kv>
[[nodiscard]] shared_kv<Kv, space_of<B>> keys_of(const text_config& config, const kv_cache<B, Kv>& cache) noexcept {
  shared_kv<Kv, space_of<B>> keys;
  for (const attention_kind kind : attention_kinds) {
    const std::size_t donor = config.donor(kind);
    if (donor < config.layer_count()) keys.layers[static_cast<std::size_t>(kind)] = cache.layer(donor);
  }
  keys.ends = {cache.committed(), cache.committed()};
  keys.position = cache.committed();
  return keys;
}

/// A Gemma 4 Assistant: four layers without keys and values of their own. Immutable; see model for sharing between threads.
template <backend_tag B>
class assistant {
  static_assert(check_backend<B>());

 public:
  using backend_type = B;

  /// What a draft step writes; for one step at a time.
  struct workspace {
    scratch<float, B> input, stream, normed, state, logits;
    std::array<rope_table<B>, 2> rope;
    product_scratch<B> products;
    block_scratch<B> block;
    typename centroid_head<B>::workspace head;

    explicit workspace(const assistant_config& c)
        : input(1, 2 * c.backbone_hidden_size),
          stream(1, c.text.hidden_size),
          normed(1, c.text.hidden_size),
          state(1, c.backbone_hidden_size),
          products(1, (std::max)(2 * c.backbone_hidden_size, c.text.hidden_size)),
          block(c.text, 1) {
      for (const attention_kind kind : attention_kinds)
        rope[static_cast<std::size_t>(kind)] = rope_table<B>(1, c.text.shape(kind).head_dim);
      if (c.centroid_head)
        head = {1, c.centroids, c.centroid_top_k, c.text.vocab_size / c.centroids};
      else
        logits = {1, c.text.vocab_size};
    }
  };

  /// Finds all weights. Errors: tensor_missing, tensor_mismatch, out_of_memory.
  assistant(assistant_config config, std::shared_ptr<const io::tensor_set> tensors, const load_options& options = {})
      : config_(std::move(config)), store_(std::move(tensors), options.form) {
    const text_config& c = config_.text;
    const std::size_t T = config_.backbone_hidden_size;
    pre_projection_ = {store_.matrix("pre_projection.weight", c.hidden_size, 2 * T)};
    post_projection_ = {store_.matrix("post_projection.weight", T, c.hidden_size)};
    final_norm_ = {store_.vector("model.norm.weight", c.hidden_size), static_cast<float>(c.rms_norm_eps)};
    const char* const table = c.tied_head ? "model.embed_tokens.weight" : "lm_head.weight";
    if (config_.centroid_head)
      centroid_head_ = {linear<B>{store_.matrix("masked_embedding.centroids.weight", config_.centroids, c.hidden_size)},
                        store_.permutation("masked_embedding.token_ordering", c.vocab_size, config_.centroids),
                        store_.stored_matrix(table, c.vocab_size, c.hidden_size), config_.centroid_top_k};
    else
      dense_head_ = {linear<B>{store_.matrix(table, c.vocab_size, c.hidden_size)}, 0};  // a drafter's logits are never capped
    for (const attention_kind kind : attention_kinds) {
      const attention_shape& shape = c.shape(kind);
      frequencies_[static_cast<std::size_t>(kind)] = store_.keep(shape.rope.frequencies(shape.head_dim));
    }
    layers_.reserve(c.layer_count());
    for (std::size_t i = 0; i < c.layer_count(); ++i) layers_.push_back(load_layer(store_, "model.", c, i));
    store_.rearrange(options);
  }

  [[nodiscard]] const assistant_config& config() const noexcept { return config_; }

  /// The input row of the next step, [1, 2T]: the target's scaled embedding of the last token, then a hidden state of the target's width.
  [[nodiscard]] matrix_for<float, B> input(workspace& ws) const noexcept { return ws.input.view(1, 2 * config_.backbone_hidden_size); }
  /// The state of the last step, [1, T]: the hidden half of the next step's input.
  [[nodiscard]] matrix_for<const float, B> state(workspace& ws) const noexcept { return ws.state.view(1, config_.backbone_hidden_size); }

  /// One draft step from input(ws): candidates with their logits, and state(ws).
  ///   h = Wpre [e; s];  four layers that read the target's keys;  z = norm(h);  s' = Wpost z;  logits = z · Eᵀ
  /// All steps of a round have the same position and keys. Sliding layers see the last W + 1 keys, full ones all of them, and no layer sees the query itself.
  template <class Kv>
  candidates<B> forward(context_of<B>& ctx, workspace& ws, const shared_kv<Kv, space_of<B>>& keys) const {
    const text_config& c = config_.text;
    const auto h = ws.stream.view(1, c.hidden_size), z = ws.normed.view(1, c.hidden_size);
    const auto position = static_cast<std::int32_t>(keys.position);
    std::array<rope_rows<B>, 2> rope;
    for (std::size_t kind = 0; kind < 2; ++kind) rope[kind] = ws.rope[kind].fill(ctx, &position, 1, frequencies_[kind]);

    product_rows<B> both = ws.products.rows(input(ws));
    pre_projection_.forward(ctx, h, both, row_kind::decode);
    for (const decoder_layer<B>& layer : layers_) {
      const auto kind = static_cast<std::size_t>(layer.kind);
      std::array<attention_part<B, Kv>, 1> seen;
      seen[0].rows = 1;
      seen[0].read = keys.layers[kind];
      seen[0].window = {keys.ends[kind], layer.kind == attention_kind::sliding ? c.window + 1 : key_window::unlimited};
      layer.forward(ctx, ws.block, h, {}, rope[kind], seen, row_kind::decode, no_observer{});
    }
    const bool with_blocks =
        post_projection_.reads_blocks() || (centroid_head_ ? centroid_head_->centroids : dense_head_.projection).reads_blocks();
    product_rows<B> finals = ws.products.normed(ctx, z, final_norm_, h, with_blocks);
    post_projection_.forward(ctx, ws.state.view(1, config_.backbone_hidden_size), finals, row_kind::decode);
    if (centroid_head_) return centroid_head_->forward(ctx, ws.head, finals);
    const auto logits = ws.logits.view(1, c.vocab_size);
    dense_head_.forward(ctx, logits, finals);
    return {logits, {nullptr, 1, c.vocab_size, c.vocab_size}};
  }

  /// out [1, V]: the logits of a step over the whole vocabulary, as the reference implementation returns them: candidates as they are,
  /// every other id at the least candidate − 1. Drafting does not need them; the array is the caller's.
  void dense_logits(context_of<B>& ctx, matrix_for<float, B> out, const candidates<B>& step) const noexcept {
    if (centroid_head_)
      pointwise_ops<B>::scatter_logits(ctx, out, step.logits, step.ids);
    else
      pointwise_ops<B>::copy(ctx, out, step.logits);
  }

  /// The clusters the last step searched, [1, top_k], by falling score; empty for a dense head.
  matrix_for<const std::int32_t, B> clusters(workspace& ws) const noexcept {
    return ws.head.clusters.view(1, centroid_head_ ? config_.centroid_top_k : 0);
  }

 private:
  assistant_config config_;
  weight_store<B> store_;
  linear<B> pre_projection_, post_projection_;
  std::vector<decoder_layer<B>> layers_;
  norm<B> final_norm_;
  dense_head<B> dense_head_;
  std::optional<centroid_head<B>> centroid_head_;
  std::array<const float*, 2> frequencies_{};  // by attention_kind
};

}  // namespace outrider::gemma4
