// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "outrider/backend/concepts.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/core/rng.hpp"
#include "outrider/core/space_copy.hpp"
#include "outrider/decode/processors.hpp"
#include "outrider/layers/head.hpp"

namespace outrider {

/// A sampler chooses tokens from logit rows:
///   pick<B>(ctx, logits [m, V], text, out [m])       out[r] = the token behind the first text.size() - (m - 1 - r) tokens of text
/// `text` is everything before the last row's choice: the prompt, what was generated, and the drafts of the pass. The logits may be
/// overwritten. A choice depends on its row and the text before it alone, never on how rows are grouped into passes: that makes speculation
/// lossless. A sampler may allocate at its first call, not later.
///
/// A sampler that can choose on a device, without looking at the text, may also have
///   may_pick_there<B>() -> bool
///   pick_there<B>(ctx, logits [m, V], position, out [m])     out[r] = the token at position + r of the text; `out` lies in B's memory, or in
///                                                            that which both sides reach, and the host waits before it reads it
template <class S, class B>
concept sampler_for = requires(S& sampler, context_of<B>& ctx, matrix_for<float, B> logits, std::span<const token_id> text, token_id* out) {
  sampler.template pick<B>(ctx, logits, text, out);
};

template <class S, class B>
concept picks_there = requires(S& sampler, const S& unchanged, context_of<B>& ctx, matrix_for<float, B> logits, std::size_t position,
                               token_id* out) {
  { unchanged.template may_pick_there<B>() } -> std::same_as<bool>;
  sampler.template pick_there<B>(ctx, logits, position, out);
};

/// The largest logit; the lowest id on ties.
struct greedy {
  template <backend_tag B>
  void pick(context_of<B>& ctx, matrix_for<float, B> logits, std::span<const token_id> /*text*/, token_id* out) const {
    most_likely<B>(ctx, {out, logits.rows}, logits);
  }
  template <backend_tag B>
  [[nodiscard]] bool may_pick_there() const noexcept {
    return true;
  }
  template <backend_tag B>
  void pick_there(context_of<B>& ctx, matrix_for<float, B> logits, std::size_t /*position*/, token_id* out) const noexcept {
    pointwise_ops<B>::argmax(ctx, out, logits, {});
  }
};

namespace detail {

/// argmax of score + Gumbel noise, the lowest id on ties. Logarithms are taken only for tokens that may win: from −log u ≥ 1 − u follows
///   gumbel ≥ d  ⇒  1 − u ≤ exp(−d) ≤ exp(−⌊d⌋)
/// and 1 − u is the complement of the noise's word. No noise reaches 23.
class gumbel_race {
 public:
  static constexpr std::size_t out_of_reach = 23;

  /// The largest complement of a word with which a token of this score may still win, if any.
  struct chance {
    bool any = false;
    std::uint32_t complement = 0;
    [[nodiscard]] bool of(std::uint32_t word) const noexcept { return any && ~word <= complement; }
  };
  [[nodiscard]] chance chance_of(double score) const noexcept {
    const double behind = best_ - score;
    if (!(behind < double{out_of_reach})) return {};  // a NaN as well
    return {true, limits[behind > 0 ? static_cast<std::size_t>(behind) : 0]};
  }

  void enter(token_id id, double score, std::uint32_t word) noexcept {
    const double sum = score + noise::gumbel_of(word);
    if (!(sum > best_ || (sum == best_ && id < winner_))) return;
    best_ = sum;
    winner_ = id;
  }

  [[nodiscard]] token_id winner() const noexcept { return winner_; }

 private:
  /// exp(−n)·2^32, and one more for roundings: sums within reach of a winner are small, for the best score is 0.
  static constexpr std::array<std::uint32_t, out_of_reach> limits = [] {
    std::array<std::uint32_t, out_of_reach> table{};
    double power = 0x1p32;
    for (std::uint32_t& limit : table) {
      limit = power + 1 < 0x1p32 ? static_cast<std::uint32_t>(power) + 1 : ~std::uint32_t{0};
      power *= 0.36787944117144233;
    }
    return table;
  }();

