// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "outrider/core/scalar.hpp"
#include "outrider/text/merge_table.hpp"
#include "outrider/text/vocabulary.hpp"

namespace outrider {

/// What a token is, with the numbers GGUF files give to it. control and unknown are markers, which are no part of decoded text; byte is the
/// token "<0xHH>" of one byte; user_defined is split out of every text before anything is merged; unused is a piece like a normal one.
enum class token_type : std::uint8_t { normal = 1, unknown, control, user_defined, unused, byte };

/// A token that is split out of the text before anything is merged.
struct added_token {
  token_id id = 0;
  bool special = false;     // a marker: found only where the caller allows it, not part of decoded text
  bool normalized = false;  // searched in the text after " " became "▁", otherwise in the raw text before
};

/// What a tokenizer is made of, whatever file it came from.
struct tokenizer_parts {
  std::string source;  // for error messages
  vocabulary tokens;
  std::vector<token_type> types;  // of the tokens, one each
  merge_table merges;
  std::vector<added_token> added;
  std::optional<token_id> bos, eos;  // where the file names them; otherwise the markers "<bos>" and "<eos>" are meant
};

namespace detail {

/// The byte that a token named "<0xHH>" stands for; nothing for another name.
[[nodiscard]] constexpr std::optional<unsigned char> byte_of_name(std::string_view name) noexcept {
  constexpr std::string_view digits = "0123456789ABCDEF";
  if (name.size() != 6 || !name.starts_with("<0x") || name[5] != '>') return std::nullopt;
  const std::size_t high = digits.find(name[3]), low = digits.find(name[4]);
  if (high == digits.npos || low == digits.npos) return std::nullopt;
  return static_cast<unsigned char>(16 * high + low);
}

}  // namespace detail

}  // namespace outrider
