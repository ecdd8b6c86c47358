// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <concepts>
#include <cstddef>

#include "outrider/config.hpp"
#include "outrider/decode/draft_acceptance.hpp"
#include "outrider/decode/draft_costs.hpp"
#include "outrider/decode/statistics.hpp"

namespace outrider {

/// What a round should draft.
struct draft_plan {
  std::size_t drafts = 0;         // at most; 0: a plain pass
  float min_confidence = 0;       // drafting ends before a token the drafter gives less; 0: never
  bool wants_confidence = false;  // the drafter shall say how sure it is, for record()
};

/// A draft-length policy decides before every round and hears what came of it. The text does not depend on it. One generation at a time.
///   plan(most)       most: what target, context and tokens still wanted allow
///   record(round)    after every pass, plain ones too
template <class P>
concept draft_length_policy = requires(P& policy, std::size_t most, const round_record& round) {
  { policy.plan(most) } -> std::same_as<draft_plan>;
  policy.record(round);
};

inline constexpr std::size_t dynamic_length = static_cast<std::size_t>(-1);

/// Always the same number of drafts: fixed<4>, or fixed(n) where n comes from a command line. 0 is plain decoding.
template <std::size_t Count = dynamic_length>
class fixed {
  static_assert(Count <= max_draft_length, "outrider: a round has at most max_draft_length drafts");

 public:
  [[nodiscard]] draft_plan plan(std::size_t most) const noexcept { return {.drafts = (std::min)(Count, most)}; }
  void record(const round_record&) const noexcept {}
};
template <>
class fixed<dynamic_length> {
 public:
  explicit fixed(std::size_t count) noexcept : count_(count) {}
  [[nodiscard]] draft_plan plan(std::size_t most) const noexcept { return {.drafts = (std::min)(count_, most)}; }
  void record(const round_record&) const noexcept {}

 private:
  std::size_t count_;
};
fixed(std::size_t)->fixed<>;

/// The rule of transformers' "heuristic" schedule: two more after a round whose drafts all held, else one fewer, at least one. It starts with
/// 4, the length the assistants are said to be trained at; transformers' 20 is meant for whole small models as assistants.
class heuristic {
 public:
  /// `start` is brought into 1 … max_draft_length.
  explicit heuristic(std::size_t start = 4) noexcept : count_(std::clamp<std::size_t>(start, 1, max_draft_length)) {}
  [[nodiscard]] draft_plan plan(std::size_t most) const noexcept { return {.drafts = (std::min)(count_, most)}; }
  void record(const round_record& round) noexcept {
    if (round.drafted == 0) return;
    count_ = round.accepted == round.drafted ? (std::min)(count_ + 2, max_draft_length) : (std::max)(count_ - 1, std::size_t{1});
  }

 private:
  std::size_t count_;
};

/// The number of drafts with the most tokens expected per second, 0 included, from running estimates: with draft i accepted with probability
/// a_i behind accepted ones, k drafts yield E = 1 + a_1 + a_1 a_2 + … tokens and cost k steps and a pass of k + 1 rows.
///   costs        from the times of the rounds; without times (0) the prior's are kept, and everything is deterministic
///   acceptance   of some 50 rounds, by position, and by the drafter's confidence where it says one. Where stopping at a low confidence
///                pays (the step is spent by then, a row of the pass is not), the plan says so
/// Where drafting does not pay, it is tried again for less than 1 % of the time; where it does, a plain pass is taken now and then, only if a
/// clock runs, to know what it costs. Does not allocate.
class adaptive {
 public:
  /// Errors: argument_invalid for costs that are not positive and finite.
  explicit adaptive(const draft_costs& prior = typical_draft_costs()) : costs_(prior) {}

