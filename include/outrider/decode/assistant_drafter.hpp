// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include "outrider/decode/drafter.hpp"
#include "outrider/gemma4/assistant.hpp"
#include "outrider/gemma4/pairing.hpp"

namespace outrider {

/// Drafts with a Gemma 4 Assistant, which reads the target's keys where they lie. Borrows the assistant and the context; one thread at a time.
template <backend_tag B>
class assistant_drafter {
 public:
  static constexpr draft_needs needs{.hidden = true, .keys = true, .embedding = true};
  static constexpr const char* name = "assistant";

  /// Errors: out_of_memory.
  assistant_drafter(const gemma4::assistant<B>& assistant, context_of<B>& ctx)
      : assistant_(&assistant), ctx_(&ctx), workspace_(assistant.config()) {}
  assistant_drafter(const gemma4::assistant<B>&& assistant, context_of<B>& ctx) = delete;  // the assistant must outlive its drafter

  /// Errors: pair_mismatch if the assistant was not made for this target. A speculative_decoder asks once.
  template <class Target>
  void check(const Target& target) const {
    gemma4::check_pair(target.config(), assistant_->config());
  }

  /// Up to out.size() draft steps at one position: the first reads the embedding of the last token and the target's hidden state, each further
  /// one the draft before it and the assistant's own state. The keys stay those of the committed positions. Confidence is the share of a
  /// token in the softmax over the candidates. Precondition: check(target) passed.
  template <in_space_of<B> Target>
  std::size_t propose(const Target& target, const draft_request& request, std::span<token_id> out) {
    const auto input = assistant_->input(workspace_);
    const std::size_t width = input.cols / 2;
    const auto keys = target.keys();
    matrix_for<const float, B> state = target.hidden();
    token_id token = request.last();
    for (std::size_t j = 0; j < out.size(); ++j) {
      target.embed(input.slice_cols(0, width), token);
      pointwise_ops<B>::copy(*ctx_, input.slice_cols(width, width), state);
      const candidates<B> step = assistant_->forward(*ctx_, workspace_, keys);
      if (!request.suppress.empty()) pointwise_ops<B>::mask(*ctx_, step.logits, step.ids, request.suppress.data(), request.suppress.size());
      const bool ask = !request.confidence.empty() || request.min_confidence > 0;
      float confidence = 0;
      token = choose(step, request, request.text.size() + j, ask ? &confidence : nullptr);
      if (ask && confidence < request.min_confidence) {
        if (request.doubted) *request.doubted = true;
        return j;
      }
      out[j] = token;
      if (!request.confidence.empty()) request.confidence[j] = confidence;
      if (std::find(request.eos.begin(), request.eos.end(), token) != request.eos.end()) return j + 1;
      state = assistant_->state(workspace_);
    }
    return out.size();
  }

 private:
  /// A token from a step's candidates, for position `position` of the text. Where the candidates lie on a device: the most likely, without a
  /// confidence.
  token_id choose(const candidates<B>& step, const draft_request& request, [[maybe_unused]] std::size_t position, float* confidence) {
    token_id token = 0;
    if constexpr (host_accessible<space_of<B>>) {
      if (request.coupling) return request.coupling->template draw<B>(*ctx_, step.logits, step.ids, position, confidence);
      if (confidence) *confidence = share_of_largest(step.logits);
    } else if (confidence) {
      *confidence = 1;
    }
    pointwise_ops<B>::argmax(*ctx_, &token, step.logits, step.ids);
    return token;
  }
  /// softmax at the largest of x [1, c].
  static float share_of_largest(matrix_for<const float, B> x) noexcept {
    const std::span<const float> row(x.row(0), x.cols);
    const float largest = *std::max_element(row.begin(), row.end());
    float total = 0;
    for (const float value : row) total += std::exp(value - largest);
    return 1 / total;
  }

  const gemma4::assistant<B>* assistant_;
  context_of<B>* ctx_;
  typename gemma4::assistant<B>::workspace workspace_;
};

}  // namespace outrider
