// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "outrider/error.hpp"
#include "outrider/gemma4/block.hpp"
#include "outrider/gemma4/config.hpp"
#include "outrider/gemma4/weights.hpp"
#include "outrider/layers/embedding.hpp"
#include "outrider/layers/head.hpp"
#include "outrider/layers/kv_cache.hpp"

namespace outrider::gemma4 {

/// What a pass hands back: views into the workspace, valid until its next pass.
template <class B>
struct forward_result {
  matrix_for<float, B> logits;        // [wanted, V], soft-capped; may be overwritten by processors
  matrix_for<const float, B> hidden;  // [wanted, H], after the final norm: what the drafter reads
};

/// The rows of one sequence in a pass over several.
template <backend_tag B, class Kv>
struct batch_part {
  kv_cache<B, Kv>* cache = nullptr;
  std::size_t rows = 0;    // of the pass, behind those of the parts before
  std::size_t wanted = 0;  // the last so many of them yield logits and hidden states; at most rows

  /// The position of the first of the last `count` rows, when they are pending.
  [[nodiscard]] std::size_t position_of_last(std::size_t count) const noexcept { return cache->committed() + cache->pending() - count; }
};

/// Everything a pass writes besides keys and values; sized once for `max_rows` rows, of all its sequences together, of which up to
/// `max_wanted` get logits. One pass at a time.
template <class B>
struct workspace {
  matrix<std::int32_t, host_space> positions;
  id_room<B> tokens;
  matrix<float, host_space> looked_up;  // rows of a table that stays on the host
  scratch<float, B> stream, per_layer, per_layer_tokens, hidden, logits;
  std::array<rope_table<B>, 2> rope;  // by attention_kind
  product_scratch<B> products;
  block_scratch<B> block;

  workspace(const text_config& c, std::size_t max_rows, std::size_t max_wanted)
      : positions(max_rows, 1),
        tokens(max_rows),
        looked_up(host_accessible<space_of<B>> ? 0 : max_rows, c.layer_count() * c.ple_width),
        stream(max_rows, c.hidden_size),
        per_layer(max_rows, c.layer_count() * c.ple_width),
        per_layer_tokens(max_rows, c.layer_count() * c.ple_width),
        hidden(max_wanted, c.hidden_size),
        logits(max_wanted, c.vocab_size),
        products(max_rows, c.hidden_size),
        block(c, max_rows) {
    for (const attention_kind kind : attention_kinds)
      rope[static_cast<std::size_t>(kind)] = rope_table<B>(max_rows, c.shape(kind).head_dim);
  }
};

/// A Gemma 4 target: immutable, so one model may serve any number of sequences and threads at once.
template <backend_tag B>
class model {
  static_assert(check_backend<B>());

 public:
  using backend_type = B;

  /// Finds all weights. Errors: tensor_missing, tensor_mismatch, model_unsupported, out_of_memory.
  model(text_config config, std::shared_ptr<const io::tensor_set> tensors, const load_options& options = {})
      : config_(std::move(config)), store_(tensors, options.form), final_norm_{nullptr, static_cast<float>(config_.rms_norm_eps)} {
    const text_config& c = config_;
    const std::string prefix = prefix_of(*tensors);
    const std::string per_layer_name = prefix + "embed_tokens_per_layer.weight";
    const bool per_layer_on_host = store_.keeps_on_host(per_layer_name);  // asked before anything is placed
    if (c.kv_shared_layers >= c.layer_count())
      throw error(error_code::model_unsupported, store_.source() + ": all " + std::to_string(c.layer_count()) +
                                                     " layers share keys and values of others: this is a drafter, not a target");
    if (!c.causal)
      throw error(error_code::model_unsupported, store_.source() +
                                                     ": use_bidirectional_attention is \"all\", a model whose tokens look ahead does not "
                                                     "generate text; allowed: null or \"vision\"");
    const std::string table_name = prefix + "embed_tokens.weight";
    const weight<B> table =
        c.tied_head ? store_.matrix(table_name, c.vocab_size, c.hidden_size) : store_.table(table_name, c.vocab_size, c.hidden_size);
    embed_tokens_ = embedding<B>::scaled_by_root(table, c.hidden_size);
    final_norm_.weight = store_.vector(prefix + "norm.weight", c.hidden_size);
    head_ = {linear<B>{c.tied_head ? table : store_.matrix("lm_head.weight", c.vocab_size, c.hidden_size)}, static_cast<float>(c.softcap)};
    if (c.ple_width != 0) {
      const std::size_t width = c.layer_count() * c.ple_width;
      per_layer_tokens_ = per_layer_on_host
                              ? embedding<B>::on_host(store_.host_table(per_layer_name, c.ple_vocab_size, width), c.ple_width)
                              : embedding<B>::scaled_by_root(store_.table(per_layer_name, c.ple_vocab_size, width), c.ple_width);
      per_layer_projection_ = {store_.matrix(prefix + "per_layer_model_projection.weight", width, c.hidden_size)};
      per_layer_norm_ = {store_.vector(prefix + "per_layer_projection_norm.weight", c.ple_width), static_cast<float>(c.rms_norm_eps)};
    }
    for (const attention_kind kind : attention_kinds) {
      const attention_shape& shape = c.shape(kind);
      frequencies_[static_cast<std::size_t>(kind)] = store_.keep(shape.rope.frequencies(shape.head_dim));
    }
    layers_.reserve(c.layer_count());
    for (std::size_t i = 0; i < c.layer_count(); ++i) layers_.push_back(load_layer(store_, prefix, c, i));
    store_.rearrange(options);
  }

