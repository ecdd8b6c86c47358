// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
// Conversations as JSON, {"messages": […], "tools": […]}: every generation of the template renders an accepted one, with markers that are
// the template's own and none that a user wrote.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "fuzz/finding.hpp"
#include "outrider/io/json.hpp"
#include "outrider/text/chat_message.hpp"
#include "outrider/text/chat_render.hpp"
#include "outrider/text/chat_template.hpp"

using outrider::error_code;
using outrider::testing::accepts;
using outrider::testing::require;

namespace {

constexpr auto markers = std::to_array<std::string_view>({"<bos>", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool>",
                                                          "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>",
                                                          "<|\"|>", "<|image|>", "<|audio|>", "<|video|>"});

void check(const outrider::rendered_chat& chat) {
  require(!chat.segments.empty() && chat.segments[0].is_marker && chat.segments[0].text == "<bos>", "a conversation begins with <bos>");
  std::string text;
  bool after_text = false;
  for (const auto& segment : chat.segments) {
    if (segment.is_marker)
      require(std::find(markers.begin(), markers.end(), segment.text) != markers.end(), "a marker is one of the template's");
    else
      require(!segment.text.empty() && !after_text, "texts are not empty, and markers lie between them");
    after_text = !segment.is_marker;
    text += segment.text;
  }
  require(text == chat.text(), "the text is that of the segments");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = outrider::testing::as_text(data, size);
  static_cast<void>(outrider::detect_chat_template(text));
  nlohmann::json document;
  if (!accepts("chat.json: ", {error_code::file_malformed}, [&] { document = outrider::io::parse_json(text, "chat.json"); })) return 0;
  if (!document.is_object()) return 0;
  accepts("chat: ", {error_code::argument_invalid}, [&] {
    const auto messages = outrider::chat_messages_from_json(document.value("messages", nlohmann::json()));
    const auto tools = outrider::chat_tools_from_json(document.value("tools", nlohmann::json()));
    for (const auto generation :
         {outrider::chat_generation::launch, outrider::chat_generation::interleaved, outrider::chat_generation::newest})
      for (const bool thinking : {false, true})
        accepts("chat: ", {error_code::argument_invalid}, [&] {
          check(outrider::render_chat(messages, tools, {.form = {generation, true}, .thinking = thinking, .add_generation_prompt = true}));
        });
  });
  return 0;
}
