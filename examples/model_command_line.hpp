// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The options of the programs that run a model, for their command lines: speculate and chat.
#pragma once
#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>

#include "model_options.hpp"
#include "outrider/version.hpp"

/// Accepts whole numbers in decimal digits only.
inline CLI::Validator whole_number() {
  return {[](std::string& text) {  // or "010" would be eight
            if (text.empty() || text.find_first_not_of("0123456789") != text.npos) return "'" + text + "' is no whole number";
            text.erase(0, std::min(text.find_first_not_of('0'), text.size() - 1));
            return std::string();
          },
          "NUMBER"};
}

inline void add_model_options(CLI::App& app, model_options& args) {
  app.add_option("--target", args.target, "The model: a Hugging Face directory or a GGUF file");
  app.add_option("--assistant", args.assistant, "Its assistant, likewise; without one, plain decoding");
  app.add_option("--max-new-tokens", args.max_new_tokens, "Most tokens to write")
      ->capture_default_str()
      ->transform(whole_number())
      ->check(CLI::Range(0, 1 << 20));
  app.add_option("--draft", args.draft, "Drafts per round; 0 = none")
      ->capture_default_str()
      ->transform(whole_number())
      ->check(CLI::Range(0, 16));
  app.add_option("--backend", args.backend, "What computes: cpu (or highway: its SIMD kernels), or reference, which is scalar and slow")
      ->capture_default_str()
      ->check(CLI::IsMember({"reference", "highway", "cpu"}));
  app.add_option("--threads", args.threads, "Threads; one per core if not given")->transform(whole_number())->check(CLI::Range(1, 1024));
  app.add_option("--kv", args.kv, "How keys and values are stored")->capture_default_str()->check(CLI::IsMember({"f32", "bf16"}));
  app.add_flag(
      "--exact-activations", args.exact_activations,
      "Multiply quantised weights by activations as they are, instead of rounding those to 8 bits first: slower, and the last percent\n"
      "of fidelity. Other weights are always multiplied so");
  app.set_version_flag("--version", OUTRIDER_VERSION);
}

/// After parsing: a target of the user's own comes without the assistant of the default one. Throws CLI::ValidationError.
inline void settle_model_options(const CLI::App& app, model_options& args) {
  if (app.count("--target") != 0 && app.count("--assistant") == 0) args.assistant.clear();
  if (args.assistant.empty() && app.count("--draft") != 0 && args.draft > 0)
    throw CLI::ValidationError("--draft", "drafts need an --assistant");
}
