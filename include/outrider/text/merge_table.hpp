// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "outrider/core/scalar.hpp"

namespace outrider {

/// The merges of a byte-pair encoding, best first: a merge's place in the list is its rank. Immutable.
class merge_table {
 public:
  struct merge {
    token_id left, right, result;  // >= 0
  };

  merge_table() = default;
  /// Of merges with the same parts the first one counts. Fewer than 2^31 of them.
  explicit merge_table(std::vector<merge> merges) : merges_(std::move(merges)), index_(std::bit_ceil(2 * merges_.size() + 1)) {
    for (std::size_t rank = 0; rank < merges_.size(); ++rank) {
      const merge& m = merges_[rank];
      entry& slot = index_[slot_of(m.left, m.right)];
      if (slot.rank == nothing) slot = {m.left, m.right, static_cast<std::uint32_t>(rank)};
    }
  }

  [[nodiscard]] const std::vector<merge>& merges() const noexcept { return merges_; }

  /// Merges adjacent symbols from place `begin` on until no pair is in the table: always the pair of the lowest rank, the leftmost of
  /// equals. In place. O(n log n) for n symbols, fewer than 2^32.
  void apply(std::vector<token_id>& symbols, std::size_t begin = 0) const {
    const std::size_t size = symbols.size() - begin;
    if (size < 2) return;
    if (size <= few) return symbols.resize(begin + apply_few(symbols.data() + begin, size));
    apply_many(symbols, begin);
  }

 private:
  static constexpr std::uint32_t nothing = 0xffffffffu;
  static constexpr token_id gone = -1;
  static constexpr std::size_t few = 32;  // up to here looking through all pairs again and again is faster than a heap

  /// Merges `size` symbols in place and returns how many are left.
  [[nodiscard]] std::size_t apply_few(token_id* symbols, std::size_t size) const noexcept {
    std::array<std::uint32_t, few> ranks;  // of merging a symbol with the next one; the last symbol has none
    for (std::size_t i = 0; i + 1 < size; ++i) ranks[i] = rank_of(symbols[i], symbols[i + 1]);
    while (size > 1) {
      const auto ranks_end = ranks.begin() + (size - 1);
      const auto best = std::min_element(ranks.begin(), ranks_end);
      if (*best == nothing) break;
      const auto place = static_cast<std::size_t>(best - ranks.begin());
      symbols[place] = merges_[*best].result;
      std::copy(symbols + place + 2, symbols + size, symbols + place + 1);
      if (place + 2 < size) std::copy(best + 2, ranks_end, best + 1);
      --size;
      if (place + 1 < size) ranks[place] = rank_of(symbols[place], symbols[place + 1]);
      if (place > 0) ranks[place - 1] = rank_of(symbols[place - 1], symbols[place]);
    }
    return size;
  }

  void apply_many(std::vector<token_id>& all, std::size_t begin) const {
    const std::size_t size = all.size() - begin;
    // A list over the symbols. A symbol that was merged into its left neighbour is marked gone; place `size` is the end on both sides.
    std::vector<std::uint32_t> next(size + 1), previous(size + 1);
    for (std::size_t i = 0; i <= size; ++i) {
      next[i] = static_cast<std::uint32_t>(i == size ? size : i + 1);
      previous[i] = static_cast<std::uint32_t>(i == 0 ? size : i - 1);
    }
    all.push_back(gone);
    token_id* const symbols = all.data() + begin;

    // Candidates rank · 2^32 + place of the left part: the least is the lowest rank, then the leftmost.
    std::vector<std::uint64_t> found;
    found.reserve(size);
    for (std::size_t i = 0; i + 1 < size; ++i)
      if (const std::uint32_t rank = rank_of(symbols[i], symbols[i + 1]); rank != nothing) found.push_back(std::uint64_t{rank} << 32 | i);
    std::priority_queue candidates(std::greater<std::uint64_t>{}, std::move(found));

    while (!candidates.empty()) {
      const std::size_t left = candidates.top() & 0xffffffffu;
      const merge& step = merges_[candidates.top() >> 32];
      candidates.pop();
      const std::size_t right = next[left];
      // A candidate is stale when one of its symbols has been merged since: the pair at its place is another one now.
      if (symbols[left] != step.left || symbols[right] != step.right) continue;
      symbols[left] = step.result;
      symbols[right] = gone;
      next[left] = next[right];
      previous[next[left]] = static_cast<std::uint32_t>(left);
      for (const std::size_t place : {std::size_t{previous[left]}, left})
        if (const std::uint32_t rank = rank_of(symbols[place], symbols[next[place]]); rank != nothing)
          candidates.push(std::uint64_t{rank} << 32 | place);
    }
    all.erase(std::remove(all.begin() + static_cast<std::ptrdiff_t>(begin), all.end(), gone), all.end());
  }

  struct entry {
    token_id left = gone, right = gone;
    std::uint32_t rank = nothing;
  };

  /// Where the rank of (left, right) is or would be. At least half of the slots are free, so the search ends.
  [[nodiscard]] std::size_t slot_of(token_id left, token_id right) const noexcept {
    std::uint64_t hash = std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
    hash = (hash ^ hash >> 31) * 0x9e3779b97f4a7c15u;
    hash = (hash ^ hash >> 29) * 0xbf58476d1ce4e5b9u;
    const std::size_t mask = index_.size() - 1;
    std::size_t slot = static_cast<std::size_t>(hash >> 32) & mask;
    while (index_[slot].rank != nothing && (index_[slot].left != left || index_[slot].right != right)) slot = (slot + 1) & mask;
    return slot;
  }
  /// The rank of merging the two, or nothing; no merge has the end as a part.
  [[nodiscard]] std::uint32_t rank_of(token_id left, token_id right) const noexcept { return index_[slot_of(left, right)].rank; }

  std::vector<merge> merges_;
  std::vector<entry> index_ = std::vector<entry>(1);  // at least half of it free
};

}  // namespace outrider
