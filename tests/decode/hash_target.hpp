// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "outrider/backend/reference.hpp"
#include "outrider/core/storage.hpp"
#include "outrider/decode/generate.hpp"
#include "outrider/gemma4/assistant.hpp"

namespace outrider::testing {

/// A target without a model: the token behind a prefix is a fixed function of all its tokens, so a wrong draft changes every row behind it.
/// It hands out positions for everything a drafter reads, and keeps a list of what it was told to do.
class hash_target {
 public:
  using backend_type = reference;
  using kv_type = float;

  static constexpr std::size_t vocabulary = 50;
  std::vector<std::string> calls;  // "prefill 0: 1 2 3", "verify 3: 7 8", "commit 2"
  std::size_t reserved = 0;

  explicit hash_target(std::size_t max_draft = 16, std::size_t max_positions = 1000)
      : max_draft_(max_draft), max_positions_(max_positions), logits_(max_draft + 1, vocabulary), hidden_(max_draft + 1, 1) {}

  /// What this target says after `tokens`.
  [[nodiscard]] static token_id next(std::span<const token_id> tokens) {
    std::uint32_t hash = 17;
    for (const token_id token : tokens) hash = hash * 31u + static_cast<std::uint32_t>(token) + (hash >> 15);
    return static_cast<token_id>(hash % vocabulary);
  }
  /// The prompt with the `count` tokens that follow it.
  [[nodiscard]] static std::vector<token_id> continued(std::vector<token_id> text, std::size_t count) {
    for (; count != 0; --count) text.push_back(next(text));
    return text;
  }

  [[nodiscard]] context_of<reference>& context() const noexcept { return ctx_; }
  [[nodiscard]] std::size_t vocab_size() const noexcept { return vocabulary; }
  [[nodiscard]] std::size_t max_draft() const noexcept { return max_draft_; }
  [[nodiscard]] std::size_t max_positions() const noexcept { return max_positions_; }
  [[nodiscard]] std::size_t committed() const noexcept { return committed_.size(); }
  [[nodiscard]] const std::vector<token_id>& tokens() const noexcept { return committed_; }
  [[nodiscard]] matrix_view<float> logits() const noexcept { return logits_.view().first_rows(rows_); }
  /// [1, 1]: the position whose state this is.
  [[nodiscard]] matrix_view<const float> hidden() const noexcept { return hidden_.view().slice_rows(last_row_, 1); }
  [[nodiscard]] gemma4::shared_kv<float, host_space> keys() const noexcept { return {{}, {committed(), committed()}, committed()}; }
  void embed(matrix_view<float> out, token_id id) const noexcept { out(0, 0) = static_cast<float>(id); }

  void reserve(std::size_t positions) { reserved = (std::max)(reserved, positions); }
  void prefill(std::span<const token_id> tokens) {
    note("prefill " + std::to_string(committed()) + ":", tokens);
    committed_.insert(committed_.end(), tokens.begin(), tokens.end());
    pending_.clear();
    rows_ = 1;
    set_row(0, committed_);
  }
  /// In pieces of three tokens, asking before each.
  template <class GoOn>
  bool prefill(std::span<const token_id> tokens, GoOn&& go_on) {
    for (std::size_t begin = 0; begin < tokens.size(); begin += 3) {
      if (!go_on()) return false;
      if (begin == 0) note("prefill " + std::to_string(committed()) + ":", tokens);
      const auto piece = tokens.subspan(begin, (std::min)(std::size_t{3}, tokens.size() - begin));
      committed_.insert(committed_.end(), piece.begin(), piece.end());
    }
    pending_.clear();
    rows_ = 1;
    set_row(0, committed_);
    return true;
  }
  void verify(std::span<const token_id> tokens) {
    note("verify " + std::to_string(committed()) + ":", tokens);
    pending_.assign(tokens.begin(), tokens.end());
    rows_ = tokens.size();
    std::vector<token_id> prefix = committed_;
    for (std::size_t r = 0; r < tokens.size(); ++r) {
      prefix.push_back(tokens[r]);
      set_row(r, prefix);
    }
  }
  void commit(std::size_t rows) {
    calls.push_back("commit " + std::to_string(rows));
    committed_.insert(committed_.end(), pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(rows));
    pending_.clear();
    last_row_ = rows - 1;
  }

 private:
  void note(std::string call, std::span<const token_id> tokens) {
    for (const token_id token : tokens) call += ' ' + std::to_string(token);
    calls.push_back(std::move(call));
  }
  void set_row(std::size_t row, std::span<const token_id> prefix) {
    const auto logits = logits_.view();
    for (std::size_t c = 0; c < vocabulary; ++c) logits(row, c) = 0;
    logits(row, static_cast<std::size_t>(next(prefix))) = 1;
    hidden_.view()(row, 0) = static_cast<float>(prefix.size() - 1);
    last_row_ = row;
  }

  std::size_t max_draft_, max_positions_, rows_ = 0, last_row_ = 0;
  std::vector<token_id> committed_, pending_;
  mutable context_of<reference> ctx_{execution{}};
  mutable matrix<float, host_space> logits_;
  matrix<float, host_space> hidden_;
};

static_assert(decoding_target<hash_target>);

}  // namespace outrider::testing
