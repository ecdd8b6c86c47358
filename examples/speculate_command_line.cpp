// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "speculate_command_line.hpp"

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdlib>
#include <iostream>
#include <system_error>

#include "model_command_line.hpp"
#include "outrider/decode/generate.hpp"
#include "outrider/text/stop_strings.hpp"

/// "2,5,7"; the library judges the numbers.
static std::vector<outrider::token_id> ids_of(const std::string& list) {
  std::vector<outrider::token_id> ids;
  for (const char *at = list.data(), *end = at + list.size();; ++at) {
    const auto [rest, failure] = std::from_chars(at, end, ids.emplace_back());
    if (failure != std::errc{} || (rest != end && *rest != ','))
      throw CLI::ValidationError("--prompt-ids", "token ids look like this: 2,5,7");
    if (rest == end) return ids;
    at = rest;
  }
}

arguments parse_command_line(int argc, char** argv) {
  arguments args;
  CLI::App app("Writes text with a Gemma 4 model and its assistant. Without --target: a tiny pair trained on the King James Bible.");
  add_model_options(app, args);
  auto* prompt = app.add_option("--prompt", args.prompt, "Text to continue")->capture_default_str();
  auto* file = app.add_option("--prompt-file", args.prompt_file, "File with the text to continue")->excludes(prompt);
  auto* ids = app.add_option("--prompt-ids", args.id_list, "Token ids to continue, as given: 2,5,7")->excludes(prompt, file);
  app.add_flag("--chat", args.chat, "The prompt is what a user says: put it into the model's chat template")->excludes(ids);
  app.add_option("--temperature", args.sampling.temperature, "How freely tokens are drawn; 0 = always the most likely")
      ->capture_default_str()
      ->check(some_number());
  app.add_option("--top-k", args.sampling.top_k, "Draw from the K most likely tokens; 0 = all")
      ->capture_default_str()
      ->transform(whole_number());
  app.add_option("--top-p", args.sampling.top_p, "Draw from the most likely tokens that have probability P together")
      ->capture_default_str()
      ->check(some_number());
  app.add_option("--min-p", args.sampling.min_p, "Leave out tokens with less than P times the probability of the most likely one")
      ->capture_default_str()
      ->check(some_number());
  app.add_option("--repeat-penalty", args.sampling.repetition_penalty, "Above 1: tokens that the text has already become less likely")
      ->capture_default_str()
      ->check(some_number());
  app.add_option("--seed", args.sampling.seed, "What draws depend on: the same seed, the same text")
      ->capture_default_str()
      ->transform(whole_number());
  app.add_option("--samples", args.samples, "How many texts to draw")
      ->capture_default_str()
      ->transform(whole_number())
      ->check(CLI::Range(1, 100000));
  auto* drafter =
      app.add_option("--drafter", args.drafter,
                     "Who guesses: the assistant; ngram, which looks for the last tokens earlier in the text; cascade, which asks\n"
                     "ngram first; or none. The assistant if there is one")
          ->check(CLI::IsMember({"assistant", "ngram", "cascade", "none"}));
  app.add_option("--p-min", args.min_confidence, "End a round's drafts before one that the assistant gives less probability")
      ->capture_default_str()
      ->check(some_number());
  app.add_option("--stop", args.stops, "End the text before this string; may be given more than once")->allow_extra_args(false);
  app.add_option("--trace", args.trace, "Write to this file what every pass did, as JSON lines (docs/trace.md)");
  app.add_flag("--json", args.json, "Print one JSON object instead of text");
  app.add_flag("--compare", args.compare, "Decode without speculation too, and compare speed and tokens");
  app.add_flag("--devices", args.devices, "List the CUDA devices, and do nothing else");
  app.add_flag("--quiet", args.quiet, "Print the text alone");
  try {
    app.parse(argc, argv);
    if (args.id_list) args.prompt_ids = ids_of(*args.id_list);
    settle_model_options(app, args);
    const bool has_assistant = !args.assistant.empty();
    if (drafter->count() == 0) args.drafter = has_assistant ? "assistant" : "none";
    if (!has_assistant && (args.drafter == "assistant" || args.drafter == "cascade"))
      throw CLI::ValidationError("--drafter", args.drafter + " needs an --assistant");
    if (args.drafter == "none" && args.draft.value_or(0) > 0)
      throw CLI::ValidationError("--draft",
                                 has_assistant ? "--drafter none drafts nothing" : "drafts need an --assistant, or --drafter ngram");
    if (args.samples > 1 && args.sampling.temperature == 0)
      throw CLI::ValidationError("--samples", "without a --temperature above 0 all texts are the same");
    check(args.sampling);
    static_cast<void>(outrider::stop_strings(args.stops));
    outrider::check(outrider::generate_options{.min_confidence = args.min_confidence});
  } catch (const CLI::ParseError& wrong) {
    std::exit(app.exit(wrong) == 0 ? 0 : 2);
  } catch (const outrider::error& wrong) {
    std::cerr << "speculate: " << wrong.what() << "\n";
    std::exit(2);
  }
  return args;
}
