// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Conversations: messages to text and ids, and the model's tokens back to answers, thoughts and tool calls.
#pragma once

#include "outrider/text/chat_encode.hpp"
#include "outrider/text/chat_message.hpp"
#include "outrider/text/chat_parse.hpp"
#include "outrider/text/chat_render.hpp"
#include "outrider/text/chat_template.hpp"
