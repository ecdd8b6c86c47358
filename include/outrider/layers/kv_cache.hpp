// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "outrider/backend/traits.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/extents.hpp"
#include "outrider/core/kv_view.hpp"
#include "outrider/core/space.hpp"
#include "outrider/core/space_copy.hpp"
#include "outrider/core/storage.hpp"
#include "outrider/error.hpp"

namespace outrider {

/// What a cache must know of a layer that owns keys and values.
struct kv_layer_shape {
  std::size_t heads = 0, head_dim = 0;
  std::size_t window = 0;  // W: positions a row sees, itself included; 0 = all of them
};

/// Keys and values of one sequence: its layers, its length, its memory. The bytes themselves are written and read by attention_ops through
/// layer(); the cache decides which positions exist.
///
///     0 … committed − 1                       positions that stay
///     committed … committed + pending − 1     positions of the pass at work; commit() keeps the first of them and forgets the others
///
/// Full layers grow by blocks of `block_rows` slots. Sliding layers are rings of W + max_rows slots, because with C committed and r pending
/// positions a ring of R slots holds positions C + r − R … C + r − 1, and of these
///   * row i of the pass sees C + i − W + 1 … C + i, the oldest being C − W + 1:                                  R >= W − 1 + r
///   * after commit(m), m >= 1, the drafter sees the last W + 1 committed keys, the oldest being C + m − W − 1:   R >= W + r
/// So R = W + max_rows serves prompt chunks of max_rows rows and verify passes of max_rows − 1 drafts (W + 1 + drafts slots): a rejected
/// row never took the place of a key that is seen again. Exactly W slots would not do. After rollback() the next row still finds all it
/// sees, since R >= W − 1 + r; the drafter finds all but its oldest key if max_rows rows were pending, until the next commit.
///
/// truncate(n) goes back to an earlier length. With E the end of the furthest position ever pending, a ring holds E − R … E − 1, and what
/// goes on behind n sees n − W − 1 … n − 1 of them: n >= E − R + W + 1 will do. `max_rewind` more slots, R = W + max_rows + max_rewind, make
/// sure of the last max_rewind committed positions, as at most max_rows − 1 rejected rows lie behind them.
///
/// fork() makes a second sequence with the same committed positions. Both share the blocks of full layers that these fill; a cache that is
/// about to write into a shared block, because it went back to before the fork, takes a copy of it first. A partly filled block and the
/// rings are copied at the fork, so it costs these and no more, however long the sequence is.
///
/// Movable; a view of layer() stays valid until the cache's memory dies, across growth, moves and forks: what a table names is exchanged in
/// reserve() and extend(), before a pass writes. One thread at a time, for a cache together with all its forks and theirs: nothing guards
/// the blocks they share.
template <backend_tag B, class Kv>
class kv_cache {
 public:
  using view = kv_view<Kv, space_of<B>>;
  using const_view = kv_view<const Kv, space_of<B>>;
  static constexpr std::size_t block_rows = 256;  // slots per block of a full layer

