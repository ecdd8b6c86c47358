// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "outrider/core/scalar.hpp"

namespace outrider {

/// Where in the ids of a text the ids of a word are, for short words met before: a text repeats its words, and copying ids is several times
/// faster than merging them anew. A word that falls on another's place replaces it.
class word_cache {
 public:
  /// `bytes` is the length of the text: short texts need few places.
  explicit word_cache(std::size_t bytes) : entries_(std::bit_ceil((std::clamp)(bytes / 8, std::size_t{1}, most_entries))) {}

  /// Appends the ids of `word`, which is not empty: those of its last occurrence in `ids`, or those that encode() appends.
  template <class Encode>
  void append(std::string_view word, std::vector<token_id>& ids, Encode&& encode) {
    if (word.size() > longest_word) return encode();
    entry& slot = entries_[std::hash<std::string_view>{}(word) & (entries_.size() - 1)];
    const std::size_t begin = ids.size();
    if (std::string_view(slot.word.data(), slot.length) == word) {
      ids.resize(begin + slot.count);
      std::copy_n(ids.begin() + static_cast<std::ptrdiff_t>(slot.begin), slot.count, ids.begin() + static_cast<std::ptrdiff_t>(begin));
    } else {
      encode();
      std::copy(word.begin(), word.end(), slot.word.begin());
      slot.length = static_cast<std::uint8_t>(word.size());
      slot.count = static_cast<std::uint32_t>(ids.size() - begin);
    }
    slot.begin = begin;
  }

 private:
  static constexpr std::size_t most_entries = 8192, longest_word = 19;
  struct entry {
    std::size_t begin = 0;    // in the ids
    std::uint32_t count = 0;  // of them
    std::uint8_t length = 0;
    std::array<char, longest_word> word{};
  };
  std::vector<entry> entries_;
};

}  // namespace outrider
