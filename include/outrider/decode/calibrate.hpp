// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "outrider/config.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/decode/draft_costs.hpp"
#include "outrider/decode/drafter.hpp"
#include "outrider/error.hpp"

namespace outrider {
namespace detail {

/// Fills the passes not measured (0) by straight lines between those that were; pass[1] must be. Behind the last the line goes on.
inline void fill_between(draft_costs& costs) noexcept {
  auto& pass = costs.pass;
  std::size_t before = 0, last = 1;
  for (std::size_t m = 2; m < pass.size(); ++m) {
    if (pass[m] == 0) continue;
    for (std::size_t i = last + 1; i < m; ++i)
      pass[i] = pass[last] + (pass[m] - pass[last]) * static_cast<double>(i - last) / static_cast<double>(m - last);
    before = last, last = m;
  }
  const double slope = before == 0 ? 0.15 * pass[1] : (std::max)((pass[last] - pass[before]) / static_cast<double>(last - before), 0.0);
  for (std::size_t m = last + 1; m < pass.size(); ++m) pass[m] = pass[m - 1] + slope;
}

}  // namespace detail

/// What a draft and a pass of 1 … most_drafts + 1 rows cost on this machine, now, in seconds: what `adaptive` would otherwise learn during
/// its first rounds, and a prior for decoding without a clock. A short prompt of arbitrary ids is processed, drafts and passes of 1, 2, 4, …
/// rows are timed, the faster of two; the rest is interpolated. `target` must be empty and is again afterwards; with a long text in the cache
/// passes cost more. Behind the prompt and the pass of one row nothing is started that would end beyond `limit` by what is known then.
/// Errors: pair_mismatch if the drafter was made for another target; argument_invalid for a target that holds tokens, is too small, or does not take most_drafts.
template <class Target, drafter_for<Target> Drafter>
draft_costs calibrate(Target& target, Drafter& drafter, std::size_t most_drafts,
                      std::chrono::duration<double> limit = std::chrono::milliseconds(250)) {
  const auto refuse = [](const std::string& what) { throw error(error_code::argument_invalid, "outrider: " + what); };
  if (target.committed() != 0)
    refuse("calibrate() needs an empty target, this one holds " + std::to_string(target.committed()) + " positions");
  if constexpr (requires { drafter.check(std::as_const(target)); }) drafter.check(std::as_const(target));
  const std::size_t most_rows = (std::min)(static_cast<std::size_t>(target.max_draft()), max_draft_length) + 1;
  if (most_drafts >= most_rows)
    refuse(std::to_string(most_drafts) + " drafts to calibrate, this target takes up to " + std::to_string(most_rows - 1));
  const std::size_t rows = most_drafts + 1, positions = target.max_positions();
  if (positions < rows + 1)
    refuse("a target of " + std::to_string(positions) + " positions is too small to time passes of " + std::to_string(rows) + " rows");

  using clock = std::chrono::steady_clock;
  const auto begin = clock::now();
  const auto seconds_since = [](clock::time_point start) { return std::chrono::duration<double>(clock::now() - start).count(); };
  const auto time = [&](auto&& work) {
    const auto start = clock::now();
    work();
    if constexpr (requires { target.context().wait(); }) target.context().wait();  // a device is only asked by then
    return (std::max)(seconds_since(start), 1e-9);                                 // a clock may be coarse
  };

  // Different ids, so that the rows of a model with experts choose different ones.
  const std::size_t prompt = (std::min)(std::size_t{16}, positions - rows);
  std::vector<token_id> ids(prompt + rows);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<token_id>((i * 7919 + 2) % target.vocab_size());
  const std::span<const token_id> text(ids);

  struct emptied {
    Target& target;
    ~emptied() { target.clear(); }
  } const afterwards{target};
  target.reserve(ids.size());
  target.prefill(text.first(prompt));

  draft_costs costs;
  const std::span<const token_id> known = text.first(prompt + 1);
  std::array<token_id, max_draft_length> out{};
  if (most_drafts > 0) {  // before the passes: a drafter reads the state that the prompt left
    const std::size_t wanted = (std::min)(most_drafts, std::size_t{4});
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 3 && (i == 0 || seconds_since(begin) < 0.2 * limit.count()); ++i) {
      std::size_t drafts = 0;
      const double seconds = time([&] {
        drafts =
            drafter.propose(std::as_const(target), draft_request{.text = known, .eos = {}, .suppress = {}}, std::span(out).first(wanted));
      });
      best = (std::min)(best, seconds / static_cast<double>((std::max)(drafts, std::size_t{1})));
    }
    costs.step = best;
  }

  const auto measure = [&](std::size_t m) {
    const auto pass = [&] { return time([&] { target.verify(text.subspan(prompt, m)); }); };
    costs.pass[m] = pass();
    if (seconds_since(begin) + costs.pass[m] <= limit.count()) costs.pass[m] = (std::min)(costs.pass[m], pass());
  };
  measure(1);
  for (std::size_t last = 1; last < rows;) {
    const std::size_t m = (std::min)(2 * last, rows);
    const double worst = costs.pass[last] * static_cast<double>(m) / static_cast<double>(last);  // every row as dear as in the pass before
    if (seconds_since(begin) + worst > limit.count()) break;
    measure(m);
    last = m;
  }
  detail::fill_between(costs);
  return costs;
}

/// The same for as many drafts as the target takes; typical_draft_costs() for one that has no room for a pass of so many rows.
template <class Target, drafter_for<Target> Drafter>
draft_costs calibrate(Target& target, Drafter& drafter) {
  const std::size_t most = (std::min)(static_cast<std::size_t>(target.max_draft()), max_draft_length);
  if (target.max_positions() < most + 2) return typical_draft_costs();
  return calibrate(target, drafter, most);
}

}  // namespace outrider
