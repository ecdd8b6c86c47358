// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What speculate.cpp does, on any backend: load, draft and verify, print.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "any_length.hpp"
#include "chat_setup.hpp"
#include "loading.hpp"
#include "outrider/decode/any_drafter.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/cascade_drafter.hpp"
#include "outrider/decode/ngram_drafter.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/decode/text_stream.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "speculate_command_line.hpp"
#include "speculate_report.hpp"
#include "speculate_trace.hpp"

/// The tokenizer beside a model's weights; none where there is none and the prompt is given as token ids.
inline std::optional<outrider::tokenizer> load_tokenizer(const arguments& args, std::size_t vocab_size) {
  using namespace outrider;
  const auto place = gemma4::locate_model(args.target);
  const bool is_gguf = !std::filesystem::is_directory(place);
  const auto file = is_gguf ? place : place / "tokenizer.json";
  const bool is_there = is_gguf ? io::open_gguf(file).find("tokenizer.ggml.tokens") != nullptr
                                : std::filesystem::symlink_status(file).type() != std::filesystem::file_type::not_found;
  if (args.id_list && !is_there) return std::nullopt;
  tokenizer text = tokenizer::from_file(file);
  if (text.vocab_size() != vocab_size)
    throw std::runtime_error(file.string() + ": not the tokenizer of this model: " + std::to_string(text.vocab_size()) +
                             " tokens, the model has " + std::to_string(vocab_size));
  return text;
}

/// Takes tokens as they are chosen, and shows them as text; or as numbers where the model has no tokenizer.
class text_printer {
 public:
  /// Shows nothing if `out` is null.
  text_printer(sample& s, std::ostream* out, const std::optional<outrider::tokenizer>& tokens, const std::vector<std::string>& stops)
      : sample_(s), out_(out) {
    const auto show = [this](std::string_view text) {
      sample_.text += text;
      if (out_) *out_ << text << std::flush;
      return true;
    };
    if (tokens) stream_.emplace(*tokens, show, stops);
  }
  text_printer(const text_printer&) = delete;
  text_printer& operator=(const text_printer&) = delete;

  std::optional<outrider::finish_reason> operator()(outrider::token_id token) {
    sample_.tokens.push_back(token);
    if (stream_) return (*stream_)(token);
    if (out_) *out_ << token << ' ' << std::flush;
    return std::nullopt;
  }
  [[nodiscard]] std::size_t tokens_of_text() const noexcept { return stream_ ? stream_->tokens_of_text() : sample_.tokens.size(); }
  void finish(const outrider::generation& result) {
    if (stream_) stream_->finish();
    sample_.tokens.resize(result.kept);
    sample_.result = result;
  }

 private:
  sample& sample_;
  std::ostream* out_;
  std::optional<outrider::text_stream> stream_;
};

/// A model, its drafter and a sequence: everything that decoding needs.
template <class Backend, class Kv>
class engine {
 public:
  using session_type = outrider::gemma4::session<Backend, Kv>;
  using drafter_type = outrider::any_drafter<session_type>;

  explicit engine(const arguments& args)
      : ctx(outrider::execution{args.threads}),
        model(outrider::gemma4::load_model<Backend>(args.target, load_options_of(args))),
        tokens(load_tokenizer(args, model.config().vocab_size)),
        session(model, ctx) {
    if (args.drafter == "assistant" || args.drafter == "cascade") {
      assistant.emplace(outrider::gemma4::load_assistant<Backend>(args.assistant, load_options_of(args)));
      guesses.emplace(*assistant, ctx);
    }
  }
  engine(const engine&) = delete;
  engine& operator=(const engine&) = delete;

  [[nodiscard]] drafter_type drafter(const std::string& kind) {
    if (kind == "assistant") return *std::move(guesses);
    if (kind == "ngram") return lookup;
    if (kind == "cascade") return outrider::cascade_drafter(lookup, *guesses);
    return outrider::no_draft{};
  }
  outrider::context_of<Backend> ctx;
  outrider::gemma4::model<Backend> model;
  std::optional<outrider::tokenizer> tokens;
  session_type session;

 private:
  std::optional<outrider::gemma4::assistant<Backend>> assistant;
  std::optional<outrider::assistant_drafter<Backend>> guesses;
  outrider::ngram_drafter lookup;
};

