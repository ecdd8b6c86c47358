// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "outrider/decode/acceptance.hpp"
#include "outrider/decode/draft_length.hpp"
#include "outrider/decode/drafter.hpp"
#include "outrider/decode/generate.hpp"

namespace outrider {

namespace detail {

/// What one round of one text works with; rows[0] is the last known token, drafts follow.
struct round_buffers {
  std::array<token_id, max_draft_length + 1> rows{}, picks{};
  std::array<float, max_draft_length> confidence{};
};

/// What a round asks a drafter, by a policy's plan; confidences aside.
template <class Sampler, class Emit>
draft_request request_for(const text_in_progress<Emit>& text, const draft_plan& plan, [[maybe_unused]] Sampler& sampler) {
  const generate_options& options = text.options();
  draft_request request{text.tokens(), options.eos, options.suppress};
  request.min_confidence = (std::max)(options.min_confidence, plan.min_confidence);
  if constexpr (std::same_as<Sampler, sampling>)
    if (sampler.options().temperature > 0) request.coupling = &sampler;
  return request;
}

/// Asks a drafter for `wanted` tokens that may follow `text`, by a policy's plan. Returns the record of the round so far; its drafts are in
/// b.rows behind the last known token.
template <class Target, class Drafter, class Sampler, class Emit>
round_record draft_round(const Target& target, Drafter& drafter, Sampler& sampler, const draft_plan& plan, std::size_t wanted,
                         const text_in_progress<Emit>& text, round_buffers& b) {
  round_record record{.position = text.tokens().size()};
  b.rows[0] = text.tokens().back();
  const double begin = text.now();
  if (wanted != 0) {
    draft_request request = request_for(text, plan, sampler);
    request.doubted = &record.doubted;
    if (plan.wants_confidence) {
      std::fill_n(b.confidence.begin(), wanted, 0.0f);
      request.confidence = std::span(b.confidence).first(wanted);
    }
    const std::span<token_id> guesses = std::span(b.rows).subspan(1, wanted);
    const std::size_t guessed = (std::min)(drafter.propose(target, request, guesses), wanted);
    record.drafted = up_to_no_token(guesses.first(guessed), target.vocab_size());
    record.confidence = std::span<const float>(request.confidence).first((std::min)(request.confidence.size(), record.drafted));
  }
  record.draft_seconds = text.now() - begin;
  return record;
}

/// Chooses the target's tokens behind a round's rows and counts the drafts that hold.
template <backend_tag B, class Drafter, class Sampler, class Emit>
std::size_t verify_round(context_of<B>& ctx, matrix_for<float, B> logits, [[maybe_unused]] Drafter& drafter, Sampler& sampler,
                         text_in_progress<Emit>& text, std::size_t drafted, round_buffers& b) {
  const std::span<const token_id> drafts = std::span(b.rows).subspan(1, drafted);
  const std::span<token_id> picks = std::span(b.picks).first(drafted + 1);
  const std::span<const token_id> with_drafts = text.with(drafts);
  if constexpr (requires { sampler.template pick_against<B>(ctx, logits, with_drafts, drafter.proposals(), picks.data()); }) {
    const auto& suppress = text.options().suppress;
    if (!suppress.empty()) pointwise_ops<B>::mask(ctx, logits, {}, suppress.data(), suppress.size());
    const std::span<const std::span<const token_probability>> proposals = drafter.proposals();
    OUTRIDER_ASSERT(proposals.size() >= drafted);
    sampler.template pick_against<B>(ctx, logits, with_drafts, proposals.first(drafted), picks.data());
  } else {
    choose<B>(ctx, logits, text.options().suppress, sampler, with_drafts, picks);
  }
  text.without_drafts(drafted);
  return count_accepted(drafts.data(), picks.data(), drafted);
}

/// Whether a round's tokens can be verified and chosen on a device in one go. Sampler and target are asked at run time too.
template <class Target, class Sampler>
concept rounds_there = !host_accessible<space_of<typename Target::backend_type>> && picks_there<Sampler, typename Target::backend_type> &&
                       requires(Target & target, const Target& view, token_id* ids, std::size_t count) {
  { view.reads_ids_there() } -> std::same_as<bool>;
  target.verify_there(ids, count);
  target.name(std::span<const token_id>());
};

/// Such a round: rows, drafts and choices lie in memory that both sides reach, and the host waits once behind it, before that only for a drafter
/// that does not draft there. What was drafted there behind a token that ends the text was verified for nothing, and is not looked at.
template <class Target, class Drafter, class Sampler, class Emit>
round_record round_there(Target& target, Drafter& drafter, Sampler& sampler, const draft_plan& plan, std::size_t wanted,
                         const text_in_progress<Emit>& text, round_buffers& b) {
  using B = typename Target::backend_type;
  auto& ctx = target.context();
  const generate_options& options = text.options();
  const std::span<token_id> exchange = ctx.exchange();
  OUTRIDER_ASSERT(2 * (wanted + 1) <= exchange.size());
  token_id* const ids = exchange.data();
  double begin = text.now();
  round_record record{.position = text.tokens().size()};
  bool drafted_there = false;
  if constexpr (drafts_there<Drafter, Target>) {
    // A plan that only wants to know how sure the drafter is does without: that would take the host between any two drafts.
    const draft_request request = request_for(text, plan, sampler);
    drafted_there = wanted != 0 && std::as_const(drafter).may_draft_there(request);
    if (drafted_there) {
      ids[0] = request.last();
      record.joint_drafts = drafter.propose_there(std::as_const(target), request, wanted, ids);
    }
  }
  if (!drafted_there) {
    record = draft_round(std::as_const(target), drafter, sampler, plan, wanted, text, b);
    std::copy_n(b.rows.begin(), record.drafted + 1, ids);
    begin = text.now();
  }
  const std::size_t drafts = (std::max)(record.drafted, record.joint_drafts), rows = drafts + 1;
  token_id* const picks = ids + rows;
  target.verify_there(ids, rows);
  if (!options.suppress.empty()) pointwise_ops<B>::mask(ctx, target.logits(), {}, options.suppress.data(), options.suppress.size());
  sampler.template pick_there<B>(ctx, target.logits(), record.position, picks);
  ctx.wait();
  std::copy_n(ids, rows, b.rows.begin());
  std::copy_n(picks, rows, b.picks.begin());
  target.name(std::span<const token_id>(b.rows).first(rows));
  record.drafted = up_to_end(std::span<const token_id>(b.rows).subspan(1, drafts), options.eos);
  record.accepted = count_accepted(b.rows.data() + 1, b.picks.data(), record.drafted);
  record.verify_seconds = text.now() - begin;
  return record;
}

}  // namespace detail

/// Draft, verify, accept, commit: the text of generate(), in fewer passes of the target.
///
/// With n tokens known, positions 0 … n - 2 are committed and y[n - 1] is not yet processed. A round
///   1. lets the drafter guess d1 … dk                              k <= what the policy plans, tokens still wanted - 1, room
///   2. processes [y[n-1], d1 … dk] in one pass; row i's logits give the target's token at position n + i, for as long as d1 … di were right
///   3. emits the target's tokens up to and including the first that differs from its draft: m drafts and one more
///   4. commits the keys of what was kept and forgets the rest
/// Drafter and policy can change the speed, never the text. (With ratio_sampling, for drafters that have proposals(), the distributions they drew
/// from, one a draft, the law of the text is the target's but the text itself is not.) What the policy learned stays from text to text. Borrows target and drafter; one
/// thread at a time.
template <decoding_target Target, class Drafter, class Sampler = greedy, draft_length_policy Length = adaptive>
class speculative_decoder {
  static_assert(check_drafter<Drafter, Target>());
  using B = typename Target::backend_type;

