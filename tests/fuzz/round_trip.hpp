// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz/finding.hpp"
#include "outrider/text/detokenizer.hpp"
#include "outrider/text/tokenizer.hpp"

namespace outrider::testing {

/// What a text is after encoding and decoding: the vocabulary's sign for a space comes back as one.
inline std::string with_spaces(std::string_view text) {
  constexpr std::string_view sign = "▁";
  std::string result;
  for (std::size_t at; (at = text.find(sign)) != text.npos; text.remove_prefix(at + sign.size())) result.append(text, 0, at).append(" ");
  return result.append(text);
}

/// Holds a tokenizer to its promises for any bytes.
inline void check_round_trip(const tokenizer& tokens, std::string_view text) {
  for (const bool parse_special : {false, true}) {
    const std::vector<token_id> ids = tokens.encode(text, {.add_bos = false, .parse_special = parse_special});
    for (const token_id id : ids) require(id >= 0 && static_cast<std::size_t>(id) < tokens.vocab_size(), "an id is one of the vocabulary");
    require(tokens.decode_bytes(ids, true) == with_spaces(text), "decoding gives back what was encoded");
    if (!parse_special)
      for (const token_id id : ids) require(!tokens.is_special(id), "what a user wrote is never a marker");
    for (const bool special : {false, true}) {
      detokenizer streaming(tokens, special);
      std::string streamed;
      for (const token_id id : ids) streamed += streaming.push(id);
      streamed += streaming.finish();
      require(streamed == tokens.decode_text(ids, special), "a text decoded token by token is the text decoded at once");
    }
    const std::vector<token_id> with_bos = tokens.encode(text, {.add_bos = true, .parse_special = parse_special});
    require(!with_bos.empty() && with_bos[0] == tokens.bos(), "<bos> comes first");
  }
}

/// Texts that have tripped tokenizers, with the tokenizer's own file among them.
inline void check_round_trips(const tokenizer& tokens, std::string_view file) {
  check_round_trip(tokens, file.substr(0, 4096));
  check_round_trip(tokens, "");
  using namespace std::string_view_literals;
  check_round_trip(tokens, " a  b\n\n\t\0▁ \xe2\x96 \xff\xf0\x9f\x98\x80 <bos><|turn>user<0x0A>"sv);
  std::string every_token;
  for (std::size_t id = 0; id < tokens.vocab_size() && every_token.size() < 4096; ++id)
    every_token += tokens.token_text(static_cast<token_id>(id));
  check_round_trip(tokens, every_token);
}

}  // namespace outrider::testing
