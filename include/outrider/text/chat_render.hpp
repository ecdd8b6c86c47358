// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "outrider/text/chat_message.hpp"
#include "outrider/text/chat_template.hpp"
#include "outrider/text/chat_write.hpp"

namespace outrider {

struct chat_options {
  chat_form form = {};
  bool thinking = false;
  bool add_generation_prompt = true;  // end with the beginning of the model's answer
};

namespace detail {

/// Without white space at both ends: what Python's str.strip() takes away, since the templates use it.
[[nodiscard]] inline std::string_view trim_text(std::string_view text) noexcept {
  using namespace std::string_view_literals;
  constexpr auto spaces = std::to_array<std::string_view>(
      {"\t"sv,       "\n"sv,     "\v"sv,     "\f"sv,     "\r"sv,     "\x1c"sv,   "\x1d"sv,   "\x1e"sv,   "\x1f"sv,   " "sv,
       "\xc2\x85"sv, "\u00a0"sv, "\u1680"sv, "\u2000"sv, "\u2001"sv, "\u2002"sv, "\u2003"sv, "\u2004"sv, "\u2005"sv, "\u2006"sv,
       "\u2007"sv,   "\u2008"sv, "\u2009"sv, "\u200a"sv, "\u2028"sv, "\u2029"sv, "\u202f"sv, "\u205f"sv, "\u3000"sv});
  const auto shorten = [&](auto&& fits, auto&& remove) {
    const auto found = std::find_if(spaces.begin(), spaces.end(), fits);
    if (found != spaces.end()) remove(found->size());
    return found != spaces.end();
  };
  while (shorten([&](std::string_view s) { return text.starts_with(s); }, [&](std::size_t n) { text.remove_prefix(n); })) {
  }
  while (shorten([&](std::string_view s) { return text.ends_with(s); }, [&](std::size_t n) { text.remove_suffix(n); })) {
  }
  return text;
}

/// The answer without thoughts: all between "<|channel>" and "<channel|>" is left out.
[[nodiscard]] inline std::string strip_thoughts(std::string_view text) {
  constexpr std::string_view opening = "<|channel>", closing = "<channel|>";
  std::string kept;
  for (bool more = true; more;) {
    const std::size_t end = text.find(closing);
    const std::string_view part = text.substr(0, end);
    kept += part.substr(0, part.find(opening));
    more = end != text.npos;
    if (more) text.remove_prefix(end + closing.size());
  }
  return std::string(trim_text(kept));
}

/// Writes a conversation, turn by turn.
class chat_renderer {
 public:
  chat_renderer(std::span<const chat_message> messages, std::span<const chat_tool> tools, const chat_options& options)
      : messages_(messages), tools_(tools), options_(options), generation_(options.form.generation), out_(generation_) {}

  rendered_chat render() {
    if (messages_.empty()) chat_writer::refuse("there are no messages; at least one is needed");
    out_.marker("<bos>");
    std::size_t begin = 0;
    const bool has_system = messages_[0].role == chat_role::system || messages_[0].role == chat_role::developer;
    if (options_.thinking || !tools_.empty() || has_system) {
      open_turn("system");
      if (options_.thinking) {
        out_.marker("<|think|>");
        if (generation_ != chat_generation::launch) out_.plain("\n");
      }
      if (has_system) {
        check(0);
        content(messages_[begin++]);
      }
      for (const chat_tool& tool : tools_) out_.declaration(tool);
      close_turn();
    }
    for (std::size_t i = begin; i < messages_.size(); ++i)
      if (messages_[i].role == chat_role::user) last_user_ = i;
    last_ = last_part::other;
    for (std::size_t i = begin; i < messages_.size(); ++i) {
      check(i);
      newest() ? newest_message(i) : older_message(i);
    }
    if (options_.add_generation_prompt) generation_prompt();
    return out_.take();
  }

 private:
  static constexpr std::size_t nobody = static_cast<std::size_t>(-1);
  /// What the last message ended in, as far as the next turn depends on it.
  enum class last_part : std::uint8_t { other, call, response };

  [[nodiscard]] bool newest() const noexcept { return generation_ == chat_generation::newest; }
  [[nodiscard]] static bool is_model(chat_role role) noexcept { return role == chat_role::assistant || role == chat_role::model; }

  void check(std::size_t i) const {
    const chat_message& m = messages_[i];
    const auto refuse = [i](const std::string& what) { chat_writer::refuse("messages[" + std::to_string(i) + "]" + what); };
    if ((!m.tool_calls.empty() || !m.tool_responses.empty()) && !is_model(m.role))
      refuse(".role is " + std::string(name_of(m.role)) + ", only an assistant's message has tool_calls or tool_responses");
    for (const tool_call& call : m.tool_calls)
      if (!call.arguments.is_object() && !call.arguments.is_string())
        refuse(".tool_calls: the arguments of '" + call.name + "' are of type " + call.arguments.type_name() +
               ", must be an object or a string");
  }

  void open_turn(std::string_view role) {
    out_.marker("<|turn>");
    out_.plain(role);
    out_.plain("\n");
  }
  void close_turn() {
    out_.marker("<turn|>");
    out_.plain("\n");
  }
  [[nodiscard]] static std::string_view turn_name(chat_role role) { return is_model(role) ? "model" : name_of(role); }

