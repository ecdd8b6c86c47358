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
            const std::string most = "18446744073709551615";
            if (text.size() > most.size() || (text.size() == most.size() && text > most)) return text + " is more than " + most;
            return std::string();
          },
          "NUMBER"};
}

/// "auto", or a number of drafts.
inline CLI::Validator drafts_or_auto() {
  return {[](std::string& text) {
            if (text == "auto") return std::string();
            if (std::string wrong = whole_number()(text); !wrong.empty()) return wrong + ", nor is it auto";
            return CLI::Range(0, 16)(text);
          },
          "NUMBER or auto"};
}

/// Accepts what is not empty, which would be taken for 0.
inline CLI::Validator some_number() {
  return {[](std::string& text) { return text.find_first_not_of(' ') == text.npos ? std::string("a number is missing") : std::string(); },
          ""};
}

inline void add_model_options(CLI::App& app, model_options& args) {
  app.add_option("--target", args.target, "The model: a Hugging Face directory or a GGUF file");
  app.add_option("--assistant", args.assistant, "Its assistant, likewise; without one, plain decoding");
  app.add_option("--max-new-tokens", args.max_new_tokens, "Most tokens to write")
      ->capture_default_str()
      ->transform(whole_number())
      ->check(CLI::Range(0, 1 << 20));
  app.add_option_function<std::string>(
         "--draft",
         [&](const std::string& text) {
           args.draft.reset();
           if (text != "auto") args.draft = std::stoul(text);
         },
         "Drafts per round, 0 to 16, or auto: as many as pay, none included")
      ->default_str("auto")
      ->transform(drafts_or_auto());
  app.add_option("--backend", args.backend,
                 "What computes: cpu (or highway: its SIMD kernels), cuda, an NVIDIA device, in programs built for it, or reference,\n"
                 "which is scalar and slow")
      ->capture_default_str()
      ->check(CLI::IsMember({"reference", "highway", "cpu", "cuda"}));
  app.add_option("--threads", args.threads, "Threads; one per core if not given")->transform(whole_number())->check(CLI::Range(1, 1024));
  app.add_option("--kv", args.kv, "How keys and values are stored")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "bf16", "f16", "q8_0"}));
  app.add_flag(
      "--exact-activations", args.exact_activations,
      "Multiply quantised weights by activations as they are, instead of rounding those to 8 bits first: slower and slightly more\n"
      "faithful. Weights in f32, f16 and bf16 are always multiplied so");
  app.set_version_flag("--version", OUTRIDER_VERSION);
}

/// After parsing: a target of the user's own comes without the assistant of the default one. Throws CLI::ValidationError.
inline void settle_model_options(const CLI::App& app, model_options& args) {
  if (app.count("--target") != 0 && app.count("--assistant") == 0) args.assistant.clear();
}
