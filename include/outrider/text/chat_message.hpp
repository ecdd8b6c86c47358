// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/error.hpp"

namespace outrider {

/// Who speaks. A developer in first place is a system; model is another name for assistant.
enum class chat_role : std::uint8_t { system, developer, user, assistant, model, tool };
[[nodiscard]] constexpr std::string_view name_of(chat_role role) noexcept {
  constexpr std::string_view names[] = {"system", "developer", "user", "assistant", "model", "tool"};
  return names[static_cast<std::size_t>(role)];
}

enum class chat_part_kind : std::uint8_t { text, image, audio, video };

/// A piece of a message: text, or the place of a picture or sound, whose features the program supplies.
struct chat_part {
  chat_part_kind kind = chat_part_kind::text;
  std::string text;  // of a text
};

/// A call of a tool that the model made.
struct tool_call {
  std::string name;
  nlohmann::json arguments = nlohmann::json::object();  // an object; a string is written between the braces as it is
  std::optional<std::string> id = {};                   // what the answer's tool_call_id refers to
};

/// A tool's answer, kept on the message that made the call.
struct tool_response {
  std::string name = "unknown";
  nlohmann::json response;  // an object, or any other value
};

struct chat_message {
  chat_role role = chat_role::user;
  std::vector<chat_part> content = {};             // none: no content
  std::string reasoning = {};                      // what the model thought before it answered; seldom sent back
  std::vector<tool_call> tool_calls = {};          // of the assistant
  std::vector<tool_response> tool_responses = {};  // of the assistant: answers to its calls; or messages of role tool follow
  std::optional<std::string> tool_call_id = {};    // of role tool: the call that is answered
  std::optional<std::string> name = {};            // of role tool: the tool, where no call has that id
};

/// A message of nothing but text.
[[nodiscard]] inline chat_message text_message(chat_role role, std::string text) {
  chat_message message;
  message.role = role;
  if (!text.empty()) message.content.push_back({chat_part_kind::text, std::move(text)});
  return message;
}

/// A tool the model may call.
struct chat_tool {
  std::string name, description;
  nlohmann::json parameters = nullptr;  // a JSON schema of type object; null or {}: none
  nlohmann::json response = nullptr;    // {description, type}; null: not described
};

namespace detail {

/// Reads messages and tools from JSON as chat programs write them.
class chat_json_reader {
 public:
  [[nodiscard]] static std::vector<chat_message> messages(const nlohmann::json& list) {
    if (!list.is_array()) refuse("messages", "is " + type_of(list) + ", must be an array");
    std::vector<chat_message> all;
    all.reserve(list.size());
    for (const nlohmann::json& entry : list) all.push_back(message(entry, "messages[" + std::to_string(all.size()) + "]"));
    return all;
  }
  [[nodiscard]] static std::vector<chat_tool> tools(const nlohmann::json& list) {
    std::vector<chat_tool> all;
    if (list.is_null()) return all;
    if (!list.is_array()) refuse("tools", "is " + type_of(list) + ", must be an array");
    for (const nlohmann::json& entry : list) {
      std::string at = "tools[" + std::to_string(all.size()) + "]";
      require_object(entry, at);
      const nlohmann::json* function = member(entry, "function");
      if (function) require_object(*function, at += ".function");
      if (!function) function = &entry;
      chat_tool tool{text(*function, "name", at).value_or(""), text(*function, "description", at).value_or("")};
      if (tool.name.empty()) refuse(at + ".name", "is missing or empty");
      for (const auto& [key, into] : {std::pair{"parameters", &tool.parameters}, std::pair{"response", &tool.response}})
        if (const nlohmann::json* found = member(*function, key)) {
          require_object(*found, at + "." + key);
          *into = *found;
        }
      all.push_back(std::move(tool));
    }
    return all;
  }

 private:
  [[noreturn]] static void refuse(const std::string& where, const std::string& what) {
    throw error(error_code::argument_invalid, "chat: " + where + " " + what);
  }
  [[nodiscard]] static std::string type_of(const nlohmann::json& value) { return std::string("of type ") + value.type_name(); }
  static void require_object(const nlohmann::json& value, const std::string& where) {
    if (!value.is_object()) refuse(where, "is " + type_of(value) + ", must be an object");
  }
  /// The member, or null if it is missing or null.
  [[nodiscard]] static const nlohmann::json* member(const nlohmann::json& object, const char* key) {
    const auto found = object.find(key);
    return found == object.end() || found->is_null() ? nullptr : &*found;
  }
  [[nodiscard]] static std::optional<std::string> text(const nlohmann::json& object, const char* key, const std::string& where) {
    const nlohmann::json* const found = member(object, key);
    if (!found) return std::nullopt;
    if (!found->is_string()) refuse(where + "." + key, "is " + type_of(*found) + ", must be a string");
    return found->get<std::string>();
  }
  [[nodiscard]] static const nlohmann::json* array(const nlohmann::json& object, const char* key, const std::string& where) {
    const nlohmann::json* const found = member(object, key);
    if (found && !found->is_array()) refuse(where + "." + key, "is " + type_of(*found) + ", must be an array");
    return found;
  }

