// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "outrider/core/scalar.hpp"
#include "outrider/decode/generate.hpp"
#include "outrider/text/detokenizer.hpp"
#include "outrider/text/stop_strings.hpp"
#include "outrider/text/tokenizer.hpp"

namespace outrider {

/// What generate() may be given as `emit`: hands on the text of the tokens, whole characters at a time, and ends it at a stop string. Text is
/// held back until it cannot become part of one; nothing of the stop string, and nothing behind it, is ever shown. The tokens that only the
/// stop string needed leave the sequence, see generation::kept.
///   on_text   called with what is final, never with nothing; false stops the generation
/// Call finish() behind generate(): it shows what was held back. Borrows the tokenizer; one thread at a time.
class text_stream {
 public:
  using callback = std::function<bool(std::string_view)>;  // false: no more

  /// Errors: argument_invalid for an empty stop string.
  text_stream(const tokenizer& tokens, callback on_text, std::vector<std::string> stops = {})
      : detokenizer_(tokens), stops_(std::move(stops)), on_text_(std::move(on_text)) {
    constexpr std::size_t tokens_held = 256;
    ends_.reserve(tokens_held);
  }
  text_stream(const tokenizer&& tokens, callback on_text, std::vector<std::string> stops = {}) = delete;  // it must outlive the stream

  /// The next token; why the text ends, if it does. Errors: argument_invalid for an id outside the vocabulary.
  std::optional<finish_reason> operator()(token_id token) {
    const bool is_whole = detokenizer_.is_between_characters();
    const std::string_view text = detokenizer_.push(token);
    if (is_whole && shown_ == decoded_) {  // nothing is held back: the tokens so far stay
      settled_ += ends_.size();
      settled_bytes_ = decoded_;
      ends_.clear();
    }
    decoded_ += text.size();
    ends_.push_back(decoded_);
    const bool go_on = show(stops_.push(text));
    if (!go_on) refused_ = true;
    if (stops_.stopped()) return finish_reason::stop_string;
    return go_on ? std::nullopt : std::optional(finish_reason::caller);
  }

  /// The end of the text: shows what was held back, unless on_text has said that it wants no more. The stream is as new afterwards.
  void finish() {
    const bool is_over = refused_ || stops_.stopped();
    std::string rest(stops_.push(detokenizer_.finish()));
    rest += stops_.finish();
    if (!is_over) show(rest);
    shown_ = decoded_ = settled_ = settled_bytes_ = 0;
    ends_.clear();
    refused_ = false;
  }

  /// How many of the tokens the text shown so far needs: up to the one that brought its last byte, and those of no text behind it that came
  /// while nothing was held back.
  [[nodiscard]] std::size_t tokens_of_text() const noexcept {
    std::size_t kept = 0, bytes = settled_bytes_;
    while (bytes < shown_) bytes = ends_[kept++];
    return settled_ + kept;
  }

 private:
  bool show(std::string_view text) {
    shown_ += text.size();
    return text.empty() || on_text_(text);
  }

  detokenizer detokenizer_;
  stop_strings stops_;
  callback on_text_;
  std::size_t decoded_ = 0, shown_ = 0;          // bytes
  std::size_t settled_ = 0, settled_bytes_ = 0;  // tokens that stay whatever comes, and their text
  std::vector<std::size_t> ends_;                // bytes of text up to each token behind these
  bool refused_ = false;
};

}  // namespace outrider
