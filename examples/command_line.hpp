// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The command line of speculate.cpp.
#pragma once
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "outrider/core/scalar.hpp"
#include "outrider/version.hpp"

struct arguments {
  std::string target = OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/target",
              assistant = OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/assistant";
  std::string prompt = "In the beginning God created", backend = "cpu", kv = "f32";
  std::optional<std::string> prompt_file, id_list;
  std::vector<outrider::token_id> prompt_ids;
  std::size_t max_new_tokens = 128, draft = 4;
  unsigned threads = 0;
  bool json = false, compare = false, quiet = false;
};

/// "2,5,7"; the library judges the numbers.
inline std::vector<outrider::token_id> ids_of(const std::string& list) {
  std::vector<outrider::token_id> ids;
  for (const char *at = list.data(), *end = at + list.size();; ++at) {
    const auto [rest, failure] = std::from_chars(at, end, ids.emplace_back());
    if (failure != std::errc{} || (rest != end && *rest != ','))
      throw CLI::ValidationError("--prompt-ids", "token ids look like this: 2,5,7");
    if (rest == end) return ids;
    at = rest;
  }
}

/// The options of the command line. Ends the program for --help, and with exit code 2 for wrong usage.
inline arguments parse_command_line(int argc, char** argv) {
  arguments args;
  CLI::App app("Writes text with a Gemma 4 model and its assistant. Without --target: a tiny pair trained on the King James Bible.");
  const CLI::Validator decimal(
      [](std::string& text) {  // or "010" would be eight
        if (text.empty() || text.find_first_not_of("0123456789") != text.npos) return "'" + text + "' is no whole number";
        text.erase(0, std::min(text.find_first_not_of('0'), text.size() - 1));
        return std::string();
      },
      "NUMBER");
  const auto* target = app.add_option("--target", args.target, "Hugging Face directory of the model");
  const auto* assistant = app.add_option("--assistant", args.assistant, "Directory of its assistant; without one, plain decoding");
  auto* prompt = app.add_option("--prompt", args.prompt, "Text to continue")->capture_default_str();
  auto* file = app.add_option("--prompt-file", args.prompt_file, "File with the text to continue")->excludes(prompt);
  app.add_option("--prompt-ids", args.id_list, "Token ids to continue, as given: 2,5,7")->excludes(prompt, file);
  app.add_option("--max-new-tokens", args.max_new_tokens, "Most tokens to write")
      ->capture_default_str()
      ->transform(decimal)
      ->check(CLI::Range(0, 1 << 20));
  const auto* draft = app.add_option("--draft", args.draft, "Drafts per round; 0 = none")
                          ->capture_default_str()
                          ->transform(decimal)
                          ->check(CLI::Range(0, 16));
  app.add_option("--backend", args.backend, "What computes")->capture_default_str()->check(CLI::IsMember({"reference", "highway", "cpu"}));
  app.add_option("--threads", args.threads, "Threads; one per core if not given")->transform(decimal)->check(CLI::Range(1, 1024));
  app.add_option("--kv", args.kv, "How keys and values are stored")->capture_default_str()->check(CLI::IsMember({"f32", "bf16"}));
  app.add_flag("--json", args.json, "Print one JSON object instead of text");
  app.add_flag("--compare", args.compare, "Decode without speculation too, and compare speed and tokens");
  app.add_flag("--quiet", args.quiet, "Print the text alone");
  app.set_version_flag("--version", OUTRIDER_VERSION);
  try {
    app.parse(argc, argv);
    if (args.id_list) args.prompt_ids = ids_of(*args.id_list);
    if (*target && !*assistant) args.assistant.clear();
    if (args.assistant.empty() && *draft && args.draft > 0) throw CLI::ValidationError("--draft", "drafts need an --assistant");
  } catch (const CLI::ParseError& wrong) {
    std::exit(app.exit(wrong) == 0 ? 0 : 2);
  }
  return args;
}
