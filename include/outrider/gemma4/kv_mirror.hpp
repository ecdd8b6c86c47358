// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "outrider/core/blocks.hpp"
#include "outrider/core/extents.hpp"
#include "outrider/core/kv_view.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/space.hpp"
#include "outrider/core/space_copy.hpp"
#include "outrider/core/storage.hpp"
#include "outrider/core/view.hpp"
#include "outrider/error.hpp"
#include "outrider/gemma4/assistant.hpp"
#include "outrider/gemma4/config.hpp"

namespace outrider::gemma4 {

/// The keys and values a drafter reads, kept a second time in memory space To, for a drafter that cannot reach those of its target in From.
/// They are stored as the target stores them, bit for bit.
///
/// update() copies what is new. It remembers whose keys it holds, by their tokens, and equal prefixes have equal keys: so it follows a target
/// that was cut back, cleared or exchanged for another sequence of the same model, copying only behind the common prefix. Rejected drafts are
/// never copied, since they were never committed. Of a sliding layer it holds what a drafter sees, the last W + 1 keys, in a ring of so many
/// slots; of a full layer everything, in blocks.
///
/// Views of keys() stay valid until the mirror dies or moves from its memory. Movable; one thread at a time.
template <class From, class To, class Kv>
class kv_mirror {
 public:
  static constexpr std::size_t block_rows = 256;  // slots per block of a full layer

  /// For a target of these numbers and sequences of up to max_positions. Takes the memory of the sliding layer here, that of the full one in
  /// reserve(). Throws argument_invalid if max_positions is 0 or heads do not consist of whole blocks of Kv, out_of_memory.
  kv_mirror(const text_config& target, std::size_t max_positions) : max_positions_(max_positions) {
    if (max_positions == 0) throw error(error_code::argument_invalid, "outrider: a mirror of 0 positions; allowed are 1 or more");
    for (const attention_kind kind : attention_kinds) {
      if (target.donor(kind) == target.layer_count()) continue;  // no such keys, and nobody reads them
      const attention_shape& shape = target.shape(kind);
      if (shape.head_dim % elements_of<Kv> != 0)
        throw error(error_code::argument_invalid,
                    std::string("outrider: ") + name_of(kind) + " layers have heads of size " + std::to_string(shape.head_dim) +
                        ", keys and values stored in blocks need a multiple of " + std::to_string(elements_of<Kv>));
      mirrored& m = layers_[static_cast<std::size_t>(kind)];
      const bool ring = kind == attention_kind::sliding;
      m.seen = ring ? target.window + 1 : key_window::unlimited;
      const std::size_t rows = ring ? (std::min)(m.seen, max_positions) : block_rows;
      m.slots = {nullptr, rows, ring ? rows : 0, shape.kv_heads, shape.head_dim};
      m.table.resize(ring ? 1 : divide_up(max_positions, block_rows));
      m.table_there = buffer<Kv*, To>(m.table.size());
      m.slots.blocks = m.table.data();
      m.memory.reserve(m.table.size());
      if (ring) m.add_block();
    }
  }

  /// Takes the memory for sequences of that many positions: update() allocates nothing up to there. What is mirrored stays. Throws
  /// context_full beyond max_positions, out_of_memory.
  void reserve(std::size_t positions) {
    if (positions > max_positions_)
      throw error(error_code::context_full, "outrider: the sequence would have " + std::to_string(positions) +
                                                " positions, its mirror is limited to " + std::to_string(max_positions_));
    tokens_.reserve(divide_up(positions, block_rows) * block_rows);  // a sequence that grows by a few tokens a round moves rarely
    for (mirrored& m : layers_) {
      if (m.slots.heads == 0 || m.slots.ring_rows != 0) continue;
      const std::size_t needed = divide_up(positions, block_rows);
      if constexpr (!host_accessible<From>) {
        if (m.source_table.size() < needed) m.source_table.resize(needed);
      }
      while (m.memory.size() < needed) m.add_block();
    }
  }

  /// Brings the mirror to what `keys` show a drafter now: those of the committed positions, whose tokens are `tokens`. To be called between
  /// passes, when nothing is pending. Throws argument_invalid if keys and tokens differ in number, or layers in shape, from what they should
  /// be; the errors of reserve(tokens.size()); both change nothing. What a copy throws: keys() is then worth nothing until an update succeeds.
  void update(const shared_kv<Kv, From>& keys, std::span<const token_id> tokens) {
    for (std::size_t kind = 0; kind < layers_.size(); ++kind)
      if (layers_[kind].slots.heads != 0) check(attention_kinds[kind], keys.layers[kind], keys.ends[kind], tokens.size());
    reserve(tokens.size());
    const std::size_t common = common_prefix(tokens);
    tokens_.resize(common);
    for (mirrored& m : layers_) m.forget_behind(common);
    for (std::size_t kind = 0; kind < layers_.size(); ++kind)
      if (layers_[kind].slots.heads != 0) layers_[kind].follow(keys.layers[kind], tokens.size());
    tokens_.insert(tokens_.end(), tokens.begin() + static_cast<std::ptrdiff_t>(common), tokens.end());
    position_ = keys.position;
  }

