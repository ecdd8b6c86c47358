// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "outrider/error.hpp"
#include "outrider/gemma4/assistant.hpp"
#include "outrider/gemma4/model.hpp"

namespace outrider::gemma4 {

/// Limits of a batch; they decide how much memory it takes.
struct batch_options {
  std::size_t max_sequences = 8;  // slots
  std::size_t max_rows = 0;  // most rows of a pass, all sequences together; 0 = a chunk of a prompt and a full verification of every slot
  std::size_t max_draft = max_draft_length;  // most drafts of a sequence in a pass
  std::size_t prompt_chunk = 128;            // most prompt rows of a sequence in a pass
  std::size_t max_positions = 0;             // limit of each sequence; 0 = what the model was made for
  std::size_t max_rewind = 0;                // tokens that truncate() can always take back; so many more slots in every sliding layer
};

/// What one sequence contributes to a pass: an entry of it. The tokens are read during the pass only; they must not be those that the batch
/// itself keeps, tokens(slot).
struct sequence_rows {
  std::size_t slot = 0;
  std::span<const token_id> tokens;  // at least one, placed behind the committed ones of the slot
  std::size_t wanted = 0;            // the last so many of them get logits and hidden states, at most max_draft() + 1
  bool prompt = false;               // up to prompt_chunk() tokens, not the max_draft() + 1 of a verification
};

template <backend_tag B, class Kv = float>
class slot_target;

/// Many sequences on one model, with one workspace: each has its own length, keys, tokens and last state, and a pass reads the weights once
/// for the rows of all that take part. A sequence lives in a slot, 0 … max_sequences() − 1, from add() or fork() to close().
///
///     const std::size_t slot = batch.add();
///     batch.forward(entries);                 what was pending in any slot is forgotten, these rows become pending
///     batch.logits(i), batch.hidden(i)        of the wanted rows of entry i, until the next pass
///     batch.commit(slot, n)                   keeps the first n rows of the slot's entry; before the next pass, if at all
///     batch.target(slot)                      what a drafter reads of the sequence; also of one that sat passes out
///
/// Results of a pass go by entry, i in the order of `entries`; what outlasts it goes by slot. All rows of a sequence are in one entry.
/// Exactness: logits, hidden states and keys of a sequence have the bits of a session that is given the same tokens, whatever the chunks of
/// its prompt are and whoever takes part beside it. Rows of prompts take the row-exact product too, for what a prompt beside others rounds
/// to must not depend on them: a backend whose matmul_prompt rounds differently, eigen_prompts, gives other bits in a session's prefill().
///
/// Borrows the model and the context; one thread at a time. Slots, tokens and counts that are not allowed are refused with argument_invalid.
template <backend_tag B, class Kv = float>
class batch {
  static_assert(attention_backend<B, Kv>,
                "outrider: this backend has no attention_ops<B, Kv> for the cache's element type Kv; see kv_types");

 public:
  using backend_type = B;

  /// Errors: argument_invalid for options outside what a batch can have, out_of_memory. The caches are made by add() and fork().
  batch(const model<B>& target, context_of<B>& ctx, batch_options options = {})
      : model_(&target),
        ctx_(&ctx),
        options_(checked(options, target.config())),
        workspace_(target.config(), options_.max_rows, (std::min)(options_.max_rows, options_.max_sequences * (options_.max_draft + 1))),
        sequences_(options_.max_sequences),
        states_(options_.max_sequences, target.config().hidden_size) {
    ids_.reserve(options_.max_rows);
    parts_.reserve(options_.max_sequences);
    entries_.reserve(options_.max_sequences);
  }
  batch(const model<B>&& target, context_of<B>& ctx, batch_options options = {}) = delete;  // the model must outlive its batches

