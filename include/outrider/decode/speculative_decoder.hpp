// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

#include "outrider/decode/acceptance.hpp"
#include "outrider/decode/drafter.hpp"
#include "outrider/decode/generate.hpp"

namespace outrider {

/// Draft, verify, accept, commit: the text of generate(), in fewer passes of the target.
///
/// With n tokens known, positions 0 … n - 2 are committed and y[n - 1] is not yet processed. A round
///   1. lets the drafter guess d1 … dk                                                          k <= draft, tokens still wanted - 1, room
///   2. processes [y[n-1], d1 … dk] in one pass; row i's logits give the target's token at position n + i, for as long as d1 … di were right
///   3. emits the target's tokens up to and including the first that differs from its draft: m drafts and one more
///   4. commits the keys of what was kept and forgets the rest
/// The drafter can change the speed, never the text. Borrows target and drafter; one thread at a time.
template <decoding_target Target, class Drafter, sampler_for<typename Target::backend_type> Sampler = greedy>
class speculative_decoder {
  static_assert(check_drafter<Drafter, Target>());

 public:
  /// Errors: pair_mismatch if the drafter was made for another target.
  speculative_decoder(Target& target, Drafter& drafter, Sampler sampler = {})
      : target_(&target), drafter_(&drafter), sampler_(std::move(sampler)) {
    if constexpr (requires { drafter.check(std::as_const(target)); }) drafter.check(std::as_const(target));
  }

  /// As generate(), with up to options.draft drafts per round. Does not allocate after the prompt. Errors: those of generate(), and
  /// argument_invalid for more drafts than the target or max_draft_length allows.
  template <class Emit>
  generation generate(std::span<const token_id> prompt, const generate_options& options, Emit&& emit) {
    detail::check_request(*target_, prompt, options, options.draft);
    generation result;
    detail::output<std::remove_reference_t<Emit>> text(options, result, emit);
    token_id last = detail::start(*target_, prompt, options, sampler_, result.stats);
    if (options.max_new_tokens == 0) return result;
    const auto begin = detail::decode_clock::now();
    bool go_on = text.push(last);
    while (go_on && (target_->committed() < target_->max_positions() || text.finish(finish_reason::context_full)))
      go_on = round(last, options, text, result.stats);
    result.stats.decode_seconds = detail::seconds_since(begin);
    return result;
  }

 private:
  /// One round; `last` goes in as y[n - 1] and comes out as the last emitted token. True if the text goes on.
  template <class Text>
  bool round(token_id& last, const generate_options& options, Text& text, statistics& stats) {
    const std::size_t n = target_->committed() + 1;
    const std::size_t wanted = (std::min)({options.draft, text.left() - 1, target_->max_positions() - n});

    auto begin = detail::decode_clock::now();
    rows_[0] = last;
    const std::span<token_id> guesses = std::span(rows_).subspan(1, wanted);
    std::size_t k =
        wanted == 0 ? 0 : drafter_->propose(std::as_const(*target_), draft_request{last, options.eos, options.suppress}, guesses);
    k = usable(guesses.first((std::min)(k, wanted)));
    stats.draft_seconds += detail::seconds_since(begin);

    begin = detail::decode_clock::now();
    target_->verify(std::span<const token_id>(rows_).first(k + 1));
    detail::choose(*target_, options.suppress, sampler_, n, std::span(picks_).first(k + 1));
    const std::size_t accepted = count_accepted(rows_.data() + 1, picks_.data(), k);
    stats.verify_seconds += detail::seconds_since(begin);

    bool go_on = true;
    std::size_t kept = 0;
    while (go_on && kept <= accepted) go_on = text.push(picks_[kept++]);
    target_->commit(kept);  // y[n - 1] and the drafts that were emitted before the last token
    ++stats.passes[k][(std::min)(accepted, kept)];
    last = picks_[kept - 1];
    return go_on;
  }

  /// Leading guesses that are tokens at all: a user's drafter may say "none" by an id outside the vocabulary.
  [[nodiscard]] std::size_t usable(std::span<const token_id> guesses) const noexcept {
    std::size_t k = 0;
    while (k < guesses.size() && guesses[k] >= 0 && static_cast<std::size_t>(guesses[k]) < target_->vocab_size()) ++k;
    return k;
  }

  Target* target_;
  Drafter* drafter_;
  [[no_unique_address]] Sampler sampler_;
  std::array<token_id, max_draft_length + 1> rows_{}, picks_{};  // [y[n-1], d1 … dk]; the target's tokens at n … n + k
};

}  // namespace outrider
