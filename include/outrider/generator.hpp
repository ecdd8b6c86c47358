// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A model that writes text, in one object: for programs that do not want to choose parts. Built on what decode/ and gemma4/ offer, and no more
// than that: whoever outgrows it reads on in these.
#pragma once
#include <cstddef>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "outrider/backend/cpu.hpp"
#include "outrider/decode/any_drafter.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/calibrate.hpp"
#include "outrider/decode/cascade_drafter.hpp"
#include "outrider/decode/ngram_drafter.hpp"
#include "outrider/decode/prefix.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/decode/text_stream.hpp"
#include "outrider/error.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "outrider/text/tokenizer.hpp"

namespace outrider {

/// How a model is loaded and held.
struct generator_options {
  unsigned threads = 0;            // one per core
  std::size_t max_positions = 0;   // of prompt and text together; 0 = what the model was made for
  std::size_t max_rewind = 512;    // tokens that a call can always go back behind the last text, to a prefix that both share
  gemma4::load_options load = {};  // progress, and how quantised weights are used
};

/// What a text may become.
struct text_options {
  std::size_t max_new_tokens = 512;
  std::optional<std::size_t> draft = {};                         // most drafts a round; 0: plain decoding
  sampling_options sampling = {};                                // greedy unless a temperature is given
  std::vector<std::string> stop = {};                            // strings that end the text and are not part of it
  double time_budget = std::numeric_limits<double>::infinity();  // seconds
  std::stop_token cancel = {};                                   // from any thread
};

/// A text and how it came about.
struct written_text {
  std::string text;
  finish_reason finish = finish_reason::max_new_tokens;
  statistics stats;
};

/// A loaded model with its drafter: the assistant, and before it, where the text repeats itself, what followed there. It drafts as many tokens as
/// pay on this machine, none included; the text is that of plain decoding. Movable. One thread at a time, but for text_options::cancel.
template <backend_tag B = cpu>
class generator {
 public:
  /// target, assistant: GGUF files or Hugging Face directories; without an assistant, drafts come from repetitions alone.
  /// Errors: those of gemma4::load_model and tokenizer::from_file; tokenizer_malformed if it is not the model's, pair_mismatch, out_of_memory;
  /// std::system_error if the system gives no threads.
  explicit generator(const std::filesystem::path& target, const std::filesystem::path& assistant = {},
                     const generator_options& options = {})
      : parts_(std::make_unique<parts>(target, assistant, options)) {}

  /// Writes on behind `prompt`, plain text. The beginning that it shares with the last call's prompt and text is not processed again, unless
  /// it ends more than max_rewind tokens before the end of these, in a text longer than the sliding layers keep.
  ///   on_text   called with the text as it comes, whole characters; void, or false to stop
  /// It may throw: what was processed stays, and the next call finds its way from there.
  /// Errors, before anything is written: argument_invalid for options that mean nothing and for a prompt without tokens, context_full for a
  /// prompt that is too long, out_of_memory.
  template <class OnText>
    requires std::invocable<OnText&, std::string_view> written_text generate(std::string_view prompt, const text_options& options,
                                                                             OnText&& on_text) {
      return generate(parts_->tokens.encode(prompt), options, std::forward<OnText>(on_text));
    }
  template <class OnText>
    requires std::invocable<OnText&, std::string_view> written_text generate(std::string_view prompt, OnText&& on_text) {
      return generate(prompt, {}, std::forward<OnText>(on_text));
    }
  written_text generate(std::string_view prompt, const text_options& options = {}) {
    return generate(prompt, options, [](std::string_view) {});
  }

  /// The same behind token ids: of a conversation, for instance, see encode_chat().
  template <class OnText>
    requires std::invocable<OnText&, std::string_view> written_text generate(std::span<const token_id> prompt, const text_options& options,
                                                                             OnText&& on_text) {
      return parts_->write(prompt, options, [&](std::string_view text) {
        if constexpr (std::is_void_v<std::invoke_result_t<OnText&, std::string_view>>)
          return on_text(text), true;
        else
          return static_cast<bool>(on_text(text));
      });
    }