  double best_ = -std::numeric_limits<double>::infinity();
  token_id winner_ = (std::numeric_limits<token_id>::max)();
};

}  // namespace detail

namespace detail {
/// Rows that lie on a device, copied to where the reference's ops read them; also the context of those. Valid until the next call of the same
/// member, which waits for the device.
class host_rows : public reference_context {
 public:
  template <backend_tag B>
  [[nodiscard]] matrix_view<float> rows(matrix_for<const float, B> x) {
    return copy(floats_, x);
  }
  /// Null stays null.
  template <backend_tag B>
  [[nodiscard]] matrix_view<token_id> ids(matrix_for<const token_id, B> x) {
    return x.data ? copy(ids_, x) : matrix_view<token_id>{};
  }

 private:
  template <class T, class Space>
  static matrix_view<T> copy(reusable<T>& room, matrix_view<const T, Space> x) {
    const matrix_view<T> here{room.first(x.rows * x.cols).data(), x.rows, x.cols, x.cols};
    copy_across(here, x);
    return here;
  }

  reusable<float> floats_;
  reusable<token_id> ids_;
};
}  // namespace detail

/// Draws tokens from the processed distribution: the token at position n is argmax of score + gumbel(seed, sequence, n, id). It is a function
/// of its row, the text before it and n, so the text is the same for every drafter, draft length, or none, and has the law of plain
/// sampling. A device whose backend has draw() chooses by itself, so that nothing but tokens is copied, unless there are penalties or
/// probabilities are asked for; otherwise logits are read on the host, and where they lie on a device, they are copied. Each member takes its
/// memory at its first call. One thread at a time; a copy draws the same.
class sampling {
 public:
  /// Errors: argument_invalid, see check(const sampling_options&).
  explicit sampling(const sampling_options& options = {}) : processor_(options), noise_(options.seed, options.sequence) {}

  [[nodiscard]] const sampling_options& options() const noexcept { return processor_.options(); }

  /// Logits [m, V] of tokens that must not come are −∞; a row without a number above −∞ gives what greedy would. Errors: out_of_memory.
  template <backend_tag B>
  void pick(context_of<B>& ctx, matrix_for<float, B> logits, std::span<const token_id> text, token_id* out) {
    OUTRIDER_ASSERT(text.size() + 1 >= logits.rows);
    if constexpr (host_accessible<space_of<B>>) {
      const std::size_t before = text.size() + 1 - logits.rows;
      for (std::size_t r = 0; r < logits.rows; ++r) processor_.penalise({logits.row(r), logits.cols}, text.first(before + r));
      pointwise_ops<B>::argmax(ctx, out, logits, {});
      if (options().temperature == 0) return;
      processor_.reserve(logits.cols);  // a drafter's coupled draw needs it later, and it is taken once
      for (std::size_t r = 0; r < logits.rows; ++r)
        out[r] = choose({logits.row(r), logits.cols}, {}, static_cast<std::size_t>(out[r]), before + r);
    } else if (may_pick_there<B>()) {
      fetch_draws<B>(ctx, logits, {}, text.size() + 1 - logits.rows, out);
    } else {
      pick<reference>(here_, here_.rows<B>(logits), text, out);
    }
  }

  /// Penalties need the text, and the host. What draws the target's tokens is decided by the options alone, so that they are the same in every
  /// pass.
  template <backend_tag B>
  [[nodiscard]] bool may_pick_there() const noexcept {
    return may_draw_there<B>() && !processor_.penalises();
  }
  template <backend_tag B>
  void pick_there(context_of<B>& ctx, matrix_for<float, B> logits, std::size_t position, token_id* out) const noexcept {
    draw_there<B>(ctx, logits, {}, position, out);
  }

  /// Whether backend B can make the coupled draws of a drafter where the logits lie.
  template <backend_tag B>
  [[nodiscard]] bool may_draw_there() const noexcept {
    return options().temperature == 0 || has_draw<B>;
  }
  /// draw() for every row of logits [m, c], in one op: out[r] is for position + r. `out` lies in B's memory, or in that which both sides reach,
  /// and the host waits before it reads it. Precondition: may_draw_there<B>().
  template <backend_tag B>
  void draw_there(context_of<B>& ctx, matrix_for<const float, B> logits, matrix_for<const token_id, B> ids, std::size_t position,
                  token_id* out) const noexcept {
    if constexpr (has_draw<B>) {
      const sampling_options& o = options();
      if (o.temperature > 0)
        return pointwise_ops<B>::draw(ctx, out, logits, ids, position, {o.temperature, o.top_k, o.top_p, o.min_p, o.seed, o.sequence});
    }
    pointwise_ops<B>::argmax(ctx, out, logits, ids);
  }

