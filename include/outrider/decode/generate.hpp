// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "outrider/backend/concepts.hpp"
#include "outrider/decode/sampler.hpp"
#include "outrider/decode/statistics.hpp"
#include "outrider/error.hpp"

namespace outrider {

/// A clock for decoding, in seconds from any origin.
using decode_clock = double (*)() noexcept;
[[nodiscard]] inline double steady_seconds() noexcept {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// What a text may become, and how it is written. Values that mean nothing are refused, see check().
struct generate_options {
  std::size_t max_new_tokens = 128;       // memory for all of them is taken first; 0: the prompt is processed and nothing chosen
  std::optional<std::size_t> draft = {};  // most drafts per round, 0 = plain; not given: as many as the target takes. generate() ignores it
  std::vector<token_id> eos = {};         // any of them ends the text and is its last token; one outside the vocabulary never comes
  std::vector<token_id> suppress = {};    // never chosen, never drafted
  float min_confidence = 0;               // a round's drafts end before one that the drafter gives less probability
  double time_budget = std::numeric_limits<double>::infinity();  // seconds, prompt included; looked at between passes
  std::stop_token cancel = {};                                   // from any thread; looked at between passes
  decode_clock clock = steady_seconds;                           // null: no clock is read, all times are 0 and no budget ends a text
  std::function<void(const round_record&)> on_pass = {};         // told of every pass behind the prompt
};

/// Why a text ended.
enum class finish_reason : std::uint8_t {
  max_new_tokens,  // it has as many tokens as were wanted
  end_of_text,     // its last token is one of options.eos
  stop_string,     // text_stream met one
  context_full,    // the target has no position left to process its last token in
  time_budget,     // the time is over
  cancelled,       // options.cancel, or batch_decoder::cancel()
  caller,          // a callback said stop
};
[[nodiscard]] constexpr const char* name_of(finish_reason reason) noexcept {
  constexpr const char* names[] = {"max_new_tokens", "end_of_text", "stop_string", "context_full", "time_budget", "cancelled", "caller"};
  return names[static_cast<std::size_t>(reason)];
}

/// A text that has ended.
struct generation {
  finish_reason finish = finish_reason::max_new_tokens;
  std::size_t kept = 0;  // tokens of the text that stay in the sequence: all, but for those that only a stop string needed
  statistics stats;
};

/// What a target must do to be decoded: gemma4::session, or a program's own. With n tokens known, positions 0 … n - 2 are committed between
/// passes; the last token is processed by the next pass.
///   tokens()          those at the committed positions
///   prefill(tokens)   processes and commits them; logits() is then one row, that of the last
///   verify(tokens)    processes up to max_draft() + 1 tokens, pending; logits() is then one row for each
///   commit(n)         keeps the first n >= 1 of the pending tokens, forgets the others
///   reserve(n)        takes the memory for n positions; nothing else allocates from then on
/// and may
///   prefill(tokens, go_on) -> bool   asks go_on() now and then and leaves with false if it says no
///   truncate(n) -> bool              goes back to the first n committed positions, or changes nothing
template <class T>
concept decoding_target = backend<typename T::backend_type> &&
    requires(T& target, const T& view, std::span<const token_id> tokens, std::size_t n) {
  { view.context() } -> std::same_as<context_of<typename T::backend_type>&>;
  { view.vocab_size() } -> std::convertible_to<std::size_t>;
  { view.max_draft() } -> std::convertible_to<std::size_t>;
  { view.max_positions() } -> std::convertible_to<std::size_t>;
  { view.committed() } -> std::convertible_to<std::size_t>;
  { view.tokens() } -> std::convertible_to<std::span<const token_id>>;
  { view.logits() } -> std::convertible_to<matrix_for<float, typename T::backend_type>>;
  target.reserve(n);
  target.prefill(tokens);
  target.verify(tokens);
  target.commit(n);
};

/// Refuses what no generation could carry out: argument_invalid with a sentence.
inline void check(const generate_options& options) {
  const auto refuse = [](const std::string& what) { throw error(error_code::argument_invalid, "outrider: " + what); };
  if (!(options.min_confidence >= 0 && options.min_confidence <= 1))
    refuse("a least confidence of " + std::to_string(options.min_confidence) + "; allowed: 0 to 1");
  if (!(options.time_budget >= 0)) refuse("a time budget of " + std::to_string(options.time_budget) + " seconds; allowed: 0 and more");
}

namespace detail {

/// Refuses ids outside the vocabulary.
inline void check_ids(const char* what, std::span<const token_id> ids, std::size_t vocab_size) {
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || static_cast<std::size_t>(ids[i]) >= vocab_size)
      throw error(error_code::argument_invalid, "outrider: " + std::string(what) + " token " + std::to_string(i) + " is " +
                                                    std::to_string(ids[i]) + ", allowed are 0 to " + std::to_string(vocab_size - 1));
}

/// The most drafts of a round; refuses more than the target takes.
template <class Target>
std::size_t most_drafts(const Target& target, const generate_options& options) {
  const std::size_t most = (std::min)(static_cast<std::size_t>(target.max_draft()), max_draft_length);
  if (options.draft.value_or(0) > most)
    throw error(error_code::argument_invalid, "outrider: " + std::to_string(*options.draft) +
                                                  " drafts per round asked for, this target takes up to " + std::to_string(most));
  return options.draft.value_or(most);
}

/// Refuses what this target could not carry out behind `committed` positions.
template <class Target>
void check_request(const Target& target, std::size_t committed, std::span<const token_id> prompt, const generate_options& options) {
  const auto refuse = [](const std::string& what) { throw error(error_code::argument_invalid, "outrider: " + what); };
  check(options);
  if (prompt.empty()) refuse("the prompt has no tokens; at least one is needed");
  check_ids("prompt", prompt, target.vocab_size());
  check_ids("suppressed", options.suppress, target.vocab_size());
  if (options.suppress.size() >= target.vocab_size()) refuse("all tokens of the vocabulary are suppressed; at least one must be left");
  if (prompt.size() > target.max_positions() - committed)
    throw error(error_code::context_full, "outrider: the prompt has " + std::to_string(prompt.size()) + " tokens, behind " +
                                              std::to_string(committed) + " in the cache, which is limited to " +
                                              std::to_string(target.max_positions()));
}

/// Picks a token for each row of `logits`, see sampler_for; text: everything before the last row's choice.
template <backend_tag B, sampler_for<B> Sampler>
void choose(context_of<B>& ctx, matrix_for<float, B> logits, std::span<const token_id> suppress, Sampler& sampler,
            std::span<const token_id> text, std::span<token_id> picks) {
  OUTRIDER_ASSERT(logits.rows == picks.size());
  if (!suppress.empty()) pointwise_ops<B>::mask(ctx, logits, {}, suppress.data(), suppress.size());
  sampler.template pick<B>(ctx, logits, text, picks.data());
}

/// A text on its way: the tokens known, how it is handed to the caller, and when it ends. All its memory is taken by the constructor.
///   Emit   called with every token as it is chosen; returns void, bool (false: stop) or std::optional<finish_reason> (why to stop)
template <class Emit>
class text_in_progress {
 public:
  /// committed: the tokens before the prompt; max_positions: of the target.
  text_in_progress(std::span<const token_id> committed, std::span<const token_id> prompt, std::size_t max_positions,
                   const generate_options& options, Emit& emit)
      : options_(options), emit_(emit), begin_(now()), max_positions_(max_positions), prompt_end_(committed.size() + prompt.size()) {
    tokens_.reserve(most_positions() + max_draft_length + 1);
    tokens_.insert(tokens_.end(), committed.begin(), committed.end());
    tokens_.insert(tokens_.end(), prompt.begin(), prompt.end());
    result_.stats.texts = 1;
    result_.stats.prompt_tokens = prompt.size();
  }
  text_in_progress(const text_in_progress&) = delete;
  text_in_progress& operator=(const text_in_progress&) = delete;

  /// All tokens known, those before the prompt included; behind with(), also drafts of the pass at work.
  [[nodiscard]] std::span<const token_id> tokens() const noexcept { return tokens_; }
  [[nodiscard]] std::span<const token_id> with(std::span<const token_id> drafts) {
    tokens_.insert(tokens_.end(), drafts.begin(), drafts.end());
    return tokens_;
  }
  void without_drafts(std::size_t count) noexcept { tokens_.resize(tokens_.size() - count); }

  /// Positions that the text can come to need: of the prompt, and of all tokens but the last.
  [[nodiscard]] std::size_t most_positions() const noexcept {
    return prompt_end_ + (std::min)(options_.max_new_tokens, max_positions_ - prompt_end_);
  }
  [[nodiscard]] std::size_t left() const noexcept { return options_.max_new_tokens - result_.stats.tokens; }
  [[nodiscard]] const generate_options& options() const noexcept { return options_; }
  [[nodiscard]] double now() const noexcept { return options_.clock ? options_.clock() : 0; }

  /// Delivers one token; true if the text goes on.
  bool push(token_id token) {
    tokens_.push_back(token);
    ++result_.stats.tokens;
    const std::optional<finish_reason> answer = deliver(token);
    if (std::find(options_.eos.begin(), options_.eos.end(), token) != options_.eos.end()) return finish(finish_reason::end_of_text);
    if (answer) return finish(*answer);
    if (result_.stats.tokens >= options_.max_new_tokens) return finish(finish_reason::max_new_tokens);
    return true;
  }
  /// Whether another pass may begin with `committed` positions behind it; if not, the text is at its end.
  bool may_go_on(std::size_t committed) {
    if (committed >= max_positions_) return finish(finish_reason::context_full);
    return nobody_interrupts();
  }
  /// The same in the middle of a prompt.
  bool nobody_interrupts() {
    if (options_.cancel.stop_requested()) return finish(finish_reason::cancelled);
    if (options_.clock && now() - begin_ >= options_.time_budget) return finish(finish_reason::time_budget);
    return true;
  }
  bool finish(finish_reason reason) noexcept {
    result_.finish = reason;
    return false;
  }
  void prompt_is_done() noexcept {
    decode_begin_ = now();
    is_prompt_done_ = true;
    result_.stats.prefill_seconds = decode_begin_ - begin_;
  }
  void count_pass(const round_record& record) {
    statistics& s = result_.stats;
    ++s.passes[record.drafted][record.accepted];
    s.draft_seconds += record.draft_seconds;
    s.verify_seconds += record.verify_seconds;
    if (options_.on_pass) options_.on_pass(record);
  }

  /// The end: closes the times, and drops tokens behind the text that a stop string left, if the target can.
  template <class Target>
  generation settle(Target& target) {
    if (is_prompt_done_)
      result_.stats.decode_seconds = now() - decode_begin_;
    else
      result_.stats.prefill_seconds = now() - begin_;
    result_.kept = result_.stats.tokens;
    if constexpr (requires {
                    emit_.tokens_of_text();
                    target.truncate(std::size_t{});
                  }) {
      const std::size_t kept = emit_.tokens_of_text();
      const std::size_t positions = prompt_end_ + kept - 1;
      if (result_.finish == finish_reason::stop_string && kept < result_.kept && target.truncate((std::min)(positions, target.committed())))
        result_.kept = kept;
    }
    return result_;
  }

 private:
  std::optional<finish_reason> deliver(token_id token) {
    using answer = std::invoke_result_t<Emit&, token_id>;
    static_assert(std::is_void_v<answer> || std::same_as<answer, bool> || std::same_as<answer, std::optional<finish_reason>>,
                  "outrider: the callback for tokens returns void, bool (false to stop) or std::optional<finish_reason>");
    if constexpr (std::is_void_v<answer>) {
      emit_(token);
      return std::nullopt;
    } else if constexpr (std::same_as<answer, bool>) {
      return emit_(token) ? std::nullopt : std::optional(finish_reason::caller);
    } else {
      return emit_(token);
    }
  }

  const generate_options& options_;
  Emit& emit_;
  generation result_;
  std::vector<token_id> tokens_;
  double begin_ = 0, decode_begin_ = 0;
  bool is_prompt_done_ = false;
  std::size_t max_positions_, prompt_end_;
};

/// Processes the prompt and chooses the token after it; none if the generation ends before it.
template <decoding_target Target, class Emit, class Sampler>
std::optional<token_id> start(Target& target, std::span<const token_id> prompt, text_in_progress<Emit>& text, Sampler& sampler) {
  using B = typename Target::backend_type;
  // All memory of the generation is taken here: the loop behind does not allocate.
  target.reserve(text.most_positions());
  if constexpr (requires { target.prefill(prompt, [] { return true; }); }) {
    if (!target.prefill(prompt, [&] { return text.nobody_interrupts(); })) return std::nullopt;
  } else {
    target.prefill(prompt);
  }
  token_id first = 0;
  choose<B>(target.context(), target.logits(), text.options().suppress, sampler, text.tokens(), {&first, 1});
  text.prompt_is_done();
  if (text.options().max_new_tokens == 0) return std::nullopt;
  return first;
}

}  // namespace detail

/// Plain decoding, a token per pass: the definition of the text that speculation must reproduce.
///   prompt   token ids, processed behind what the target has committed; afterwards everything but the last kept token is committed, so a
///            conversation goes on with a prompt that begins with that token
///   emit     called with every token as it is chosen; returns void, bool (false: stop) or std::optional<finish_reason> (why to stop). It may
///            throw: the target then stands at its last commit, and what goes on with it begins with the token at position committed()
/// Errors, before anything is processed: argument_invalid, context_full; out_of_memory.
template <decoding_target Target, class Emit, class Sampler = greedy>
generation generate(Target& target, std::span<const token_id> prompt, const generate_options& options, Emit&& emit, Sampler sampler = {}) {
  using B = typename Target::backend_type;
  detail::check_request(target, target.committed(), prompt, options);
  detail::text_in_progress<std::remove_reference_t<Emit>> text(target.tokens(), prompt, target.max_positions(), options, emit);
  const std::optional<token_id> first = detail::start(target, prompt, text, sampler);
  bool go_on = first && text.push(*first);
  while (go_on && text.may_go_on(target.committed())) {
    const double begin = text.now();
    token_id next = 0;
    target.verify(text.tokens().last(1));
    detail::choose<B>(target.context(), target.logits(), options.suppress, sampler, text.tokens(), {&next, 1});
    target.commit(1);
    text.count_pass({.position = text.tokens().size(), .emitted = 1, .verify_seconds = text.now() - begin});
    go_on = text.push(next);
  }
  return text.settle(target);
}

}  // namespace outrider
