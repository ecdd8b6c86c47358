// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Shows what is inside a model file, checks it, and says whether an assistant fits a target.
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "inspect_check.hpp"
#include "inspect_command_line.hpp"
#include "inspect_contents.hpp"
#include "inspect_dump.hpp"
#include "inspect_model.hpp"
#include "inspect_pair.hpp"
#include "inspect_text.hpp"

namespace inspect {
namespace {

/// One line, whatever bytes the file's texts are made of.
void print_line(std::ostream& out, const json& object) { out << object.dump(-1, ' ', true, json::error_handler_t::replace) << "\n"; }

/// Each returns the program's exit code.
int show_pair(const arguments& args) {
  const pair_report report = compare(args.pair[0], args.pair[1]);
  args.json ? print_line(std::cout, to_json(report)) : print(std::cout, report);
  return report.misfit.empty() ? 0 : 1;
}

int show_file(const arguments& args) {
  const contents file = open(args.path, args.full);
  const model_facts model = recognise(file);
  json object;
  if (args.json)
    object = to_json(file, model, !args.no_tensors);
  else
    print(std::cout, file, model, !args.no_tensors, args.full);
  std::size_t findings = 0;
  if (args.check) {
    const check_report report = check(file, model);
    findings = report.findings.size();
    if (args.json)
      object["check"] = {{"bytes", report.bytes}, {"findings", report.findings}, {"notes", report.notes}};
    else
      print(std::cout, report);
  }
  if (args.json) print_line(std::cout, object);
  return findings == 0 ? 0 : 1;
}

}  // namespace
}  // namespace inspect

int main(int argc, char** argv) try {
  const inspect::arguments args = inspect::parse_command_line(argc, argv);
  const int code = args.pair.empty() ? inspect::show_file(args) : inspect::show_pair(args);
  if (!std::cout.flush()) throw std::runtime_error("standard output cannot be written");
  return code;
} catch (const std::exception& problem) {
  std::cerr << "inspect: " << inspect::printable(problem.what()) << "\n";
  return 1;
}
