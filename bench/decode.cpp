// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// How fast a pair decodes on this machine, and why: read bandwidth, a plain pass, a verify pass of M rows, a draft step, a prompt, and whole
// texts with and without speculation. What is compared is measured side by side in every round, so ratios are of neighbours in time.
// Nothing is reported unless the text is that of the reference backend and speculation leaves it as it is.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "decode_report.hpp"
#include "machine.hpp"
#include "outrider/backend/cpu.hpp"
#include "outrider/backend/highway_dispatch.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "outrider/text/tokenizer.hpp"
#include "outrider/version.hpp"

namespace {

using namespace outrider;
using bench::most_rows;
using nlohmann::ordered_json;
using ids = std::vector<token_id>;

constexpr std::size_t drafts_timed = 4;                            // draft steps per timed proposal
constexpr std::size_t passes_per_round = 5;                        // of each number of rows; their median is the sample
constexpr std::size_t checked_tokens = 32;                         // compared with the reference, which takes its time
constexpr std::array<std::size_t, 7> drafts{0, 1, 2, 3, 4, 6, 8};  // drafts per round of the texts; 0 = plain comes first
constexpr std::array prompts{"In the beginning God created", "And the LORD said unto Moses,",    "The LORD is my shepherd;",
                             "And it came to pass, when",    "A wise son maketh a glad father:", "Behold, the days come, saith the LORD,"};

struct arguments {
  std::string target = OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/target",
              assistant = OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/assistant";
  std::string backend = "cpu", kv = "f32", json_file;
  unsigned threads = 0;
  std::size_t repeat = 15, context = 128, new_tokens = 64;
};

/// A loaded pair with one sequence. Not movable: its parts point to each other.
template <class B, class Kv>
struct loaded_pair {
  context_of<B> ctx;
  std::shared_ptr<const io::tensor_set> tensors;
  gemma4::model<B> model;
  gemma4::assistant<B> assistant;
  gemma4::session<B, Kv> session{model, ctx};
  assistant_drafter<B> drafter{assistant, ctx};

  explicit loaded_pair(const arguments& args)
      : ctx(execution{args.threads}),
        tensors(std::make_shared<const io::tensor_set>(io::load_safetensors(args.target))),
        model(gemma4::read_target_config(std::filesystem::path(args.target) / "config.json"), tensors),
        assistant(gemma4::load_assistant<B>(args.assistant)) {}
  loaded_pair(const loaded_pair&) = delete;
  loaded_pair& operator=(const loaded_pair&) = delete;

