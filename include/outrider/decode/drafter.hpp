// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <concepts>
#include <cstddef>
#include <span>
#include <utility>

#include "outrider/backend/concepts.hpp"
#include "outrider/decode/sampler.hpp"

namespace outrider {

/// What a drafter reads of its target, stated at compile time; a target without it is refused with a sentence.
struct draft_needs {
  bool hidden = false;     // target.hidden(): [1, H], the state behind the last token's logits
  bool keys = false;       // target.keys(): the committed keys and values
  bool embedding = false;  // target.embed(out, id)
};

/// One round's question: what comes after a text?
struct draft_request {
  std::span<const token_id> text;  // the n >= 1 tokens known: the target has not processed the last, positions 0 … n - 2 are committed
  std::span<const token_id> eos;   // drafting ends behind one of these
  std::span<const token_id> suppress;  // never proposed
  std::span<float> confidence = {};    // as long as `out`, or empty if nobody asks: the drafter's own probability of each token; 0: unknown
  float min_confidence = 0;            // drafting ends before a token that the drafter gives less than this,
  bool* doubted = nullptr;             // and then sets this, if somebody asks
  sampling* coupling = nullptr;        // draws tokens by the target's own noise; null: the most likely ones

  [[nodiscard]] token_id last() const noexcept { return text.back(); }
};

/// A drafter has `static constexpr draft_needs needs` and
///   propose(const Target&, const draft_request&, std::span<token_id> out) -> how many tokens it guessed, 0 … out.size()
/// and may have a `name` for traces, `static constexpr const char*`. Guesses may be anything in the vocabulary: they change the speed, never the text. A drafter that does not suit every target has
///   check(const Target&)                   throws error_code::pair_mismatch; called when it is joined with a target
/// and one that takes memory as the text grows
///   reserve(positions)                     called before a text, so that the loop does not allocate
template <class D>
concept drafter = requires {
  { D::needs } -> std::convertible_to<draft_needs>;
};
/// … and can guess for this target. propose() may throw what the target's or its own ops throw (out_of_memory at most); it should not allocate.
template <class D, class Target>
concept drafter_for = drafter<D> && requires(D& d, const Target& target, const draft_request& request, std::span<token_id> out) {
  { d.propose(target, request, out) } -> std::same_as<std::size_t>;
};

/// A drafter on a device, whose guesses need not pass through the host, may also have
///   may_draft_there(request) -> bool               whether it can do what the request asks in this way
///   propose_there(target, request, count, ids) -> how many tokens n it will have guessed, 0 … count
///       ids[1 … n] = guesses behind ids[0], all in the vocabulary; the ids lie in memory that both sides reach, and the host waits before it reads
///       them
template <class D, class Target>
concept drafts_there = !host_accessible<space_of<typename Target::backend_type>> &&
                       requires(D & d, const Target& target, const draft_request& request, std::size_t count, token_id* ids) {
  { std::as_const(d).may_draft_there(request) } -> std::same_as<bool>;
  { d.propose_there(target, request, count, ids) } -> std::same_as<std::size_t>;
};

/// A target whose memory backend B can read.
template <class T, class B>
concept in_space_of = std::same_as<space_of<typename T::backend_type>, space_of<B>>;

/// What a target may offer to drafters, see draft_needs.
template <class T>
concept provides_hidden = requires(const T& target) {
  { target.hidden() } -> std::convertible_to<matrix_for<const float, typename T::backend_type>>;
};
template <class T>
concept provides_keys = requires(const T& target) {
  target.keys().layers;
};
template <class T>
concept provides_embedding = requires(const T& target, matrix_for<float, typename T::backend_type> out, token_id id) {
  target.embed(out, id);
};

/// A target that embeds ids which only a device knows yet.
template <class T>
concept embeds_there = requires(const T& target, matrix_for<float, typename T::backend_type> out, const token_id* id) {
  target.embed_at(out, id);
};

namespace detail {
/// How many of `guesses` count: those up to and including the first that is in `eos`.
[[nodiscard]] inline std::size_t up_to_end(std::span<const token_id> guesses, std::span<const token_id> eos) noexcept {
  const auto end = std::find_first_of(guesses.begin(), guesses.end(), eos.begin(), eos.end());
  return static_cast<std::size_t>(end - guesses.begin()) + (end != guesses.end() ? 1 : 0);
}
/// How many leading guesses are tokens at all: a user's drafter may say "none" by an id outside the vocabulary.
[[nodiscard]] inline std::size_t up_to_no_token(std::span<const token_id> guesses, std::size_t vocab_size) noexcept {
  const auto is_none = [&](token_id id) { return id < 0 || static_cast<std::size_t>(id) >= vocab_size; };
  return static_cast<std::size_t>(std::find_if(guesses.begin(), guesses.end(), is_none) - guesses.begin());
}
}  // namespace detail

/// One readable sentence if drafter and target do not fit together.
template <class Drafter, class Target>
consteval bool check_drafter() {
  static_assert(drafter<Drafter>, "outrider: a drafter states what it reads of the target: static constexpr outrider::draft_needs needs");
  if constexpr (drafter<Drafter>) {
    static_assert(!Drafter::needs.hidden || provides_hidden<Target>,
                  "outrider: this drafter reads the target's hidden state, but the target has no hidden()");
    static_assert(!Drafter::needs.keys || provides_keys<Target>,
                  "outrider: this drafter reads the target's keys and values, but the target has no keys()");
    static_assert(!Drafter::needs.embedding || provides_embedding<Target>,
                  "outrider: this drafter reads the target's embeddings, but the target has no embed(out, id)");
  }
  static_assert(drafter_for<Drafter, Target>, "outrider: this drafter has no propose(target, request, out) -> std::size_t for this target");
  return true;
}

/// Who made a drafter's last proposal, for traces: what its source() says, or its name.
template <class D>
[[nodiscard]] const char* source_of(const D& d) noexcept {
  if constexpr (requires {
                  { d.source() } -> std::convertible_to<const char*>;
                }) {
    return d.source();
  } else if constexpr (requires {
                         { D::name } -> std::convertible_to<const char*>;
                       }) {
    return D::name;
  } else {
    return "drafter";
  }
}

/// Never guesses: every round is a plain step.
struct no_draft {
  static constexpr draft_needs needs{};
  static constexpr const char* name = "none";
  template <class Target>
  std::size_t propose(const Target&, const draft_request&, std::span<token_id>) const noexcept {
    return 0;
  }
};

}  // namespace outrider
