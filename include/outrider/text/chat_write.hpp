// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/error.hpp"
#include "outrider/text/chat_message.hpp"
#include "outrider/text/chat_template.hpp"

namespace outrider {

/// A rendered conversation as an alternation of the template's markers and of plain text, in which whatever looks like a marker was typed
/// by somebody.
struct rendered_chat {
  struct segment {
    std::string text;
    bool is_marker = false;
  };
  std::vector<segment> segments;

  /// The whole as one text.
  [[nodiscard]] std::string text() const {
    std::string all;
    for (const segment& s : segments) all += s.text;
    return all;
  }
};

namespace detail {

[[nodiscard]] inline char lower_ascii(char c) noexcept { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }
[[nodiscard]] inline std::string upper_ascii(std::string text) {
  for (char& c : text) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return text;
}

/// A floating-point number as Python prints it: the shortest digits that read back as the same, "1.0", "0.0001", "1e-05", "1e+16".
[[nodiscard]] inline std::string shown_number(double value) {
  std::array<char, 40> buffer{};
  const auto printed = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::scientific);
  const std::string text(buffer.data(), printed.ptr);
  if (!std::isfinite(value)) return text;
  const std::size_t e = text.find('e'), sign = text[0] == '-' ? 1 : 0;
  const int exponent = std::stoi(text.substr(e + 1));
  if (exponent < -4 || exponent >= 16) return text;
  std::string digits = text.substr(sign, e - sign);
  std::erase(digits, '.');
  if (exponent < 0) return text.substr(0, sign) + "0." + std::string(static_cast<std::size_t>(-exponent - 1), '0') + digits;
  const std::size_t whole = static_cast<std::size_t>(exponent) + 1;
  if (digits.size() <= whole) digits.resize(whole + 1, '0');
  return text.substr(0, sign) + digits.substr(0, whole) + "." + digits.substr(whole);
}

/// Writes the pieces that all generations have in common: markers, plain text, values and declarations of tools.
class chat_writer {
 public:
  explicit chat_writer(chat_generation generation) : generation_(generation) {}

  void marker(std::string_view text) { result_.segments.push_back({std::string(text), true}); }
  void plain(std::string_view text) {
    if (text.empty()) return;
    if (result_.segments.empty() || result_.segments.back().is_marker) result_.segments.push_back({});
    result_.segments.back().text += text;
  }
  /// A string between quotes, which are markers.
  void quoted(std::string_view text) {
    marker(quote);
    plain(text);
    marker(quote);
  }

  /// key:value, … with the keys in order, without the braces.
  void members(const nlohmann::json& object, bool quote_keys, std::size_t depth = 0) {
    bool first = true;
    for (const auto* entry : sorted(object)) {
      if (!std::exchange(first, false)) plain(",");
      quote_keys ? quoted(entry->first) : plain(entry->first);
      plain(":");
      value(entry->second, quote_keys, depth + 1);
    }
  }
  void value(const nlohmann::json& v, bool quote_keys, std::size_t depth = 0) {
    if (depth > max_depth) refuse("a value of a tool is nested deeper than " + std::to_string(max_depth) + " levels");
    switch (v.type()) {
      case nlohmann::json::value_t::string:
        return quoted(v.get_ref<const std::string&>());
      case nlohmann::json::value_t::boolean:
        return plain(v.get<bool>() ? "true" : "false");
      case nlohmann::json::value_t::object:
        plain("{");
        members(v, quote_keys, depth);
        return plain("}");
      case nlohmann::json::value_t::array:
        plain("[");
        for (std::size_t i = 0; i < v.size(); ++i) {
          if (i != 0) plain(",");
          value(v[i], quote_keys, depth + 1);
        }
        return plain("]");
      case nlohmann::json::value_t::number_integer:
        return plain(std::to_string(v.get<std::int64_t>()));
      case nlohmann::json::value_t::number_unsigned:
        return plain(std::to_string(v.get<std::uint64_t>()));
      case nlohmann::json::value_t::number_float:
        return plain(shown_number(v.get<double>()));
      case nlohmann::json::value_t::null:
        return plain("None");  // the templates' word
      default:
        refuse(std::string("a value of a tool is of type ") + v.type_name() + ", which JSON does not have");
    }
  }

