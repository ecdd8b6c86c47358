// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "speculate_command_line.hpp"

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdlib>
#include <system_error>

#include "model_command_line.hpp"

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
  app.add_option("--prompt-ids", args.id_list, "Token ids to continue, as given: 2,5,7")->excludes(prompt, file);
  app.add_flag("--json", args.json, "Print one JSON object instead of text");
  app.add_flag("--compare", args.compare, "Decode without speculation too, and compare speed and tokens");
  app.add_flag("--quiet", args.quiet, "Print the text alone");
  try {
    app.parse(argc, argv);
    if (args.id_list) args.prompt_ids = ids_of(*args.id_list);
    settle_model_options(app, args);
  } catch (const CLI::ParseError& wrong) {
    std::exit(app.exit(wrong) == 0 ? 0 : 2);
  }
  return args;
}