  /// The coupled draw of a drafter: its own logits [1, c], c >= 1, the same noise, temperature and filters, but no penalties. It agrees with
  /// the target's choice at that position with at least (1 − t) / (1 + t), t being the total variation distance of the two distributions.
  ///   ids           [1, c], the token of each column; null data: column c is token c
  ///   position      of the token drawn
  ///   probability   if asked for: what the distribution drawn from gives the token; at temperature 0 what the softmax gives it
  /// Errors: out_of_memory.
  template <backend_tag B>
  [[nodiscard]] token_id draw(context_of<B>& ctx, matrix_for<const float, B> logits, matrix_for<const token_id, B> ids,
                              std::size_t position, float* probability = nullptr) {
    OUTRIDER_ASSERT(logits.rows == 1 && logits.cols > 0);
    if constexpr (!host_accessible<space_of<B>>) {
      if (probability || !may_draw_there<B>())
        return draw<reference>(here_, here_.rows<B>(logits), here_.ids<B>(ids), position, probability);
      token_id drawn = 0;
      fetch_draws<B>(ctx, logits, ids, position, &drawn);
      return drawn;
    }
    const std::span<const float> row(logits.row(0), logits.cols);
    const std::span<const token_id> names = ids.data ? std::span<const token_id>(ids.row(0), ids.cols) : std::span<const token_id>{};
    token_id best = 0;
    if (options().temperature == 0) {
      pointwise_ops<B>::argmax(ctx, &best, logits, ids);
      if (probability) *probability = softmax_of(row, names, best);
      return best;
    }
    pointwise_ops<B>::argmax(ctx, &best, logits, {});
    return choose(row, names, static_cast<std::size_t>(best), position, probability);
  }

  /// The distribution a row [1, V] behind `text` is drawn from, ids rising; temperature 0: all on one token. The logits may be overwritten.
  /// Valid until the next call of any member. Errors: out_of_memory.
  template <backend_tag B>
  [[nodiscard]] std::span<const token_probability> distribution(context_of<B>& ctx, matrix_for<float, B> logits,
                                                                std::span<const token_id> text) {
    if constexpr (!host_accessible<space_of<B>>) return distribution<reference>(here_, here_.rows<B>(logits), text);
    processor_.penalise({logits.row(0), logits.cols}, text);
    return proposal<B>(ctx, logits, {});
  }

  /// The distribution draw() draws from, ids rising. Arguments as there, the rest as distribution().
  template <backend_tag B>
  [[nodiscard]] std::span<const token_probability> proposal(context_of<B>& ctx, matrix_for<const float, B> logits,
                                                            matrix_for<const token_id, B> ids) {
    OUTRIDER_ASSERT(logits.rows == 1 && logits.cols > 0);
    if constexpr (!host_accessible<space_of<B>>) return proposal<reference>(here_, here_.rows<B>(logits), here_.ids<B>(ids));
    const std::span<token_probability> list = probabilities_.first(logits.cols);
    token_id best = 0;
    pointwise_ops<B>::argmax(ctx, &best, logits, options().temperature == 0 ? ids : matrix_for<const token_id, B>{});
    if (options().temperature == 0) {
      list[0] = {best, 1};
      return list.first(1);
    }
    const std::span<const float> row(logits.row(0), logits.cols);
    const std::span<const token_id> names = ids.data ? std::span<const token_id>(ids.row(0), ids.cols) : std::span<const token_id>{};
    const auto column = static_cast<std::size_t>(best);
    if (!(row[column] > nothing)) {
      list[0] = {names.empty() ? best : names[column], 1};
      return list.first(1);
    }
    const std::span<const candidate> kept = processor_.candidates(row, names, row[column]);
    const double total = total_weight(kept);
    for (std::size_t i = 0; i < kept.size(); ++i) list[i] = {kept[i].id, std::exp(kept[i].score) / total};
    if (!names.empty())
      std::sort(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(kept.size()),
                [](const token_probability& a, const token_probability& b) { return a.id < b.id; });
    return list.first(kept.size());
  }

 private:
  static constexpr float nothing = -std::numeric_limits<float>::infinity();

