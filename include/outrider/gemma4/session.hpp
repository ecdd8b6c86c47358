// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "outrider/error.hpp"
#include "outrider/gemma4/assistant.hpp"
#include "outrider/gemma4/model.hpp"

namespace outrider::gemma4 {

/// Limits of a session; they decide how much memory it takes.
struct session_options {
  std::size_t max_draft = max_draft_length;  // most drafts a verify pass may carry
  std::size_t prompt_chunk = 128;  // prompt rows per pass; part of the configuration, since prompts may round differently by chunk
  std::size_t max_positions = 0;   // limit of the sequence; 0 = what the model was made for
  std::size_t max_rewind = 0;      // tokens that truncate() can always take back; so many more slots in every sliding layer
};

/// One sequence on one model: its cache, its workspace, and the results of its last pass. This is the target the decoding loops of decode/
/// drive. Borrows the model and the context; one thread at a time.
template <backend_tag B, class Kv = float>
class session {
  static_assert(attention_backend<B, Kv>,
                "outrider: this backend has no attention_ops<B, Kv> for the cache's element type Kv; see kv_types");

 public:
  using backend_type = B;

  /// Errors: argument_invalid for options outside what a session can have, out_of_memory.
  session(const model<B>& target, context_of<B>& ctx, session_options options = {})
      : model_(&target),
        ctx_(&ctx),
        options_(checked(options)),
        workspace_(target.config(), max_rows(), options_.max_draft + 1),
        cache_(target.kv_layers(), max_rows(), options_.max_positions ? options_.max_positions : target.config().max_positions,
               options_.max_rewind, options_.max_draft) {}

  session(const model<B>&& target, context_of<B>& ctx, session_options options = {}) = delete;  // the model must outlive its sessions

  [[nodiscard]] const text_config& config() const noexcept { return model_->config(); }
  [[nodiscard]] context_of<B>& context() const noexcept { return *ctx_; }
  [[nodiscard]] std::size_t vocab_size() const noexcept { return config().vocab_size; }
  [[nodiscard]] std::size_t max_draft() const noexcept { return options_.max_draft; }
  [[nodiscard]] std::size_t max_positions() const noexcept { return cache_.max_positions(); }
  /// Positions whose keys are committed: 0 … committed() - 1.
  [[nodiscard]] std::size_t committed() const noexcept { return cache_.committed(); }
  /// The tokens at these positions.
  [[nodiscard]] std::span<const token_id> tokens() const noexcept { return std::span(tokens_).first(committed()); }
  [[nodiscard]] const kv_cache<B, Kv>& cache() const noexcept { return cache_; }

  /// Takes the memory that `positions` positions need, so that no later call allocates. Errors: context_full, out_of_memory.
  void reserve(std::size_t positions) {
    cache_.reserve(positions);
    tokens_.reserve(positions + options_.max_draft + 1);
  }
  /// Starts an empty sequence; memory is kept.
  void clear() noexcept {
    cache_.clear();
    tokens_.clear();
    result_ = {};
  }
  /// Goes back to the first `positions` committed tokens, as if the others had never been: what follows is the text of a new session that was
  /// given these tokens, bit for bit where prompts are row-exact (all shipped backends but eigen_prompts). The next call must be prefill(),
  /// which renews logits() and hidden(). False, and nothing is changed, if the sliding layers no longer hold what would be seen again, see
  /// kv_cache::truncate; options.max_rewind tokens can always be taken back, counted from the furthest length so far.
  bool truncate(std::size_t positions) noexcept {
    if (!cache_.truncate(positions)) return false;
    tokens_.resize(positions);
    result_ = {};
    return true;
  }

  /// Processes and commits tokens, a chunk per pass. logits() and hidden() are then one row, that of the last token. Between two chunks
  /// go_on() is asked: if it says no, the chunks so far stay committed, logits() and hidden() are nothing, and the answer is false.
  /// Precondition: at least one token, all in [0, V). Errors, before anything is written: context_full, out_of_memory; on a device also what
  /// goes wrong there, and then the chunks before stay committed.
  template <class GoOn>
  bool prefill(std::span<const token_id> tokens, GoOn&& go_on) {
    forget_pending();
    reserve(committed() + tokens.size());
    result_ = {};
    for (std::size_t begin = 0; begin < tokens.size();) {
      if (!go_on()) return false;
      const std::size_t m = (std::min)(options_.prompt_chunk, tokens.size() - begin);
      const std::size_t wanted = begin + m == tokens.size() ? 1 : 0;
      const auto chunk = tokens.subspan(begin, m);
      result_ = model_->forward(*ctx_, workspace_, cache_, chunk, wanted, row_kind::prompt);
      // A device is only asked by then: keys are committed when they are there.
      if constexpr (requires { ctx_->wait(); }) ctx_->wait();
      cache_.commit(m);
      tokens_.insert(tokens_.end(), chunk.begin(), chunk.end());
      begin += m;
    }
    last_row_ = 0;
    return true;
  }
  void prefill(std::span<const token_id> tokens) {
    prefill(tokens, [] { return true; });
  }