  [[nodiscard]] const text_config& config() const noexcept { return model_->config(); }
  [[nodiscard]] context_of<B>& context() const noexcept { return *ctx_; }
  [[nodiscard]] std::size_t vocab_size() const noexcept { return config().vocab_size; }
  [[nodiscard]] std::size_t max_sequences() const noexcept { return options_.max_sequences; }
  [[nodiscard]] std::size_t max_rows() const noexcept { return options_.max_rows; }
  [[nodiscard]] std::size_t max_draft() const noexcept { return options_.max_draft; }
  [[nodiscard]] std::size_t prompt_chunk() const noexcept { return options_.prompt_chunk; }
  [[nodiscard]] std::size_t max_positions() const noexcept { return options_.max_positions; }

  /// How many slots hold a sequence. While it is below max_sequences(), add() and fork() find one.
  [[nodiscard]] std::size_t size() const noexcept { return open_; }
  [[nodiscard]] bool is_open(std::size_t slot) const noexcept { return slot < sequences_.size() && sequences_[slot].open; }

  /// Opens an empty sequence in the lowest slot that is free. Errors: argument_invalid if none is, out_of_memory.
  [[nodiscard]] std::size_t add() {
    const std::size_t slot = free_slot();
    sequence& s = sequences_[slot];
    if (!s.cache) s.cache.emplace(model_->kv_layers(), cache_rows(), options_.max_positions, options_.max_rewind, options_.max_draft);
    open(s);
    return slot;
  }
  /// A second sequence with the committed tokens of `slot`, in the lowest slot that is free; what is pending stays with the first. They share
  /// the memory of what they share, see kv_cache::fork(), and have nothing else to do with each other: either may be closed first.
  /// Errors: argument_invalid if no slot is free, out_of_memory.
  [[nodiscard]] std::size_t fork(std::size_t slot) {
    const sequence& from = at(slot);
    const std::size_t into = free_slot();
    sequence& s = sequences_[into];
    std::vector<token_id> tokens(from.tokens.begin(), from.tokens.begin() + static_cast<std::ptrdiff_t>(from.cache->committed()));
    s.cache.emplace(from.cache->fork());
    open(s);
    s.tokens = std::move(tokens);
    s.has_state = from.has_state;
    if (s.has_state) pointwise_ops<B>::copy(*ctx_, state_of(into), std::as_const(*this).state_of(slot));
    return into;
  }
  /// Ends a sequence. Its slot is free for another, which takes over its memory.
  void close(std::size_t slot) {
    sequence& s = at(slot);
    s.cache->clear();
    s.tokens.clear();
    s.open = false;
    s.entry = none;
    --open_;
  }

  /// Positions of the sequence whose keys are committed: 0 … committed(slot) − 1.
  [[nodiscard]] std::size_t committed(std::size_t slot) const { return at(slot).cache->committed(); }
  /// The tokens at these positions; valid until the sequence changes.
  [[nodiscard]] std::span<const token_id> tokens(std::size_t slot) const {
    const sequence& s = at(slot);
    return std::span(s.tokens).first(s.cache->committed());
  }
  [[nodiscard]] const kv_cache<B, Kv>& cache(std::size_t slot) const { return *at(slot).cache; }
  /// What drafters and samplers read of the sequence. Valid until close(slot).
  [[nodiscard]] slot_target<B, Kv> target(std::size_t slot) const {
    static_cast<void>(at(slot));
    return {*this, slot};
  }

  /// Takes the memory that `positions` positions of the sequence need: passes, commits and truncations allocate nothing up to there, but for
  /// what a sequence that forked writes into blocks it shares. Errors: context_full, out_of_memory.
  void reserve(std::size_t slot, std::size_t positions) {
    sequence& s = at(slot);
    s.cache->reserve(positions);
    s.tokens.reserve(positions);
  }

  /// Goes back to the first `positions` committed tokens, as if the others had never been, and forgets what is pending; hidden() of the slot
  /// is then unknown until a pass, unless nothing committed was taken back. False, and nothing is changed, where kv_cache::truncate() says so;
  /// options.max_rewind tokens can always be taken back, counted from the furthest length so far.
  bool truncate(std::size_t slot, std::size_t positions) {
    sequence& s = at(slot);
    const std::size_t before = s.cache->committed();
    if (!s.cache->truncate(positions)) return false;
    s.tokens.resize(positions);
    s.entry = none;
    s.has_state = s.has_state && positions == before;
    return true;
  }