  /// What the last update() was given, in To. A drafter may read what it sees: of a sliding layer the last W + 1 positions.
  [[nodiscard]] shared_kv<Kv, To> keys() const noexcept {
    shared_kv<Kv, To> keys;
    for (std::size_t kind = 0; kind < layers_.size(); ++kind) {
      keys.layers[kind] = layers_[kind].slots;
      keys.layers[kind].blocks = layers_[kind].table_there.data();
      keys.ends[kind] = tokens_.size();
    }
    keys.position = position_;
    return keys;
  }

  /// Holds nothing any more, for a target of another model; memory is kept.
  void clear() noexcept {
    tokens_.clear();
    position_ = 0;
    for (mirrored& m : layers_) m.forget_behind(0);
  }

 private:
  /// The mirror of one layer. It holds positions begin … end − 1.
  struct mirrored {
    std::size_t seen = 0;                 // the last so many keys are what a drafter sees
    kv_view<Kv, To> slots;                // its blocks lie in To, its table is `table`, so that key() is for the host
    std::vector<Kv*> table;               // sized once
    buffer<Kv*, To> table_there;          // the same table, for the drafter
    std::vector<matrix<Kv, To>> memory;   // the blocks so far
    std::vector<const Kv*> source_table;  // the target's table on the host, where it is elsewhere
    std::size_t begin = 0, end = 0;

    void add_block() {
      matrix<Kv, To> block(2 * slots.heads * slots.block_rows, slots.stride());
      Kv*& entry = table[memory.size()];
      entry = block.view().data;
      space_copy<host_space, To>::copy(table_there.data() + memory.size(), &entry, 1);
      memory.push_back(std::move(block));
    }

    void forget_behind(std::size_t position) noexcept {
      end = (std::min)(end, position);
      begin = (std::min)(begin, end);
    }

    /// Copies what the `seen` positions before `new_end` >= end lack. No two of them share a slot, so what stays is not overwritten.
    void follow(const kv_view<const Kv, From>& source, std::size_t new_end) {
      const std::size_t first = new_end > seen ? new_end - seen : 0;
      if (end <= first) begin = end = first;
      if (first < begin) copy(source, first, begin);  // after the target went back: keys that had left the window
      begin = first;
      if (end < new_end) copy(source, end, new_end);
      end = new_end;
    }

    /// Positions first … last − 1, at least one, a run at a time. The keys and values of all heads in a run are the rows of one matrix.
    void copy(kv_view<const Kv, From> source, std::size_t first, std::size_t last) {
      if constexpr (!host_accessible<From>) fetch_table(source, first, last);
      const std::size_t rows = 2 * slots.heads, stride = slots.stride();
      for (std::size_t p = first; p < last;) {
        const std::size_t count = slots.run(p, p + source.run(p, last));
        copy_across(matrix_view<Kv, To>{local(slots).key(p, 0), rows, count * stride, slots.block_rows * stride},
                    matrix_view<const Kv, From>{local(source).key(p, 0), rows, count * stride, source.block_rows * stride});
        p += count;
      }
    }

    /// Brings the table of `source` to the host for these positions. Asked for anew each time: a cache may exchange its blocks.
    void fetch_table(kv_view<const Kv, From>& source, std::size_t first, std::size_t last) {
      const std::size_t a = source.ring_rows != 0 ? 0 : first / source.block_rows;
      const std::size_t b = source.ring_rows != 0 ? 0 : (last - 1) / source.block_rows;
      if (source_table.size() <= b) source_table.resize(b + 1);
      space_copy<From, host_space>::copy(source_table.data() + a, source.blocks + a, b + 1 - a);
      source.blocks = source_table.data();
    }
  };

  void check(attention_kind kind, const kv_view<const Kv, From>& source, std::size_t end, std::size_t count) const {
    const mirrored& m = layers_[static_cast<std::size_t>(kind)];
    const auto refuse = [&](const char* what, std::size_t found, const char* than, std::size_t allowed) {
      throw error(error_code::argument_invalid, std::string("outrider: the mirror of ") + name_of(kind) + " layers is given " + what +
                                                    std::to_string(found) + than + std::to_string(allowed));
    };
    if (end != count) refuse("keys that end at ", end, ", the number of tokens is ", count);
    if (count == 0) return;
    if (source.heads != m.slots.heads) refuse("a number of heads of ", source.heads, ", it was made for ", m.slots.heads);
    if (source.head_dim != m.slots.head_dim) refuse("heads of size ", source.head_dim, ", it was made for ", m.slots.head_dim);
    const std::size_t needed = (std::min)(m.seen, count);
    if (source.ring_rows != 0 && source.ring_rows < needed) refuse("a ring of ", source.ring_rows, " slots, a drafter sees ", needed);
  }

  /// How many of `tokens` are those mirrored. Nearly always all that are: that is asked first, and fast.
  [[nodiscard]] std::size_t common_prefix(std::span<const token_id> tokens) const noexcept {
    const std::size_t most = (std::min)(tokens_.size(), tokens.size());
    if (std::equal(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(most), tokens_.begin())) return most;
    const auto differing = std::mismatch(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(most), tokens_.begin()).first;
    return static_cast<std::size_t>(differing - tokens.begin());
  }

  std::size_t max_positions_;
  std::array<mirrored, 2> layers_;  // by attention_kind; without heads: none
  std::vector<token_id> tokens_;    // of the mirrored positions
  std::size_t position_ = 0;
};

}  // namespace outrider::gemma4