  void newest_message(std::size_t i) {
    const chat_message& m = messages_[i];
    if (m.role == chat_role::tool) {
      if (speaker_ == nobody || messages_[speaker_].tool_calls.empty() || !messages_[speaker_].tool_responses.empty())
        chat_writer::refuse("messages[" + std::to_string(i) + "].role is tool, but no unanswered tool call stands before it");
      return;  // written with the call
    }
    const bool goes_on = is_model(m.role) && speaker_ != nobody && messages_[speaker_].role == chat_role::assistant;
    speaker_ = i;
    last_ = last_part::other;
    if (!goes_on) open_turn(turn_name(m.role));
    if (!m.reasoning.empty() && after_last_user(i) && !m.tool_calls.empty()) thought(m.reasoning + "\n");
    calls(m);
    bool answered = responses(m);
    if (m.tool_responses.empty() && !m.tool_calls.empty())
      for (std::size_t k = i + 1; k < messages_.size() && messages_[k].role == chat_role::tool; ++k) {
        response(name_of_tool(m, messages_[k]), all_text(messages_[k], k));
        answered = true;
      }
    content(m);
    if (last_ == last_part::call && !answered)
      out_.marker("<|tool_response>");
    else if (!answered || !m.content.empty())
      close_turn();
  }
  void older_message(std::size_t i) {
    const chat_message& m = messages_[i];
    const bool goes_on = generation_ == chat_generation::interleaved && last_ == last_part::response && !m.tool_calls.empty();
    if (!goes_on) open_turn(turn_name(m.role));
    last_ = last_part::other;
    if (generation_ == chat_generation::interleaved && !m.tool_calls.empty() && !m.reasoning.empty() && after_last_user(i))
      thought(m.reasoning);
    calls(m);
    responses(m);
    content(m);
    if (m.tool_responses.empty() || !m.content.empty()) close_turn();
  }
  [[nodiscard]] bool after_last_user(std::size_t i) const noexcept { return last_user_ == nobody || i > last_user_; }

  void thought(std::string_view text) {
    out_.marker("<|channel>");
    out_.plain("thought\n");
    out_.plain(text);
    out_.marker("<channel|>");
  }
  void calls(const chat_message& m) {
    for (const tool_call& call : m.tool_calls) {
      out_.marker("<|tool_call>");
      out_.plain("call:" + call.name + "{");
      call.arguments.is_string() ? out_.plain(call.arguments.get_ref<const std::string&>()) : out_.members(call.arguments, false);
      out_.plain("}");
      out_.marker("<tool_call|>");
      last_ = last_part::call;
    }
  }
  bool responses(const chat_message& m) {
    for (const tool_response& one : m.tool_responses) response(one.name, one.response);
    return !m.tool_responses.empty();
  }
  void response(const std::string& name, const nlohmann::json& value) {
    out_.marker("<|tool_response>");
    out_.plain("response:" + name + "{");
    if (value.is_object()) {
      out_.members(value, false);
    } else {
      out_.plain("value:");
      out_.value(value, false);
    }
    out_.plain("}");
    out_.marker("<tool_response|>");
    last_ = last_part::response;
  }
  /// The tool that `answer` is from: that of the call with its id (neither having one counts as equal, the last one wins), else its own name.
  [[nodiscard]] static std::string name_of_tool(const chat_message& m, const chat_message& answer) {
    std::string name = answer.name.value_or("unknown");
    for (const tool_call& call : m.tool_calls)
      if (call.id == answer.tool_call_id) name = call.name;
    return name;
  }
  [[nodiscard]] static nlohmann::json all_text(const chat_message& m, std::size_t i) {
    std::string text;
    for (const chat_part& part : m.content) {
      if (part.kind != chat_part_kind::text)
        chat_writer::refuse("messages[" + std::to_string(i) + "].content: a tool answers with text, not with pictures or sounds");
      text += part.text;
    }
    return text;
  }

  void content(const chat_message& m) {
    for (const chat_part& part : m.content) {
      if (part.kind == chat_part_kind::text) {
        is_model(m.role) ? out_.plain(strip_thoughts(part.text)) : out_.plain(trim_text(part.text));
        continue;
      }
      constexpr std::string_view names[] = {"", "<|image|>", "<|audio|>", "<|video|>"};
      const std::string_view space = generation_ == chat_generation::launch && part.kind != chat_part_kind::audio ? "\n\n" : "";
      out_.plain(space);
      out_.marker(names[static_cast<std::size_t>(part.kind)]);
      out_.plain(space);
      last_ = last_part::other;
    }
  }

  void generation_prompt() {
    const bool same_turn = last_ == last_part::response || (newest() && last_ == last_part::call);
    if (!same_turn) open_turn("model");
    if (!options_.thinking && options_.form.empty_thought && !(newest() && same_turn)) thought("");
  }

  std::span<const chat_message> messages_;
  std::span<const chat_tool> tools_;
  const chat_options& options_;
  chat_generation generation_;
  chat_writer out_;
  std::size_t last_user_ = nobody, speaker_ = nobody;  // speaker: the last message that is not a tool's
  last_part last_ = last_part::other;
};

}  // namespace detail

/// A conversation in Gemma 4's format, from `<bos>` on, as the model's own template of that generation writes it.
/// error_code::argument_invalid with the message or the tool: no messages, a tool's answer without a call, calls on a message that is not
/// the assistant's, schemas with members of the wrong type, nesting beyond 64 levels.
[[nodiscard]] inline rendered_chat render_chat(std::span<const chat_message> messages, std::span<const chat_tool> tools = {},
                                               const chat_options& options = {}) {
  return detail::chat_renderer(messages, tools, options).render();
}

}  // namespace outrider
