// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Writes text with a Gemma 4 model and its assistant, and says what speculation did. Without arguments: the tiny pair of examples/data.
#include <unistd.h>

#include <chrono>
#include <exception>
#include <filesystem>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "loading.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/outrider.hpp"
#include "speculate_command_line.hpp"
#include "speculate_report.hpp"

namespace {

/// The tokenizer beside a model's weights; none where there is none and the prompt is given as token ids.
std::optional<outrider::tokenizer> load_tokenizer(const arguments& args, std::size_t vocab_size) {
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

std::vector<outrider::token_id> prompt_of(const arguments& args, const std::optional<outrider::tokenizer>& text) {
  if (args.id_list) return args.prompt_ids;
  return text->encode(args.prompt_file ? outrider::io::read_text_file(*args.prompt_file) : args.prompt);
}

/// Shows tokens as they come: as text, or as numbers where the model has no tokenizer.
class token_printer {
 public:
  token_printer(std::ostream* out, const std::optional<outrider::tokenizer>& text) : out_(out) {
    if (text) stream_.emplace(*text);
  }
  void show(outrider::token_id token) {
    if (!out_) return;
    if (stream_)
      *out_ << stream_->push(token) << std::flush;
    else
      *out_ << token << ' ' << std::flush;
  }
  void finish() {
    if (out_ && stream_) *out_ << stream_->finish() << std::flush;
  }

 private:
  std::ostream* out_;  // null: says nothing
  std::optional<outrider::detokenizer> stream_;
};

template <class Backend, class Kv>
void run(const arguments& args) {
  using namespace outrider;
  // Load: weights stay in the mapped files, but for quantised ones that are rearranged for products with int8 activations.
  const auto start = std::chrono::steady_clock::now();
  context_of<Backend> ctx{execution{args.threads}};
  const auto how = load_options_of(args);
  const auto model = gemma4::load_model<Backend>(args.target, how);
  std::optional<gemma4::assistant<Backend>> assistant;
  if (!args.assistant.empty()) assistant.emplace(gemma4::load_assistant<Backend>(args.assistant, how));
  const std::optional<tokenizer> text = load_tokenizer(args, model.config().vocab_size);
  gemma4::session<Backend, Kv> session(model, ctx);
  const std::chrono::duration<double> load_time = std::chrono::steady_clock::now() - start;

  outcome o;
  o.load_seconds = load_time.count();
  o.simd = backend_traits<Backend>::simd();
  o.int8_activations = model.int8_activations();
  o.threads = ctx.threads();

  // Generate. With --json on a terminal, the text goes to stderr, so that stdout holds one object.
  const auto prompt = prompt_of(args, text);
  std::ostream* const show = !args.json ? &std::cout : isatty(STDOUT_FILENO) ? &std::cerr : nullptr;
  token_printer printer(show, text);
  const auto emit = [&](token_id token) {
    o.written.push_back(token);
    printer.show(token);
  };
  const generate_options options{args.max_new_tokens, assistant ? args.draft : 0, model.config().eos, model.config().suppress};
  if (assistant) {
    assistant_drafter<Backend> drafter(*assistant, ctx);
    o.result = speculative_decoder(session, drafter).generate(prompt, options, emit);
  } else {
    o.result = generate(session, prompt, options, emit);
  }
  printer.finish();

  if (args.compare) {
    session.clear();
    o.plain = generate(session, prompt, options, [&](token_id token) { o.plain_written.push_back(token); }).stats;
  }
  if (args.json && show) *show << std::endl;
  report(args, o, text && args.json ? text->decode_text(o.written) : "");
}

template <class Backend>
void run_on(const arguments& args) {
  args.kv == "bf16" ? run<Backend, outrider::bf16>(args) : run<Backend, float>(args);
}

}  // namespace

int main(int argc, char** argv) try {
  const arguments args = parse_command_line(argc, argv);
  if (args.backend == "reference")
    run_on<outrider::reference>(args);
  else
    run_on<outrider::cpu>(args);
} catch (const std::exception& problem) {
  std::cerr << "speculate: " << problem.what() << "\n";
  return 1;
}
