// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Writes text with a Gemma 4 model and its assistant, and says what speculation did. Without arguments: the tiny pair of examples/data.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "outrider/backend/reference.hpp"
#include "outrider/outrider.hpp"

namespace {

struct arguments {
  std::string target = OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/target",
              assistant = OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/assistant";
  std::string prompt = "In the beginning God created", prompt_file, backend = "cpu", kv = "f32";
  std::vector<outrider::token_id> prompt_ids;
  std::size_t max_new_tokens = 128, draft = 4;
  unsigned threads = 0;
  bool json = false, compare = false, quiet = false;
};

template <class Backend, class Kv>
void run(const arguments& args) {
  using namespace outrider;
  // Load: weights stay in the mapped files.
  const auto start = std::chrono::steady_clock::now();
  context_of<Backend> ctx{execution{args.threads}};
  const auto model = gemma4::load_model<Backend>(args.target);
  std::optional<gemma4::assistant<Backend>> assistant;
  if (!args.assistant.empty()) assistant.emplace(gemma4::load_assistant<Backend>(args.assistant));
  std::optional<tokenizer> text;
  const auto file = std::filesystem::path(args.target) / "tokenizer.json";
  if (args.prompt_ids.empty() || std::filesystem::exists(file)) text.emplace(tokenizer::from_json_file(file));
  gemma4::session<Backend, Kv> session(model, ctx);
  const std::chrono::duration<double> load_time = std::chrono::steady_clock::now() - start;

  // Generate, showing tokens as they come: as text, or as numbers where the model has no tokenizer.
  const auto prompt = !args.prompt_ids.empty()
                          ? args.prompt_ids
                          : text->encode(args.prompt_file.empty() ? args.prompt : io::read_text_file(args.prompt_file));
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
  const std::string simd(backend_traits<Backend>::simd());
  if (args.json) {
    std::vector<std::size_t> accepted_at;
    for (std::size_t i = 1; i <= options.draft; ++i) accepted_at.push_back(s.accepted_at(i));
    nlohmann::json out{{"tokens", written},
                       {"text", text ? text->decode_text(written) : ""},
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
                       {"threads", ctx.threads()}};
    if (args.compare) out["plain_seconds"] = plain.decode_seconds, out["identical"] = identical;
    std::cout << out.dump() << std::endl;
  } else if (std::puts(""); !args.quiet) {
    std::printf("\n%zu tokens, %zu rounds (and %zu plain passes), %zu drafted, %zu accepted: %.0f %%, %.2f tokens per target pass\n",
                s.tokens, s.rounds(), s.plain_passes(), s.drafted(), s.accepted(), 100 * s.acceptance_rate(), s.tokens_per_pass());
    std::printf("%.0f tokens/s", s.tokens_per_second());
    if (args.compare)
      std::printf(" with, %.0f without; identical to plain decoding: %s", plain.tokens_per_second(), identical ? "yes" : "no");
    std::printf("\nbackend %s, SIMD %s, threads %u\n", args.backend.c_str(), simd.c_str(), ctx.threads());
  }
  if (s.rounds() >= 8 && 5 * s.accepted_at(1) < s.rounds())
    std::cerr << "speculate: few drafts were accepted; is this the assistant of this very model?\n";
  if (args.compare && !identical) throw std::runtime_error("the text differs from plain decoding, which must not happen");
}

template <class Backend>
void run_on(const arguments& args) {
  args.kv == "bf16" ? run<Backend, outrider::bf16>(args) : run<Backend, float>(args);
}

}  // namespace

int main(int argc, char** argv) try {
  arguments args;
  CLI::App app("Writes text with a Gemma 4 model and its assistant. Without --target: a tiny pair trained on the King James Bible.");
  const auto* target = app.add_option("--target", args.target, "Hugging Face directory of the model");
  const auto* assistant = app.add_option("--assistant", args.assistant, "Directory of its assistant; without one, plain decoding");
  auto* prompt = app.add_option("--prompt", args.prompt, "Text to continue")->capture_default_str();
  auto* file = app.add_option("--prompt-file", args.prompt_file, "File with the text to continue")->excludes(prompt);
  app.add_option("--prompt-ids", args.prompt_ids, "Token ids to continue, as given: 2,5,7")->delimiter(',')->excludes(prompt, file);
  app.add_option("--max-new-tokens", args.max_new_tokens, "Most tokens to write")->capture_default_str()->check(CLI::Range(0, 1 << 20));
  const auto* draft = app.add_option("--draft", args.draft, "Drafts per round; 0 = none")->capture_default_str()->check(CLI::Range(0, 16));
  app.add_option("--backend", args.backend, "What computes")->capture_default_str()->check(CLI::IsMember({"reference", "highway", "cpu"}));
  app.add_option("--threads", args.threads, "Threads; one per core if not given")->check(CLI::Range(1, 1024));
  app.add_option("--kv", args.kv, "How keys and values are stored")->capture_default_str()->check(CLI::IsMember({"f32", "bf16"}));
  app.add_flag("--json", args.json, "Print one JSON object instead of text");
  app.add_flag("--compare", args.compare, "Decode without speculation too, and compare speed and tokens");
  app.add_flag("--quiet", args.quiet, "Print the text alone");
  app.set_version_flag("--version", OUTRIDER_VERSION);
  try {
    app.parse(argc, argv);
    if (*target && !*assistant) args.assistant.clear();
    if (args.assistant.empty() && *draft && args.draft > 0) throw CLI::ValidationError("--draft", "drafts need an --assistant");
  } catch (const CLI::ParseError& wrong) {
    return app.exit(wrong) == 0 ? 0 : 2;
  }
  if (args.backend == "reference") run_on<outrider::reference>(args);
  if (args.backend == "highway") run_on<outrider::highway_dispatch>(args);
  if (args.backend == "cpu") run_on<outrider::cpu>(args);
} catch (const std::exception& problem) {
  std::cerr << "speculate: " << problem.what() << "\n";
  return 1;
}