  [[nodiscard]] const tokenizer& tokens() const noexcept { return parts_->tokens; }
  [[nodiscard]] const gemma4::model<B>& model() const noexcept { return parts_->model; }

 private:
  using session_type = gemma4::session<B>;

  /// Not movable: its parts point to each other.
  struct parts {
    context_of<B> ctx;
    gemma4::model<B> model;
    tokenizer tokens;
    std::optional<gemma4::assistant<B>> assistant;
    session_type session;
    ngram_drafter lookup;
    std::optional<assistant_drafter<B>> guesses;
    any_drafter<session_type> drafter;
    speculative_decoder<session_type, any_drafter<session_type>, sampling, adaptive> decoder;

    bool is_writing = false;

    parts(const std::filesystem::path& target, const std::filesystem::path& with, const generator_options& options)
        : ctx(execution{options.threads}),
          model(gemma4::load_model<B>(target, options.load)),
          tokens(tokenizer::from_file(gemma4::locate_model(target))),
          assistant(with.empty() ? std::nullopt : std::optional(gemma4::load_assistant<B>(with, options.load))),
          session(model, ctx, {.max_positions = options.max_positions, .max_rewind = options.max_rewind}),
          guesses(assistant ? std::optional<assistant_drafter<B>>(std::in_place, *assistant, ctx) : std::nullopt),
          drafter(guesses ? any_drafter<session_type>(cascade_drafter(lookup, *guesses)) : any_drafter<session_type>(lookup)),
          decoder(session, drafter, sampling(), adaptive(costs())) {
      if (tokens.vocab_size() != model.config().vocab_size)
        throw error(error_code::tokenizer_malformed, target.string() + ": its tokenizer has " + std::to_string(tokens.vocab_size()) +
                                                         " tokens, the model " + std::to_string(model.config().vocab_size));
    }
    parts(const parts&) = delete;
    parts& operator=(const parts&) = delete;

    /// Of the assistant where there is one: drafts by repetition cost nothing.
    [[nodiscard]] draft_costs costs() { return guesses ? calibrate(session, *guesses) : calibrate(session, drafter); }

    written_text write(std::span<const token_id> prompt, const text_options& options, const text_stream::callback& on_text) {
      if (is_writing)
        throw error(error_code::argument_invalid, "outrider: a generator was asked for a text by the callback of another one of its own");
      struct writing {
        bool& flag;
        explicit writing(bool& f) : flag(f) { flag = true; }
        ~writing() { flag = false; }
      } const now(is_writing);
      written_text out;
      text_stream stream(
          tokens,
          [&](std::string_view text) {
            out.text += text;
            return on_text(text);
          },
          options.stop);
      generate_options how;
      how.max_new_tokens = options.max_new_tokens;
      how.draft = options.draft;
      how.eos = model.config().eos;
      how.suppress = model.config().suppress;
      how.time_budget = options.time_budget;
      how.cancel = options.cancel;
      check(how);
      decoder.use(sampling(options.sampling));
      if (prompt.size() > session.max_positions())
        throw error(error_code::context_full, "outrider: the prompt has " + std::to_string(prompt.size()) + " tokens, the context " +
                                                  std::to_string(session.max_positions()));
      std::size_t known = 0;
      if (!prompt.empty()) known = reuse_prefix(session, session.tokens(), prompt);
      const generation result = decoder.generate(prompt.subspan(known), how, stream);
      stream.finish();
      out.finish = result.finish;
      out.stats = result.stats;
      return out;
    }
  };
  std::unique_ptr<parts> parts_;
};

/// The shortest way: outrider::load("gemma-4-E2B.gguf", "gemma-4-E2B-assistant.gguf").generate("Once upon a time", print). It measures first, for
/// a quarter of a second or a short prompt and a pass, how many drafts pay.
/// See generator; another backend: outrider::load<reference>(…).
template <backend_tag B = cpu>
[[nodiscard]] generator<B> load(const std::filesystem::path& target, const std::filesystem::path& assistant = {},
                                const generator_options& options = {}) {
  return generator<B>(target, assistant, options);
}

}  // namespace outrider
