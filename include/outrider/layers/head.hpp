// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>

#include "outrider/layers/linear.hpp"
#include "outrider/layers/scratch.hpp"

namespace outrider {

/// Logits of the whole vocabulary: softcap(E y).
template <class B>
struct dense_head {
  linear<B> projection;  // [V, H], usually the token embedding, without its factor
  float softcap = 0;     // 0 = none

  /// logits [m, V] from y [m, H], the stream after the final norm. Always row-exact: the rows of a prompt that get logits are decoded rows.
  void forward(context_of<B>& ctx, matrix_for<float, B> logits, product_rows<B>& y) const noexcept {
    projection.forward(ctx, logits, y, row_kind::decode);
    if (softcap != 0) pointwise_ops<B>::softcap(ctx, logits, logits, softcap);
  }
};

/// Candidate ids of some rows and their logits.
template <class B>
struct candidates {
  matrix_for<float, B> logits;        // [m, c]
  matrix_for<const token_id, B> ids;  // [m, c]; null data: column c is token c
};

/// out [m], on the host = the ids of the largest values of x [m, n], as pointwise_ops' argmax gives them; waits for a device. Errors: what
/// went wrong there with any op before.
template <backend_tag B>
void most_likely(context_of<B>& ctx, std::span<token_id> out, matrix_for<const float, B> x, matrix_for<const token_id, B> ids = {}) {
  OUTRIDER_ASSERT(out.size() == x.rows);
  if constexpr (host_accessible<space_of<B>>) {
    pointwise_ops<B>::argmax(ctx, out.data(), x, ids);
  } else {
    const std::span<token_id> answers = ctx.exchange();
    for (std::size_t first = 0; first < x.rows;) {
      const std::size_t count = (std::min)(answers.size(), x.rows - first);
      pointwise_ops<B>::argmax(ctx, answers.data(), x.slice_rows(first, count), ids.data ? ids.slice_rows(first, count) : ids);
      ctx.wait();
      std::copy_n(answers.data(), count, out.data() + first);
      first += count;
    }
  }
}

/// A sparse head: clusters of tokens are scored by their centroids and only the best clusters' tokens get a logit.
template <class B>
struct centroid_head {
  linear<B> centroids;                     // [C, H]
  matrix_for<const token_id, B> ordering;  // [C, V / C]: the ids of each cluster
  stored_weight<B> projection;             // [V, H] in vocabulary order, as stored: single rows are read
  std::size_t top_k = 0;                   // clusters kept

  /// Scratch for `max_rows` rows: what forward() returns points into it.
  struct workspace {
    scratch<float, B> scores, logits;
    scratch<std::int32_t, B> clusters;
    scratch<token_id, B> ids;

    workspace() = default;
    workspace(std::size_t max_rows, std::size_t cluster_count, std::size_t kept, std::size_t cluster_size)
        : scores(max_rows, cluster_count),
          logits(max_rows, kept * cluster_size),
          clusters(max_rows, kept),
          ids(max_rows, kept * cluster_size) {}
  };

  /// The candidates of y [m, H]; their clusters, by falling score, stay in s.clusters as [m, top_k].
  candidates<B> forward(context_of<B>& ctx, workspace& s, product_rows<B>& y) const noexcept {
    const auto scores = s.scores.view(y.count(), ordering.rows);
    const auto clusters = s.clusters.view(y.count(), top_k);
    const auto ids = s.ids.view(y.count(), top_k * ordering.cols);
    const auto logits = s.logits.view(y.count(), top_k * ordering.cols);
    centroids.forward(ctx, scores, y, row_kind::decode);
    pointwise_ops<B>::top_k(ctx, clusters, scores);
    pointwise_ops<B>::gather_ids(ctx, ids, ordering, clusters);
    std::visit([&]<class W>(const weight_view<W, space_of<B>>& w) { linear_ops<B, W>::gathered_matmul(ctx, logits, y.floats(), w, ids); },
               projection);
    return {logits, ids};
  }
};

}  // namespace outrider
