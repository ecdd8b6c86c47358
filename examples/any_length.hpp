// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// --draft of speculate.cpp and chat.cpp: a draft-length policy chosen at run time.
#pragma once
#include <cstddef>
#include <optional>
#include <variant>

#include "outrider/decode/calibrate.hpp"
#include "outrider/decode/draft_length.hpp"

struct any_length {
  std::variant<outrider::adaptive, outrider::fixed<>> policy;

  outrider::draft_plan plan(std::size_t most) {
    return std::visit([&](auto& p) { return p.plan(most); }, policy);
  }
  void record(const outrider::round_record& round) {
    std::visit([&](auto& p) { p.record(round); }, policy);
  }
};

/// As many drafts as --draft says; without a number as many as pay here, which is measured first: `target` must be empty.
template <class Target, class Drafter>
any_length length_for(std::optional<std::size_t> drafts, Target& target, Drafter& drafter) {
  if (drafts) return {outrider::fixed(*drafts)};
  return {outrider::adaptive(outrider::calibrate(target, drafter))};
}
