// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A backend of one's own: everything from `cpu`, one op replaced. The whole model, its assistant and the decoding loop run on it unchanged.
#include <cstdio>
#include <string>

#include "outrider/outrider.hpp"

/// The tag. A backend is a type, so the choice costs nothing at run time.
struct my_backend {};

template <>
struct outrider::backend_traits<my_backend> : outrider::backend_traits<outrider::cpu> {
  static constexpr std::string_view name() noexcept { return "my_backend"; }
};
template <class Weight>
struct outrider::linear_ops<my_backend, Weight> : outrider::linear_ops<outrider::cpu, Weight> {};
template <class Kv>
struct outrider::attention_ops<my_backend, Kv> : outrider::attention_ops<outrider::cpu, Kv> {};

/// Inherits all pointwise ops and replaces one: a norm that counts its rows, and otherwise does what `cpu` does.
template <>
struct outrider::pointwise_ops<my_backend> : outrider::pointwise_ops<outrider::cpu> {
  static inline std::size_t rows_normed = 0;
  static void rms_norm(context_of<my_backend>& ctx, matrix_view<float> out, matrix_view<const float> x, const float* weight,
                       float eps) noexcept {
    rows_normed += x.rows;
    pointwise_ops<cpu>::rms_norm(ctx, out, x, weight, eps);
  }
};

/// One readable sentence here if an op were missing or had another signature.
static_assert(outrider::check_backend<my_backend>());

int main() try {
  using namespace outrider;
  const std::string pair = OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv";
  context_of<my_backend> ctx{execution{}};
  const auto model = gemma4::load_model<my_backend>(pair + "/target");
  const auto assistant = gemma4::load_assistant<my_backend>(pair + "/assistant");
  const auto text = tokenizer::from_json_file(pair + "/target/tokenizer.json");

  gemma4::session<my_backend> session(model, ctx);
  assistant_drafter<my_backend> drafter(assistant, ctx);
  detokenizer stream(text);
  const auto result = speculative_decoder(session, drafter)
                          .generate(text.encode("And it came to pass"),
                                    {.max_new_tokens = 48, .draft = 4, .eos = model.config().eos, .suppress = model.config().suppress},
                                    [&](token_id token) { std::fputs(std::string(stream.push(token)).c_str(), stdout); });
  std::fputs(std::string(stream.finish()).c_str(), stdout);
  std::printf("\n\n%s: %zu tokens in %zu rounds, %zu drafts accepted; its own rms_norm ran on %zu rows\n",
              backend_traits<my_backend>::name().data(), result.stats.tokens, result.stats.rounds(), result.stats.accepted(),
              pointwise_ops<my_backend>::rows_normed);
} catch (const std::exception& problem) {
  std::fprintf(stderr, "custom_backend: %s\n", problem.what());
  return 1;
}