  [[nodiscard]] const text_config& config() const noexcept { return config_; }
  /// Whether any of its matrices is kept in groups, so that activations are rounded to int8 for products with it.
  [[nodiscard]] bool int8_activations() const noexcept { return store_.has_groups(); }

  /// The layers a kv_cache for this model must have: those that own keys and values, in order.
  [[nodiscard]] std::vector<kv_layer_shape> kv_layers() const {
    std::vector<kv_layer_shape> shapes;
    for (std::size_t i = 0; i < config_.first_shared(); ++i) {
      const attention_shape& shape = config_.shape_of(i);
      shapes.push_back({shape.kv_heads, shape.head_dim, config_.layers[i] == attention_kind::sliding ? config_.window : 0});
    }
    return shapes;
  }

  /// One pass over tokens [m], placed behind the positions the cache holds; their keys and values become pending in it. The last `wanted`
  /// rows yield logits and hidden states. Row r's results have the same bits whatever m and `wanted` are (for row_kind::decode).
  /// Preconditions: ids in [0, V); m within the workspace and the cache's max_rows; wanted <= m.
  /// Errors, before anything is written: context_full, argument_invalid from the cache.
  template <class Kv, class Observer = no_observer>
  forward_result<B> forward(context_of<B>& ctx, workspace<B>& ws, kv_cache<B, Kv>& cache, std::span<const token_id> tokens,
                            std::size_t wanted, row_kind rows, Observer&& observe = {}) const {
    const batch_part<B, Kv> whole{&cache, tokens.size(), wanted};
    return forward(ctx, ws, std::span(&whole, 1), tokens, rows, observe);
  }

  /// The same over rows of several sequences, in the order of `parts`: every weight is read once for all of them, and each sequence has its
  /// own positions, keys and number of rows, which may be 0. The wanted rows of all parts follow one another in the result. A row's results
  /// have the bits of a pass over its sequence alone (for row_kind::decode). An observer sees all rows, from the first layer that shares keys
  /// on the wanted ones only. Nothing is allocated where the caches have room.
  /// Preconditions: as above for every part and for the sums; tokens has the rows of all parts; no cache is there twice.
  /// Errors, before anything is written or pending in any cache: context_full, argument_invalid, out_of_memory from a cache.
  template <class Kv, class Observer = no_observer>
  forward_result<B> forward(context_of<B>& ctx, workspace<B>& ws, std::span<const batch_part<B, Kv>> parts,
                            std::span<const token_id> tokens, row_kind rows, Observer&& observe = {}) const {
    return forward(ctx, ws, parts, pass_tokens{tokens.size(), tokens, ws.tokens.put(tokens)}, rows, observe);
  }