template <class Backend, class Kv>
void run(const arguments& args) {
  using namespace outrider;
  const auto start = std::chrono::steady_clock::now();
  if (fcntl(STDOUT_FILENO, F_GETFD) == -1) throw std::runtime_error("standard output cannot be written: it is closed");
  engine<Backend, Kv> e(args);
  const std::chrono::duration<double> load_time = std::chrono::steady_clock::now() - start;

  outcome o;
  o.load_seconds = load_time.count();
  o.simd = backend_traits<Backend>::simd();
  o.int8_activations = e.model.int8_activations();
  o.threads = e.ctx.threads();

  if (!e.tokens && !args.stops.empty()) throw std::runtime_error("--stop needs a tokenizer, and this model has none");
  std::optional<trace_writer> trace;
  if (args.trace) {
    for (const auto& input : {args.target, args.assistant, args.prompt_file.value_or("")})
      if (std::error_code none; !input.empty() && std::filesystem::equivalent(input, *args.trace, none))
        throw std::runtime_error(*args.trace + ": --trace would overwrite an input");
    trace.emplace(*args.trace);
  }

  generate_options options;
  options.max_new_tokens = args.max_new_tokens;
  options.eos = e.model.config().eos;
  options.suppress = e.model.config().suppress;
  options.min_confidence = args.min_confidence;
  std::vector<token_id> prompt = args.prompt_ids;
  if (!args.id_list) {
    const std::string text = args.prompt_file ? io::read_text_file(*args.prompt_file) : args.prompt;
    if (args.chat) {
      const chat_setup chat = chat_setup_of(gemma4::locate_model(args.target), *e.tokens, e.model.config(), false);
      options.eos = chat.eos;
      const std::vector<chat_message> messages{text_message(chat_role::user, text)};
      prompt = encode_chat(*e.tokens, messages, {}, chat.options);
    } else {
      prompt = e.tokens->encode(text);
    }
  }

  auto drafter = e.drafter(args.drafter);
  const auto drafts = args.drafter == "none" ? std::optional<std::size_t>(0) : args.draft;
  speculative_decoder decoder(e.session, drafter, sampling(args.sampling), length_for(drafts, e.session, drafter));
  if (trace) options.on_pass = [&](const round_record& record) { trace->pass(record, drafter.source()); };

  // With --json on a terminal, texts go to stderr, so that stdout holds one object.
  std::ostream* const show = !args.json ? &std::cout : isatty(STDOUT_FILENO) ? &std::cerr : nullptr;
  for (std::size_t i = 0; i < args.samples; ++i) {
    sampling_options draws = args.sampling;
    draws.sequence = i;
    if (show && args.samples > 1 && !args.quiet) *show << (i == 0 ? "" : "\n") << "--- " << i + 1 << " of " << args.samples << "\n";
    sample& s = o.samples.emplace_back();
    text_printer printer(s, show, e.tokens, args.stops);
    if (trace)
      trace->begin({{"backend", args.backend},
                    {"simd", o.simd},
                    {"threads", o.threads},
                    {"drafter", args.drafter},
                    {"policy", args.draft ? "fixed " + std::to_string(*args.draft) : "adaptive"},
                    {"prompt_tokens", prompt.size()}});
    e.session.clear();
    decoder.use(sampling(draws));
    printer.finish(decoder.generate(prompt, options, printer));
    if (trace) trace->end(s.result);
    if (show) *show << std::endl;

    if (args.compare) {
      sample plain;
      text_printer silent(plain, nullptr, e.tokens, args.stops);
      generate_options as_plain = options;
      as_plain.on_pass = {};
      e.session.clear();
      silent.finish(generate(e.session, prompt, as_plain, silent, sampling(draws)));
      s.plain_tokens = plain.tokens;
      o.plain_seconds += plain.result.stats.decode_seconds;
    }
  }
  report(args, o);
}

// In files of their own: speculate_reference.cpp, speculate_cuda.cpp, speculate_fewer_bits.cpp.
void run_on_reference(const arguments& args);
void run_on_cuda(const arguments& args);
void print_devices();
void run_with_fewer_bits(const arguments& args);
