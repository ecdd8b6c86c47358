// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
// expect: outrider: this drafter reads the target's hidden state, but the target has no hidden\(\)
#include "outrider/backend/reference.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/session.hpp"

/// Any language model that can be decoded, but is no Gemma 4: it has nothing for an assistant to read.
struct other_model {
  using backend_type = outrider::reference;
  [[nodiscard]] outrider::context_of<backend_type>& context() const noexcept;
  [[nodiscard]] std::size_t vocab_size() const noexcept;
  [[nodiscard]] std::size_t max_draft() const noexcept;
  [[nodiscard]] std::size_t max_positions() const noexcept;
  [[nodiscard]] std::size_t committed() const noexcept;
  [[nodiscard]] std::span<const outrider::token_id> tokens() const noexcept;
  [[nodiscard]] outrider::matrix_view<float> logits() const noexcept;
  void reserve(std::size_t);
  void prefill(std::span<const outrider::token_id>);
  void verify(std::span<const outrider::token_id>);
  void commit(std::size_t);
};

#if defined(OUTRIDER_TWIN)
using target = outrider::gemma4::session<outrider::reference>;
#else
using target = other_model;
#endif
static_assert(sizeof(outrider::speculative_decoder<target, outrider::assistant_drafter<outrider::reference>>) > 0);
