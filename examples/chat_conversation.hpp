// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A conversation of chat.cpp: its messages, and the session that has processed them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "any_length.hpp"
#include "chat_command_line.hpp"
#include "chat_setup.hpp"
#include "loading.hpp"
#include "outrider/decode/prefix.hpp"
#include "outrider/outrider.hpp"
#include "outrider/text/chat.hpp"

/// What an answer took, or all of them together.
struct chat_work {
  std::size_t reused = 0, prefilled = 0;  // prompt tokens that were committed already, and those that were not
  std::size_t written = 0, drafted = 0, accepted = 0;
  double seconds = 0;  // of writing

  void add(const chat_work& more) {
    reused += more.reused;
    prefilled += more.prefilled;
    written += more.written;
    drafted += more.drafted;
    accepted += more.accepted;
    seconds += more.seconds;
  }
};

template <class Backend, class Kv>
class conversation {
 public:
  explicit conversation(const chat_arguments& args)
      : args_(args),
        ctx_(outrider::execution{args.threads}),
        place_(outrider::gemma4::locate_model(args.target)),
        model_(outrider::gemma4::load_model<Backend>(place_, load_options_of(args))),
        tokens_(outrider::tokenizer::from_file(place_)),
        parser_(tokens_),
        session_(model_, ctx_, {.max_rewind = (std::min)(args.max_new_tokens, most_rewind) + 8}) {
    using namespace outrider;
    if (tokens_.vocab_size() != model_.config().vocab_size)
      throw std::runtime_error(place_.string() + ": not the tokenizer of this model: " + std::to_string(tokens_.vocab_size()) +
                               " tokens, the model has " + std::to_string(model_.config().vocab_size));
    const chat_setup setup = chat_setup_of(place_, tokens_, model_.config(), args.think);
    chat_ = setup.options;
    is_unknown_template_ = setup.is_unknown_template;
    options_.max_new_tokens = args.max_new_tokens;
    options_.suppress = model_.config().suppress;
    options_.eos = setup.eos;
    options_.draft = args.draft;
    if (!args.assistant.empty()) {
      assistant_.emplace(gemma4::load_assistant<Backend>(args.assistant, load_options_of(args)));
      drafter_.emplace(*assistant_, ctx_);
      decoder_.emplace(session_, *drafter_, greedy{}, length_for(args.draft, session_, *drafter_));
    }
    reset();
  }
  conversation(const conversation&) = delete;
  conversation& operator=(const conversation&) = delete;

  /// The template that came with the model is none of Gemma 4.
  [[nodiscard]] bool is_unknown_template() const noexcept { return is_unknown_template_; }
  [[nodiscard]] std::size_t max_positions() const noexcept { return session_.max_positions(); }
  [[nodiscard]] std::size_t committed() const noexcept { return session_.committed(); }
  [[nodiscard]] std::size_t turns() const noexcept { return turns_; }
  [[nodiscard]] const chat_work& last() const noexcept { return last_; }
  [[nodiscard]] const chat_work& total() const noexcept { return total_; }

  /// Begins anew, behind the system's message.
  void reset() {
    messages_.clear();
    if (args_.system) messages_.push_back(outrider::text_message(outrider::chat_role::system, *args_.system));
    session_.clear();
    turns_ = 0;
    last_ = total_ = {};
  }

  /// Answers a line. `show` is called with every outrider::chat_parser::delta of the answer, `stop` before each token and each piece of the
  /// prompt: true ends the answer there. What was written so far is part of the conversation; a line without any answer is not.
  /// Throws outrider::error, context_full if the conversation is longer than the model's context; the line is then forgotten.
  template <class Show, class Stop>
  outrider::finish_reason answer(const std::string& line, Show&& show, Stop&& stop) {
    using namespace outrider;
    messages_.push_back(text_message(chat_role::user, line));
    last_ = {};
    chat_message reply{.role = chat_role::assistant};
    std::string text;
    finish_reason finish = finish_reason::caller;
    const std::vector<token_id> prompt = encode_chat(tokens_, messages_, {}, chat_);
    if (prompt.size() > session_.max_positions()) {
      messages_.pop_back();
      throw error(error_code::context_full, "the conversation has " + std::to_string(prompt.size()) + " tokens, the model's context is " +
                                                std::to_string(session_.max_positions()));
    }
    try {
      last_.reused = reuse_prefix(session_, session_.tokens(), prompt);
      // Long prompts in pieces, so that they can be stopped.
      std::span<const token_id> rest = std::span(prompt).subspan(last_.reused);
      for (; rest.size() > piece && !stop(); rest = rest.subspan(piece)) session_.prefill(rest.first(piece));
      if (rest.size() <= piece) {
        const auto take = [&](const chat_parser::delta& d) {
          text += d.answer;
          reply.reasoning += d.thought;
          if (d.call && d.call->is_valid) reply.tool_calls.push_back({d.call->name, d.call->arguments});
          show(d);
        };
        const auto emit = [&](token_id token) {
          take(parser_.push(token));
          return !stop();
        };
        const generation result = decoder_ ? decoder_->generate(rest, options_, emit) : generate(session_, rest, options_, emit);
        finish = result.finish;
        note(result.stats);
        take(parser_.finish());
      }
      last_.prefilled = (std::min)(prompt.size(), session_.committed()) - last_.reused;
    } catch (...) {
      messages_.pop_back();
      session_.clear();
      throw;
    }
    if (last_.written == 0) {
      messages_.pop_back();
      return finish;
    }
    ++turns_;
    total_.add(last_);
    if (!text.empty()) reply.content.push_back({chat_part_kind::text, std::move(text)});
    messages_.push_back(std::move(reply));
    return finish;
  }

 private:
  static constexpr std::size_t piece = 512;        // of a prompt: a multiple of the session's chunks
  static constexpr std::size_t most_rewind = 512;  // slots of every sliding layer for going back behind an answer

  void note(const outrider::statistics& s) {
    last_.written = s.tokens;
    last_.drafted = s.drafted();
    last_.accepted = s.accepted();
    last_.seconds = s.decode_seconds;
  }

  chat_arguments args_;
  outrider::context_of<Backend> ctx_;
  std::filesystem::path place_;
  outrider::gemma4::model<Backend> model_;
  std::optional<outrider::gemma4::assistant<Backend>> assistant_;
  outrider::tokenizer tokens_;
  outrider::chat_parser parser_;
  outrider::gemma4::session<Backend, Kv> session_;
  std::optional<outrider::assistant_drafter<Backend>> drafter_;
  using decoder = outrider::speculative_decoder<outrider::gemma4::session<Backend, Kv>, outrider::assistant_drafter<Backend>,
                                                outrider::greedy, any_length>;
  std::optional<decoder> decoder_;  // what it learns of drafting lasts from answer to answer
  outrider::chat_options chat_;
  outrider::generate_options options_;
  bool is_unknown_template_ = false;

  std::vector<outrider::chat_message> messages_;
  std::size_t turns_ = 0;
  chat_work last_, total_;
};