  /// max_rows: most positions that may be pending at once, max(prompt chunk, max_draft + 1). max_positions: limit of the sequence.
  /// max_rewind: committed positions that truncate() can always take back. max_rejected: rows behind a commit that may have been forgotten;
  /// truncate() then counts with so many whether there were any or not, so that what it can do is the same for every draft length. Rings are allocated here (no longer than max_positions), blocks of full layers by reserve().
  /// Throws argument_invalid if a count other than `window` is 0 or heads do not consist of whole blocks of Kv, out_of_memory.
  kv_cache(std::span<const kv_layer_shape> layers, std::size_t max_rows, std::size_t max_positions, std::size_t max_rewind = 0,
           std::size_t max_rejected = 0)
      : max_rows_(max_rows), max_positions_(max_positions), max_rejected_((std::min)(max_rejected, max_rows - 1)) {
    if (max_rows == 0 || max_positions == 0)
      throw error(error_code::argument_invalid, "outrider: a cache of " + std::to_string(max_rows) + " rows a pass and " +
                                                    std::to_string(max_positions) + " positions holds nothing; both must be at least 1");
    table_rows_ = (max_positions - 1) / block_rows + 1;
    table_ = matrix<Kv*, host_space>(layers.size(), table_rows_);
    if constexpr (!host_accessible<space_of<B>>) table_there_ = matrix<Kv*, space_of<B>>(layers.size(), table_rows_);
    layers_.reserve(layers.size());
    rings_.reserve(layers.size());
    for (const kv_layer_shape& shape : layers) {
      if (shape.heads == 0 || shape.head_dim == 0)
        throw error(error_code::argument_invalid, "outrider: cache layer " + std::to_string(layers_.size()) + " has " +
                                                      std::to_string(shape.heads) + " heads of size " + std::to_string(shape.head_dim) +
                                                      "; both must be at least 1");
      if (shape.head_dim % elements_of<Kv> != 0)
        throw error(error_code::argument_invalid,
                    "outrider: cache layer " + std::to_string(layers_.size()) + " has heads of size " + std::to_string(shape.head_dim) +
                        ", keys and values stored in blocks need a multiple of " + std::to_string(elements_of<Kv>));
      Kv** const table = table_of(layers_.size());  // filled here
      Kv** const seen_table = table_there(layers_.size());
      if (shape.window == 0) {
        const auto sum = checked_add(growth_, elements(shape, block_rows));
        if (!sum) throw too_large();
        growth_ = *sum;
        layers_.push_back({seen_table, block_rows, 0, shape.heads, shape.head_dim});
      } else {
        const auto seen = checked_add(shape.window, max_rows), held = seen ? checked_add(*seen, max_rewind) : seen;
        const std::size_t rows = (std::min)(held.value_or(max_positions), max_positions);
        windows_.push_back({shape.window, rows});
        table[0] = rings_.emplace_back(elements(shape, rows)).data();
        layers_.push_back({seen_table, rows, rows, shape.heads, shape.head_dim});
      }
    }
    if (growth_ != 0) blocks_.reserve(table_rows_);
    publish();
  }

  kv_cache(kv_cache&&) noexcept = default;  // the source may then be destroyed or assigned to, nothing else
  kv_cache& operator=(kv_cache&&) noexcept = default;

  /// Positions that stay: 0 … committed() − 1. The next pass begins at position committed().
  [[nodiscard]] std::size_t committed() const noexcept { return committed_; }
  /// Positions of the pass at work, after the committed ones.
  [[nodiscard]] std::size_t pending() const noexcept { return pending_; }
  [[nodiscard]] std::size_t max_rows() const noexcept { return max_rows_; }
  [[nodiscard]] std::size_t max_positions() const noexcept { return max_positions_; }
  [[nodiscard]] std::size_t layer_count() const noexcept { return layers_.size(); }
  /// Bytes of keys and values held, used or not; a block that forks share counts in each of them, see shared_bytes().
  [[nodiscard]] std::size_t bytes() const noexcept {
    std::size_t sum = 0;
    for (const auto& slots : rings_) sum += slots.size() * sizeof(Kv);
    return sum + blocks_.size() * growth_ * sizeof(Kv);
  }
  /// How many of bytes() lie in blocks that another cache holds as well: bytes() − shared_bytes() are this cache's alone.
  [[nodiscard]] std::size_t shared_bytes() const noexcept {
    return static_cast<std::size_t>(std::count_if(blocks_.begin(), blocks_.end(), is_shared)) * growth_ * sizeof(Kv);
  }

  /// Another sequence with the same committed positions, and the limits of this one. What is pending here is not in it; the room it has is
  /// that of its positions, see reserve(). It goes back as far as this cache does. Throws out_of_memory.
  [[nodiscard]] kv_cache fork() const { return kv_cache(*this); }

