// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "outrider/backend/concepts.hpp"
#include "outrider/decode/sampler.hpp"
#include "outrider/decode/statistics.hpp"
#include "outrider/error.hpp"

namespace outrider {

struct generate_options {
  std::size_t max_new_tokens = 128;
  std::size_t draft = 4;                // drafts per round at most; 0 = plain. generate() ignores it
  std::vector<token_id> eos = {};       // any of them ends the text and is its last token
  std::vector<token_id> suppress = {};  // never chosen, never drafted
};

enum class finish_reason : std::uint8_t { max_new_tokens, end_of_text, context_full, caller };
[[nodiscard]] constexpr const char* name_of(finish_reason reason) noexcept {
  constexpr const char* names[] = {"max_new_tokens", "end_of_text", "context_full", "caller"};
  return names[static_cast<std::size_t>(reason)];
}

struct generation {
  finish_reason finish = finish_reason::max_new_tokens;
  statistics stats;
};

/// What a target must do to be decoded: gemma4::session, or a program's own. With n tokens known, positions 0 … n - 2 are committed between
/// passes; the last token is processed by the next pass.
///   prefill(tokens)   processes and commits them; logits() is then one row, that of the last
///   verify(tokens)    processes up to max_draft() + 1 tokens, pending; logits() is then one row for each
///   commit(n)         keeps the first n >= 1 of the pending tokens, forgets the others
///   reserve(n)        takes the memory for n positions; nothing else allocates from then on
template <class T>
concept decoding_target = backend<typename T::backend_type> &&
    requires(T& target, const T& view, std::span<const token_id> tokens, std::size_t n) {
  { view.context() } -> std::same_as<context_of<typename T::backend_type>&>;
  { view.vocab_size() } -> std::convertible_to<std::size_t>;
  { view.max_draft() } -> std::convertible_to<std::size_t>;
  { view.max_positions() } -> std::convertible_to<std::size_t>;
  { view.committed() } -> std::convertible_to<std::size_t>;
  { view.logits() } -> std::convertible_to<matrix_for<float, typename T::backend_type>>;
  target.reserve(n);
  target.prefill(tokens);
  target.verify(tokens);
  target.commit(n);
};

namespace detail {

using decode_clock = std::chrono::steady_clock;
[[nodiscard]] inline double seconds_since(decode_clock::time_point start) noexcept {
  return std::chrono::duration<double>(decode_clock::now() - start).count();
}

/// Refuses what a generation could not carry out. `draft`: drafts asked for.
template <decoding_target Target>
void check_request(const Target& target, std::span<const token_id> prompt, const generate_options& options, std::size_t draft) {
  const auto refuse = [](const std::string& what) { throw error(error_code::argument_invalid, "outrider: " + what); };
  const auto check_ids = [&](const char* what, std::span<const token_id> ids) {
    for (std::size_t i = 0; i < ids.size(); ++i)
      if (ids[i] < 0 || static_cast<std::size_t>(ids[i]) >= target.vocab_size())
        refuse(std::string(what) + " token " + std::to_string(i) + " is " + std::to_string(ids[i]) + ", allowed are 0 to " +
               std::to_string(target.vocab_size() - 1));
  };
  if (prompt.empty()) refuse("the prompt has no tokens; at least one is needed");
  check_ids("prompt", prompt);
  check_ids("suppressed", options.suppress);
  if (options.suppress.size() >= target.vocab_size()) refuse("all tokens of the vocabulary are suppressed; at least one must be left");
  const std::size_t most = (std::min)(target.max_draft(), max_draft_length);
  if (draft > most) refuse(std::to_string(draft) + " drafts per round asked for, this target takes up to " + std::to_string(most));
  if (prompt.size() > target.max_positions() - target.committed())
    throw error(error_code::context_full, "outrider: the prompt has " + std::to_string(prompt.size()) + " tokens behind " +
                                              std::to_string(target.committed()) + " in the cache, which is limited to " +
                                              std::to_string(target.max_positions()));
}

/// Picks a token for each logit row of the target's last pass, whose first row stands for the token at `position`.
template <decoding_target Target, sampler_for<typename Target::backend_type> Sampler>
void choose(const Target& target, std::span<const token_id> suppress, const Sampler& sampler, std::size_t position,
            std::span<token_id> picks) {
  using B = typename Target::backend_type;
  const matrix_for<float, B> logits = target.logits();
  OUTRIDER_ASSERT(logits.rows == picks.size());
  if (!suppress.empty()) pointwise_ops<B>::mask(target.context(), logits, {}, suppress.data(), suppress.size());
  sampler.template pick<B>(target.context(), logits, position, picks.data());
}

/// The text so far: hands tokens to the caller's callback and knows when to end. A callback may return void, or false to stop.
template <class Emit>
class output {
 public:
  output(const generate_options& options, generation& result, Emit& emit) : options_(options), result_(result), emit_(emit) {}