  /// One pass over the rows of `entries`, at least one, no slot twice, max_rows() rows together. What is pending in any slot is forgotten,
  /// the rows become pending. Errors, before anything is changed: argument_invalid, also for ids outside the vocabulary, context_full if a
  /// sequence would outgrow max_positions(), out_of_memory.
  void forward(std::span<const sequence_rows> entries) {
    check(entries);
    for (const sequence_rows& e : entries) {
      sequence& s = sequences_[e.slot];
      const std::size_t positions = s.cache->committed() + e.tokens.size();
      s.cache->reserve(positions);
      if (s.tokens.capacity() < positions) s.tokens.reserve((std::max)(positions, 2 * s.tokens.capacity()));
    }

    for (sequence& s : sequences_) {
      if (s.entry == none) continue;
      s.cache->rollback();
      s.tokens.resize(s.cache->committed());
      s.entry = none;
    }
    ids_.clear();
    parts_.clear();
    entries_.clear();
    std::size_t wanted = 0;
    for (const sequence_rows& e : entries) {
      sequence& s = sequences_[e.slot];
      s.entry = entries_.size();
      ids_.insert(ids_.end(), e.tokens.begin(), e.tokens.end());
      s.tokens.insert(s.tokens.end(), e.tokens.begin(), e.tokens.end());
      parts_.push_back({&*s.cache, e.tokens.size(), e.wanted});
      entries_.push_back({wanted, e.wanted, e.tokens.size()});
      wanted += e.wanted;
    }
    result_ = model_->forward(*ctx_, workspace_, std::span<const batch_part<B, Kv>>(parts_), ids_, row_kind::decode);
  }

  /// [wanted, V] of entry i of the last pass, soft-capped. Mutable: processors work in place.
  [[nodiscard]] matrix_for<float, B> logits(std::size_t i) const noexcept { return rows_of(result_.logits, i); }
  /// [wanted, H] of entry i of the last pass: the states after the final norm.
  [[nodiscard]] matrix_for<const float, B> hidden(std::size_t i) const noexcept { return rows_of(result_.hidden, i); }

  /// Keeps the first `rows` >= 1 of the slot's rows in the last pass and forgets the others. If the last row kept was a wanted one, its state
  /// is kept with the slot, for target(slot).hidden(). A slot's rows are committed once, and before the next pass.
  void commit(std::size_t slot, std::size_t rows) {
    sequence& s = at(slot);
    if (s.entry == none)
      throw error(error_code::argument_invalid,
                  "outrider: " + std::to_string(rows) + " rows to commit in slot " + std::to_string(slot) + ", none are pending");
    if (rows == 0) throw error(error_code::argument_invalid, "outrider: 0 rows to commit; the token a pass begins with is always kept");
    s.cache->commit(rows);
    s.tokens.resize(s.cache->committed());
    const entry& e = entries_[std::exchange(s.entry, none)];
    const std::size_t unwanted = e.rows - e.wanted;
    s.has_state = rows > unwanted;
    if (s.has_state) pointwise_ops<B>::copy(*ctx_, state_of(slot), result_.hidden.slice_rows(e.first + rows - 1 - unwanted, 1));
  }

 private:
  friend class slot_target<B, Kv>;

  static constexpr std::size_t none = static_cast<std::size_t>(-1);

  struct sequence {
    std::optional<kv_cache<B, Kv>> cache;  // of a closed one: empty, its memory waits for the next
    std::vector<token_id> tokens;          // of the committed positions, then of the pending ones
    bool open = false;
    bool has_state = false;    // of the last committed position, in states_
    std::size_t entry = none;  // of the last pass, while its rows are pending
    std::size_t seen = 0;      // the last check() that met it
  };
  struct entry {
    std::size_t first, wanted, rows;  // its rows of the result, its rows of the pass
  };