  [[nodiscard]] static chat_message message(const nlohmann::json& entry, const std::string& at) {
    require_object(entry, at);
    chat_message result;
    result.role = role(text(entry, "role", at), at);
    if (const nlohmann::json* found = member(entry, "content")) result.content = content(*found, at + ".content");
    result.reasoning = text(entry, "reasoning", at).value_or("");
    if (result.reasoning.empty()) result.reasoning = text(entry, "reasoning_content", at).value_or("");
    if (const nlohmann::json* calls = array(entry, "tool_calls", at))
      for (const nlohmann::json& call : *calls)
        result.tool_calls.push_back(read_call(call, at + ".tool_calls[" + std::to_string(result.tool_calls.size()) + "]"));
    if (const nlohmann::json* responses = array(entry, "tool_responses", at))
      for (const nlohmann::json& response : *responses) {
        const std::string where = at + ".tool_responses[" + std::to_string(result.tool_responses.size()) + "]";
        require_object(response, where);
        const nlohmann::json* const value = member(response, "response");
        result.tool_responses.push_back({text(response, "name", where).value_or("unknown"), value ? *value : nlohmann::json()});
      }
    result.tool_call_id = text(entry, "tool_call_id", at);
    result.name = text(entry, "name", at);
    return result;
  }
  [[nodiscard]] static chat_role role(const std::optional<std::string>& name, const std::string& at) {
    if (!name) refuse(at + ".role", "is missing");
    for (const chat_role known :
         {chat_role::system, chat_role::developer, chat_role::user, chat_role::assistant, chat_role::model, chat_role::tool})
      if (*name == name_of(known)) return known;
    refuse(at + ".role", "is '" + *name + "', allowed are system, developer, user, assistant, model and tool");
  }
  [[nodiscard]] static std::vector<chat_part> content(const nlohmann::json& value, const std::string& at) {
    if (value.is_string()) return text_message({}, value.get<std::string>()).content;
    if (!value.is_array()) refuse(at, "is " + type_of(value) + ", must be a string or an array of parts");
    std::vector<chat_part> parts;
    for (const nlohmann::json& entry : value) {
      const std::string where = at + "[" + std::to_string(parts.size()) + "]";
      require_object(entry, where);
      const std::string kind = text(entry, "type", where).value_or("");
      chat_part& part = parts.emplace_back();
      if (kind == "text") {
        part.text = text(entry, "text", where).value_or("");
      } else if (kind == "image") {
        part.kind = chat_part_kind::image;
      } else if (kind == "audio") {
        part.kind = chat_part_kind::audio;
      } else if (kind == "video") {
        part.kind = chat_part_kind::video;
      } else {
        refuse(where + ".type", "is '" + kind + "', allowed are text, image, audio and video");
      }
    }
    return parts;
  }
  [[nodiscard]] static tool_call read_call(const nlohmann::json& entry, const std::string& at) {
    require_object(entry, at);
    const nlohmann::json* const function = member(entry, "function");
    if (!function) refuse(at + ".function", "is missing");
    require_object(*function, at + ".function");
    tool_call call;
    call.id = text(entry, "id", at);
    call.name = text(*function, "name", at + ".function").value_or("");
    if (call.name.empty()) refuse(at + ".function.name", "is missing or empty");
    if (const nlohmann::json* arguments = member(*function, "arguments")) {
      if (!arguments->is_object() && !arguments->is_string())
        refuse(at + ".function.arguments", "is " + type_of(*arguments) + ", must be an object or a string");
      call.arguments = *arguments;
    }
    return call;
  }
};

}  // namespace detail

/// Messages as chat programs write them: [{"role", "content": text or parts, "reasoning", "tool_calls": [{"id", "function": {"name",
/// "arguments"}}], "tool_responses": [{"name", "response"}], "tool_call_id", "name"}]. Members that are not known are ignored.
/// error_code::argument_invalid names the member that is missing, unknown or of the wrong type.
[[nodiscard]] inline std::vector<chat_message> chat_messages_from_json(const nlohmann::json& list) {
  return detail::chat_json_reader::messages(list);
}
/// Tools: [{"type": "function", "function": {"name", "description", "parameters", "response"}}], or the functions alone. null: none.
[[nodiscard]] inline std::vector<chat_tool> chat_tools_from_json(const nlohmann::json& list) {
  return detail::chat_json_reader::tools(list);
}

}  // namespace outrider
