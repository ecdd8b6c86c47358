// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <string>
#include <string_view>

#include "outrider/core/scalar.hpp"
#include "outrider/text/tokenizer.hpp"
#include "outrider/text/utf8.hpp"

namespace outrider {

/// Text as it is generated, token by token, always whole characters: an incomplete one waits for its other bytes. All that push() and
/// finish() returned, put together, is tokenizer::decode_text of the tokens. Allocates in the constructor only. Borrows the tokenizer.
class detokenizer {
 public:
  /// Special tokens are left out, or spelled out if `special`.
  explicit detokenizer(const tokenizer& tokens, bool special = false) : tokens_(&tokens), special_(special) {
    bytes_.reserve(tokens.longest_token());
    text_.reserve(utf8_repair::bound(tokens.longest_token()));
  }
  explicit detokenizer(const tokenizer&& tokens, bool special = false) = delete;  // the tokenizer must outlive it

  /// The text that is final now; empty if the token is a marker or a part of a character. Valid until the next call.
  /// error_code::argument_invalid for an id outside the vocabulary.
  [[nodiscard]] std::string_view push(token_id token) {
    bytes_.clear();
    text_.clear();
    tokens_->append_bytes(token, bytes_, special_);
    repair_.push(bytes_, text_);
    return text_;
  }
  /// Whether all tokens so far are text already: no character waits for its other bytes.
  [[nodiscard]] bool is_between_characters() const noexcept { return repair_.is_empty(); }

  /// The end of the text: U+FFFD if a character was left incomplete, else nothing. The object is as new afterwards.
  [[nodiscard]] std::string_view finish() {
    text_.clear();
    repair_.finish(text_);
    return text_;
  }

 private:
  const tokenizer* tokens_;
  bool special_;
  utf8_repair repair_;
  std::string bytes_, text_;
};

}  // namespace outrider