  [[nodiscard]] static batch_options checked(batch_options options, const text_config& config) {
    const auto refuse = [](const char* what, std::size_t found, std::size_t least, std::size_t most) {
      if (found < least || found > most)
        throw error(error_code::argument_invalid, std::string("outrider: ") + what + " of " + std::to_string(found) +
                                                      "; allowed: " + std::to_string(least) + " to " + std::to_string(most));
    };
    constexpr std::size_t most_positions = 0x7fffffff;  // positions travel as 32-bit numbers
    refuse("a most of sequences", options.max_sequences, 1, 1 << 12);
    refuse("a most of drafts", options.max_draft, 0, max_draft_length);
    refuse("a prompt chunk", options.prompt_chunk, 1, 1 << 16);
    refuse("a limit of positions", options.max_positions, 0, most_positions);
    refuse("a rewind", options.max_rewind, 0, most_positions);
    const std::size_t verified = options.max_draft + 1;
    if (options.max_rows == 0) options.max_rows = options.prompt_chunk + options.max_sequences * verified;
    refuse("a most of rows", options.max_rows, (std::max)(options.prompt_chunk, verified), 1 << 20);  // every legal entry fits
    if (options.max_positions == 0) options.max_positions = config.max_positions;
    return options;
  }
  /// Most rows of one sequence in a pass.
  [[nodiscard]] std::size_t cache_rows() const noexcept { return (std::max)(options_.prompt_chunk, options_.max_draft + 1); }

  [[nodiscard]] const sequence& at(std::size_t slot) const {
    if (!is_open(slot))
      throw error(error_code::argument_invalid, "outrider: there is no sequence in slot " + std::to_string(slot) + "; " +
                                                    std::to_string(open_) + " of " + std::to_string(sequences_.size()) + " are open");
    return sequences_[slot];
  }
  [[nodiscard]] sequence& at(std::size_t slot) { return const_cast<sequence&>(std::as_const(*this).at(slot)); }
  [[nodiscard]] std::size_t free_slot() const {
    for (std::size_t slot = 0; slot < sequences_.size(); ++slot)
      if (!sequences_[slot].open) return slot;
    throw error(error_code::argument_invalid, "outrider: all " + std::to_string(sequences_.size()) + " slots of the batch are taken");
  }
  void open(sequence& s) noexcept {
    s.open = true;
    s.has_state = false;
    ++open_;
  }

  [[nodiscard]] matrix_for<float, B> state_of(std::size_t slot) noexcept { return states_.view().slice_rows(slot, 1); }
  [[nodiscard]] matrix_for<const float, B> state_of(std::size_t slot) const noexcept { return states_.view().slice_rows(slot, 1); }

  void check(std::span<const sequence_rows> entries) {
    const auto refuse = [](const std::string& what) { throw error(error_code::argument_invalid, "outrider: " + what); };
    if (entries.empty()) refuse("a pass over no sequence; at least one is needed");
    ++checks_;
    std::size_t rows = 0;
    for (const sequence_rows& e : entries) {
      sequence& s = at(e.slot);
      const auto refuse_entry = [&](std::int64_t found, const char* what, std::size_t least, std::size_t most) {
        refuse(std::to_string(found) + what + " in slot " + std::to_string(e.slot) + "; allowed: " + std::to_string(least) + " to " +
               std::to_string(most));
      };
      if (std::exchange(s.seen, checks_) == checks_)
        refuse("two entries of slot " + std::to_string(e.slot) + " in a pass; all rows of a sequence are in one");
      const std::size_t count = e.tokens.size(), verified = max_draft() + 1, most = e.prompt ? prompt_chunk() : verified;
      if (count == 0 || count > most) refuse_entry(static_cast<std::int64_t>(count), e.prompt ? " tokens of a prompt" : " tokens", 1, most);
      if (e.wanted > (std::min)(count, verified))
        refuse_entry(static_cast<std::int64_t>(e.wanted), " wanted rows", 0, (std::min)(count, verified));
      for (const token_id id : e.tokens)
        if (id < 0 || static_cast<std::size_t>(id) >= vocab_size()) refuse_entry(id, " as a token", 0, vocab_size() - 1);
      rows += count;
    }
    if (rows > max_rows())
      refuse("a pass over " + std::to_string(rows) + " rows; this batch was made for up to " + std::to_string(max_rows()));
  }

