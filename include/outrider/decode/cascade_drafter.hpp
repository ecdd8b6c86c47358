// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <span>
#include <utility>

#include "outrider/config.hpp"
#include "outrider/decode/drafter.hpp"
#include "outrider/error.hpp"

namespace outrider {

namespace detail {

template <class Target, class... Drafters>
concept suits_all = (drafter_for<Drafters, Target> && ...);

template <class D>
concept has_name = requires {
  { D::name } -> std::convertible_to<const char*>;
};

}  // namespace detail

/// Asks a cheap drafter first and a better one where the first has nothing to say: n-grams before an assistant, for instance.
/// What the second reads of the target belongs to the committed text, so it does not mind rounds that it was not asked in.
/// Borrows both; one thread at a time.
template <drafter First, drafter Second>
class cascade_drafter {
 public:
  static constexpr draft_needs needs{.hidden = First::needs.hidden || Second::needs.hidden,
                                     .keys = First::needs.keys || Second::needs.keys,
                                     .embedding = First::needs.embedding || Second::needs.embedding};
  static constexpr const char* name = "cascade";

  /// What one of the two contributed: the rounds whose draft was its own, and the tokens of those.
  struct contribution {
    std::size_t rounds = 0, drafted = 0;
    bool operator==(const contribution&) const = default;
  };

  /// `min_length`: a shorter draft of `first` is dropped and `second` asked. Errors: argument_invalid if it is 0, for then `second` never is.
  cascade_drafter(First& first, Second& second, std::size_t min_length = 1) : first_(&first), second_(&second), min_length_(min_length) {
    if (min_length == 0)
      throw error(error_code::argument_invalid,
                  "outrider: a cascade with a least length of 0 never asks its second drafter; allowed are 1 or more");
  }

  /// Errors: pair_mismatch if one of the two was made for another target.
  template <class Target>
  void check(const Target& target) const {
    if constexpr (requires { first_->check(target); }) first_->check(target);
    if constexpr (requires { second_->check(target); }) second_->check(target);
  }

  void reserve([[maybe_unused]] std::size_t positions) {
    if constexpr (requires { first_->reserve(positions); }) first_->reserve(positions);
    if constexpr (requires { second_->reserve(positions); }) second_->reserve(positions);
  }

  /// The draft of `first` if it has min_length tokens or fills `out`, else that of `second`, be it shorter.
  template <detail::suits_all<First, Second> Target>
  std::size_t propose(const Target& target, const draft_request& request, std::span<token_id> out) {
    return ask_both(
        out.size(), [&] { return first_->propose(target, request, out); }, [&] { return second_->propose(target, request, out); });
  }

  /// On a device, where `second` guesses there; `first` guesses on the host, and its tokens lie where both sides reach them.
  [[nodiscard]] bool may_draft_there([[maybe_unused]] const draft_request& request) const {
    if constexpr (requires { std::as_const(*second_).may_draft_there(request); })
      return std::as_const(*second_).may_draft_there(request);
    else
      return false;
  }
  template <detail::suits_all<First, Second> Target>
    requires(drafts_there<Second, Target>)
  std::size_t propose_there(const Target& target, const draft_request& request, std::size_t count, token_id* ids) {
    return ask_both(
        count,
        [&] {
          const std::span<token_id> out(ids + 1, count);
          return detail::up_to_no_token(out.first(first_->propose(target, request, out)), target.vocab_size());
        },
        [&] { return second_->propose_there(target, request, count, ids); });
  }

  /// Whose answer the last proposal was: 0 the first, 1 the second. 0 before any.
  [[nodiscard]] std::size_t last_source() const noexcept { return last_source_; }
  /// Its name, for traces; "first" or "second" if it has none.
  [[nodiscard]] const char* source() const noexcept { return last_source_ == 0 ? label_of<First>("first") : label_of<Second>("second"); }
  /// Since construction. Precondition: source is 0 or 1.
  [[nodiscard]] contribution from(std::size_t source) const noexcept {
    OUTRIDER_ASSERT(source < 2);
    return contributions_[source];
  }

 private:
  template <class AskFirst, class AskSecond>
  std::size_t ask_both(std::size_t wanted, AskFirst ask_first, AskSecond ask_second) {
    last_source_ = 0;
    std::size_t count = ask_first();
    if (count < (std::min)(min_length_, wanted)) {
      last_source_ = 1;
      count = ask_second();
    }
    if (count != 0) {
      ++contributions_[last_source_].rounds;
      contributions_[last_source_].drafted += count;
    }
    return count;
  }

  template <class D>
  [[nodiscard]] static constexpr const char* label_of([[maybe_unused]] const char* otherwise) noexcept {
    if constexpr (detail::has_name<D>)
      return D::name;
    else
      return otherwise;
  }

  First* first_;
  Second* second_;
  std::size_t min_length_, last_source_ = 0;
  std::array<contribution, 2> contributions_{};
};

}  // namespace outrider