  /// Always `count` tokens: nothing ends a text here, so that all runs are of one length.
  statistics write(const ids& prompt, std::size_t draft, std::size_t count, ids& text) {
    session.clear();
    text.clear();
    text.reserve(count);
    const generate_options options{.max_new_tokens = count, .draft = draft, .eos = {}, .suppress = {}};
    const auto keep = [&](token_id token) { text.push_back(token); };
    if (draft == 0) return generate(session, prompt, options, keep).stats;
    return speculative_decoder(session, drafter).generate(prompt, options, keep).stats;
  }
};

void require_same(const ids& got, const ids& want, const std::string& what, const std::string& standard) {
  const auto [a, b] = std::mismatch(got.begin(), got.end(), want.begin(), want.end());
  if (a == got.end() && b == want.end()) return;
  throw std::runtime_error("token " + std::to_string(a - got.begin()) + " of the text " + what + " is not the one " + standard +
                           " gives; no figures from a program that writes another text");
}

/// The prompts as ids. Without a tokenizer.json: ids spread over the vocabulary.
std::vector<ids> prompt_ids(const arguments& args, std::size_t vocab_size) {
  std::vector<ids> all(prompts.size());
  const auto file = std::filesystem::path(args.target) / "tokenizer.json";
  if (std::filesystem::exists(file)) {
    const tokenizer text = tokenizer::from_json_file(file);
    std::transform(prompts.begin(), prompts.end(), all.begin(), [&](const char* prompt) { return text.encode(prompt); });
  } else {
    for (std::size_t p = 0; p < all.size(); ++p)
      for (std::size_t i = 0; i < 8; ++i) all[p].push_back(static_cast<token_id>((p * 7919 + i * 104729) % vocab_size));
  }
  return all;
}

/// Refuses to go on with a program that writes another text than the reference backend, or than itself without speculation.
template <class B, class Kv>
void check_text(loaded_pair<B, Kv>& pair, const arguments& args, const ids& prompt) {
  const std::size_t count = (std::min)(args.new_tokens, checked_tokens);
  ids want, got;
  loaded_pair<reference, Kv>(args).write(prompt, 0, count, want);
  pair.write(prompt, 0, count, got);
  require_same(got, want, "on backend " + args.backend, "backend reference");
  pair.write(prompt, drafts_timed, count, got);
  require_same(got, want, "with speculation", "plain decoding");
}

/// A prompt, then passes and draft steps behind it. Nothing is committed, so each of them meets the same cache.
template <class B, class Kv>
void measure_passes(loaded_pair<B, Kv>& pair, const ids& context, bench::samples& s) {
  pair.session.clear();
  s.prefill.push_back(1000 * static_cast<double>(context.size()) / bench::milliseconds([&] { pair.session.prefill(context); }));

  std::array<std::vector<double>, most_rows + 1> pass;
  std::vector<double> drafting;
  std::array<token_id, most_rows> picks{};
  const auto verify = [&](std::size_t m) {
    pair.session.verify(std::span(context).first(m));
    greedy{}.pick<B>(pair.ctx, pair.session.logits(), context.size() + 1, picks.data());
  };
  for (std::size_t i = 0; i < passes_per_round; ++i) {
    for (std::size_t m = 1; m <= most_rows; ++m) {
      verify(m);  // the timed pass follows one like it, whatever was measured before
      pass[m].push_back(bench::milliseconds([&] { verify(m); }));
    }
    drafting.push_back(bench::milliseconds([&] {
      pair.drafter.propose(std::as_const(pair.session), {context.back(), {}, {}}, std::span(picks).first(drafts_timed));
    }));
  }
  const double plain = bench::summary(pass[1]).median, step = bench::summary(drafting).median / drafts_timed;
  for (std::size_t m = 1; m <= most_rows; ++m) {
    s.pass_ms[m].push_back(bench::summary(pass[m]).median);
    s.pass_cost[m].push_back(s.pass_ms[m].back() / plain);
  }
  s.draft_ms.push_back(step);
  s.draft_cost.push_back(step / plain);
}

/// Every prompt with every number of drafts, one after the other.
template <class B, class Kv>
void measure_texts(loaded_pair<B, Kv>& pair, const arguments& args, const std::vector<ids>& texts, bench::samples& s) {
  std::map<std::size_t, double> seconds;
  std::map<std::size_t, statistics> counts;
  ids plain, text;
  for (const ids& prompt : texts)
    for (const std::size_t k : drafts) {
      const statistics stats = pair.write(prompt, k, args.new_tokens, k == 0 ? plain : text);
      if (k != 0) require_same(text, plain, "with " + std::to_string(k) + " drafts a round", "plain decoding");
      seconds[k] += stats.decode_seconds;
      counts[k].tokens += stats.tokens - 1;  // the first one comes from the prompt's pass
      for (std::size_t d = 0; d <= max_draft_length; ++d)
        for (std::size_t a = 0; a <= d; ++a) counts[k].passes[d][a] += stats.passes[d][a];
    }
  for (const std::size_t k : drafts) {
    s.tokens_per_second[k].push_back(static_cast<double>(counts[k].tokens) / seconds[k]);
    s.speedup[k].push_back(seconds[0] / seconds[k]);
  }
  s.counts = counts;
}

template <class B, class Kv>
ordered_json measure(const arguments& args) {
  loaded_pair<B, Kv> pair(args);
  const std::vector<ids> texts = prompt_ids(args, pair.session.vocab_size());
  check_text(pair, args, texts[0]);

  ids context;
  while (context.size() < args.context)
    for (const ids& prompt : texts) context.insert(context.end(), prompt.begin(), prompt.end());
  context.resize(args.context);
  bench::memory_reader memory(pair.ctx.threads());
  bench::samples s;
  for (std::size_t round = 0; round < args.repeat; ++round) {
    s.one_stream.push_back(memory.template gigabytes_per_second<1>());
    s.four_streams.push_back(memory.template gigabytes_per_second<4>());
    measure_passes(pair, context, s);
    measure_texts(pair, args, texts, s);
  }

  ordered_json out;
  out["target"] = args.target, out["assistant"] = args.assistant, out["outrider"] = OUTRIDER_VERSION;
  out["cpu"] = bench::cpu_model(), out["simd"] = backend_traits<B>::simd(), out["compiler"] = bench::compiler();
  out["backend"] = args.backend, out["threads"] = pair.ctx.threads(), out["kv"] = args.kv, out["rounds"] = args.repeat;
  out["context"] = args.context, out["new_tokens"] = args.new_tokens, out["prompts"] = texts.size();
  bench::add_figures(out, s, bench::weight_bytes(*pair.tensors, pair.model.config()));
  return out;
}

template <class B>
ordered_json measure_on(const arguments& args) {
  return args.kv == "bf16" ? measure<B, bf16>(args) : measure<B, float>(args);
}

}  // namespace

