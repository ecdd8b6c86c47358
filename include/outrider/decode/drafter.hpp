// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <concepts>
#include <cstddef>
#include <span>

#include "outrider/gemma4/assistant.hpp"
#include "outrider/gemma4/pairing.hpp"

namespace outrider {

/// What a drafter reads of its target, stated at compile time; a target without it is refused with a sentence.
struct draft_needs {
  bool hidden = false;     // target.hidden(): [1, H], the state behind the last token's logits
  bool keys = false;       // target.keys(): the committed keys and values
  bool embedding = false;  // target.embed(out, id)
};

/// One round's question: what comes after `last`? With n tokens known, `last` is token n - 1, not yet processed by the target, and
/// positions 0 … n - 2 are committed.
struct draft_request {
  token_id last = 0;
  std::span<const token_id> eos;       // drafting ends behind one of these
  std::span<const token_id> suppress;  // never proposed
};

/// A drafter has `static constexpr draft_needs needs` and
///   propose(const Target&, const draft_request&, std::span<token_id> out) -> how many tokens it guessed, 0 … out.size()
/// Guesses may be anything in the vocabulary: they change the speed, never the text. A drafter that does not suit every target has
///   check(const Target&)                   throws error_code::pair_mismatch; called when it is joined with a target
template <class D>
concept drafter = requires {
  { D::needs } -> std::convertible_to<draft_needs>;
};
template <class D, class Target>
concept drafter_for = drafter<D> && requires(D& d, const Target& target, const draft_request& request, std::span<token_id> out) {
  { d.propose(target, request, out) } -> std::same_as<std::size_t>;
};

/// A target whose memory backend B can read.
template <class T, class B>
concept in_space_of = std::same_as<space_of<typename T::backend_type>, space_of<B>>;

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

/// Never guesses: every round is a plain step.
struct no_draft {
  static constexpr draft_needs needs{};
  template <class Target>
  std::size_t propose(const Target&, const draft_request&, std::span<token_id>) const noexcept {
    return 0;
  }
};

/// Drafts with a Gemma 4 Assistant, which reads the target's keys where they lie. Borrows the assistant and the context; one thread at a time.
template <backend_tag B>
class assistant_drafter {
 public:
  static constexpr draft_needs needs{.hidden = true, .keys = true, .embedding = true};

  /// Errors: out_of_memory.
  assistant_drafter(const gemma4::assistant<B>& assistant, context_of<B>& ctx)
      : assistant_(&assistant), ctx_(&ctx), workspace_(assistant.config()) {}
  assistant_drafter(const gemma4::assistant<B>&& assistant, context_of<B>& ctx) = delete;  // the assistant must outlive its drafter

  /// Errors: pair_mismatch if the assistant was not made for this target. A speculative_decoder asks once.
  template <class Target>
  void check(const Target& target) const {
    gemma4::check_pair(target.config(), assistant_->config());
  }

  /// Up to out.size() draft steps at one position: the first reads the embedding of `last` and the target's hidden state, each further one
  /// the draft before it and the assistant's own state. The keys stay those of the committed positions. Precondition: check(target) passed.
  template <in_space_of<B> Target>
  std::size_t propose(const Target& target, const draft_request& request, std::span<token_id> out) {
    const auto input = assistant_->input(workspace_);
    const std::size_t width = input.cols / 2;
    const auto keys = target.keys();
    matrix_for<const float, B> state = target.hidden();
    token_id token = request.last;
    for (std::size_t j = 0; j < out.size(); ++j) {
      target.embed(input.slice_cols(0, width), token);
      pointwise_ops<B>::copy(*ctx_, input.slice_cols(width, width), state);
      const candidates<B> step = assistant_->forward(*ctx_, workspace_, keys);
      if (!request.suppress.empty()) pointwise_ops<B>::mask(*ctx_, step.logits, step.ids, request.suppress.data(), request.suppress.size());
      pointwise_ops<B>::argmax(*ctx_, &token, step.logits, step.ids);
      out[j] = token;
      if (std::find(request.eos.begin(), request.eos.end(), token) != request.eos.end()) return j + 1;
      state = assistant_->state(workspace_);
    }
    return out.size();
  }

 private:
  const gemma4::assistant<B>* assistant_;
  context_of<B>* ctx_;
  typename gemma4::assistant<B>::workspace workspace_;
};

}  // namespace outrider
