// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Everything a program on the CPU needs. Programs that want less, or another backend, include the parts.
#pragma once

#include "outrider/backend/cpu.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/batch_decoder.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "outrider/generator.hpp"
#include "outrider/text/detokenizer.hpp"
#include "outrider/text/tokenizer.hpp"
#include "outrider/version.hpp"