  /// A pass over `count` tokens of one sequence that lie where B's ops read them, whatever the host knows of them, all wanted. Precondition:
  /// reads_ids_there(). The rest is as above.
  template <class Kv>
  forward_result<B> forward_there(context_of<B>& ctx, workspace<B>& ws, kv_cache<B, Kv>& cache, const token_id* ids,
                                  std::size_t count) const {
    OUTRIDER_ASSERT(reads_ids_there());
    const batch_part<B, Kv> whole{&cache, count, count};
    return forward(ctx, ws, std::span(&whole, 1), pass_tokens{count, {}, ids}, row_kind::decode, no_observer{});
  }
  /// Whether a pass needs token ids in B's memory only: no table stays on the host.
  [[nodiscard]] bool reads_ids_there() const noexcept { return !per_layer_tokens_.host_table; }

  /// The scaled embedding of one token, out [1, H]: half of a drafter's input. The id lies in B's memory.
  void embed(context_of<B>& ctx, matrix_for<float, B> out, const token_id* id) const noexcept { embed_tokens_.forward(ctx, out, id); }

 private:
  /// The tokens of a pass, on the host, if it knows them, and where ops read them.
  struct pass_tokens {
    std::size_t count;
    std::span<const token_id> here;
    const token_id* there;
  };

  template <class Kv, class Observer>
  forward_result<B> forward(context_of<B>& ctx, workspace<B>& ws, std::span<const batch_part<B, Kv>> parts, const pass_tokens& tokens,
                            row_kind rows, Observer&& observe) const {
    const text_config& c = config_;
    const std::size_t m = tokens.count;
    std::size_t wanted = 0;
    for (const auto& part : parts) {
      part.cache->prepare(part.rows);
      wanted += part.wanted;
    }
    for (const auto& part : parts) part.cache->extend(part.rows);

    bool wanted_only = false;
    std::array<rope_rows<B>, 2> rope = rotations(ctx, ws, parts, wanted_only);
    auto h = ws.stream.view(m, c.hidden_size);
    embed_tokens_.forward(ctx, h, tokens.there);
    observe(stage::embedding, 0, h);
    auto per_layer = ws.per_layer.view(m, c.layer_count() * c.ple_width);
    if (c.ple_width != 0) {
      per_layer_inputs(ctx, ws, per_layer, h, tokens, rows);
      observe(stage::per_layer_inputs, 0, per_layer);
    }

    for (std::size_t i = 0; i < c.layer_count(); ++i) {
      // From the first sharing layer on no keys are written any more, so rows that nobody wants can stop there.
      if (i == c.first_shared() && wanted != m) {
        if (wanted == 0) break;
        wanted_only = true;
        h = wanted_rows(ctx, h, parts);
        per_layer = wanted_rows(ctx, per_layer, parts);
        rope = rotations(ctx, ws, parts, wanted_only);
      }
      const attention_kind kind = c.layers[i];
      const layer_parts<Kv> keys{parts, c.owns_kv(i) ? i : c.donor(kind),
                                 kind == attention_kind::sliding ? c.window : key_window::unlimited, wanted_only};
      layers_[i].forward(ctx, ws.block, h, per_layer.slice_cols(i * c.ple_width, c.ple_width), rope[static_cast<std::size_t>(kind)], keys,
                         rows, observe);
    }

    const auto hidden = ws.hidden.view(wanted, c.hidden_size), logits = ws.logits.view(wanted, c.vocab_size);
    if (wanted != 0) {
      const auto last = wanted_only ? h : wanted_rows(ctx, h, parts);
      product_rows<B> heard = ws.products.normed(ctx, hidden, final_norm_, last, head_.projection.reads_blocks());
      head_.forward(ctx, logits, heard);
    }
    return {logits, hidden};
  }

  /// What the parts of a pass write and read in one layer, each made when it is asked for: there is no list of them to keep.
  template <class Kv>
  struct layer_parts {
    std::span<const batch_part<B, Kv>> parts;
    std::size_t layer;  // whose keys are read: itself or its donor
    std::size_t width;  // of the windows
    bool wanted_only;   // the other rows have stopped

