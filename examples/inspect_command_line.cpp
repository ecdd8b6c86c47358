// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "inspect_command_line.hpp"

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "outrider/version.hpp"

namespace inspect {

arguments parse_command_line(int argc, char** argv) {
  arguments args;
  CLI::App app("Shows what is inside a model file: its keys, its tensors, which model it is and which drafters fit it.");
  app.footer(
      "Exit code: 0 if all is well, 1 if --check found something, if a pair does not fit or if a file cannot be read, 2 for wrong usage.\n"
      "The JSON object of --json is described in docs/inspect.md.");
  auto* path = app.add_option("PATH", args.path, "GGUF file (or one of a split set), safetensors file, or Hugging Face directory");
  auto* pair = app.add_option("--pair", args.pair, "Target and assistant: does the one draft for the other?")
                   ->expected(2)
                   ->type_name("TARGET ASSISTANT")
                   ->excludes(path);
  app.add_flag("--json", args.json, "Print one JSON object instead of text");
  app.add_flag("--check", args.check, "Read every byte and report what is wrong with it")->excludes(pair);
  app.add_flag("--no-tensors", args.no_tensors, "Leave the list of tensors out")->excludes(pair);
  app.add_flag("--full", args.full, "Whole arrays and texts, not their beginnings")->excludes(pair);
  app.set_version_flag("--version", OUTRIDER_VERSION);
  try {
    app.parse(argc, argv);
    if (args.path.empty() && args.pair.empty()) throw CLI::RequiredError("PATH");
  } catch (const CLI::ParseError& wrong) {
    std::exit(app.exit(wrong) == 0 ? 0 : 2);
  }
  return args;
}

}  // namespace inspect
