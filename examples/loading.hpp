// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <chrono>
#include <cstddef>

#include "model_options.hpp"
#include "outrider/gemma4/load.hpp"
#include "progress_bar.hpp"

/// How the options say that a model is loaded. What takes longer than a second shows its progress on a terminal.
inline outrider::gemma4::load_options load_options_of(const model_options& args) {
  using outrider::gemma4::weight_form;
  return {args.exact_activations ? weight_form::stored : weight_form::preferred,
          [bar = progress_bar(true, std::chrono::seconds(1))](std::size_t done, std::size_t all) mutable { bar(done, all); }, args.threads};
}