    [[nodiscard]] std::size_t size() const noexcept { return parts.size(); }
    [[nodiscard]] attention_part<B, Kv> operator[](std::size_t p) const noexcept {
      const batch_part<B, Kv>& part = parts[p];
      const std::size_t rows = wanted_only ? part.wanted : part.rows, first = part.position_of_last(rows);
      const auto view = part.cache->layer(layer);
      return {rows, first, view, view, {first + 1, width}};
    }
  };

  /// The rotations of all rows of a pass, or of the wanted ones.
  template <class Kv>
  std::array<rope_rows<B>, 2> rotations(context_of<B>& ctx, workspace<B>& ws, std::span<const batch_part<B, Kv>> parts,
                                        bool wanted_only) const noexcept {
    const auto positions = ws.positions.view();
    std::size_t row = 0;
    for (const auto& part : parts) {
      const std::size_t rows = wanted_only ? part.wanted : part.rows, first = part.position_of_last(rows);
      for (std::size_t r = 0; r < rows; ++r) positions(row++, 0) = static_cast<std::int32_t>(first + r);
    }
    std::array<rope_rows<B>, 2> rope;
    for (std::size_t kind = 0; kind < 2; ++kind) rope[kind] = ws.rope[kind].fill(ctx, positions.data, row, frequencies_[kind]);
    return rope;
  }

  /// The wanted rows of x, which has all rows of a pass: those of the first part where they are, those of the others moved up to them.
  template <class Kv>
  static matrix_for<float, B> wanted_rows(context_of<B>& ctx, matrix_for<float, B> x, std::span<const batch_part<B, Kv>> parts) noexcept {
    const std::size_t begin = parts.front().rows - parts.front().wanted;
    std::size_t from = 0, to = begin;
    for (const auto& part : parts) {
      from += part.rows - part.wanted;
      for (std::size_t left = part.wanted; left != 0;) {
        const std::size_t count = from == to ? left : (std::min)(left, from - to);  // a copy must not overlap what it reads
        if (from != to) pointwise_ops<B>::copy(ctx, x.slice_rows(to, count), x.slice_rows(from, count));
        from += count;
        to += count;
        left -= count;
      }
    }
    return x.slice_rows(begin, to - begin);
  }

  static std::string prefix_of(const io::tensor_set& tensors) {
    for (const char* prefix : {"model.language_model.", "model."})
      if (tensors.find(std::string(prefix) + "embed_tokens.weight")) return prefix;
    throw error(error_code::tensor_missing,
                tensors.source() + ": neither 'model.embed_tokens.weight' nor 'model.language_model.embed_tokens.weight' is there");
  }

  /// out [m, L · P]: U = (norm(Wc x₀ · H^(−1/2)) + √P · Ep[id]) · 2^(−1/2), from the scaled embedding x₀ [m, H].
  void per_layer_inputs(context_of<B>& ctx, workspace<B>& ws, matrix_for<float, B> out, matrix_for<const float, B> x0,
                        const pass_tokens& ids, row_kind rows) const {
    using pointwise = pointwise_ops<B>;
    const auto tokens = ws.per_layer_tokens.view(out.rows, out.cols);
    if (per_layer_tokens_.host_table)
      per_layer_tokens_.forward_from_host(tokens, ids.here, ws.looked_up.first_rows(out.rows));
    else
      per_layer_tokens_.forward(ctx, tokens, ids.there);
    product_rows<B> embedded = ws.products.rows(x0);
    per_layer_projection_.forward(ctx, out, embedded, rows);
    pointwise::scale(ctx, out, out, static_cast<float>(1 / std::sqrt(static_cast<double>(x0.cols))));
    per_layer_norm_.forward(ctx, out.split_cols(config_.ple_width), out.split_cols(config_.ple_width));
    pointwise::add(ctx, out, out, tokens);
    pointwise::scale(ctx, out, out, static_cast<float>(std::sqrt(0.5)));
  }

  text_config config_;
  weight_store<B> store_;
  embedding<B> embed_tokens_;
  embedding<B> per_layer_tokens_;
  linear<B> per_layer_projection_;
  norm<B> per_layer_norm_;
  std::vector<decoder_layer<B>> layers_;
  norm<B> final_norm_;
  dense_head<B> head_;
  std::array<const float*, 2> frequencies_{};  // [head_dim / 2] by attention_kind
};

}  // namespace outrider::gemma4
