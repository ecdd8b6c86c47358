// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cmath>
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
#include "outrider/gemma4/config_object.hpp"
#include "outrider/io/gguf.hpp"

namespace outrider::gemma4::detail {

/// The shortest decimal; JSON has no text for what is not finite.
inline std::string decimal(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  return nlohmann::json(value).dump();
}

/// The pairs of a GGUF file under one prefix, read as strictly as config_object reads JSON, with sentences of the same form: file, key, what
/// was found, what is allowed. Whole numbers may be of any integer type, real ones of any number type. Borrows the file. All members throw
/// error_code::config_invalid unless said otherwise.
class gguf_object {
 public:
  /// Keys are those behind `prefix`: "gemma4." for instance, or nothing.
  gguf_object(const io::gguf_file& file, std::string prefix) : file_(&file), prefix_(std::move(prefix)) {}

  [[nodiscard]] bool has(std::string_view key) const { return find(key) != nullptr; }

  /// A fallback outside `allowed` is refused like a value: it is what the file stands for.
  [[nodiscard]] std::size_t integer(std::string_view key, range allowed, std::optional<std::size_t> fallback = {}) const {
    const io::gguf_value* const value = find(key);
    if (!value && fallback) {
      if (*fallback < allowed.least || *fallback > allowed.most)
        refuse(key, "missing, which stands for " + std::to_string(*fallback), sentence(allowed));
      return *fallback;
    }
    const auto number = value ? in_range(value->integer(), allowed) : std::nullopt;
    if (!number) refuse(key, sentence(allowed));
    return *number;
  }

  /// One number for all of `count` layers, or an array with one for each.
  [[nodiscard]] std::vector<std::size_t> per_layer(std::string_view key, std::size_t count, range allowed) const {
    const io::gguf_value* const value = find(key);
    if (!value || !value->is_array) return std::vector<std::size_t>(count, integer(key, allowed));
    check_count(key, *value, count);
    const auto numbers = value->integers();
    if (!numbers) refuse(key, "whole numbers");
    std::vector<std::size_t> out;
    for (const std::int64_t n : *numbers) {
      const auto number = in_range(n, allowed);
      if (!number) refuse(key, "an array with " + std::to_string(n), sentence(allowed));
      out.push_back(*number);
    }
    return out;
  }
  [[nodiscard]] std::vector<bool> flag_per_layer(std::string_view key, std::size_t count) const {
    const io::gguf_value* const value = find(key);
    const auto flags = value ? value->booleans() : std::nullopt;
    if (!flags) refuse(key, "an array of booleans, one per layer");
    check_count(key, *value, count);
    return *flags;
  }

  [[nodiscard]] double number(std::string_view key, double least, double most, std::optional<double> fallback = {}) const {
    const io::gguf_value* const value = find(key);
    if (!value && fallback) return *fallback;
    const auto number = value ? value->number() : std::nullopt;
    if (!number || !(*number >= least && *number <= most)) refuse(key, "a number from " + decimal(least) + " to " + decimal(most));
    return *number;
  }

  [[nodiscard]] bool boolean(std::string_view key, bool fallback) const {
    const io::gguf_value* const value = find(key);
    if (!value) return fallback;
    const auto flag = value->boolean();
    if (!flag) refuse(key, "true or false");
    return *flag;
  }

  /// Any string; `allowed` names the ones the caller goes on with.
  [[nodiscard]] std::string text(std::string_view key, const std::string& allowed) const {
    const io::gguf_value* const value = find(key);
    const auto found = value ? value->text() : std::nullopt;
    if (!found) refuse(key, allowed);
    return std::string(*found);
  }

  /// Throws the sentence about the value of `key`.
  [[noreturn]] void refuse(std::string_view key, const std::string& allowed, error_code code = error_code::config_invalid) const {
    const io::gguf_value* const value = find(key);
    refuse(key, value ? describe(*value) : "missing", allowed, code);
  }
  /// The same with `found` in place of the value.
  [[noreturn]] void refuse(std::string_view key, const std::string& found, const std::string& allowed,
                           error_code code = error_code::config_invalid) const {
    throw error(code, file_->source + ": " + prefix_ + std::string(key) + " is " + found + "; allowed: " + allowed);
  }

  [[nodiscard]] const io::gguf_value* find(std::string_view key) const { return file_->find(prefix_ + std::string(key)); }

 private:
  static std::string sentence(range allowed) {
    return allowed.least == allowed.most ? std::to_string(allowed.least)
                                         : "a whole number from " + std::to_string(allowed.least) + " to " + std::to_string(allowed.most);
  }
  static std::optional<std::size_t> in_range(std::optional<std::int64_t> number, range allowed) {
    if (!number || *number < 0) return std::nullopt;
    const auto value = static_cast<std::uint64_t>(*number);
    return value >= allowed.least && value <= allowed.most ? std::optional(static_cast<std::size_t>(value)) : std::nullopt;
  }
  void check_count(std::string_view key, const io::gguf_value& value, std::size_t count) const {
    if (value.count != count)
      refuse(key, "an array of " + std::to_string(value.count), "one entry per layer, " + std::to_string(count) + " of them");
  }
  static std::string describe(const io::gguf_value& value) {
    if (value.is_array) return "an array of " + std::to_string(value.count) + " " + std::string(io::name_of(value.type));
    if (const auto text = value.text()) return config_object::quote(*text);
    if (const auto flag = value.boolean()) return *flag ? "true" : "false";
    if (const auto whole = value.integer()) return std::to_string(*whole);
    const auto number = value.number();
    return number ? decimal(*number) : "a number too large";
  }

  const io::gguf_file* file_;
  std::string prefix_;
};

}  // namespace outrider::gemma4::detail