  /// draw_there() into memory of the host.
  template <backend_tag B>
  void fetch_draws(context_of<B>& ctx, matrix_for<const float, B> logits, matrix_for<const token_id, B> ids, std::size_t position,
                   token_id* out) const {
    const std::span<token_id> answers = ctx.exchange();
    for (std::size_t first = 0; first < logits.rows; first += answers.size()) {
      const std::size_t count = (std::min)(answers.size(), logits.rows - first);
      draw_there<B>(ctx, logits.slice_rows(first, count), ids.data ? ids.slice_rows(first, count) : ids, position + first, answers.data());
      ctx.wait();
      std::copy_n(answers.data(), count, out + first);
    }
  }

  /// `best`: the column of the largest logit.
  [[nodiscard]] token_id choose(std::span<const float> row, std::span<const token_id> ids, std::size_t best, std::size_t position,
                                float* probability = nullptr) {
    if (!(row[best] > nothing)) {
      if (probability) *probability = 1;
      return ids.empty() ? static_cast<token_id>(best) : ids[best];
    }
    if (ids.empty() && !processor_.filters(row.size())) {
      const token_id token = race(row, best, position);
      if (probability) {
        double total = 0;
        for (const float s : row)
          if (s > nothing) total += std::exp(score_of(s, row[best], options().temperature));
        *probability =
            static_cast<float>(std::exp(score_of(row[static_cast<std::size_t>(token)], row[best], options().temperature)) / total);
      }
      return token;
    }
    const std::span<const candidate> kept = processor_.candidates(row, ids, row[best]);
    const token_id token = race(kept, position);
    if (probability) {
      const auto drawn = std::find_if(kept.begin(), kept.end(), [&](const candidate& c) { return c.id == token; });
      *probability = static_cast<float>(std::exp(drawn->score) / total_weight(kept));
    }
    return token;
  }

  /// Over all columns. The best goes first, so that most of the others are out of reach before they need noise at all.
  [[nodiscard]] token_id race(std::span<const float> row, std::size_t best, std::size_t position) const noexcept {
    const double temperature = options().temperature;
    const float largest = row[best];
    detail::gumbel_race race;
    race.enter(static_cast<token_id>(best), 0, noise_.words(position, static_cast<std::uint32_t>(best / 4)).word[best % 4]);
    for (std::size_t c = 0; c < row.size(); c += 4) {
      const std::size_t lanes = (std::min)(row.size() - c, std::size_t{4});
      float most = nothing;
      for (std::size_t l = 0; l < lanes; ++l) most = row[c + l] > most ? row[c + l] : most;
      const auto chance = race.chance_of(score_of(most, largest, temperature));
      if (!chance.any) continue;
      const philox_words words = noise_.words(position, static_cast<std::uint32_t>(c / 4));
      for (std::size_t l = 0; l < lanes; ++l)
        if (chance.of(words.word[l]) && row[c + l] > nothing)
          race.enter(static_cast<token_id>(c + l), score_of(row[c + l], largest, temperature), words.word[l]);
    }
    return race.winner();
  }

  /// Over a list. Neighbouring ids share a block of noise.
  [[nodiscard]] token_id race(std::span<const candidate> candidates, std::size_t position) const noexcept {
    detail::gumbel_race race;
    philox_words words;
    std::uint32_t block = ~std::uint32_t{0};
    for (const candidate& c : candidates) {
      const auto chance = race.chance_of(c.score);
      if (!chance.any) continue;
      const auto id = static_cast<std::uint32_t>(c.id);
      if (id / 4 != block) words = noise_.words(position, block = id / 4);
      if (chance.of(words.word[id % 4])) race.enter(c.id, c.score, words.word[id % 4]);
    }
    return race.winner();
  }

  /// The probability of token `best`, the one with the largest logit, at temperature 1.
  [[nodiscard]] static float softmax_of(std::span<const float> row, std::span<const token_id> ids, token_id best) noexcept {
    const std::size_t column =
        ids.empty() ? static_cast<std::size_t>(best) : static_cast<std::size_t>(std::find(ids.begin(), ids.end(), best) - ids.begin());
    if (!(row[column] > nothing)) return 1;
    double total = 0;
    for (const float s : row)
      if (s > nothing) total += std::exp(score_of(s, row[column], 1));
    return static_cast<float>(1 / total);
  }

  row_processor processor_;
  noise noise_;
  detail::reusable<token_probability> probabilities_;
  detail::host_rows here_;
};

}  // namespace outrider