  /// Makes room for positions 0 … positions − 1, with copies of the shared blocks among them that will be written: no extend() up to there
  /// allocates then, unless fork() or truncate() comes between. Existing bytes and views stay. Throws
  /// context_full beyond max_positions, out_of_memory; the cache is then unchanged.
  void reserve(std::size_t positions) {
    if (positions > max_positions_)
      throw error(error_code::context_full, "outrider: the sequence would have " + std::to_string(positions) +
                                                " positions, its cache is limited to " + std::to_string(max_positions_));
    if (growth_ == 0) return;
    const std::size_t needed = divide_up(positions, block_rows), open = committed_ / block_rows;  // blocks before `open` are never written
    const std::size_t held = (std::min)(needed, blocks_.size());
    std::size_t missing = needed - held;
    for (std::size_t b = open; b < held; ++b) missing += is_shared(blocks_[b]) ? 1u : 0u;
    if (missing == 0) {
      if (!published_) publish();
      return;
    }
    // All memory is taken before anything is changed, so that there is no state between none and all. Places in blocks_ are reserved. What a
    // shared block holds behind the committed positions is never needed: it was written before the fork, by what has been given up since.
    std::vector<block> fresh;
    fresh.reserve(missing);
    while (fresh.size() < missing) fresh.push_back(std::make_shared<buffer<Kv, space_of<B>>>(growth_));
    auto next = fresh.begin();
    for (std::size_t b = open; b < needed; ++b) {
      if (b < held && !is_shared(blocks_[b])) continue;
      if (b < held && b * block_rows < committed_) copy(*blocks_[b], **next);
      put(b, std::move(*next++));
    }
    publish();
  }

  /// Does what extend(rows) can fail at and opens nothing, so that several caches can be extended together, all of them or none. Throws as
  /// extend() does; if not, extend(rows) will not throw.
  void prepare(std::size_t rows) {
    if (rows > max_rows_ - pending_)
      throw error(error_code::argument_invalid, "outrider: " + std::to_string(rows) + " more rows with " + std::to_string(pending_) +
                                                    " pending, the cache was made for " + std::to_string(max_rows_) + " a pass");
    reserve(committed_ + pending_ + rows);
  }

  /// Opens `rows` more pending positions behind the last one, with reserve() if need be; their bytes are whatever was there before.
  /// Throws argument_invalid if more than max_rows would be pending, context_full beyond max_positions, out_of_memory; the cache is then unchanged.
  void extend(std::size_t rows) {
    prepare(rows);
    pending_ += rows;
    furthest_ = (std::max)(furthest_, committed_ + pending_);
  }

  /// Keeps the first `rows` pending positions and forgets the others. Throws argument_invalid if fewer are pending.
  void commit(std::size_t rows) {
    if (rows > pending_)
      throw error(error_code::argument_invalid,
                  "outrider: " + std::to_string(rows) + " rows to commit, " + std::to_string(pending_) + " are pending");
    committed_ += rows;
    furthest_ = (std::max)(furthest_, committed_ + (std::min)(max_rejected_, max_positions_ - committed_));
    pending_ = 0;
  }

  /// Forgets all pending positions.
  void rollback() noexcept { pending_ = 0; }

  /// An empty sequence; the memory is kept, but for blocks that other caches hold too.
  void clear() noexcept {
    committed_ = pending_ = furthest_ = 0;
    std::erase_if(blocks_, is_shared);
    for (std::size_t b = 0; b < blocks_.size(); ++b) name(b);
  }

  /// Goes back to the first `positions` committed positions and forgets the others, and what is pending. True if all that the positions
  /// behind them and a drafter see is still held: for all of them or none; without sliding layers or while no ring is full; and, after a
  /// commit, for up to max_rewind of them taken back, counted from the furthest length the sequence ever had. False, and nothing is changed,
  /// if a ring has lost keys that would be seen again, or if fewer are committed.
  bool truncate(std::size_t positions) noexcept {
    if (positions > committed_) return false;
    if (positions == 0) return clear(), true;
    for (const ring& r : windows_)
      if (positions != committed_ && furthest_ > r.rows && positions < furthest_ - r.rows + (std::min)(r.window, positions - 1) + 1)
        return false;
    committed_ = positions;
    pending_ = 0;
    return true;
  }

  /// Keys and values of a layer, index < layer_count(). Positions at or beyond committed + pending are not to be read.
  [[nodiscard]] view layer(std::size_t index) noexcept { return layers_[index]; }
  [[nodiscard]] const_view layer(std::size_t index) const noexcept { return layers_[index]; }

 private:
  using block = std::shared_ptr<buffer<Kv, space_of<B>>>;  // one block of every full layer, in order

