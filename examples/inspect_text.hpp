// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Text and numbers from files, as inspect.cpp prints them.
#pragma once
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "outrider/text/utf8.hpp"

namespace inspect {

/// Whether a character does something to a terminal other than appear: controls, and marks that hide, join or turn round what stands beside
/// them.
[[nodiscard]] constexpr bool acts_on_terminal(std::uint32_t c) noexcept {
  return c < 0x20 || (c >= 0x7f && c < 0xa0) || c == 0xad || c == 0x61c || (c >= 0x200b && c <= 0x200f) || (c >= 0x2028 && c <= 0x202e) ||
         (c >= 0x2060 && c <= 0x206f) || c == 0xfeff || (c >= 0xfff9 && c <= 0xfffb) || (c >= 0xe0000 && c <= 0xe0fff);
}

/// Calls character(bytes, code point) for every character; a byte that belongs to none comes alone, its code point negative.
template <class Character>
void for_each_character(std::string_view text, const Character& character) {
  while (!text.empty()) {
    const std::size_t length = outrider::utf8_character_length(text);
    const std::string_view bytes = text.substr(0, length == 0 ? 1 : length);
    std::int32_t code = length == 0 ? -1 : static_cast<unsigned char>(bytes[0]);
    if (length > 1) {
      code &= 0xff >> (length + 1);
      for (const char c : bytes.substr(1)) code = code << 6 | (static_cast<unsigned char>(c) & 0x3f);
    }
    character(bytes, code);
    text.remove_prefix(bytes.size());
  }
}

/// Text from a file for one line of a terminal: whatever could act on it, and bytes that are no UTF-8, become escapes such as \x1b. Of
/// `also`, ASCII characters, each gets a backslash in front.
[[nodiscard]] inline std::string printable(std::string_view text, std::string_view also = {}) {
  std::string out;
  for_each_character(text, [&](std::string_view bytes, std::int32_t code) {
    const auto escape = [&](const char* format, unsigned value) {
      char digits[16];
      std::snprintf(digits, sizeof digits, format, value);
      out += digits;
    };
    const auto c = static_cast<std::uint32_t>(code);
    if (code < 0)
      escape("\\x%02x", static_cast<unsigned char>(bytes[0]));
    else if (code == '\n' || code == '\r' || code == '\t')
      out += code == '\n' ? "\\n" : code == '\r' ? "\\r" : "\\t";
    else if (acts_on_terminal(c))
      escape(c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
    else if (also.find(bytes) != also.npos)
      (out += '\\') += bytes;
    else
      out += bytes;
  });
  return out;
}

/// The text in quotes. One of more than sixty characters ends after 57, with three dots, unless it is wanted whole.
[[nodiscard]] inline std::string quoted(std::string_view text, bool whole) {
  std::size_t characters = 0, bytes = 0, kept = 0;
  if (!whole)
    for_each_character(text, [&](std::string_view character, std::int32_t) {
      bytes += character.size();
      if (++characters == 57) kept = bytes;
    });
  const bool cut = characters > 60;
  return "'" + printable(cut ? text.substr(0, kept) : text, "'\\") + (cut ? "..." : "") + "'";
}

/// The shortest decimal that reads back as the same double: 1000000.0, 0.25, 9.999999974752427e-07, inf.
[[nodiscard]] inline std::string decimal(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  const double magnitude = std::fabs(value);
  const bool plain = magnitude == 0 || (magnitude >= 1e-4 && magnitude < 1e16);
  char digits[64];
  const auto end = std::to_chars(digits, digits + sizeof digits, value, plain ? std::chars_format::fixed : std::chars_format::scientific);
  std::string out(digits, end.ptr);
  if (plain && out.find('.') == out.npos) out += ".0";
  return out;
}

}  // namespace inspect
