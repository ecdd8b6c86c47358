// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Writes text with a Gemma 4 model and its assistant, and says what speculation did. Without arguments: the tiny pair of examples/data.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "command_line.hpp"
#include "loading.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/outrider.hpp"

namespace {

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
  std::optional<tokenizer> text;
  const auto place = gemma4::locate_model(args.target);
  const bool is_gguf = !std::filesystem::is_directory(place);
  const auto file = is_gguf ? place : place / "tokenizer.json";
  const bool has_text = is_gguf ? io::open_gguf(file).find("tokenizer.ggml.tokens") != nullptr
                                : std::filesystem::symlink_status(file).type() != std::filesystem::file_type::not_found;
  if (!args.id_list || has_text) {
    text.emplace(tokenizer::from_file(file));
    if (text->vocab_size() != model.config().vocab_size)
      throw std::runtime_error(file.string() + ": not the tokenizer of this model: " + std::to_string(text->vocab_size()) +
                               " tokens, the model has " + std::to_string(model.config().vocab_size));
  }
  gemma4::session<Backend, Kv> session(model, ctx);
  const std::chrono::duration<double> load_time = std::chrono::steady_clock::now() - start;

  // Generate, showing tokens as they come: as text, or as numbers where the model has no tokenizer.
  const auto prompt = args.id_list ? args.prompt_ids : text->encode(args.prompt_file ? io::read_text_file(*args.prompt_file) : args.prompt);
  std::ostream* const show = !args.json ? &std::cout : isatty(STDOUT_FILENO) ? &std::cerr : nullptr;
  std::optional<detokenizer> stream;
  if (text) stream.emplace(*text);
  std::vector<token_id> written, plain_written;
  const auto emit = [&](token_id token) {
    written.push_back(token);
    if (show && stream) *show << stream->push(token) << std::flush;
    if (show && !stream) *show << token << ' ' << std::flush;
  };
  const generate_options options{args.max_new_tokens, assistant ? args.draft : 0, model.config().eos, model.config().suppress};
  generation result;
  if (assistant) {
    assistant_drafter<Backend> drafter(*assistant, ctx);
    result = speculative_decoder(session, drafter).generate(prompt, options, emit);
  } else {
    result = generate(session, prompt, options, emit);
  }
  if (show && stream) *show << stream->finish() << std::flush;

  statistics plain;
  if (args.compare) {
    session.clear();
    plain = generate(session, prompt, options, [&](token_id token) { plain_written.push_back(token); }).stats;
  }
  const bool identical = written == plain_written;

  // Report.
  const statistics& s = result.stats;
  const std::string simd(backend_traits<Backend>::simd()), activations = model.int8_activations() ? "int8" : "float";
  if (args.json) {
    std::vector<std::size_t> accepted_at;
    for (std::size_t i = 1; i <= options.draft; ++i) accepted_at.push_back(s.accepted_at(i));
    nlohmann::json out{{"tokens", written},
                       {"text", text ? text->decode_text(written) : ""},
                       {"finish", name_of(result.finish)},
                       {"prompt_tokens", s.prompt_tokens},
                       {"rounds", s.rounds()},
                       {"plain_passes", s.plain_passes()},
                       {"drafted", s.drafted()},
                       {"accepted", s.accepted()},
                       {"accepted_per_position", accepted_at},
                       {"tokens_per_round", s.tokens_per_round()},
                       {"seconds", {{"load", load_time.count()}, {"prefill", s.prefill_seconds}, {"decode", s.decode_seconds}}},
                       {"backend", args.backend},
                       {"simd", simd},
                       {"activations", activations},
                       {"threads", ctx.threads()}};
    if (args.compare) out["plain_seconds"] = plain.decode_seconds, out["identical"] = identical;
    if (show) *show << std::endl;
    std::cout << out.dump() << std::endl;
  } else if (std::puts(""); !args.quiet) {
    std::printf("\n%zu tokens, %zu rounds (and %zu plain passes), %zu drafted, %zu accepted: %.0f %%, %.2f tokens per target pass\n",
                s.tokens, s.rounds(), s.plain_passes(), s.drafted(), s.accepted(), 100 * s.acceptance_rate(), s.tokens_per_pass());
    std::printf("%.0f tokens/s", s.tokens_per_second());
    if (args.compare)
      std::printf(" with, %.0f without; identical to plain decoding: %s", plain.tokens_per_second(), identical ? "yes" : "no");
    std::printf("\nbackend %s, SIMD %s, threads %u, %s activations\n", args.backend.c_str(), simd.c_str(), ctx.threads(),
                activations.c_str());
  }
  if (!args.quiet && s.rounds() >= 8 && 5 * s.accepted_at(1) < s.rounds())
    std::cerr << "speculate: few drafts were accepted; is this the assistant of this very model?\n";
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) throw std::runtime_error("standard output cannot be written");
  if (args.compare && !identical) throw std::runtime_error("the text differs from plain decoding, which must not happen");
}

template <class Backend>
void run_on(const arguments& args) {
  args.kv == "bf16" ? run<Backend, outrider::bf16>(args) : run<Backend, float>(args);
}

}  // namespace

int main(int argc, char** argv) try {
  const arguments args = parse_command_line(argc, argv);
  if (args.backend == "reference") run_on<outrider::reference>(args);
  if (args.backend == "highway") run_on<outrider::highway_dispatch>(args);
  if (args.backend == "cpu") run_on<outrider::cpu>(args);
} catch (const std::exception& problem) {
  std::cerr << "speculate: " << problem.what() << "\n";
  return 1;
}
