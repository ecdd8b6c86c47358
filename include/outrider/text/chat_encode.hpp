// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "outrider/core/scalar.hpp"
#include "outrider/text/chat_render.hpp"
#include "outrider/text/tokenizer.hpp"

namespace outrider {

/// All the markers a conversation is made of.
inline constexpr auto chat_markers = std::to_array<std::string_view>(
    {"<bos>", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>",
     "<|tool_response>", "<tool_response|>", "<|\"|>", "<|image|>", "<|audio|>", "<|video|>"});

namespace detail {

/// The ids of text in which no marker may come out, whatever it spells. Some vocabularies list markers as ordinary added tokens, which
/// encode() finds everywhere: a spelling of one of those is cut behind its first byte.
inline void append_plain(const tokenizer& tokens, std::string_view text, std::vector<token_id>& ids) {
  const auto append = [&](std::string_view piece) {
    const std::vector<token_id> more = tokens.encode(piece, {.add_bos = false, .parse_special = false});
    ids.insert(ids.end(), more.begin(), more.end());
  };
  std::size_t begin = 0;
  for (std::size_t at = text.find('<'); at != text.npos; at = text.find('<', at + 1))
    for (const std::string_view marker : chat_markers) {
      if (!text.substr(at).starts_with(marker)) continue;
      if (const auto id = tokens.find(marker); !id || tokens.is_special(*id)) continue;
      append(text.substr(begin, at + 1 - begin));
      begin = at + 1;
    }
  if (begin < text.size()) append(text.substr(begin));
}

}  // namespace detail

/// The ids of a rendered conversation. The template's markers become their tokens; whatever people, tools or the model wrote stays text, even
/// where it spells a marker. Where it spells none, these are the ids of encode(chat.text(), {.parse_special = true}). A marker that the
/// vocabulary does not have is text as well. Errors: those of tokenizer::encode.
[[nodiscard]] inline std::vector<token_id> encode_chat(const tokenizer& tokens, const rendered_chat& chat) {
  std::vector<token_id> ids;
  std::string plain;  // up to the next marker: merges do not stop where the template ends and a message begins
  for (const rendered_chat::segment& segment : chat.segments) {
    const auto id = segment.is_marker ? tokens.find(segment.text) : std::nullopt;
    if (!id) {
      plain += segment.text;
      continue;
    }
    detail::append_plain(tokens, std::exchange(plain, {}), ids);
    ids.push_back(*id);
  }
  detail::append_plain(tokens, plain, ids);
  return ids;
}

/// Messages to ids in one step: render_chat, then the other encode_chat. Errors: those of both.
[[nodiscard]] inline std::vector<token_id> encode_chat(const tokenizer& tokens, std::span<const chat_message> messages,
                                                       std::span<const chat_tool> tools = {}, const chat_options& options = {}) {
  return encode_chat(tokens, render_chat(messages, tools, options));
}

}  // namespace outrider
