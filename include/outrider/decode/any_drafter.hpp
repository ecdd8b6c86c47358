// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <concepts>
#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

#include "outrider/decode/drafter.hpp"

namespace outrider {

/// Any drafter for one type of target, chosen at run time: one decoder then serves them all. Owns its drafter; one call more per round. As
/// thread-safe as that is.
template <class Target>
class any_drafter {
 public:
  static constexpr draft_needs needs{};  // those of the drafter inside were checked when it came in

  template <class Drafter>
    requires(!std::same_as<std::remove_cvref_t<Drafter>, any_drafter> && drafter<Drafter>)
  any_drafter(Drafter drafter) : drafter_(std::make_unique<holder<Drafter>>(std::move(drafter))) {
    static_assert(check_drafter<Drafter, Target>());
  }

  /// Errors: pair_mismatch, if the drafter inside asks.
  void check(const Target& target) const { drafter_->check(target); }
  void reserve(std::size_t positions) { drafter_->reserve(positions); }
  std::size_t propose(const Target& target, const draft_request& request, std::span<token_id> out) {
    return drafter_->propose(target, request, out);
  }
  /// On a device, if the drafter inside can do without the host: see drafts_there.
  [[nodiscard]] bool may_draft_there(const draft_request& request) const { return drafter_->may_draft_there(request); }
  std::size_t propose_there(const Target& target, const draft_request& request, std::size_t count, token_id* ids) {
    return drafter_->propose_there(target, request, count, ids);
  }
  /// Who made the last proposal, for traces; see source_of().
  [[nodiscard]] const char* source() const noexcept { return drafter_->source(); }

 private:
  struct base {
    virtual ~base() = default;
    virtual void check(const Target& target) const = 0;
    virtual void reserve(std::size_t positions) = 0;
    virtual std::size_t propose(const Target& target, const draft_request& request, std::span<token_id> out) = 0;
    [[nodiscard]] virtual bool may_draft_there(const draft_request& request) const = 0;
    virtual std::size_t propose_there(const Target& target, const draft_request& request, std::size_t count, token_id* ids) = 0;
    [[nodiscard]] virtual const char* source() const noexcept = 0;
  };
  template <class Drafter>
  struct holder final : base {
    Drafter drafter;
    explicit holder(Drafter d) : drafter(std::move(d)) {}
    void check([[maybe_unused]] const Target& target) const override {
      if constexpr (requires { drafter.check(target); }) drafter.check(target);
    }
    void reserve([[maybe_unused]] std::size_t positions) override {
      if constexpr (requires { drafter.reserve(positions); }) drafter.reserve(positions);
    }
    std::size_t propose(const Target& target, const draft_request& request, std::span<token_id> out) override {
      return drafter.propose(target, request, out);
    }
    [[nodiscard]] bool may_draft_there([[maybe_unused]] const draft_request& request) const override {
      if constexpr (drafts_there<Drafter, Target>)
        return drafter.may_draft_there(request);
      else
        return false;
    }
    std::size_t propose_there([[maybe_unused]] const Target& target, [[maybe_unused]] const draft_request& request,
                              [[maybe_unused]] std::size_t count, [[maybe_unused]] token_id* ids) override {
      if constexpr (drafts_there<Drafter, Target>)
        return drafter.propose_there(target, request, count, ids);
      else
        return 0;
    }
    [[nodiscard]] const char* source() const noexcept override { return source_of(drafter); }
  };
  std::unique_ptr<base> drafter_;
};

}  // namespace outrider
