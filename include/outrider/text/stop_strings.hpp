// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "outrider/error.hpp"

namespace outrider {

/// Lets generated text pass until one of the stop strings is complete, and holds back what may become one: nothing of the stop string that
/// ends the text, and nothing behind it, is ever shown. The first to be complete counts; of those that end together, the longest. How the
/// text is cut into push() calls changes nothing. Behind a detokenizer, with valid UTF-8 as stop strings, what it returns is whole
/// characters. Allocates in the constructor only, as long as no push is longer than 4 KiB.
class stop_strings {
 public:
  /// Without stop strings everything passes. error_code::argument_invalid for an empty one.
  explicit stop_strings(std::vector<std::string> stops) : stops_(std::move(stops)) {
    std::size_t longest = 0;
    for (std::size_t i = 0; i < stops_.size(); ++i) {
      if (stops_[i].empty()) throw error(error_code::argument_invalid, "stop_strings: string " + std::to_string(i) + " is empty");
      longest = (std::max)(longest, stops_[i].size());
    }
    constexpr std::size_t longest_push = 4096;
    held_.reserve(longest + longest_push);
    shown_.reserve(longest + longest_push);
  }

  /// The text that is final now. Nothing once a stop string was met. Valid until the next call.
  [[nodiscard]] std::string_view push(std::string_view text) {
    shown_.clear();
    for (std::size_t i = 0; i < text.size() && !stopped_; ++i) {
      held_ += text[i];
      std::size_t stop = 0;  // length of the longest one that ends here
      for (const std::string& s : stops_)
        if (s.size() > stop && held_.ends_with(s)) stop = s.size();
      if (stop != 0) {
        stopped_ = true;
        held_.resize(held_.size() - stop);
      }
    }
    show(held_.size() - (stopped_ ? 0 : possible()));
    return shown_;
  }
  /// The end of the text: what was held back, as no stop string can follow any more. The object is as new afterwards.
  [[nodiscard]] std::string_view finish() {
    shown_.clear();
    show(held_.size());
    stopped_ = false;
    return shown_;
  }

  /// Whether a stop string was met: the text is at its end.
  [[nodiscard]] bool stopped() const noexcept { return stopped_; }

 private:
  /// Bytes at the end of the held text that may be the beginning of a stop string.
  [[nodiscard]] std::size_t possible() const noexcept {
    std::size_t most = 0;
    for (const std::string& s : stops_)
      for (std::size_t size = (std::min)(s.size() - 1, held_.size()); size > most; --size)
        if (std::string_view(held_).ends_with(std::string_view(s).substr(0, size))) most = size;
    return most;
  }
  void show(std::size_t size) {
    shown_.append(held_, 0, size);
    held_.erase(0, size);
  }

  std::vector<std::string> stops_;
  std::string held_, shown_;
  bool stopped_ = false;
};

}  // namespace outrider