  [[nodiscard]] draft_plan plan(std::size_t most) noexcept {
    most = (std::min)(most, max_draft_length);
    planned_ = {};
    probing_ = false;
    if (most == 0) return {};
    const choices best = best_of_drafting((std::min)(most, costs_.known_rows() - 1));
    if (best.expected.speed <= 1) {
      probing_ = credit_ >= best.expected.cost - best.expected.tokens;
      if (!probing_) return {};
      planned_ = best.expected;
    } else {
      if (plain_pass_is_due(best.expected.speed)) return {};
      planned_ = best.hoped;
    }
    return {planned_.drafts, running_acceptance::edges[planned_.bucket], true};
  }

  void record(const round_record& round) noexcept {
    const bool gated = round.doubted && planned_.bucket > 0;
    const std::size_t steps = round.drafted + (round.doubted ? 1 : 0);  // the doubted draft was made too
    if (probing_)
      credit_ -= planned_.cost - planned_.tokens;
    else if (round.drafted == 0)
      credit_ = (std::min)(credit_ + probe_share, most_credit);
    if (round.joint_drafts > 0)
      costs_.record_joint(round.joint_drafts + 1, round.verify_seconds);
    else
      costs_.record_pass(round.drafted + 1, round.verify_seconds), costs_.record_steps(steps, round.draft_seconds);
    if (round.drafted > 0 || gated) acceptance_.record(round, gated, planned_.bucket);
    since_plain_ = round.drafted == 0 ? 0 : since_plain_ + 1;
  }

 private:
  using running_acceptance = detail::running_acceptance;
  struct choice {
    std::size_t drafts = 0, bucket = 0;
    double tokens = 0, cost = 1;  // expected; the cost in plain passes
    double speed = 0;             // tokens / cost
  };

  struct choices {
    choice expected, hoped;  // with the costs as they seem, and as they may be
  };

  [[nodiscard]] choices best_of_drafting(std::size_t most) const noexcept {
    choices best;
    const bool gated = acceptance_.knows_confidence();
    for (std::size_t b = 0; b < (gated ? running_acceptance::buckets : 1); ++b) {
      const auto gate = gated ? acceptance_.from(b) : running_acceptance::gate{};
      double tokens = 1, all = 1;     // all: P(k drafts are proposed and hold)
      double steps = 0, reached = 1;  // steps: expected, a refused draft's too; reached: P(k drafts are proposed)
      double ended = 0, hoped = 0;    // the passes of rounds that ended at fewer than k drafts, by their probability
      for (std::size_t k = 1; k <= most; ++k) {
        ended += reached * (1 - gate.passes) * costs_.pass(k), hoped += reached * (1 - gate.passes) * costs_.hoped_pass(k);
        steps += reached, reached *= gate.passes;
        all *= gated ? gate.passes * gate.holds : acceptance_.rate(k), tokens += all;
        consider(best.expected, k, b, tokens, steps * costs_.step() + ended + reached * costs_.pass(k + 1));
        consider(best.hoped, k, b, tokens, steps * costs_.step() + hoped + reached * costs_.hoped_pass(k + 1));
      }
    }
    return best;
  }
  static void consider(choice& best, std::size_t drafts, std::size_t bucket, double tokens, double cost) noexcept {
    if (tokens > best.speed * cost) best = {drafts, bucket, tokens, cost, tokens / cost};
  }

  /// What a plain pass costs must be known, the better the less drafting gains; at a speed of S, a plain pass loses 1 - 1 / S of its time.
  [[nodiscard]] bool plain_pass_is_due(double speed) const noexcept {
    if (!costs_.timed()) return false;
    return static_cast<double>(since_plain_) >= (costs_.plain_weight() < 2 ? 4 : 64 * speed * speed);
  }

  static constexpr double probe_share = 0.006;  // of the time, for probes
  static constexpr double most_credit = 20;

  detail::running_costs costs_;
  detail::running_acceptance acceptance_;
  choice planned_;               // of the round under way
  bool probing_ = false;         // it is a probe
  double credit_ = 1;            // for probes, in plain passes
  std::size_t since_plain_ = 0;  // rounds
};

}  // namespace outrider
