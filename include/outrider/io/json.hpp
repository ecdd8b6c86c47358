// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/error.hpp"

namespace outrider::io {

namespace detail {

/// Walks a text and notes in *reached how far the parser has read: nlohmann's own events carry no position.
struct json_cursor {
  using difference_type = std::ptrdiff_t;
  using value_type = char;
  using pointer = const char*;
  using reference = const char&;
  using iterator_category = std::input_iterator_tag;

  const char* at;
  const char** reached;

  const char& operator*() const noexcept { return *at; }
  json_cursor& operator++() noexcept {
    *reached = ++at;
    return *this;
  }
  bool operator==(const json_cursor& other) const noexcept { return at == other.at; }
  bool operator!=(const json_cursor& other) const noexcept { return at != other.at; }
};

/// Builds the document from the parser's events and stops at the first thing that is refused. The plain parser keeps the last of two equal
/// keys silently and sets no limit to nesting. A reader of its own kind of file derives from it and takes some of the events for itself.
class json_builder {
 public:
  static constexpr std::size_t max_depth = 64;
  static constexpr std::size_t max_values = 2'000'000;  // a value of two bytes takes fifty in memory

  json_builder(std::string_view text, const std::string& file) : text_(text), file_(file), reached_(text.data()) {}
  virtual ~json_builder() = default;

  /// The document that `events`, this object or one of a derived class, makes of the text.
  template <class Builder>
  static nlohmann::json build(Builder&& events) {
    json_builder& self = events;
    const std::string_view text = self.text_;
    // The parser takes a zero byte between two tokens for the end of the text.
    if (const std::size_t zero = text.find('\0'); zero != text.npos) self.refuse_text(zero, "a zero byte");
    nlohmann::json::sax_parse(json_cursor{text.data(), &self.reached_}, json_cursor{text.data() + text.size(), &self.reached_}, &events);
    return std::move(self.document_);
  }

  // The events; each returns true to go on.
  bool null() { return add(nullptr); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(std::int64_t value) { return add(value); }
  bool number_unsigned(std::uint64_t value) { return add(value); }
  bool number_float(double value, const std::string&) { return add(value); }
  bool string(std::string& value) { return add(std::move(value)); }
  bool binary(nlohmann::json::binary_t&) { return false; }  // not in textual JSON
  bool start_object(std::size_t) { return open(nlohmann::json::object()); }
  bool start_array(std::size_t) { return open(nlohmann::json::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(std::string& name) {
    const auto [value, is_new] = open_.back()->emplace(name, nullptr);
    if (!is_new) refuse_text(offset(), "the key '" + name + "' is there twice in one object");
    member_ = &*value;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception& cause) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: <what>; last read: '<any bytes>'": keep <what>.
    std::string what = cause.what();
    what = what.substr(0, what.rfind("; last read: "));
    if (const std::size_t id = what.find("] "); id != what.npos) what.erase(0, id + 2);
    if (const std::size_t place = what.find(": "); what.starts_with("parse error at ") && place != what.npos) what.erase(0, place + 2);
    refuse_text(offset(), what);
  }

 protected:
  [[nodiscard]] const std::string& file() const noexcept { return file_; }
  /// The containers around the next value, outermost first. None of them moves while it is open.
  [[nodiscard]] const std::vector<nlohmann::json*>& containers() const noexcept { return open_; }
  /// Called before a value becomes part of the document; throws to refuse it.
  virtual void check_value(const nlohmann::json&) const {}

 private:
  [[nodiscard]] std::size_t offset() const noexcept { return static_cast<std::size_t>(reached_ - text_.data()); }
  [[noreturn]] void refuse_text(std::size_t where, const std::string& what) const {
    throw error(error_code::file_malformed, file_ + ": not usable JSON at byte " + std::to_string(where) + ": " + what);
  }

  /// Puts a value where the document expects the next one, and says where it lies now.
  nlohmann::json* place(nlohmann::json value) {
    check_value(value);
    if (++values_ > max_values) refuse_text(offset(), "more than " + std::to_string(max_values) + " values");
    if (open_.empty()) return &(document_ = std::move(value));
    if (open_.back()->is_object()) return &(*member_ = std::move(value));
    open_.back()->push_back(std::move(value));
    return &open_.back()->back();
  }
  bool add(nlohmann::json value) {
    place(std::move(value));
    return true;
  }
  bool open(nlohmann::json container) {
    if (open_.size() == max_depth) refuse_text(offset(), "nested deeper than " + std::to_string(max_depth) + " levels");
    open_.push_back(place(std::move(container)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view text_;
  const std::string& file_;
  const char* reached_;
  nlohmann::json document_;
  std::vector<nlohmann::json*> open_;
  nlohmann::json* member_ = nullptr;  // where the value of the last key goes
  std::size_t values_ = 0;
};

}  // namespace detail

/// The document in `text`. Stricter than nlohmann::json::parse: an object with a key twice, nesting deeper than 64 levels, more than 2,000,000 values,
/// a number outside the range of double and a zero byte are refused too. error_code::file_malformed names `file` and the byte where reading stopped.
[[nodiscard]] inline nlohmann::json parse_json(std::string_view text, const std::string& file) {
  return detail::json_builder::build(detail::json_builder(text, file));
}

}  // namespace outrider::io