 public:
  /// Errors: pair_mismatch if the drafter was made for another target.
  speculative_decoder(Target& target, Drafter& drafter, Sampler sampler = Sampler(), Length length = Length())
      : target_(&target), drafter_(&drafter), sampler_(std::move(sampler)), length_(std::move(length)) {
    if constexpr (requires { drafter.check(std::as_const(target)); }) drafter.check(std::as_const(target));
  }

  [[nodiscard]] const Length& length() const noexcept { return length_; }
  /// Draws may begin anew with another seed or sequence.
  void use(Sampler sampler) { sampler_ = std::move(sampler); }

  /// As generate(). Does not allocate after the prompt. Errors: those of generate(), and argument_invalid for more drafts than the target or
  /// max_draft_length allows.
  template <class Emit>
  generation generate(std::span<const token_id> prompt, const generate_options& options, Emit&& emit) {
    detail::check_request(*target_, target_->committed(), prompt, options);
    const std::size_t most = detail::most_drafts(*target_, options);
    detail::text_in_progress<std::remove_reference_t<Emit>> text(target_->tokens(), prompt, target_->max_positions(), options, emit);
    if constexpr (requires { drafter_->reserve(text.most_positions()); }) drafter_->reserve(text.most_positions());
    const std::optional<token_id> first = detail::start(*target_, prompt, text, sampler_);
    bool go_on = first && text.push(*first);
    while (go_on && text.may_go_on(target_->committed())) go_on = round(text, most);
    return text.settle(*target_);
  }

 private:
  /// One round; true if the text goes on.
  template <class Text>
  bool round(Text& text, std::size_t most) {
    most = (std::min)({most, text.left() - 1, target_->max_positions() - text.tokens().size()});
    const draft_plan plan = length_.plan(most);
    round_record record = draft_and_verify(text, plan, (std::min)(plan.drafts, most));
    length_.record(record);

    bool go_on = true;
    std::size_t kept = 0;
    while (go_on && kept <= record.accepted) go_on = text.push(buffers_.picks[kept++]);
    target_->commit(kept);  // y[n - 1] and the drafts that were emitted before the last token
    record.accepted = (std::min)(record.accepted, kept);
    record.emitted = kept;
    text.count_pass(record);
    return go_on;
  }

  template <class Text>
  round_record draft_and_verify(Text& text, const draft_plan& plan, std::size_t wanted) {
    if constexpr (detail::rounds_there<Target, Sampler>)
      if (sampler_.template may_pick_there<B>() && std::as_const(*target_).reads_ids_there())
        return detail::round_there(*target_, *drafter_, sampler_, plan, wanted, text, buffers_);
    round_record record = detail::draft_round(std::as_const(*target_), *drafter_, sampler_, plan, wanted, text, buffers_);
    const double begin = text.now();
    target_->verify(std::span<const token_id>(buffers_.rows).first(record.drafted + 1));
    record.accepted = detail::verify_round<B>(target_->context(), target_->logits(), *drafter_, sampler_, text, record.drafted, buffers_);
    record.verify_seconds = text.now() - begin;
    return record;
  }

  Target* target_;
  Drafter* drafter_;
  [[no_unique_address]] Sampler sampler_;
  [[no_unique_address]] Length length_;
  detail::round_buffers buffers_;
};

}  // namespace outrider
