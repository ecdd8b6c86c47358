// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <span>

#include "outrider/config.hpp"
#include "outrider/core/rng.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/decode/sampler.hpp"

namespace outrider {

/// How many drafts hold: the number of leading i < count with picks[i] == drafts[i]. picks[i] is the target's choice after draft i - 1, so
/// the first difference is itself a valid token and the text is the target's own, whatever was drafted.
[[nodiscard]] OUTRIDER_HD constexpr std::size_t count_accepted(const token_id* drafts, const token_id* picks, std::size_t count) noexcept {
  std::size_t accepted = 0;
  while (accepted < count && picks[accepted] == drafts[accepted]) ++accepted;
  return accepted;
}

/// The ratio rule (Leviathan, Kalman, Matias: Fast inference from transformers via speculative decoding, 2023; Chen et al.: Accelerating
/// large language model decoding with speculative sampling, 2023): the target's token, given a draft d that was drawn from q.
///   accept · q(d) ≤ p(d): d itself; else a draw from norm(max(p − q, 0)), which never gives d
/// The result has law p, if d was drawn from exactly this q and by noise that is independent of both numbers. A d that p excludes is
/// refused even if q claims never to propose it. Where the residual is numerically 0 the draw is from p.
///   p, q           what is not listed has probability 0; ids rising; each sums to 1; p is not empty
///   accept, draw   independent, uniform in (0, 1)
[[nodiscard]] inline token_id ratio_choice(std::span<const token_probability> p, std::span<const token_probability> q, token_id d,
                                           double accept, double draw) noexcept {
  OUTRIDER_ASSERT(!p.empty());
  const auto probability = [](std::span<const token_probability> list, token_id id) {
    const auto at = std::lower_bound(list.begin(), list.end(), id, [](const token_probability& t, token_id i) { return t.id < i; });
    return at != list.end() && at->id == id ? at->probability : 0.0;
  };
  const double target = probability(p, d);
  if (target > 0 && accept * probability(q, d) <= target) return d;

  // visit(id, max(p − q, 0)) for all of p, until it says stop
  const auto each_residual = [&](auto&& visit) {
    auto other = q.begin();
    for (const token_probability& t : p) {
      while (other != q.end() && other->id < t.id) ++other;
      const double proposed = other != q.end() && other->id == t.id ? other->probability : 0.0;
      if (visit(t.id, (std::max)(t.probability - proposed, 0.0))) return;
    }
  };
  double total = 0;
  each_residual([&](token_id, double weight) {
    total += weight;
    return false;
  });
  if (!(total > 0)) {
    q = {};
    each_residual([&](token_id, double weight) {
      total += weight;
      return false;
    });
  }
  token_id chosen = p.front().id;
  double left = draw * total;
  each_residual([&](token_id id, double weight) {
    if (weight > 0) {
      chosen = id;  // the last one with any weight, should the sum come out a rounding short
      left -= weight;
    }
    return left < 0;
  });
  return chosen;
}

/// A sampler for drafters that draw from a distribution of their own and tell it: accepts Σ min(p, q) of the drafts, the most any rule can.
/// The law of the text is the target's, as sampling's; the text itself depends on the drafter.
///
/// Its numbers are functions of (seed, sequence, position), on a stream apart from sampling's. The drafter must draw with noise that is
/// independent of all of them: another seed or sequence. Drafts drawn by this sampler's own noise, as sampling::draw does, would bias the text.
class ratio_sampling {
 public:
  /// Errors: argument_invalid, see check(const sampling_options&).
  explicit ratio_sampling(const sampling_options& options) : plain_(options), noise_(options.seed, options.sequence) {}

  [[nodiscard]] const sampling_options& options() const noexcept { return plain_.options(); }

  /// Without drafts: as sampling.
  template <backend_tag B>
  void pick(context_of<B>& ctx, matrix_for<float, B> logits, std::span<const token_id> text, token_id* out) {
    plain_.pick<B>(ctx, logits, text, out);
  }

  /// As pick, but row i < k = m − 1 is decided against its draft, text[text.size() - k + i], and the distribution proposals[i] it was drawn
  /// from (k spans; see ratio_choice). The last row is a plain draw. A refused draft is never chosen again in its place (and if roundings
  /// had it that way, it is a token like any other), so count_accepted() needs nothing but `out`. Rows behind the first refused draft mean
  /// nothing: their out is −1. Errors: out_of_memory.
  template <backend_tag B>
  void pick_against(context_of<B>& ctx, matrix_for<float, B> logits, std::span<const token_id> text,
                    std::span<const std::span<const token_probability>> proposals, token_id* out) {
    OUTRIDER_ASSERT(logits.rows == proposals.size() + 1 && text.size() >= proposals.size());
    const std::size_t drafts = proposals.size(), before = text.size() - drafts;
    std::fill_n(out, logits.rows, token_id{-1});
    for (std::size_t i = 0; i < drafts; ++i) {
      const std::size_t position = before + i;
      const auto p = plain_.distribution<B>(ctx, logits.slice_rows(i, 1), text.first(position));
      out[i] = ratio_choice(p, proposals[i], text[position], noise_.uniform(position, 0), noise_.uniform(position, 1));
      if (out[i] != text[position]) return;
    }
    plain_.pick<B>(ctx, logits.slice_rows(drafts, 1), text, out + drafts);
  }

 private:
  sampling plain_;
  noise noise_;
};

}  // namespace outrider