  /// <|tool>declaration:NAME{…}<tool|>. Where a schema says less than it should, the braces are those of the templates.
  void declaration(const chat_tool& tool) {
    marker("<|tool>");
    plain("declaration:" + tool.name + "{description:");
    quoted(tool.description);
    if (truthy(tool.parameters)) {
      plain(",parameters:{");
      if (const nlohmann::json& properties = member(tool.parameters, "properties"); truthy(properties)) {
        plain("properties:{");
        parameters(properties, 0);
        plain("},");
      }
      if (const nlohmann::json& required = member(tool.parameters, "required"); truthy(required)) {
        names(required);
        plain(",");
      }
      if (truthy(member(tool.parameters, "type"))) {
        type_of(tool.parameters);
        plain("}");
      }
    }
    if (!tool.response.is_null()) {
      plain(",response:{");
      if (const nlohmann::json& text = member(tool.response, "description"); truthy(text)) {
        description(text);
        plain(",");
      }
      if (upper_type(tool.response) == "OBJECT") {
        type_of(tool.response);
        plain("}");
      }
    }
    plain("}");
    marker("<tool|>");
  }

  [[noreturn]] static void refuse(const std::string& what) { throw error(error_code::argument_invalid, "chat: " + what); }
  [[nodiscard]] rendered_chat take() { return std::move(result_); }

 private:
  static constexpr std::string_view quote = "<|\"|>";
  static constexpr std::size_t max_depth = 64;
  using named_value = nlohmann::json::object_t::value_type;

  /// The members by key, upper and lower case alike (ASCII; other letters by their bytes).
  [[nodiscard]] static std::vector<const named_value*> sorted(const nlohmann::json& object) {
    std::vector<const named_value*> entries;
    for (const named_value& e : object.get_ref<const nlohmann::json::object_t&>()) entries.push_back(&e);
    std::stable_sort(entries.begin(), entries.end(), [](const named_value* a, const named_value* b) {
      return std::lexicographical_compare(a->first.begin(), a->first.end(), b->first.begin(), b->first.end(), [](char x, char y) {
        return static_cast<unsigned char>(lower_ascii(x)) < static_cast<unsigned char>(lower_ascii(y));
      });
    });
    return entries;
  }
  /// The member, or null.
  [[nodiscard]] static const nlohmann::json& member(const nlohmann::json& object, const char* key) {
    static const nlohmann::json none;
    if (!object.is_object()) return none;
    const auto found = object.find(key);
    return found == object.end() ? none : *found;
  }
  /// As an `if` of the templates sees a value.
  [[nodiscard]] static bool truthy(const nlohmann::json& v) {
    if (v.is_string()) return !v.get_ref<const std::string&>().empty();
    if (v.is_boolean()) return v.get<bool>();
    if (v.is_number()) return v.get<double>() != 0;
    return !v.empty();  // null, arrays and objects
  }
  [[nodiscard]] static const std::string& string_of(const nlohmann::json& v, const char* what) {
    if (!v.is_string()) refuse(std::string(what) + " in a tool's schema is of type " + v.type_name() + ", must be a string");
    return v.get_ref<const std::string&>();
  }

  /// The type of a schema in capitals, empty if it has none; a list of them as Python prints it.
  [[nodiscard]] static std::string upper_type(const nlohmann::json& schema) {
    const nlohmann::json& type = member(schema, "type");
    if (type.is_null()) return "";
    if (!type.is_array()) return upper_ascii(string_of(type, "a type"));
    std::string all;
    for (const nlohmann::json& one : type) all += (all.empty() ? "'" : ", '") + upper_ascii(string_of(one, "a type")) + "'";
    return "[" + all + "]";
  }
  void type_of(const nlohmann::json& schema) {
    plain("type:");
    quoted(upper_type(schema));
  }
  void description(const nlohmann::json& text) {
    plain("description:");
    quoted(string_of(text, "a description"));
  }
  void names(const nlohmann::json& list) {
    if (!list.is_array()) refuse(std::string("'required' in a tool's schema is of type ") + list.type_name() + ", must be an array");
    plain("required:[");
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (i != 0) plain(",");
      quoted(string_of(list[i], "a required name"));
    }
    plain("]");
  }

