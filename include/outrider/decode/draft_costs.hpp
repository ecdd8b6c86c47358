// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>

#include "outrider/config.hpp"
#include "outrider/error.hpp"

namespace outrider {

/// What drafting costs, in any one unit: only ratios matter.
struct draft_costs {
  double step = 0.05;                                  // a draft
  std::array<double, max_draft_length + 2> pass = {};  // [M]: a pass of M rows, M = 1 … max_draft_length + 1; [0] is not used
};

/// A middling machine, for a start: every further row costs 15 % of a plain pass, a draft 5 %.
[[nodiscard]] constexpr draft_costs typical_draft_costs() noexcept {
  draft_costs costs;
  for (std::size_t m = 1; m < costs.pass.size(); ++m) costs.pass[m] = 1 + 0.15 * static_cast<double>(m - 1);
  return costs;
}

namespace detail {

/// Costs in plain passes of this moment, learned from the times of passes, each of which happens at its own moment of a machine that others
/// use too. A time that is off moves the level of all passes by a part of the surprise, and the pass's own figure by a part that shrinks
/// with what is known of it: a slower minute leaves ratios as they are. Figures never measured follow from their neighbours and the prior.
class running_costs {
 public:
  /// Errors: argument_invalid for a figure that is not positive and finite (a step may be free).
  explicit running_costs(const draft_costs& prior) {
    const auto check = [](double value, double least, const std::string& what) {
      if (!(std::isfinite(value) && value >= least))
        throw error(error_code::argument_invalid, "outrider: the cost of " + what + " is " + std::to_string(value) +
                                                      "; a positive number is needed, for a draft step 0 is allowed");
    };
    check(prior.step, 0, "a draft step");
    for (std::size_t m = 1; m <= most_rows; ++m) {
      check(prior.pass[m], (std::numeric_limits<double>::min)(), "a pass of " + std::to_string(m) + " rows");
      pass_[m] = prior_[m] = prior.pass[m] / prior.pass[1];
      growth_[m] = (std::max)(prior_[m] - 1, 0.01 * static_cast<double>(m - 1));
    }
    step_ = prior.step / prior.pass[1];
  }

  [[nodiscard]] double step() const noexcept { return step_; }
  [[nodiscard]] double pass(std::size_t rows) const noexcept { return pass_[rows]; }
  /// What a pass may cost with luck: less than pass() where it was seldom timed, so that it is tried.
  [[nodiscard]] double hoped_pass(std::size_t rows) const noexcept {
    return timed_ ? pass_[rows] * (1 - hope / (1 + weight_[rows])) : pass_[rows];
  }
  /// How many plain passes were timed, old ones counted less.
  [[nodiscard]] double plain_weight() const noexcept { return weight_[1]; }
  /// The most rows worth trying: twice as many as were ever timed, as what is far from all measurements is a guess.
  [[nodiscard]] std::size_t known_rows() const noexcept {
    std::size_t rows = most_rows;
    while (timed_ && rows > 1 && weight_[rows] == 0) --rows;
    return (std::min)(2 * rows + 1, most_rows);
  }
  [[nodiscard]] bool timed() const noexcept { return timed_; }

  /// A pass of `rows` took `seconds`; 0: no clock ran.
  void record_pass(std::size_t rows, double seconds) noexcept {
    if (!is_time(seconds)) return;
    double time = std::log(seconds);
    if (!timed_) {
      for (std::size_t m = 1; m <= most_rows; ++m) level_[m] = time + std::log(prior_[m] / prior_[rows]);
      step_seconds_ = step_ * std::exp(level_[1]);
      doubt_[rows] = seconds;
      timed_ = true;
      return;
    }
    if (weight_[rows] == 0) {
      // Passes are delayed by accident, never hastened: what is slower than expected is measured twice, and the faster counts.
      if (doubt_[rows] == 0 && time > level_[1] + std::log(pass_[rows]) + clip) {
        doubt_[rows] = seconds;
        return;
      }
      if (doubt_[rows] > 0) time = (std::min)(time, std::log(doubt_[rows]));
    }

    const double known = weight_[rows];
    double surprise = time - level_[rows];
    const bool believe = known == 0 || (known < few && surprise < -clip);
    if (!believe) surprise = std::clamp(surprise, -clip, clip);
    const double shared = believe ? 0 : share * surprise;
    for (double& level : level_) level += shared;
    step_seconds_ *= std::exp(shared);
    level_[rows] += believe ? surprise : (surprise - shared) / (known + 1);
    for (double& weight : weight_) weight *= 1 - 1 / pass_memory;
    weight_[rows] = (std::min)(known, most_weight) + 1;
    interpolate();
  }

