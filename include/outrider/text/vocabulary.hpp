// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "outrider/core/scalar.hpp"
#include "outrider/error.hpp"

namespace outrider {

/// A text from a file, quoted for an error message and cut to a readable length.
[[nodiscard]] inline std::string in_quotes(std::string_view text) {
  constexpr std::size_t longest = 60;
  if (text.size() <= longest) return "'" + std::string(text) + "'";
  std::size_t end = longest;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;  // not inside a character
  return "'" + std::string(text.substr(0, end)) + "…'";
}

/// Token texts by id and ids by text. All texts lie in one string; the index is an open-addressed table of ids. Immutable.
class vocabulary {
 public:
  struct piece {
    std::uint32_t offset = 0, length = 0;  // in the texts, bytes
  };

  vocabulary() = default;
  /// pieces[id] is the text of token id and lies inside `texts`, which is shorter than 4 GiB.
  /// error_code::tokenizer_malformed, beginning with `source`, if a text is empty or two ids have the same.
  vocabulary(const std::string& source, std::string texts, std::vector<piece> pieces)
      : texts_(std::move(texts)), pieces_(std::move(pieces)), index_(std::bit_ceil(2 * pieces_.size()), nobody) {
    for (std::size_t id = 0; id < pieces_.size(); ++id) {
      if (pieces_[id].length == 0)
        throw error(error_code::tokenizer_malformed, source + ": token " + std::to_string(id) + " is an empty text");
      token_id& slot = index_[slot_of(text_of(id))];
      if (slot != nobody)
        throw error(error_code::tokenizer_malformed, source + ": tokens " + std::to_string(slot) + " and " + std::to_string(id) +
                                                         " have the same text " + in_quotes(text_of(id)) + ", every token needs its own");
      slot = static_cast<token_id>(id);
    }
  }

  [[nodiscard]] std::size_t size() const noexcept { return pieces_.size(); }
  [[nodiscard]] bool contains(token_id id) const noexcept { return id >= 0 && static_cast<std::size_t>(id) < size(); }
  /// The text of a token; contains(id) must hold. Valid as long as the vocabulary.
  [[nodiscard]] std::string_view text(token_id id) const noexcept { return text_of(static_cast<std::size_t>(id)); }
  [[nodiscard]] std::optional<token_id> find(std::string_view text) const noexcept {
    if (pieces_.empty()) return std::nullopt;
    const token_id id = index_[slot_of(text)];
    return id == nobody ? std::nullopt : std::optional(id);
  }

 private:
  static constexpr token_id nobody = -1;

  [[nodiscard]] std::string_view text_of(std::size_t id) const noexcept {
    return std::string_view(texts_).substr(pieces_[id].offset, pieces_[id].length);
  }
  /// Where the id of `text` is or would be. At least half of the slots are free, so the search ends.
  [[nodiscard]] std::size_t slot_of(std::string_view text) const noexcept {
    const std::size_t mask = index_.size() - 1;
    std::size_t slot = std::hash<std::string_view>{}(text)&mask;
    while (index_[slot] != nobody && text_of(static_cast<std::size_t>(index_[slot])) != text) slot = (slot + 1) & mask;
    return slot;
  }

  std::string texts_;
  std::vector<piece> pieces_;
  std::vector<token_id> index_;
};

}  // namespace outrider
