// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// inspect --pair: whether an assistant drafts for a target.
#pragma once
#include <array>
#include <cctype>
#include <cstddef>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "inspect_check.hpp"
#include "inspect_contents.hpp"
#include "inspect_model.hpp"
#include "inspect_text.hpp"
#include "outrider/gemma4/pairing.hpp"

namespace inspect {

struct pair_report {
  std::string target, assistant;  // paths
  bool swapped = false;           // the assistant was named first
  std::string misfit;             // why the two do not belong together; "" if they do
  std::vector<std::string> warnings;
};

namespace detail {

/// Whether a name says that a model was tuned for instructions ("gemma-4-E2B-it") or not ("-pt", "base"); nothing if it is silent.
inline std::optional<bool> instructed(const std::string& name) {
  std::string word;
  std::optional<bool> answer;
  for (const char c : name + " ") {
    if (std::isalnum(static_cast<unsigned char>(c))) {
      word += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      continue;
    }
    if (word == "it" || word == "instruct") answer = true;
    if (word == "pt" || word == "base" || word == "pretrained") answer = false;
    word.clear();
  }
  return answer;
}
inline std::optional<bool> instructed(const contents& file) {
  for (const char* key : {"general.finetune", "general.name"})
    if (const auto answer = instructed(text_of(file, "", key))) return answer;
  return instructed(text_of(file, "config.json", "_name_or_path"));
}

/// Compares the texts of the tokens, which is what ids mean.
inline void compare_tokenizers(const contents& target, const contents& assistant, pair_report& report) {
  std::array<std::optional<outrider::tokenizer>, 2> texts;
  for (const auto& [file, text] : {std::pair(&target, &texts[0]), std::pair(&assistant, &texts[1])}) {
    try {
      *text = tokenizer_of(*file);
      if (!*text) report.warnings.push_back(file->path.string() + " has no tokenizer to compare");
    } catch (const outrider::error& problem) {
      report.warnings.push_back(problem.what());
    }
  }
  if (!texts[0] || !texts[1]) return;
  if (texts[0]->vocab_size() != texts[1]->vocab_size()) {
    report.misfit = "the target's tokenizer has " + std::to_string(texts[0]->vocab_size()) + " tokens, the assistant's " +
                    std::to_string(texts[1]->vocab_size());
    return;
  }
  for (std::size_t i = 0; i < texts[0]->vocab_size(); ++i) {
    const auto id = static_cast<outrider::token_id>(i);
    if (texts[0]->token_text(id) == texts[1]->token_text(id)) continue;
    report.misfit = "token " + std::to_string(i) + " is " + quoted(texts[0]->token_text(id), false) + " in the target, " +
                    quoted(texts[1]->token_text(id), false) + " in the assistant";
    return;
  }
}

}  // namespace detail

/// Compares the models at two paths, in either order. Errors: those of the readers, for what is no Gemma 4 model.
[[nodiscard]] inline pair_report compare(const std::string& first, const std::string& second) {
  std::array<contents, 2> files{open(first, false), open(second, false)};
  std::array<model_facts, 2> models{recognise(files[0]), recognise(files[1])};
  for (const model_facts& model : models)
    if (!model.problem.empty()) throw outrider::error(outrider::error_code::pair_mismatch, model.problem);

  pair_report report;
  report.swapped = models[0].assistant && models[1].target;
  if (report.swapped) {
    std::swap(files[0], files[1]);
    std::swap(models[0], models[1]);
  }
  report.target = files[0].path.string();
  report.assistant = files[1].path.string();
  if (!models[0].target || !models[1].assistant) {
    report.misfit = models[0].target ? "both are targets, one must be an assistant" : "both are assistants, one must be a target";
    return report;
  }
  try {
    gemma4::check_pair(*models[0].target, *models[1].assistant);
    detail::compare_tokenizers(files[0], files[1], report);
  } catch (const outrider::error& difference) {
    report.misfit = difference.what();
  }
  const auto target = detail::instructed(files[0]), assistant = detail::instructed(files[1]);
  if (target && assistant && *target != *assistant)
    report.warnings.push_back(std::string("by their names the target is ") + (*target ? "" : "not ") +
                              "tuned for instructions and the assistant is " + (*assistant ? "" : "not ") +
                              ": it will fit, but guess badly");
  return report;
}

/// Prints a report as text.
inline void print(std::ostream& out, const pair_report& report) {
  if (report.swapped) out << "The assistant was named first.\n";
  out << "target     " << printable(report.target) << "\nassistant  " << printable(report.assistant) << "\n";
  for (const std::string& text : report.warnings) out << "warning: " << printable(text) << "\n";
  if (report.misfit.empty())
    out << "Yes: the assistant drafts for the target.\n";
  else
    out << "No: " << printable(report.misfit) << "\n";
}

/// The same as one object; docs/inspect.md says what is in it.
[[nodiscard]] inline json to_json(const pair_report& report) {
  return {{"target", report.target},
          {"assistant", report.assistant},
          {"swapped", report.swapped},
          {"fits", report.misfit.empty()},
          {"misfit", report.misfit.empty() ? json(nullptr) : json(report.misfit)},
          {"warnings", report.warnings}};
}

}  // namespace inspect
