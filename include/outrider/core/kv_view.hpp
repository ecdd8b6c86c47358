// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <type_traits>

#include "outrider/config.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/space.hpp"

namespace outrider {

/// Borrowed keys and values of one layer, addressed by absolute position. Two layouts share this form:
///   growing: position p lies in slot p, `block_rows` slots a block (ring_rows == 0);
///   ring:    position p lies in slot p mod ring_rows, all slots in blocks[0] (ring_rows == block_rows).
/// A block holds keys [heads, block_rows, head_dim], then values [heads, block_rows, head_dim]: the keys of a head are one stream.
/// Kv is a scalar type or a block format of core/blocks.hpp; a key is then head_dim / elements_of<Kv> blocks, and head_dim a multiple of
/// elements_of<Kv>.
/// The table `blocks` outlives every growth of the cache, so a view stays valid for the cache's life. It lies in Space, like the blocks: key() and
/// value() are for code that can read it there, which a kernel does through local(view).
template <class Kv, class Space = host_space>
struct kv_view {
  Kv* const* blocks = nullptr;
  std::size_t block_rows = 0, ring_rows = 0, heads = 0, head_dim = 0;

  template <class Other>
    requires(!std::is_const_v<Kv> && std::is_same_v<Other, const Kv>)
  OUTRIDER_HD constexpr operator kv_view<Other, Space>() const noexcept { return {blocks, block_rows, ring_rows, heads, head_dim}; }

  /// Stored objects of a key or a value: head_dim elements as Kv.
  [[nodiscard]] OUTRIDER_HD constexpr std::size_t stride() const noexcept { return head_dim / elements_of<Kv>; }
  /// [stride()], the key of `head` at `position`; the keys of the next positions follow at a distance of stride(), see run().
  [[nodiscard]] OUTRIDER_HD constexpr Kv* key(std::size_t position, std::size_t head) const noexcept requires host_accessible<Space> {
    const std::size_t slot = slot_of(position);
    return blocks[slot / block_rows] + (head * block_rows + slot % block_rows) * stride();
  }
  /// [stride()], the value of `head` at `position`.
  [[nodiscard]] OUTRIDER_HD constexpr Kv* value(std::size_t position, std::size_t head) const noexcept requires host_accessible<Space> {
    return key(position, head) + heads * block_rows * stride();
  }
  /// How many positions from `position` on, before `end`, lie one after the other in memory.
  [[nodiscard]] OUTRIDER_HD constexpr std::size_t run(std::size_t position, std::size_t end) const noexcept {
    const std::size_t left_in_block = block_rows - slot_of(position) % block_rows;
    return end - position < left_in_block ? end - position : left_in_block;
  }

 private:
  [[nodiscard]] OUTRIDER_HD constexpr std::size_t slot_of(std::size_t position) const noexcept {
    return ring_rows == 0 ? position : position % ring_rows;
  }
};

/// The same keys and values for code that runs where their table lies: a kernel, or a host that has brought the table over.
template <class Kv, class Space>
[[nodiscard]] OUTRIDER_HD constexpr kv_view<Kv> local(const kv_view<Kv, Space>& v) noexcept {
  return {v.blocks, v.block_rows, v.ring_rows, v.heads, v.head_dim};
}

/// Which keys the rows of a pass see: row r sees positions max(0, first_end + r - width) … first_end + r - 1.
/// A causal pass that starts at position p has first_end = p + 1; width = W in sliding layers and unlimited in full ones.
/// The drafter's single row at position p = n - 1 reads committed keys only: first_end = n - 1, width = W + 1.
struct key_window {
  static constexpr std::size_t unlimited = static_cast<std::size_t>(-1);
  std::size_t first_end = 0, width = unlimited;

  [[nodiscard]] OUTRIDER_HD constexpr std::size_t end(std::size_t row) const noexcept { return first_end + row; }
  [[nodiscard]] OUTRIDER_HD constexpr std::size_t begin(std::size_t row) const noexcept { return end(row) > width ? end(row) - width : 0; }
};

}  // namespace outrider