  template <class T>
  [[nodiscard]] matrix_for<T, B> rows_of(matrix_for<T, B> rows, std::size_t i) const noexcept {
    OUTRIDER_ASSERT(i < entries_.size());
    return rows.slice_rows(entries_[i].first, entries_[i].wanted);
  }

  const model<B>* model_;
  context_of<B>* ctx_;
  batch_options options_;
  workspace<B> workspace_;
  std::vector<sequence> sequences_;
  matrix<float, space_of<B>> states_;  // [max_sequences, H], after the final norm: the pass that a state is from may be long gone
  std::size_t open_ = 0, checks_ = 0;
  // The last pass. None of these grows beyond what the constructor reserved.
  mutable id_room<B> drafted_{1};  // scratch of slot_target::embed()
  std::vector<token_id> ids_;
  std::vector<batch_part<B, Kv>> parts_;
  std::vector<entry> entries_;
  forward_result<B> result_;
};

/// One sequence of a batch, as drafters and samplers see a target. A view: it borrows the batch and says what is so now, so it may be kept
/// from round to round while the slot is open.
template <backend_tag B, class Kv>
class slot_target {
 public:
  using backend_type = B;

  slot_target(const batch<B, Kv>& all, std::size_t slot) noexcept : batch_(&all), slot_(slot) {}

  [[nodiscard]] std::size_t slot() const noexcept { return slot_; }
  [[nodiscard]] const text_config& config() const noexcept { return batch_->config(); }
  [[nodiscard]] context_of<B>& context() const noexcept { return batch_->context(); }
  [[nodiscard]] std::size_t vocab_size() const noexcept { return batch_->vocab_size(); }
  [[nodiscard]] std::size_t max_draft() const noexcept { return batch_->max_draft(); }
  [[nodiscard]] std::size_t max_positions() const noexcept { return batch_->max_positions(); }
  [[nodiscard]] std::size_t committed() const noexcept { return cache().committed(); }
  /// The tokens at the committed positions.
  [[nodiscard]] std::span<const token_id> tokens() const noexcept { return std::span(sequence().tokens).first(committed()); }
  [[nodiscard]] const kv_cache<B, Kv>& cache() const noexcept { return *sequence().cache; }

  /// [1, H]: the state after the final norm of the last committed position, whichever pass it was in. Without rows if it is not known: the
  /// row was not wanted, or truncate() went back.
  [[nodiscard]] matrix_for<const float, B> hidden() const noexcept {
    return batch_->state_of(slot_).first_rows(sequence().has_state ? 1 : 0);
  }
  /// The donors' keys and values, read by the drafter where they are.
  [[nodiscard]] shared_kv<Kv, space_of<B>> keys() const noexcept { return keys_of<B, Kv>(config(), cache()); }
  /// out [1, H]: the scaled embedding of one token. Errors, on a device: those of a copy.
  void embed(matrix_for<float, B> out, token_id id) const { batch_->model_->embed(context(), out, batch_->drafted_.put({&id, 1})); }
  /// The same for an id that lies where B's ops read it.
  void embed_at(matrix_for<float, B> out, const token_id* id) const noexcept { batch_->model_->embed(context(), out, id); }

 private:
  [[nodiscard]] const auto& sequence() const noexcept {
    OUTRIDER_ASSERT(batch_->is_open(slot_));
    return batch_->sequences_[slot_];
  }

  const batch<B, Kv>* batch_;
  std::size_t slot_;
};

}  // namespace outrider::gemma4
