// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

#include "outrider/backend/traits.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/space_copy.hpp"
#include "outrider/core/storage.hpp"
#include "outrider/core/view.hpp"
#include "outrider/decode/drafter.hpp"
#include "outrider/gemma4/kv_mirror.hpp"

namespace outrider {

namespace detail {
/// The mirror of what Target::keys() returns, for drafters in To.
template <class Keys, class To>
struct mirror_of;
template <class Kv, class From, class To>
struct mirror_of<gemma4::shared_kv<Kv, From>, To> {
  using type = gemma4::kv_mirror<From, To, Kv>;
};
}  // namespace detail

/// A target as a drafter on backend B sees it: what it reads of the target, in the memory of B. Borrows everything; made for one round.
template <backend_tag B, class Target>
class mirrored_target {
 public:
  using backend_type = B;
  using mirror = typename detail::mirror_of<decltype(std::declval<const Target&>().keys()), space_of<B>>::type;

  /// embedding: a row [1, H] in the target's memory, to be written to.
  mirrored_target(const Target& target, const mirror& keys, matrix_for<const float, B> hidden,
                  matrix_for<float, typename Target::backend_type> embedding) noexcept
      : target_(&target), keys_(&keys), hidden_(hidden), embedding_(embedding) {}

  [[nodiscard]] decltype(auto) config() const noexcept { return target_->config(); }
  [[nodiscard]] std::size_t vocab_size() const noexcept { return target_->vocab_size(); }
  [[nodiscard]] std::size_t committed() const noexcept { return target_->committed(); }
  [[nodiscard]] std::span<const token_id> tokens() const noexcept { return target_->tokens(); }
  /// [1, H], as it was when the round began.
  [[nodiscard]] matrix_for<const float, B> hidden() const noexcept { return hidden_; }
  [[nodiscard]] auto keys() const noexcept { return keys_->keys(); }
  /// out [1, H]: looked up by the target, then copied.
  void embed(matrix_for<float, B> out, token_id id) const {
    target_->embed(embedding_, id);
    copy_across(out, embedding_);
  }

 private:
  const Target* target_;
  const mirror* keys_;
  matrix_for<const float, B> hidden_;
  matrix_for<float, typename Target::backend_type> embedding_;
};

/// Lets a drafter on backend B draft for a target whose memory B cannot read: before each round the keys and values that are newly committed
/// are copied, with the hidden state, and during it each embedding. A drafter on another backend in the same memory needs none of this.
/// For one text at a time: where several take turns, as in a batch, everything behind their common prefix is copied at every change.
/// Borrows the drafter; one thread at a time.
template <backend_tag B, class Drafter, class Target>
class mirrored_drafter {
  using from = space_of<typename Target::backend_type>;
  using view = mirrored_target<B, Target>;
  static_assert(check_drafter<Drafter, view>());

 public:
  static constexpr draft_needs needs = Drafter::needs;

  /// Takes its sizes from a target, whose sequences then are those of any session of that model and no more positions.
  /// Errors: out_of_memory.
  mirrored_drafter(Drafter& drafter, const Target& target)
      : drafter_(&drafter),
        mirror_(target.config(), target.max_positions()),
        hidden_(1, target.config().hidden_size),
        embedding_(1, target.config().hidden_size) {}

  /// Takes the memory that `positions` positions need, so that no round allocates for a full layer's keys; without it, each further block
  /// does. Errors: context_full, out_of_memory.
  void reserve(std::size_t positions) {
    if constexpr (needs.keys) mirror_.reserve(positions);
  }
  /// Forgets what was copied: to be called before a target of another model takes the place of this one.
  void clear() noexcept { mirror_.clear(); }

  /// Errors: those of the drafter.
  void check(const Target& target) const {
    const view seen = view_of(target);
    if constexpr (requires { drafter_->check(seen); }) drafter_->check(seen);
  }

  /// Errors: context_full, out_of_memory.
  std::size_t propose(const Target& target, const draft_request& request, std::span<token_id> out) {
    if constexpr (needs.keys) mirror_.update(target.keys(), target.tokens());
    if constexpr (needs.hidden) copy_across(hidden_.view(), target.hidden());
    return drafter_->propose(view_of(target), request, out);
  }

  /// Who made the last proposal, for traces; see source_of().
  [[nodiscard]] const char* source() const noexcept { return source_of(*drafter_); }
  /// The distributions the last proposal was drawn from, where the drafter keeps them.
  [[nodiscard]] decltype(auto) proposals() const requires requires(const Drafter& d) { d.proposals(); }
  { return std::as_const(*drafter_).proposals(); }

 private:
  [[nodiscard]] view view_of(const Target& target) const noexcept { return {target, mirror_, hidden_.view(), embedding_.view()}; }

  Drafter* drafter_;
  typename view::mirror mirror_;
  matrix<float, space_of<B>> hidden_;
  mutable matrix<float, from> embedding_;  // scratch
};

}  // namespace outrider
