// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/core/scalar.hpp"
#include "outrider/text/detokenizer.hpp"
#include "outrider/text/tokenizer.hpp"

namespace outrider {

/// A tool call as the model wrote it.
struct parsed_call {
  bool is_valid = false;  // false: the text is not what a call looks like, and only `text` is filled in
  std::string name;
  nlohmann::json arguments;  // an object
  std::string text;          // as written, quotes spelled out: call:get_weather{city:<|"|>Oslo<|"|>}
};

namespace detail {

/// Reads call:NAME{key:value,…}. The quotes around strings are markers, so the text comes without them and with a list of where they
/// stood: a spelling of a quote in the text is text.
class call_parser {
 public:
  call_parser(std::string_view text, const std::vector<std::size_t>& quotes) : text_(text), quotes_(quotes) {}

  /// False if the text is no call; `name` and `arguments` are then whatever was read so far.
  bool parse(std::string& name, nlohmann::json& arguments) {
    if (!take("call:")) return false;
    const std::size_t brace = text_.find('{', at_);
    if (brace == text_.npos || brace == at_ || quote_before(brace)) return false;
    name = trim(text_.substr(at_, brace - at_));
    at_ = brace;
    return !name.empty() && object(arguments, 0) && at_ == text_.size() && !at_quote();
  }

 private:
  static constexpr std::size_t max_depth = 64;

  [[nodiscard]] static std::string_view trim(std::string_view text) {
    const std::size_t begin = text.find_first_not_of(" \t\r\n");
    return begin == text.npos ? std::string_view() : text.substr(begin, text.find_last_not_of(" \t\r\n") + 1 - begin);
  }
  [[nodiscard]] bool at_quote() const noexcept { return next_ < quotes_.size() && quotes_[next_] == at_; }
  /// Whether a quote stands between here and `end`.
  [[nodiscard]] bool quote_before(std::size_t end) const noexcept { return next_ < quotes_.size() && quotes_[next_] <= end; }
  void skip_space() {
    while (!at_quote() && at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }
  bool take(std::string_view expected) {
    skip_space();
    if (at_quote() || !text_.substr(at_).starts_with(expected)) return false;
    at_ += expected.size();
    skip_space();
    return true;
  }
  [[nodiscard]] bool has(char expected) const noexcept { return !at_quote() && at_ < text_.size() && text_[at_] == expected; }

  bool string(std::string& out) {
    if (!at_quote() || next_ + 1 == quotes_.size()) return false;
    const std::size_t begin = quotes_[next_], end = quotes_[next_ + 1];
    next_ += 2;
    at_ = end;
    out = text_.substr(begin, end - begin);
    return true;
  }
  /// Up to one of `ends`, without the spaces around it.
  bool bare(std::string& out, std::string_view ends) {
    const std::size_t end = text_.find_first_of(ends, at_);
    if (end == text_.npos || quote_before(end)) return false;
    out = trim(text_.substr(at_, end - at_));
    at_ = end;
    return !out.empty();
  }
  bool object(nlohmann::json& out, std::size_t depth) {
    out = nlohmann::json::object();
    if (depth == max_depth || !take("{")) return false;
    if (take("}")) return true;
    do {
      std::string key;
      if (!(at_quote() ? string(key) : bare(key, ":}")) || !take(":")) return false;
      const auto [member, is_new] = out.emplace(std::move(key), nullptr);
      if (!is_new || !value(*member, depth + 1)) return false;
    } while (take(","));
    return take("}");
  }
  bool array(nlohmann::json& out, std::size_t depth) {
    out = nlohmann::json::array();
    if (depth == max_depth || !take("[")) return false;
    if (take("]")) return true;
    do {
      out.push_back(nullptr);
      if (!value(out.back(), depth + 1)) return false;
    } while (take(","));
    return take("]");
  }
  bool value(nlohmann::json& out, std::size_t depth) {
    if (at_quote()) {
      std::string text;
      const bool is_string = string(text);
      out = std::move(text);
      return is_string;
    }
    if (has('{')) return object(out, depth);
    if (has('[')) return array(out, depth);
    std::string word;
    if (!bare(word, ",}]")) return false;
    if (word == "None") word = "null";  // how the templates show it
    out = nlohmann::json::parse(word, nullptr, false);
    return out.is_number() || out.is_boolean() || out.is_null();
  }

  std::string_view text_;
  const std::vector<std::size_t>& quotes_;  // offsets in text_, rising
  std::size_t at_ = 0, next_ = 0;           // next_: the first quote that is not behind us
};

}  // namespace detail

/// Takes a model's answer apart while it is generated: what it thinks, what it says, which tools it calls. Markers are told by their ids, so
/// an answer that merely spells them stays text; a vocabulary without markers gives nothing but answer. Nothing a model writes makes it
/// throw: a call that is none is handed over as text. Borrows the tokenizer.
class chat_parser {
 public:
  /// What a token brought; views are valid until the next call.
  struct delta {
    std::string_view answer, thought;
    const parsed_call* call = nullptr;  // a call that has just ended
  };

