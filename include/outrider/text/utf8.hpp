// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace outrider {

/// What a first byte announces: how long its character is, and which second bytes may follow it (overlong forms, surrogates and values
/// above U+10FFFF end there). Later bytes lie in 80 … BF. length is 0 for a byte that starts no character.
struct utf8_lead {
  std::size_t length = 0;
  unsigned char second_low = 0x80, second_high = 0xbf;
};

[[nodiscard]] constexpr utf8_lead utf8_lead_of(unsigned char byte) noexcept {
  if (byte < 0x80) return {1};
  if (byte < 0xc2 || byte > 0xf4) return {0};
  if (byte < 0xe0) return {2};
  if (byte < 0xf0)
    return {3, static_cast<unsigned char>(byte == 0xe0 ? 0xa0 : 0x80), static_cast<unsigned char>(byte == 0xed ? 0x9f : 0xbf)};
  return {4, static_cast<unsigned char>(byte == 0xf0 ? 0x90 : 0x80), static_cast<unsigned char>(byte == 0xf4 ? 0x8f : 0xbf)};
}

/// Bytes of the character at the front of `bytes`, 1 … 4; 0 if there is no whole valid one.
[[nodiscard]] constexpr std::size_t utf8_character_length(std::string_view bytes) noexcept {
  if (bytes.empty()) return 0;
  utf8_lead lead = utf8_lead_of(static_cast<unsigned char>(bytes[0]));
  if (lead.length > bytes.size()) return 0;
  for (std::size_t i = 1; i < lead.length; ++i) {
    const auto byte = static_cast<unsigned char>(bytes[i]);
    if (byte < lead.second_low || byte > lead.second_high) return 0;
    lead.second_low = 0x80;
    lead.second_high = 0xbf;
  }
  return lead.length;
}

/// Turns a stream of bytes into valid UTF-8: characters pass, each maximal invalid sub-sequence becomes one U+FFFD. How the stream is cut
/// into push() calls does not change the text.
class utf8_repair {
 public:
  /// Bytes that one push of n bytes can append at most: three for every byte of it, three for what was pending.
  [[nodiscard]] static constexpr std::size_t bound(std::size_t n) noexcept { return 3 * n + 3; }

  /// Appends all that is final to `out`; at most three bytes of an incomplete character stay pending.
  void push(std::string_view bytes, std::string& out) {
    for (const char byte : bytes) push(byte, out);
  }

  /// Whether no incomplete character is pending.
  [[nodiscard]] bool is_empty() const noexcept { return pending_size_ == 0; }

  /// Nothing follows: a pending incomplete character becomes one U+FFFD.
  void finish(std::string& out) {
    if (pending_size_ != 0) out += replacement;
    pending_size_ = 0;
  }

 private:
  static constexpr std::string_view replacement = "\xef\xbf\xbd";

  void push(char c, std::string& out) {
    const auto byte = static_cast<unsigned char>(c);
    if (pending_size_ != 0) {
      if (byte >= lead_.second_low && byte <= lead_.second_high) {
        lead_.second_low = 0x80;
        lead_.second_high = 0xbf;
        pending_[pending_size_++] = c;
        if (pending_size_ == lead_.length) {
          out.append(pending_, pending_size_);
          pending_size_ = 0;
        }
        return;
      }
      finish(out);  // the byte breaks the pending character and is looked at anew
    }
    lead_ = utf8_lead_of(byte);
    if (lead_.length == 0) {
      out += replacement;
    } else if (lead_.length == 1) {
      out += c;
    } else {
      pending_[0] = c;
      pending_size_ = 1;
    }
  }

  char pending_[4] = {};
  std::size_t pending_size_ = 0;
  utf8_lead lead_;  // of the pending character
};

}  // namespace outrider
