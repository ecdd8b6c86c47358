// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Whether tokens that were counted follow a distribution.
#pragma once
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "outrider/decode/processors.hpp"

namespace outrider::testing {

/// Pearson's statistic over its critical value: above 1 with a chance of 1e-6 if the tokens have this law. Tokens expected fewer than 10 times
/// are counted as one; one that was not listed, or has probability 0, makes it infinite.
/// The critical value is Wilson and Hilferty's: (χ²/f)^(1/3) is normal with mean 1 − 2/(9f) and variance 2/(9f); 4.7534 is the 1e-6 point.
inline double misfit(std::span<const std::size_t> counts, std::span<const token_probability> law) {
  std::vector<double> probability(counts.size());
  for (const token_probability& t : law) probability[static_cast<std::size_t>(t.id)] = t.probability;
  std::size_t draws = 0;
  for (const std::size_t count : counts) draws += count;

  double statistic = 0, rare_seen = 0, rare_expected = 0;
  std::size_t cells = 0;
  const auto add = [&](double seen, double expected) {
    statistic += (seen - expected) * (seen - expected) / expected;
    ++cells;
  };
  for (std::size_t id = 0; id < counts.size(); ++id) {
    const double seen = static_cast<double>(counts[id]), expected = probability[id] * static_cast<double>(draws);
    if (seen > 0 && expected == 0) return INFINITY;
    if (expected >= 10) {
      add(seen, expected);
    } else {
      rare_seen += seen;
      rare_expected += expected;
    }
  }
  if (rare_expected >= 10) add(rare_seen, rare_expected);
  if (cells < 2) return 0;
  const double f = static_cast<double>(cells - 1);
  return statistic / (f * std::pow(1 - 2 / (9 * f) + 4.7534 * std::sqrt(2 / (9 * f)), 3));
}

}  // namespace outrider::testing
