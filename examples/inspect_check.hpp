// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// inspect --check: what is wrong with a file.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "inspect_contents.hpp"
#include "inspect_model.hpp"
#include "inspect_text.hpp"
#include "inspect_values.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/text/tokenizer.hpp"

namespace inspect {

/// Findings are faults; notes are worth knowing and may be as they should.
struct check_report {
  std::vector<std::string> findings, notes;
  std::size_t bytes = 0;  // of tensors, all of them read
};

namespace detail {

/// A percentage on the terminal's last line while much is read; says nothing elsewhere.
class progress {
 public:
  explicit progress(std::size_t total) : total_(total), wanted_(total >= std::size_t{1} << 28 && isatty(STDERR_FILENO) != 0) {}
  progress(const progress&) = delete;
  progress& operator=(const progress&) = delete;
  ~progress() {
    if (wanted_) std::fputs("\r          \r", stderr);
  }
  void add(std::size_t bytes) {
    done_ += bytes;
    if (wanted_) std::fprintf(stderr, "\rread %3.0f %%", 100 * static_cast<double>(done_) / static_cast<double>(total_));
  }

 private:
  std::size_t total_, done_ = 0;
  bool wanted_;
};

inline std::string in_tensor(const io::tensor& t) { return "tensor '" + t.name + "': "; }

inline void check_values(const io::tensor& t, check_report& report) {
  const auto found = survey(t);
  if (!found) {
    const bool real = io::describe(t.type).elements > 1;
    if (real) report.notes.push_back(in_tensor(t) + "elements of type " + std::string(io::name_of(t.type)) + " are not looked at");
    return;
  }
  if (const auto& first = found->first_not_finite)
    report.findings.push_back(in_tensor(t) + decimal(double{first->value}) + " in row " + std::to_string(first->row) + ", column " +
                              std::to_string(first->column) + ", the first of " + std::to_string(found->not_finite) +
                              " values that are not finite");
  if (found->zero_rows != 0)
    report.notes.push_back(in_tensor(t) + std::to_string(found->zero_rows) + " rows are all zero, the first is row " +
                           std::to_string(found->first_zero_row));
}

inline std::string internal_name(const contents& file, const std::string& name) {
  return file.gguf ? gemma4::internal_name(name).value_or("") : name;
}

/// Bytes of a GGUF file that belong to nothing.
inline void check_gaps(const contents& file, check_report& report) {
  for (const io::gguf_part& part : file.gguf->parts) {
    std::size_t end = part.data_offset;
    const auto check_padding = [&](std::size_t next) {
      if (next <= end) return;  // without tensors the data may begin behind the file's end
      const auto gap = part.bytes.subspan(end, next - end);
      if (std::any_of(gap.begin(), gap.end(), [](std::byte b) { return b != std::byte{0}; }))
        report.notes.push_back(part.file + ": the padding from byte " + std::to_string(end) + " to " + std::to_string(next) +
                               " is not zero");
    };
    for (const stored_tensor& t : file.tensors)
      if (t.tensor.file == part.file) {
        check_padding(part.data_offset + t.offset);
        end = part.data_offset + t.offset + t.tensor.bytes.size();
      }
    const std::size_t rest = end % file.gguf->alignment, padded = rest == 0 ? end : end + (file.gguf->alignment - rest);
    check_padding(std::min(padded, std::max(end, part.bytes.size())));
    if (part.bytes.size() > padded)
      report.findings.push_back(part.file + ": " + std::to_string(part.bytes.size() - padded) +
                                " bytes behind the last tensor's data, at byte " + std::to_string(padded));
  }
}

}  // namespace detail

/// The tokenizer that comes with a model; nothing if none does. Errors: those of its readers.
[[nodiscard]] inline std::optional<outrider::tokenizer> tokenizer_of(const contents& file) {
  if (file.gguf) {
    if (!file.gguf->find("tokenizer.ggml.tokens")) return std::nullopt;
    return outrider::tokenizer::from_gguf(*file.gguf);
  }
  std::error_code failure;
  const auto json_file = file.path / "tokenizer.json";
  if (std::filesystem::symlink_status(json_file, failure).type() == std::filesystem::file_type::not_found) return std::nullopt;
  return outrider::tokenizer::from_json_file(json_file);
}

/// Reads every byte of every tensor, and everything else that a program would read to run the model.
[[nodiscard]] inline check_report check(const contents& file, const model_facts& model) {
  check_report report;
  const auto attempt = [&](const auto& action) {
    try {
      action();
    } catch (const outrider::error& problem) {
      report.findings.push_back(problem.what());
    }
  };

  std::size_t total = 0, unused = 0;
  for (const stored_tensor& t : file.tensors) total += t.tensor.bytes.size();
  detail::progress progress(total);
  std::string ordering, first_unused;
  for (const auto& [t, offset] : file.tensors) {
    const std::string name = detail::internal_name(file, t.name);
    if (name == "masked_embedding.token_ordering") {
      ordering = permutation_fault(t);
      if (!ordering.empty()) report.findings.push_back(detail::in_tensor(t) + "no permutation of the token ids: " + ordering);
    } else {
      detail::check_values(t, report);
    }
    if (!gemma4::gguf_name(name) && t.name != gemma4::rope_factors_name && unused++ == 0) first_unused = t.name;
    report.bytes += t.bytes.size();
    progress.add(t.bytes.size());
  }
  if (unused != 0 && model.problem.empty())
    report.notes.push_back(std::to_string(unused) + " tensors are of no use to the text model, the first is '" + first_unused + "'");
  if (file.gguf) detail::check_gaps(file, report);
  if (file.format == file_format::safetensors) return report;  // the file alone is no model

  if (!model.problem.empty()) {
    report.findings.push_back(model.problem);
  } else {
    // Opening the model compares its tensors with the configuration; the first difference ends it. A bad ordering was reported above.
    attempt([&] {
      try {
        if (model.target) static_cast<void>(gemma4::load_model<outrider::reference>(file.path));
        if (model.assistant) static_cast<void>(gemma4::load_assistant<outrider::reference>(file.path));
      } catch (const outrider::error& problem) {
        if (ordering.empty() || std::string_view(problem.what()).find("no permutation") == std::string_view::npos) throw;
      }
    });
  }
  if (!model.template_problem.empty()) report.findings.push_back(model.template_problem);
  attempt([&] {
    const auto text = tokenizer_of(file);
    if (!text) {
      report.notes.push_back("there is no tokenizer");
    } else if (model.problem.empty() && text->vocab_size() != model.vocab_size()) {
      report.findings.push_back("the tokenizer has " + std::to_string(text->vocab_size()) + " tokens, the configuration has " +
                                std::to_string(model.vocab_size()));
    }
  });
  return report;
}

/// Prints a report as text: one line each.
inline void print(std::ostream& out, const check_report& report) {
  out << "* Check: " << report.bytes << " bytes of tensors read, " << report.findings.size() << " finding(s)\n";
  for (const std::string& text : report.findings) out << "  finding: " << printable(text) << "\n";
  for (const std::string& text : report.notes) out << "  note: " << printable(text) << "\n";
}

}  // namespace inspect
