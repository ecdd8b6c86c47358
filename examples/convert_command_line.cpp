// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "convert_command_line.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "outrider/version.hpp"

static std::string in_lower_case(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

/// "PATTERN=TYPE".
static outrider::gemma4::type_override override_of(const std::string& text) {
  const std::size_t equals = text.rfind('=');
  const std::string wanted = equals == text.npos ? "" : in_lower_case(text.substr(equals + 1));
  std::string allowed;
  for (const outrider::io::dtype type : outrider::gemma4::writable_types) {
    const std::string name = in_lower_case(std::string(outrider::io::name_of(type)));
    if (wanted == name && equals != 0) return {text.substr(0, equals), type};
    allowed += (allowed.empty() ? "" : ", ") + name;
  }
  throw CLI::ValidationError("--tensor-type", "'" + text + "' is not PATTERN=TYPE with one of the types " + allowed);
}

conversion_arguments parse_command_line(int argc, char** argv) {
  conversion_arguments args;
  std::string type, names = "nextn", recipes;
  std::vector<std::string> overrides;
  bool no_centroids = false;
  for (const auto& recipe : outrider::gemma4::weight_recipes) recipes += (recipes.empty() ? "" : ", ") + std::string(recipe.name);

  CLI::App app(
      "Converts a Gemma 4 model or assistant: a Hugging Face directory to a GGUF file, a GGUF file to a directory, or a GGUF file to "
      "one with other types.");
  app.footer(
      "Examples:\n"
      "  convert gemma-4-E2B-it e2b-q4_k_m.gguf --type q4_k_m\n"
      "  convert gemma-4-E2B-it e2b.gguf --type q8_0 --tensor-type 'blk.*.ffn_down.weight=q6_k'\n"
      "  convert gemma-4-E2B-it-assistant assistant.gguf --type q8_0 --no-centroids\n"
      "  convert e2b.gguf e2b-directory\n"
      "A file appears under its name when it is complete: an interrupted run leaves nothing behind.");
  app.add_option("IN", args.in, "Hugging Face directory or GGUF file")->required();
  app.add_option("OUT", args.out, "GGUF file if the name ends in .gguf, directory otherwise")->required();
  app.add_option(
      "--type", type,
      "How weights are stored: " + recipes +
          ". Default: bf16 from a directory, and to a directory as they are, quantised ones in bf16; none from one GGUF file to another");
  app.add_option(
         "--tensor-type", overrides,
         "PATTERN=TYPE: another type for matrices of a GGUF file whose whole name fits; * is any text, ? any character. May be repeated, "
         "the first that fits decides")
      ->allow_extra_args(false);
  app.add_flag("--no-centroids", no_centroids, "Leave out an assistant's centroid head, as llama.cpp wants it");
  app.add_option("--names", names, "What an assistant's own tensors are called in a GGUF file")
      ->capture_default_str()
      ->check(CLI::IsMember({"nextn", "assist"}));
  app.add_flag("--force", args.force, "Replace OUT if it is there; a directory must then be one that convert made, or empty");
  app.add_flag("--quiet", args.quiet, "No progress and no summary");
  app.set_version_flag("--version", OUTRIDER_VERSION);
  try {
    app.parse(argc, argv);
    if (!type.empty()) {
      args.options.recipe = outrider::gemma4::recipe_named(in_lower_case(type));
      if (!args.options.recipe) throw CLI::ValidationError("--type", "'" + type + "' is none of " + recipes);
    }
    for (const std::string& text : overrides) args.options.overrides.push_back(override_of(text));
    args.options.centroids = !no_centroids;
    args.options.assist_names = names == "assist";
  } catch (const CLI::ParseError& wrong) {
    std::exit(app.exit(wrong) == 0 ? 0 : 2);
  }
  return args;
}
