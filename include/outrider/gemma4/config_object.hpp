// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/core/scalar.hpp"
#include "outrider/error.hpp"

namespace outrider::gemma4::detail {

/// The whole numbers a field may have.
struct range {
  std::size_t least, most;
};

/// A JSON object of a configuration file that knows its place, so that reading a field is one line and every refusal names file, key, what
/// was found and what is allowed. Types are strict: no numbers in strings, no null for a number, no fraction for a whole number; a whole
/// number is a legal real one. A field without a fallback must be there. Borrows the document. All members throw error_code::config_invalid unless said otherwise.
class config_object {
 public:
  /// The top of a file.
  config_object(const nlohmann::json& document, std::string file) : config_object(document, std::move(file), "") {}

  [[nodiscard]] bool has(const char* key) const { return object_.contains(key); }
  /// The key is there and its value is null.
  [[nodiscard]] bool is_null(const char* key) const { return has(key) && object_.at(key).is_null(); }
  /// The key is there and its value is not null.
  [[nodiscard]] bool is_set(const char* key) const { return has(key) && !object_.at(key).is_null(); }

  /// A fallback outside `allowed` is refused like a value: it is what the file stands for.
  [[nodiscard]] std::size_t integer(const char* key, range allowed, std::optional<std::size_t> fallback = {}) const {
    const std::string sentence = allowed.least == allowed.most
                                     ? std::to_string(allowed.least)
                                     : "a whole number from " + std::to_string(allowed.least) + " to " + std::to_string(allowed.most);
    if (!has(key) && fallback) {
      if (*fallback < allowed.least || *fallback > allowed.most)
        refuse(key, "missing, which stands for " + std::to_string(*fallback), sentence);
      return *fallback;
    }
    const auto value = has(key) ? integer_of(object_.at(key), allowed) : std::nullopt;
    if (!value) refuse(key, sentence);
    return *value;
  }

  [[nodiscard]] double number(const char* key, double least, double most, std::optional<double> fallback = {}) const {
    if (!has(key) && fallback) return *fallback;
    if (has(key) && object_.at(key).is_number()) {
      const double value = object_.at(key).get<double>();
      if (value >= least && value <= most) return value;
    }
    refuse(key, "a number from " + nlohmann::json(least).dump() + " to " + nlohmann::json(most).dump());
  }

  [[nodiscard]] bool boolean(const char* key, bool fallback) const {
    if (!has(key)) return fallback;
    if (!object_.at(key).is_boolean()) refuse(key, "true or false");
    return object_.at(key).get<bool>();
  }

  /// Any string; `allowed` names the ones the caller goes on with, for the message about what is no string.
  [[nodiscard]] std::string text(const char* key, const std::string& allowed, std::optional<std::string> fallback = {}) const {
    if (!has(key) && fallback) return *fallback;
    if (!has(key) || !object_.at(key).is_string()) refuse(key, allowed);
    return object_.at(key).get<std::string>();
  }

  [[nodiscard]] std::vector<std::string> texts(const char* key) const {
    constexpr const char* allowed = "a list of strings";
    if (!has(key) || !object_.at(key).is_array()) refuse(key, allowed);
    std::vector<std::string> out;
    for (const nlohmann::json& entry : object_.at(key)) {
      if (!entry.is_string()) refuse(key, "a list with " + describe(entry), allowed);
      out.push_back(entry.get<std::string>());
    }
    return out;
  }

  /// Token ids below vocab_size: a list of them, none for null, and a single one where a number is allowed in place of a list.
  [[nodiscard]] std::vector<token_id> ids(const char* key, std::size_t vocab_size, bool single, std::vector<token_id> fallback = {}) const {
    if (!has(key)) return fallback;
    const nlohmann::json& value = object_.at(key);
    const std::string allowed =
        std::string(single ? "a token id, " : "") + "a list of token ids or null, each id from 0 to " + std::to_string(vocab_size - 1);
    const auto id_of = [&](const nlohmann::json& entry) {
      const auto id = integer_of(entry, {0, vocab_size - 1});
      if (!id) refuse(key, value.is_array() ? "a list with " + describe(entry) : describe(entry), allowed);
      return static_cast<token_id>(*id);
    };
    if (value.is_null()) return {};
    if (!value.is_array() && single) return {id_of(value)};
    if (!value.is_array()) refuse(key, allowed);
    std::vector<token_id> out;
    for (const nlohmann::json& entry : value) out.push_back(id_of(entry));
    return out;
  }

  [[nodiscard]] config_object object(const char* key) const {
    if (!has(key)) refuse(key, "an object");
    return {object_.at(key), file_, path_ + key + "."};
  }

  /// All keys, in the order of their bytes.
  [[nodiscard]] std::vector<std::string> keys() const {
    std::vector<std::string> out;
    for (const auto& item : object_.items()) out.push_back(item.key());
    return out;
  }

  /// Throws the sentence about the value of `key`.
  [[noreturn]] void refuse(const char* key, const std::string& allowed, error_code code = error_code::config_invalid) const {
    refuse(key, has(key) ? describe(object_.at(key)) : "missing", allowed, code);
  }
  /// The same with `found` in place of the value.
  [[noreturn]] void refuse(const char* key, const std::string& found, const std::string& allowed,
                           error_code code = error_code::config_invalid) const {
    throw error(code, file_ + ": " + path_ + key + " is " + found + "; allowed: " + allowed);
  }

  /// Text from a file, quoted for a message: short and without control characters, however long the text.
  [[nodiscard]] static std::string quote(std::string_view text) {
    return shortened(nlohmann::json(std::string(text.substr(0, longest))));  // which is too long by its quotes if anything was cut off
  }

 private:
  config_object(const nlohmann::json& object, std::string file, std::string path)
      : object_(object), file_(std::move(file)), path_(std::move(path)) {
    if (!object.is_object())
      throw error(error_code::config_invalid, file_ + ": " + (path_.empty() ? "the document" : path_.substr(0, path_.size() - 1)) + " is " +
                                                  describe(object) + "; allowed: an object");
  }

  [[nodiscard]] static std::optional<std::size_t> integer_of(const nlohmann::json& value, range allowed) {
    if (!value.is_number_integer()) return std::nullopt;  // true for unsigned numbers as well
    if (!value.is_number_unsigned() && value.get<std::int64_t>() < 0) return std::nullopt;
    const auto number = value.get<std::uint64_t>();
    if (number < allowed.least || number > allowed.most) return std::nullopt;
    return static_cast<std::size_t>(number);
  }

  [[nodiscard]] static std::string describe(const nlohmann::json& value) {
    if (value.is_object()) return "an object";
    if (value.is_array()) return "a list";
    return value.is_string() ? quote(value.get_ref<const std::string&>()) : shortened(value);
  }
  [[nodiscard]] static std::string shortened(const nlohmann::json& scalar) {
    const std::string json = scalar.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);  // ASCII only: may be cut anywhere
    return json.size() <= longest ? json : json.substr(0, longest) + "…";
  }

  static constexpr std::size_t longest = 60;  // characters of a value in a message

  const nlohmann::json& object_;
  std::string file_, path_;  // path_ ends in a dot unless it is empty
};

}  // namespace outrider::gemma4::detail