  /// `steps` drafts took `seconds`; ignored as long as no pass was timed.
  void record_steps(std::size_t steps, double seconds) noexcept {
    if (!timed_ || steps == 0 || !is_time(seconds)) return;
    const double each = seconds / static_cast<double>(steps);
    const double most = step_weight_ == 0 ? each : 2 * step_seconds_ + 0.01 * std::exp(level_[1]);
    step_weight_ = (std::min)(step_weight_ + 1, step_memory);
    step_seconds_ += ((std::min)(each, most) - step_seconds_) / step_weight_;
    step_ = step_seconds_ * std::exp(-level_[1]);
  }

  /// A pass of `rows` and its drafts took `seconds` together. Nobody can tell the two apart: drafts are free from now on, and passes of more than
  /// one row cost what both do.
  void record_joint(std::size_t rows, double seconds) noexcept {
    if (!is_time(seconds)) return;
    record_pass(rows, seconds);
    step_ = step_seconds_ = step_weight_ = 0;
  }

 private:
  static constexpr std::size_t most_rows = max_draft_length + 1;
  static constexpr double clip = 0.25;         // the largest surprise taken at its word, in e-folds
  static constexpr double few = 3;             // measurements
  static constexpr double lean = 3;            // measurements that the neighbours are worth
  static constexpr double share = 0.1;         // of a surprise, for the level of all
  static constexpr double hope = 0.15;         // how far the figure of a pass never timed may be off
  static constexpr double pass_memory = 1000;  // passes
  static constexpr double most_weight = 50;    // measurements
  static constexpr double noise = 0.1;         // of a measured growth, in plain passes
  static constexpr double step_memory = 32;    // proposals

  static bool is_time(double seconds) noexcept { return seconds > 0 && std::isfinite(seconds); }

  using by_rows = std::array<double, most_rows + 1>;

  /// pass_ from level_: the growth over a plain pass, as a multiple of the prior's growth, is a smooth function of the rows.
  void interpolate() noexcept {
    step_ = step_seconds_ * std::exp(-level_[1]);
    by_rows measured{}, multiple{}, strength{}, nearness{};
    for (std::size_t m = 2; m <= most_rows; ++m) {
      measured[m] = std::exp(level_[m] - level_[1]);
      multiple[m] = (measured[m] - 1) / growth_[m];
      const double signal = growth_[m] * growth_[m];
      strength[m] = weight_[m] / (weight_[m] + lean) * signal / (signal + noise * noise);
      nearness[m - 1] = 1 / (1 + static_cast<double>((m - 1) * (m - 1)));  // by distance; 0 of itself
    }
    for (std::size_t m = 2; m <= most_rows; ++m) {
      double weights = 0.002, sum = weights;  // the prior itself counts where nothing was measured
      for (std::size_t i = 2; i <= most_rows; ++i) {
        const double weight = strength[i] * nearness[i < m ? m - i : i - m];
        weights += weight, sum += weight * multiple[i];
      }
      const double expected = 1 + growth_[m] * (std::max)(sum / weights, 0.0);
      pass_[m] = (weight_[m] * measured[m] + lean * expected) / (weight_[m] + lean);
    }
  }

  by_rows prior_{}, pass_{};    // in plain passes
  by_rows growth_{};            // of the prior over a plain pass, never 0
  by_rows level_{}, weight_{};  // log of the seconds now expected; how often measured, old measurements counted less
  by_rows doubt_{};             // seconds of a first pass that is not believed yet
  double step_ = 0, step_seconds_ = 0, step_weight_ = 0;
  bool timed_ = false;
};

}  // namespace detail
}  // namespace outrider