  /// Processes up to max_draft() + 1 tokens in one pass; their keys are pending until commit(), or forgotten by the next pass. logits() has a
  /// row for each token. Precondition: ids in [0, V). Errors, before anything is written: argument_invalid for another number of tokens,
  /// context_full, out_of_memory.
  void verify(std::span<const token_id> tokens) {
    check_pass(tokens.size());
    forget_pending();
    result_ = model_->forward(*ctx_, workspace_, cache_, tokens, tokens.size(), row_kind::decode);
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
    last_row_ = tokens.size() - 1;
  }
  /// The same for `count` tokens that lie where B's ops read them, while the host need not know them yet. It has to name() them before commit().
  /// Precondition: reads_ids_there().
  void verify_there(const token_id* ids, std::size_t count) {
    check_pass(count);
    forget_pending();
    result_ = model_->forward_there(*ctx_, workspace_, cache_, ids, count);
    tokens_.resize(committed() + count);
    last_row_ = count - 1;
  }
  void name(std::span<const token_id> tokens) noexcept {
    OUTRIDER_ASSERT(tokens.size() == cache_.pending());
    std::copy(tokens.begin(), tokens.end(), tokens_.end() - static_cast<std::ptrdiff_t>(tokens.size()));
  }
  /// Whether verify_there() can be used: not if a table of the model stays on the host.
  [[nodiscard]] bool reads_ids_there() const noexcept { return model_->reads_ids_there(); }

  /// Keeps the keys of the first `rows` >= 1 tokens of the last verify() and forgets the others; hidden() is then the last kept row.
  /// Errors: argument_invalid for 0 rows or more than are pending.
  void commit(std::size_t rows) {
    if (rows == 0) throw error(error_code::argument_invalid, "outrider: 0 rows to commit; the token a pass begins with is always kept");
    cache_.commit(rows);
    tokens_.resize(committed());
    last_row_ = rows - 1;
  }

  /// [rows of the last pass, V], soft-capped, until the next pass. Mutable: processors work in place.
  [[nodiscard]] matrix_for<float, B> logits() const noexcept { return result_.logits; }
  /// [1, H]: the state after the final norm of the last committed position, until the next pass.
  [[nodiscard]] matrix_for<const float, B> hidden() const noexcept { return result_.hidden.slice_rows(last_row_, 1); }
  /// The donors' keys and values, read by the drafter where they are; the ends are those of now, the memory lives as long as the session.
  [[nodiscard]] shared_kv<Kv, space_of<B>> keys() const noexcept { return keys_of<B, Kv>(config(), cache_); }
  /// out [1, H]: the scaled embedding of one token. Errors, on a device: those of a copy.
  void embed(matrix_for<float, B> out, token_id id) const { model_->embed(*ctx_, out, drafted_.put({&id, 1})); }
  /// The same for an id that lies where B's ops read it.
  void embed_at(matrix_for<float, B> out, const token_id* id) const noexcept { model_->embed(*ctx_, out, id); }

 private:
  void check_pass(std::size_t count) const {
    if (count == 0 || count > max_draft() + 1)
      throw error(error_code::argument_invalid, "outrider: a pass over " + std::to_string(count) + " tokens, this session verifies 1 to " +
                                                    std::to_string(max_draft() + 1));
  }
  void forget_pending() noexcept {
    cache_.rollback();
    tokens_.resize(committed());
  }
  static session_options checked(session_options options) {
    const auto refuse = [](const char* what, std::size_t found, std::size_t least, std::size_t most) {
      if (found < least || found > most)
        throw error(error_code::argument_invalid, std::string("outrider: ") + what + " of " + std::to_string(found) +
                                                      "; allowed: " + std::to_string(least) + " to " + std::to_string(most));
    };
    constexpr std::size_t most_positions = 0x7fffffff;  // positions travel as 32-bit numbers
    refuse("a most of drafts", options.max_draft, 0, max_draft_length);
    refuse("a prompt chunk", options.prompt_chunk, 1, 1 << 16);
    refuse("a limit of positions", options.max_positions, 0, most_positions);
    refuse("a rewind", options.max_rewind, 0, most_positions);
    return options;
  }
  [[nodiscard]] std::size_t max_rows() const noexcept { return (std::max)(options_.prompt_chunk, options_.max_draft + 1); }

  const model<B>* model_;
  context_of<B>* ctx_;
  session_options options_;
  workspace<B> workspace_;
  kv_cache<B, Kv> cache_;
  std::vector<token_id> tokens_;  // of the committed positions, then of the pending ones
  forward_result<B> result_;
  std::size_t last_row_ = 0;
  mutable id_room<B> drafted_{1};  // scratch of embed()
};

}  // namespace outrider::gemma4
