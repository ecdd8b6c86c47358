// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// How fast a pair decodes on this machine, and why: read bandwidth, a plain pass, a verify pass of M rows, a draft step, a prompt, and whole
// texts with and without speculation. What is compared is measured side by side in every round, so ratios are of neighbours in time.
// Nothing is reported unless the text is that of the reference backend (of models that are not too large for it) and speculation leaves it
// as it is.
#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "decode_pair.hpp"
#include "decode_passes.hpp"
#include "decode_report.hpp"
#include "decode_texts.hpp"
#include "machine.hpp"
#include "outrider/backend/cpu.hpp"
#include "outrider/version.hpp"

namespace {

using namespace bench;

template <class B, class Kv>
ordered_json measure(const arguments& args) {
  progress say;
  const weight_facts weights = count_weights(args.target);
  loaded_pair<B, Kv> pair(args);
  const std::vector<ids> texts = prompt_ids(args, pair.session.vocab_size());
  const ids context = long_text(texts, args.context);
  pair.session.prefill(context);
  pair.session.verify(std::span(context).first(most_rows));
  const std::size_t peak = peak_memory(), kv_bytes = pair.session.cache().bytes();  // before the bench takes memory for itself
  say("comparing texts");
  const std::string checked = check_text(pair, args, texts[0], weights.parameters);

  samples s;
  if (args.measures("passes")) s.chosen_experts = count_chosen_experts(pair, context);
  if (args.measures("long")) s.long_context = measure_long_context(pair, args, texts, say);
  memory_reader memory(pair.ctx.threads());
  for (std::size_t round = 1; round <= args.repeat; ++round) {
    say("round " + std::to_string(round) + " of " + std::to_string(args.repeat));
    for (int i = 0; i < 3; ++i) {
      s.one_stream.push_back(memory.template gigabytes_per_second<1>());
      s.four_streams.push_back(memory.template gigabytes_per_second<4>());
    }
    if (args.measures("passes")) measure_passes(pair, args, context, s.passes);
    if (args.measures("texts")) measure_texts(pair, args, texts, say, s.texts);
    if (args.measures("schedules")) measure_schedules(pair, args, texts[0], say, s.imposed);
  }

  ordered_json out;
  out["target"] = args.target, out["assistant"] = args.assistant, out["outrider"] = OUTRIDER_VERSION;
  out["cpu"] = cpu_model(), out["simd"] = backend_traits<B>::simd(), out["compiler"] = compiler();
  out["backend"] = args.backend, out["threads"] = pair.ctx.threads(), out["kv"] = args.kv, out["rounds"] = args.repeat;
  out["context"] = args.context, out["new_tokens"] = args.new_tokens, out["checked_against"] = checked;
  out["weights"] = {{"parameters", weights.parameters}, {"read_bytes", weights.read}, {"macs", weights.macs}, {"used_bytes", weights.used}};
  out["weights"]["assistant_bytes"] = count_bytes(args.assistant);
  out["load_seconds"] = pair.load_seconds, out["peak_memory_bytes"] = peak, out["kv_bytes"] = kv_bytes;
  if (args.measures("passes")) add_passes(out, s, weights);
  for (const long_pass& at : s.long_context)
    out["long_context"].push_back({{"positions", at.positions}, {"ms", to_json(at.ms)}, {"share", to_json(at.share)}});
  if (args.measures("texts")) add_texts(out, s.texts, s.passes);
  if (args.measures("schedules")) add_schedules(out, s.imposed);
  return out;
}

template <class B>
ordered_json measure_on(const arguments& args) {
  return args.kv == "bf16" ? measure<B, bf16>(args) : args.kv == "q8_0" ? measure<B, q8_0>(args) : measure<B, float>(args);
}

}  // namespace

int main(int argc, char** argv) try {
  arguments args;
  CLI::App app(
      "Measures how a Gemma 4 model decodes with its assistant on this machine: memory bandwidth, plain, verify and draft passes,\n"
      "a prompt, and whole texts with 0 to 8 drafts a round. Prints nothing unless the texts are those of the reference backend\n"
      "(of models below 10^8 parameters; larger ones must write the same text with and without speculation).\n"
      "Without --target: the tiny pair of examples/data.");
  auto* assistant = app.add_option("--assistant", args.assistant, "Its assistant: Hugging Face directory or GGUF file");
  app.add_option("--target", args.target, "The model: Hugging Face directory or GGUF file")->needs(assistant);
  app.add_option("--backend", args.backend, "What computes")->capture_default_str()->check(CLI::IsMember({"reference", "cpu"}));
  app.add_option("--threads", args.threads, "Threads; one per core if not given")->check(CLI::Range(1, 1024));
  app.add_option("--kv", args.kv, "How keys and values are stored")->capture_default_str()->check(CLI::IsMember({"f32", "bf16", "q8_0"}));
  app.add_option("--measure", args.measure,
                 "Any of passes, texts (the assistant's own guesses), schedules (an imposed acceptance), long (a long context)")
      ->capture_default_str()
      ->delimiter(',')
      ->check(CLI::IsMember({"passes", "texts", "schedules", "long"}));
  app.add_option("--repeat", args.repeat, "Rounds: samples of every figure")->capture_default_str()->check(CLI::Range(1, 10000));
  app.add_option("--seconds", args.seconds, "For a figure in a round: up to 5 passes, fewer if they take longer")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 60.0));
  app.add_option("--context", args.context, "Positions in the cache when passes are timed, and length of the timed prompt")
      ->capture_default_str()
      ->check(CLI::Range(most_rows, std::size_t{1} << 20));
  app.add_option("--long-context", args.long_context,
                 "For long: plain passes at --context, a quarter, half and all of so many positions, once")
      ->capture_default_str()
      ->check(CLI::Range(std::size_t{4}, std::size_t{1} << 20));
  app.add_option("--new-tokens", args.new_tokens, "Length of the texts")->capture_default_str()->check(CLI::Range(2, 1 << 20));
  const auto* json =
      app.add_option("--json", args.json_file, "One JSON object instead of the tables; with FILE, written there besides the tables")
          ->expected(0, 1)
          ->type_name("[FILE]");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& wrong) {
    return app.exit(wrong) == 0 ? 0 : 2;
  }

  const ordered_json result = args.backend == "reference" ? measure_on<reference>(args) : measure_on<cpu>(args);
  const bool alone = *json && args.json_file.empty();  // the object is all there is on stdout
  if (alone)
    std::cout << result.dump() << std::endl;
  else
    print_report(result);
  if (*json && !alone && !(std::ofstream(args.json_file) << result.dump(2) << std::endl))
    throw std::runtime_error(args.json_file + " cannot be written");
} catch (const std::exception& problem) {
  std::cerr << "decode: " << problem.what() << "\n";
  return 1;
}