  /// Delivers one token; true if the text goes on.
  bool push(token_id token) {
    ++result_.stats.tokens;
    bool go_on = true;
    using answer = std::invoke_result_t<Emit&, token_id>;
    static_assert(std::is_void_v<answer> || std::same_as<answer, bool>,
                  "outrider: the callback for tokens returns void, or bool: false to stop");
    if constexpr (std::is_void_v<answer>)
      emit_(token);
    else
      go_on = emit_(token);
    if (std::find(options_.eos.begin(), options_.eos.end(), token) != options_.eos.end()) return finish(finish_reason::end_of_text);
    if (!go_on) return finish(finish_reason::caller);
    if (result_.stats.tokens >= options_.max_new_tokens) return finish(finish_reason::max_new_tokens);
    return true;
  }
  bool finish(finish_reason reason) noexcept {
    result_.finish = reason;
    return false;
  }
  [[nodiscard]] std::size_t left() const noexcept { return options_.max_new_tokens - result_.stats.tokens; }

 private:
  const generate_options& options_;
  generation& result_;
  Emit& emit_;
};

/// Processes the prompt and returns the token after it.
template <decoding_target Target, class Sampler>
token_id start(Target& target, std::span<const token_id> prompt, const generate_options& options, const Sampler& sampler,
               statistics& stats) {
  const auto begin = decode_clock::now();
  // All memory of the generation is taken here: the loop behind does not allocate.
  const std::size_t room = target.max_positions() - target.committed() - prompt.size();
  target.reserve(target.committed() + prompt.size() + (std::min)(options.max_new_tokens, room));
  target.prefill(prompt);
  token_id first = 0;
  choose(target, options.suppress, sampler, target.committed(), {&first, 1});
  stats.prompt_tokens = prompt.size();
  stats.prefill_seconds = seconds_since(begin);
  return first;
}

}  // namespace detail

/// Plain decoding, a token per pass: the definition of the text that speculation must reproduce.
///   prompt   token ids, processed behind what the target has committed; afterwards everything but the last emitted token is committed, so a
///            conversation goes on with a prompt that begins with that token
///   emit     called with every token as it is chosen; returns void, or false to stop. It may throw: the target then stands at its last
///            commit, and what goes on with it begins with the token at position committed()
/// Errors, before anything is processed: argument_invalid, context_full; out_of_memory.
template <decoding_target Target, class Emit, class Sampler = greedy>
generation generate(Target& target, std::span<const token_id> prompt, const generate_options& options, Emit&& emit,
                    const Sampler& sampler = {}) {
  detail::check_request(target, prompt, options, 0);
  generation result;
  detail::output<std::remove_reference_t<Emit>> text(options, result, emit);
  token_id last = detail::start(target, prompt, options, sampler, result.stats);
  if (options.max_new_tokens == 0) return result;
  const auto begin = detail::decode_clock::now();
  while (text.push(last) && (target.committed() < target.max_positions() || text.finish(finish_reason::context_full))) {
    target.verify({&last, 1});
    detail::choose(target, options.suppress, sampler, target.committed() + 1, {&last, 1});
    target.commit(1);
    ++result.stats.passes[0][0];
  }
  result.stats.decode_seconds = result.stats.verify_seconds = detail::seconds_since(begin);
  return result;
}

}  // namespace outrider
