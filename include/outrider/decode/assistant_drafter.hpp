// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cmath>
#include <concepts>
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
  /// token in the softmax over the candidates. Precondition: check(target) passed. Errors, on a device: what went wrong there.
  template <in_space_of<B> Target>
  std::size_t propose(const Target& target, const draft_request& request, std::span<token_id> out) {
    if constexpr (drafts_there<assistant_drafter, Target>) {
      if (may_draft_there(request)) {
        token_id* const ids = ctx_->exchange().data();
        ids[0] = request.last();
        propose_there(target, request, out.size(), ids);
        ctx_->wait();
        std::copy_n(ids + 1, out.size(), out.begin());
        return detail::up_to_end(out, request.eos);
      }
    }
    const auto input = assistant_->input(workspace_);
    const std::size_t width = input.cols / 2;
    const auto keys = target.keys();
    matrix_for<const float, B> state = target.hidden();
    token_id token = request.last();
    for (std::size_t j = 0; j < out.size(); ++j) {
      target.embed(input.slice_cols(0, width), token);
      const candidates<B> step = step_from(state, keys, request);
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

  /// Whether propose_there() can do what this request asks: nobody wants to know how sure a guess is, and drawn guesses need no host.
  [[nodiscard]] bool may_draft_there(const draft_request& request) const noexcept {
    return request.confidence.empty() && request.min_confidence == 0 &&
           (!request.coupling || request.coupling->template may_draw_there<B>());
  }

  /// `count` tokens, ids[1 … count], the most likely or the drawn ones, behind ids[0], all in memory that both sides reach. Returns at once:
  /// whoever reads them on the host waits first, and cuts them behind an end of text.
  template <in_space_of<B> Target>
    requires(embeds_there<Target>)
  std::size_t propose_there(const Target& target, const draft_request& request, std::size_t count, token_id* ids) {
    const auto input = assistant_->input(workspace_);
    const std::size_t width = input.cols / 2;
    const auto keys = target.keys();
    matrix_for<const float, B> state = target.hidden();
    for (std::size_t j = 0; j < count; ++j) {
      target.embed_at(input.slice_cols(0, width), ids + j);
      const candidates<B> step = step_from(state, keys, request);
      if (request.coupling)
        request.coupling->template draw_there<B>(*ctx_, step.logits, step.ids, request.text.size() + j, ids + j + 1);
      else
        pointwise_ops<B>::argmax(*ctx_, ids + j + 1, step.logits, step.ids);
      state = assistant_->state(workspace_);
    }
    return count;
  }

 private:
  /// The candidates of a step that reads the embedding in its input row and `state`, without those that are suppressed.
  template <class Keys>
  candidates<B> step_from(matrix_for<const float, B> state, const Keys& keys, const draft_request& request) {
    const auto input = assistant_->input(workspace_);
    const std::size_t width = input.cols / 2;
    pointwise_ops<B>::copy(*ctx_, input.slice_cols(width, width), state);
    const candidates<B> step = assistant_->forward(*ctx_, workspace_, keys);
    if (!request.suppress.empty()) pointwise_ops<B>::mask(*ctx_, step.logits, step.ids, request.suppress.data(), request.suppress.size());
    return step;
  }
  /// A token from a step's candidates, for position `position` of the text.
  token_id choose(const candidates<B>& step, const draft_request& request, std::size_t position, float* confidence) {
    if (request.coupling) return request.coupling->template draw<B>(*ctx_, step.logits, step.ids, position, confidence);
    token_id token = 0;
    if (confidence) *confidence = share_of_largest(on_host(step.logits));
    most_likely<B>(*ctx_, {&token, 1}, step.logits, step.ids);
    return token;
  }
  [[nodiscard]] matrix_view<const float> on_host(matrix_for<const float, B> x) {
    if constexpr (host_accessible<space_of<B>>)
      return x;
    else
      return here_.rows<B>(x);
  }
  /// softmax at the largest of x [1, c].
  static float share_of_largest(matrix_view<const float> x) noexcept {
    const std::span<const float> row(x.row(0), x.cols);
    const float largest = *std::max_element(row.begin(), row.end());
    float total = 0;
    for (const float value : row) total += std::exp(value - largest);
    return 1 / total;
  }

  const gemma4::assistant<B>* assistant_;
  context_of<B>* ctx_;
  typename gemma4::assistant<B>::workspace workspace_;
  detail::host_rows here_;  // candidates whose probabilities the host reads
};

}  // namespace outrider
