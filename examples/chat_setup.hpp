// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// How a model is spoken to, found out from its files: for chat.cpp and speculate.cpp.
#pragma once
#include <algorithm>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "outrider/gemma4/config.hpp"
#include "outrider/text/chat.hpp"
#include "outrider/text/tokenizer.hpp"

struct chat_setup {
  outrider::chat_options options;
  std::vector<outrider::token_id> eos;  // the model's own, and the ends of a turn
  bool is_unknown_template = false;     // the template that came with the model is none of Gemma 4
};

/// Errors: std::runtime_error if the model's vocabulary has no markers for what is asked.
inline chat_setup chat_setup_of(const std::filesystem::path& place, const outrider::tokenizer& tokens,
                                const outrider::gemma4::text_config& config, bool think) {
  using namespace outrider;
  const auto has = [&](std::string_view marker) { return tokens.find(marker).has_value(); };
  if (!has("<|turn>") || !has("<turn|>"))
    throw std::runtime_error(place.string() + ": its vocabulary has no <|turn> and <turn|>: this model was not made for conversations");
  if (think && (!has("<|think|>") || !has("<|channel>") || !has("<channel|>")))
    throw std::runtime_error(place.string() + ": its vocabulary has no markers for thoughts, so it cannot --think");

  chat_setup setup;
  const auto text = read_chat_template(place);
  const auto form = text ? detect_chat_template(*text) : std::nullopt;
  setup.is_unknown_template = text && !form;
  // Of models without a template: those with per-layer embeddings are E2B and E4B, or made like them.
  setup.options.form = form.value_or(chat_form{chat_generation::newest, config.ple_width == 0});
  setup.options.form.empty_thought = setup.options.form.empty_thought && has("<|channel>") && has("<channel|>");
  setup.options.thinking = think;

  setup.eos = config.eos;
  for (const char* end : {"<eos>", "<turn|>", "<|tool_response>"})
    if (const auto id = tokens.find(end); id && std::find(setup.eos.begin(), setup.eos.end(), *id) == setup.eos.end())
      setup.eos.push_back(*id);
  return setup;
}