  /// fork()
  kv_cache(const kv_cache& other)
      : max_rows_(other.max_rows_),
        max_positions_(other.max_positions_),
        committed_(other.committed_),
        max_rejected_(other.max_rejected_),
        furthest_(other.furthest_),
        windows_(other.windows_),
        growth_(other.growth_),
        table_rows_(other.table_rows_),
        table_(other.table_.rows(), other.table_.cols()),
        table_there_(other.table_there_.rows(), other.table_there_.cols()),
        layers_(other.layers_) {
    rings_.reserve(other.rings_.size());
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      layers_[i].blocks = table_there(i);
      if (layers_[i].ring_rows == 0) continue;
      const auto& slots = other.rings_[rings_.size()];
      copy(slots, rings_.emplace_back(slots.size()));
      table_of(i)[0] = rings_.back().data();
    }
    if (growth_ != 0) {
      blocks_.reserve(table_rows_);
      const std::size_t full = committed_ / block_rows;
      for (std::size_t b = 0; b < full; ++b) put(b, other.blocks_[b]);
      if (committed_ % block_rows != 0) {
        put(full, std::make_shared<buffer<Kv, space_of<B>>>(growth_));
        copy(*other.blocks_[full], *blocks_[full]);
      }
    }
    publish();
  }

  static void copy(const buffer<Kv, space_of<B>>& from, buffer<Kv, space_of<B>>& to) {
    space_copy<space_of<B>, space_of<B>>::copy(to.data(), from.data(), from.size());
  }
  [[nodiscard]] static bool is_shared(const block& b) noexcept { return b.use_count() > 1; }
  /// Makes `memory` block b, which is held already or the next one.
  void put(std::size_t b, block memory) noexcept {
    if (b < blocks_.size())
      blocks_[b] = std::move(memory);
    else
      blocks_.push_back(std::move(memory));
    name(b);
  }
  /// Enters block b in the tables of the layers; publish() makes it known where ops read them.
  void name(std::size_t b) noexcept {
    published_ = false;
    Kv* next = blocks_[b]->data();
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (layers_[i].ring_rows != 0) continue;
      table_of(i)[b] = next;
      next += 2 * layers_[i].heads * block_rows * layers_[i].stride();
    }
  }
  [[nodiscard]] static error too_large() {
    return {error_code::out_of_memory, "outrider: the keys and values of the cache do not fit into an address"};
  }
  /// Stored objects of a block of `rows` slots, keys and values.
  [[nodiscard]] static std::size_t elements(const kv_layer_shape& shape, std::size_t rows) {
    const auto width = checked_multiply(shape.heads, shape.head_dim / elements_of<Kv>);
    const auto both = width ? checked_multiply(*width, 2) : width;
    const auto size = both ? checked_multiply(*both, rows) : both;
    if (!size) throw too_large();
    return *size;
  }
  [[nodiscard]] Kv** table_of(std::size_t layer) noexcept { return table_.view().row(layer); }
  /// The same table where ops read it.
  [[nodiscard]] Kv** table_there(std::size_t layer) noexcept {
    return host_accessible<space_of<B>> ? table_of(layer) : table_there_.view().row(layer);
  }
  void publish() {
    if constexpr (!host_accessible<space_of<B>>) copy_across(table_there_.view(), table_.view());
    published_ = true;
  }

  struct ring {
    std::size_t window, rows;
  };

  std::size_t max_rows_, max_positions_, committed_ = 0, pending_ = 0;
  std::size_t max_rejected_ = 0;
  std::size_t furthest_ =
      0;  // the end of the last position that was, or may have been, ever pending: later slots of the rings are as they were
  std::vector<ring> windows_;                   // of the sliding layers
  std::size_t growth_ = 0;                      // objects of one more block in every full layer
  std::size_t table_rows_ = 0;                  // blocks a full layer has at max_positions
  matrix<Kv*, host_space> table_;               // [layers, table_rows_], never moves in memory: views point into it
  matrix<Kv*, space_of<B>> table_there_;        // or into its copy, where the backend's memory is elsewhere
  bool published_ = false;                      // the copy says the same
  std::vector<view> layers_;                    // handed out by layer()
  std::vector<buffer<Kv, space_of<B>>> rings_;  // of the sliding layers
  std::vector<block> blocks_;                   // of the full ones
};

}  // namespace outrider