  /// NAME:{…}, … for the properties of an object. Properties with the names of the schema's own words are left out, as in the templates.
  void parameters(const nlohmann::json& properties, std::size_t depth) {
    if (depth > max_depth) refuse("a tool's schema is nested deeper than " + std::to_string(max_depth) + " levels");
    if (!properties.is_object())
      refuse(std::string("'properties' in a tool's schema is of type ") + properties.type_name() + ", must be an object");
    bool first = true;
    for (const named_value* property : sorted(properties)) {
      constexpr auto own_words = std::to_array<std::string_view>({"description", "type", "properties", "required", "nullable"});
      if (std::find(own_words.begin(), own_words.end(), property->first) != own_words.end()) continue;
      if (!std::exchange(first, false)) plain(",");
      plain(property->first + ":{");
      schema(property->second, depth);
      plain("}");
    }
  }
  /// The parts of one property's schema, the type last.
  void schema(const nlohmann::json& s, std::size_t depth) {
    const std::string type = upper_type(s);
    const bool newest = generation_ == chat_generation::newest;
    bool comma = false;
    const auto separate = [&] {
      if (std::exchange(comma, true)) plain(",");
    };
    const auto nullable = [&] {
      if (!truthy(member(s, "nullable"))) return;
      separate();
      plain("nullable:true");
    };
    const auto object = [&] {
      if (!s.is_object()) return;
      newest ? separate() : plain(",");
      plain("properties:{");
      parameters(member(s, "properties").is_object() ? member(s, "properties") : s, depth + 1);
      plain("}");
      if (!truthy(member(s, "required"))) return;
      newest ? separate() : plain(",");
      names(member(s, "required"));
    };

    if (const nlohmann::json& text = member(s, "description"); truthy(text)) {
      separate();
      description(text);
    }
    if (!newest) nullable();
    if (type == "STRING" && truthy(member(s, "enum"))) {
      separate();
      plain("enum:");
      value(member(s, "enum"), true, depth);
    } else if (const nlohmann::json& of = member(s, "items"); type == "ARRAY" && of.is_object() && !of.empty()) {
      newest ? separate() : plain(",");
      items(of, depth);
    } else if (!newest && type == "OBJECT") {
      object();
    }
    if (newest) {
      nullable();
      if (type == "OBJECT") object();
    }
    separate();
    type_of(s);
  }
  /// items:{…}, the schema of an array's elements: its members by name.
  void items(const nlohmann::json& of, std::size_t depth) {
    plain("items:{");
    bool first = true;
    for (const named_value* part : sorted(of)) {
      const auto& [key, v] = *part;
      if (v.is_null()) continue;
      if (!std::exchange(first, false)) plain(",");
      if (key == "properties") {
        plain("properties:{");
        if (v.is_object()) parameters(v, depth + 1);
        plain("}");
      } else if (key == "required") {
        names(v);
      } else if (key == "type" && v.is_array()) {
        nlohmann::json types = nlohmann::json::array();
        for (const nlohmann::json& one : v) types.push_back(upper_ascii(string_of(one, "a type")));
        plain("type:");
        value(types, true, depth);
      } else if (key == "type") {
        plain("type:");
        quoted(upper_ascii(string_of(v, "a type")));
      } else {
        plain(key + ":");
        value(v, true, depth);
      }
    }
    plain("}");
  }

  chat_generation generation_;
  rendered_chat result_;
};

}  // namespace detail

}  // namespace outrider
