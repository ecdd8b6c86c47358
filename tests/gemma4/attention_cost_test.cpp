// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What attention costs as a text grows: keys read, counted by a backend.
#include <doctest/doctest.h>

#include <cstddef>
#include <filesystem>
#include <string_view>
#include <vector>

#include "outrider/backend/reference.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"

namespace {

/// The reference, counting the keys that rows see.
struct key_counting {
  static inline std::size_t keys = 0;
};

}  // namespace

template <>
struct outrider::backend_traits<key_counting> : outrider::backend_traits<outrider::reference> {
  static constexpr std::string_view name() noexcept { return "key counting"; }
};
template <class W>
struct outrider::linear_ops<key_counting, W> : outrider::linear_ops<outrider::reference, W> {};
template <>
struct outrider::pointwise_ops<key_counting> : outrider::pointwise_ops<outrider::reference> {};
template <class Kv>
struct outrider::attention_ops<key_counting, Kv> : outrider::attention_ops<outrider::reference, Kv> {
  static void attend(context_of<reference>& ctx, matrix_view<float> out, matrix_view<const float> q, kv_view<const Kv> cache,
                     key_window window) noexcept {
    for (std::size_t r = 0; r < q.rows; ++r) key_counting::keys += window.end(r) - window.begin(r);
    attention_ops<reference, Kv>::attend(ctx, out, q, cache, window);
  }
};

namespace {

using namespace outrider;

TEST_CASE("keys read for a token: all positions in full layers, a window in the sliding ones, however long the text") {
  const auto model = gemma4::load_model<key_counting>(std::filesystem::path(OUTRIDER_SOURCE_DIR) / "examples/data/tiny-kjv/target");
  const gemma4::text_config& c = model.config();
  std::size_t full = 0, sliding = 0;
  for (const gemma4::attention_kind kind : c.layers) ++(kind == gemma4::attention_kind::full ? full : sliding);
  context_of<key_counting> ctx{execution{1}};
  gemma4::session<key_counting> session(model, ctx);
  std::vector<token_id> text(900, 17);
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<token_id>(i * 7 % c.vocab_size);
  const std::vector<token_id> next{5};
  for (const std::size_t n : {std::size_t{100}, std::size_t{450}, std::size_t{900}}) {
    session.prefill(std::span(text).subspan(session.committed(), n - session.committed()));
    key_counting::keys = 0;
    session.verify(next);
    CHECK(key_counting::keys == full * (n + 1) + sliding * c.window);
  }
}

}  // namespace
