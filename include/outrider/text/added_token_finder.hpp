// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <bitset>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "outrider/core/scalar.hpp"

namespace outrider {

/// Finds fixed token texts in a text: at each place the longest one, left to right, without overlap. Immutable.
class added_token_finder {
 public:
  struct entry {
    std::string text;  // not empty
    token_id id = 0;
    bool special = false;
  };

  added_token_finder() = default;
  explicit added_token_finder(std::vector<entry> entries) : entries_(std::move(entries)) {
    std::sort(entries_.begin(), entries_.end(), [](const entry& a, const entry& b) { return a.text < b.text; });
    for (const entry& e : entries_) first_bytes_.set(static_cast<unsigned char>(e.text.front()));
  }

  /// Calls on_plain(text) for each non-empty stretch between tokens and on_token(id) for each token, in the order of the text.
  /// Unless with_special, a special token's text belongs to the stretch around it (and hides what could be found inside it).
  template <class OnPlain, class OnToken>
  void split(std::string_view text, bool with_special, OnPlain&& on_plain, OnToken&& on_token) const {
    std::size_t plain_begin = 0, i = 0;
    while (i < text.size()) {
      const entry* const found = longest_at(text.substr(i));
      const std::size_t begin = i;
      i += found ? found->text.size() : 1;
      if (!found || (found->special && !with_special)) continue;
      if (begin > plain_begin) on_plain(text.substr(plain_begin, begin - plain_begin));
      on_token(found->id);
      plain_begin = i;
    }
    if (text.size() > plain_begin) on_plain(text.substr(plain_begin));
  }

 private:
  /// The longest entry that `text` starts with, or null. In sorted order the entries that share a prefix lie side by side, the shortest
  /// first: byte by byte the range of those that still fit shrinks.
  [[nodiscard]] const entry* longest_at(std::string_view text) const noexcept {
    if (!first_bytes_[static_cast<unsigned char>(text.front())]) return nullptr;
    const entry* longest = nullptr;
    auto begin = entries_.begin(), end = entries_.end();
    for (std::size_t depth = 0; depth < text.size() && begin != end; ++depth) {
      const auto byte = static_cast<unsigned char>(text[depth]);
      const auto at_depth = [depth](const entry& e) { return static_cast<unsigned char>(e.text[depth]); };
      begin = std::partition_point(begin, end, [&](const entry& e) { return at_depth(e) < byte; });
      end = std::partition_point(begin, end, [&](const entry& e) { return at_depth(e) == byte; });
      for (; begin != end && begin->text.size() == depth + 1; ++begin) longest = &*begin;
    }
    return longest;
  }

  std::vector<entry> entries_;  // sorted by text, as unsigned bytes
  std::bitset<256> first_bytes_;
};

}  // namespace outrider