int main(int argc, char** argv) try {
  arguments args;
  CLI::App app(
      "Measures how a Gemma 4 model decodes with its assistant on this machine: memory bandwidth, plain, verify and draft passes,\n"
      "a prompt, and whole texts with 0 to 8 drafts a round. Prints nothing unless the texts are those of the reference backend.\n"
      "Without --target: the tiny pair of examples/data.");
  auto* assistant = app.add_option("--assistant", args.assistant, "Hugging Face directory of its assistant");
  app.add_option("--target", args.target, "Hugging Face directory of the model")->needs(assistant);
  app.add_option("--backend", args.backend, "What computes")->capture_default_str()->check(CLI::IsMember({"reference", "highway", "cpu"}));
  app.add_option("--threads", args.threads, "Threads; one per core if not given")->check(CLI::Range(1, 1024));
  app.add_option("--kv", args.kv, "How keys and values are stored")->capture_default_str()->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--repeat", args.repeat, "Rounds: samples of every figure")->capture_default_str()->check(CLI::Range(1, 10000));
  app.add_option("--context", args.context, "Positions in the cache when passes are timed, and length of the timed prompt")
      ->capture_default_str()
      ->check(CLI::Range(most_rows, std::size_t{1} << 20));
  app.add_option("--new-tokens", args.new_tokens, "Length of the texts")->capture_default_str()->check(CLI::Range(2, 1 << 20));
  const auto* json =
      app.add_option("--json", args.json_file, "One JSON object instead of the table; with FILE, written there besides the table")
          ->expected(0, 1)
          ->type_name("[FILE]");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& wrong) {
    return app.exit(wrong) == 0 ? 0 : 2;
  }

  const ordered_json result = args.backend == "reference" ? measure_on<reference>(args)
                              : args.backend == "highway" ? measure_on<highway_dispatch>(args)
                                                          : measure_on<cpu>(args);
  const bool alone = *json && args.json_file.empty();  // the object is all there is on stdout
  if (alone)
    std::cout << result.dump() << std::endl;
  else
    bench::print_table(result);
  if (*json && !alone && !(std::ofstream(args.json_file) << result.dump(2) << std::endl))
    throw std::runtime_error(args.json_file + " cannot be written");
} catch (const std::exception& problem) {
  std::cerr << "decode: " << problem.what() << "\n";
  return 1;
}
