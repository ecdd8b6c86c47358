// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "outrider/error.hpp"
#include "outrider/gemma4/config.hpp"

namespace outrider::gemma4 {

namespace detail {

/// Equal frequencies as far as float goes: a GGUF file keeps base and factor in single precision, which costs each of them half an ulp, and
/// computing and rounding a frequency another half each.
inline bool same_rotation(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](float x, float y) { return std::abs(double{x} - double{y}) <= 4 * 0x1p-24 * std::abs(double{x}); });
}

}  // namespace detail

/// Whether the assistant can draft for the target: it takes the target's hidden state and embedding rows, proposes the target's token ids
/// and reads the target's keys and values as they lie in the cache, so all these sizes, the window and the rotation must be equal. Throws
/// error_code::pair_mismatch with the first difference and both values; returns if there is none.
inline void check_pair(const text_config& target, const assistant_config& assistant) {
  const auto differ = [](const std::string& what, const std::string& of_target, const std::string& of_assistant) {
    throw error(error_code::pair_mismatch, "target and assistant do not belong together: " + what + " is " + of_target +
                                               " in the target, but the assistant is made for " + of_assistant);
  };
  const auto same = [&](const std::string& what, std::size_t of_target, std::size_t of_assistant) {
    if (of_target != of_assistant) differ(what, std::to_string(of_target), std::to_string(of_assistant));
  };

  const text_config& drafter = assistant.text;
  same("the hidden size", target.hidden_size, assistant.backbone_hidden_size);
  same("the vocabulary size", target.vocab_size, drafter.vocab_size);
  if (drafter.layers.empty() || drafter.layers.back() != attention_kind::full) differ("the last layer", "full", "a sliding one");

  for (const attention_kind kind : attention_kinds) {
    bool used = false;
    for (const attention_kind layer : drafter.layers) used = used || layer == kind;
    if (!used) continue;
    const std::string layers = std::string(" of ") + name_of(kind) + " layers";
    if (target.donor(kind) == target.layer_count()) differ("the number" + layers + " with keys and values of their own", "0", "1 or more");

    const attention_shape &theirs = target.shape(kind), &ours = drafter.shape(kind);
    same("the head size" + layers, theirs.head_dim, ours.head_dim);
    same("the number of KV heads" + layers, theirs.kv_heads, ours.kv_heads);
    if (kind == attention_kind::sliding) same("the sliding window", target.window, drafter.window);
    if (!detail::same_rotation(theirs.rope.frequencies(theirs.head_dim), ours.rope.frequencies(ours.head_dim))) {
      const auto text = [](const rope_parameters& rope) {
        return "theta " + std::to_string(rope.theta) + ", fraction " + std::to_string(rope.fraction) + ", factor " +
               std::to_string(rope.factor);
      };
      differ("the rotation" + layers, text(theirs.rope), text(ours.rope));
    }
  }
}

}  // namespace outrider::gemma4