  explicit chat_parser(const tokenizer& tokens)
      : stream_(tokens),
        open_channel_(tokens.find("<|channel>")),
        close_channel_(tokens.find("<channel|>")),
        open_call_(tokens.find("<|tool_call>")),
        close_call_(tokens.find("<tool_call|>")),
        open_response_(tokens.find("<|tool_response>")),
        quote_(tokens.find(quote)) {}
  explicit chat_parser(const tokenizer&& tokens) = delete;  // the tokenizer must outlive it

  /// error_code::argument_invalid for an id outside the vocabulary.
  [[nodiscard]] delta push(token_id token) {
    const bool is_marker = token == open_channel_ || token == close_channel_ || token == open_call_ || token == close_call_ ||
                           token == open_response_ || (token == quote_ && state_ == state::call);
    if (!is_marker) return take(stream_.push(token));
    delta result = take(stream_.finish());
    if (token == quote_) {
      quotes_.push_back(call_text_.size());
      return result;
    }
    if (state_ == state::call) result.call = end_call();
    enter(token == open_channel_ ? state::channel_name : token == open_call_ ? state::call : state::answer);
    return result;
  }
  /// The answer ends: what was held back. The object is as new afterwards.
  [[nodiscard]] delta finish() {
    delta result = take(stream_.finish());
    if (state_ == state::call) result.call = end_call();
    enter(state::answer);
    return result;
  }

 private:
  enum class state : std::uint8_t { answer, channel_name, thought, other_channel, call };
  static constexpr std::string_view quote = "<|\"|>";
  static constexpr std::size_t longest_name = 64;

  void enter(state next) {
    state_ = next;
    name_.clear();
    call_text_.clear();
    quotes_.clear();
  }
  /// Text that is no marker, to where it belongs.
  delta take(std::string_view text) {
    delta result;
    switch (state_) {
      case state::thought:
        result.thought = text;
        break;
      case state::call:
        call_text_ += text;
        break;
      case state::channel_name: {
        // The name ends with its line. What is too long for a name has none, and is thought.
        name_ += text;
        const std::size_t end = name_.find('\n');
        if (end == name_.npos && name_.size() <= longest_name) break;
        const bool has_name = end != name_.npos;
        state_ = !has_name || std::string_view(name_).substr(0, end) == "thought" ? state::thought : state::other_channel;
        shown_ = has_name ? name_.substr(end + 1) : name_;
        (state_ == state::thought ? result.thought : result.answer) = shown_;
        break;
      }
      case state::answer:
      case state::other_channel:
        result.answer = text;
    }
    return result;
  }
  /// The call that ends here, be it with its marker or with the answer.
  const parsed_call* end_call() {
    call_ = {};
    std::size_t begin = 0;
    for (const std::size_t at : quotes_) {
      call_.text.append(call_text_, begin, at - begin).append(quote);
      begin = at;
    }
    call_.text.append(call_text_, begin);
    call_.is_valid = detail::call_parser(call_text_, quotes_).parse(call_.name, call_.arguments);
    if (!call_.is_valid) {
      call_.name.clear();
      call_.arguments = nullptr;
    }
    return &call_;
  }

  detokenizer stream_;
  std::optional<token_id> open_channel_, close_channel_, open_call_, close_call_, open_response_, quote_;
  state state_ = state::answer;
  std::string name_, shown_;         // of a channel; what came behind its name
  std::string call_text_;            // without quotes
  std::vector<std::size_t> quotes_;  // where they stood in it
  parsed_call call_;
};

}  // namespace outrider
