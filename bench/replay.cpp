// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What another draft length would have done with a text that was decoded already: reads traces (docs/trace.md) and feeds them to policies.
// Nothing is decoded; times are those of the trace, or of a report of bench/decode.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "outrider/decode/calibrate.hpp"
#include "outrider/decode/draft_length.hpp"

namespace {

using namespace outrider;
using nlohmann::json;

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error(what); }

struct pass {
  std::size_t position = 0, drafted = 0, accepted = 0, emitted = 0;
  double draft_seconds = 0, verify_seconds = 0;
  std::size_t joint_drafts = 0;
};
using trace = std::vector<pass>;  // of one text

/// A number of a line, named in the message if it is not there or not one. `where`: file and line.
double number(const json& line, const char* key, const std::string& where) {
  const auto found = line.find(key);
  if (found == line.end()) refuse(where + ": \"" + key + "\" is missing");
  if (!found->is_number() || !(found->get<double>() >= 0))
    refuse(where + ": \"" + key + "\" is " + found->dump() + ", not a number from 0 on");
  return found->get<double>();
}
std::size_t count(const json& line, const char* key, const std::string& where) {
  const double value = number(line, key, where);
  if (value != std::floor(value) || value > 1e15) refuse(where + ": \"" + key + "\" is " + line[key].dump() + ", not a count");
  return static_cast<std::size_t>(value);
}

pass read_pass(const json& line, const std::string& where) {
  pass p{.position = count(line, "position", where),
         .drafted = count(line, "drafted", where),
         .accepted = count(line, "accepted", where),
         .emitted = count(line, "emitted", where),
         .draft_seconds = number(line, "draft_seconds", where),
         .verify_seconds = number(line, "verify_seconds", where),
         .joint_drafts = line.contains("joint_drafts") ? count(line, "joint_drafts", where) : 0};
  const auto told = [&](const char* key) { return "\"" + std::string(key) + "\" is " + line[key].dump(); };
  for (const char* key : {"drafted", "joint_drafts"})
    if (line.contains(key) && line[key].get<double>() > max_draft_length)
      refuse(where + ": " + told(key) + ", a round has at most " + std::to_string(max_draft_length));
  if (p.accepted > p.drafted) refuse(where + ": " + told("accepted") + ", but " + told("drafted"));
  if (p.emitted == 0 || p.emitted > p.accepted + 1)
    refuse(where + ": " + told("emitted") + ", a pass emits from 1 token to one more than accepted");
  return p;
}

/// Adds the texts of a file.
void read_traces(const std::string& file, std::vector<trace>& traces) {
  std::ifstream in(file);
  if (!in) refuse(file + " cannot be read");
  const std::size_t before = traces.size();
  bool open = false;  // a text has begun and not ended
  const auto warn = [&] { std::cerr << "replay: a text in " << file << " ends without a line with \"finish\"; what is there is used\n"; };
  std::string text;
  for (std::size_t n = 1; std::getline(in, text); ++n) {
    const std::string where = file + ", line " + std::to_string(n);
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    const json line = json::parse(text, nullptr, false);
    if (!line.is_object()) refuse(where + " is not a JSON object");
    if (line.contains("outrider_trace")) {
      if (line["outrider_trace"] != 1)
        refuse(where + ": a trace of version " + line["outrider_trace"].dump() + ", this program reads version 1");
      if (open) warn();
      traces.emplace_back();
      open = true;
    } else if (!open) {
      refuse(where + ": a text begins with \"outrider_trace\", which is missing; is this a trace?");
    } else if (line.contains("finish")) {
      open = false;
    } else {
      trace& t = traces.back();
      const pass p = read_pass(line, where);
      if (!t.empty() && p.position != t.back().position + t.back().emitted)
        refuse(where + ": \"position\" is " + std::to_string(p.position) + ", but the pass before ends at " +
               std::to_string(t.back().position + t.back().emitted));
      t.push_back(p);
    }
  }
  if (open) warn();
  if (traces.size() == before) refuse(file + " is empty");
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// The medians of the traces' own passes; a step is the mean.
draft_costs costs_of(const std::vector<trace>& traces) {
  std::array<std::vector<double>, max_draft_length + 2> seconds;
  double draft_seconds = 0, drafts = 0;
  for (const trace& t : traces)
    for (const pass& p : t) {
      if (p.verify_seconds > 0) seconds[(p.joint_drafts > 0 ? p.joint_drafts : p.drafted) + 1].push_back(p.verify_seconds);
      if (p.joint_drafts == 0) draft_seconds += p.draft_seconds, drafts += static_cast<double>(p.drafted);
    }
  if (seconds[1].empty()) refuse("no pass without drafts has a time, so nothing tells what plain decoding costs; give --costs");
  draft_costs costs{.step = drafts > 0 ? draft_seconds / drafts : 0};
  for (std::size_t m = 1; m < seconds.size(); ++m)
    if (!seconds[m].empty()) costs.pass[m] = median(seconds[m]);
  detail::fill_between(costs);
  return costs;
}

/// verify[].rows, verify[].cost.median and draft_step.cost.median of a report of bench/decode --json.
draft_costs read_costs(const std::string& file) {
  std::ifstream in(file);
  if (!in) refuse(file + " cannot be read");
  const json report = json::parse(in, nullptr, false);
  if (!report.is_object()) refuse(file + " is not a JSON object");
  for (const char* key : {"verify", "draft_step"})
    if (!report.contains(key)) refuse(file + ": \"" + key + "\" is missing; bench/decode --measure passes --json writes it");
  const auto cost = [&](const json& of, const char* what) {
    if (!of.is_object() || !of.contains("cost") || !of["cost"].is_object()) refuse(file + ": " + what + " has no \"cost\"");
    return number(of["cost"], "median", file + ", the cost of " + what);
  };
  if (!report["verify"].is_array()) refuse(file + ": \"verify\" is not a list");
  draft_costs costs{.step = cost(report["draft_step"], "draft_step")};
  for (const json& v : report["verify"]) {
    if (!v.is_object()) refuse(file + ": \"verify\" holds what is not an object");
    const std::size_t rows = count(v, "rows", file + ", verify");
    if (rows >= 1 && rows < costs.pass.size()) costs.pass[rows] = cost(v, "verify");
  }
  if (!(costs.pass[1] > 0)) refuse(file + ": \"verify\" has no pass of 1 row");
  detail::fill_between(costs);
  return costs;
}

/// A number in [0, 1) for each (seed, counter).
double uniform(std::uint64_t seed, std::uint64_t counter) {
  std::uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15u + counter * 0xd1342543de82ef95u;
  for (int i = 0; i < 3; ++i) x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u, x ^= x >> 27;
  return static_cast<double>(x >> 11) * 0x1p-53;
}

/// Whether the draft of each token holds behind right ones: what the trace saw, and where it saw nothing a coin of the trace's own rate for
/// that place in a round, thrown once for each token, so all policies meet the same text.
class text {
 public:
  text(const trace& t, std::uint64_t seed) : seed_(seed) {
    const std::size_t begin = t.front().position;
    seen_.assign(t.back().position + t.back().emitted - begin, unseen);
    double tries = 0, hits = 0;
    std::array<double, max_draft_length + 1> tried{}, held{};
    for (const pass& p : t)
      for (std::size_t i = 1; i <= (std::min)(p.accepted + 1, p.drafted); ++i) {
        const bool holds = i <= p.accepted;
        tries += 1, tried[i] += 1;
        if (holds) hits += 1, held[i] += 1;
        const std::size_t token = p.position - begin + i - 1;
        if (token < seen_.size()) seen_[token] = holds ? right : wrong;
      }
    const double all = tries > 0 ? hits / tries : 0;
    for (std::size_t i = 1; i <= max_draft_length; ++i) rate_[i] = (held[i] + 4 * all) / (tried[i] + 4);
  }
  [[nodiscard]] std::size_t size() const noexcept { return seen_.size(); }
  [[nodiscard]] bool holds(std::size_t token, std::size_t draft) const noexcept {
    return seen_[token] == unseen ? uniform(seed_, token) < rate_[draft] : seen_[token] == right;
  }

 private:
  enum sight : std::uint8_t { unseen, right, wrong };
  std::uint64_t seed_;
  std::vector<sight> seen_;
  std::array<double, max_draft_length + 1> rate_{};
};

struct outcome {
  double time = 0, tokens = 0, passes = 0, drafted = 0, accepted = 0;
};

/// Decodes all texts, one after the other, by one policy, in expected time.
template <draft_length_policy Policy>
outcome replay(Policy policy, const std::vector<text>& texts, const draft_costs& costs) {
  outcome all;
  for (const text& t : texts)
    for (std::size_t n = 0; n < t.size();) {
      const std::size_t drafts = (std::min)(policy.plan((std::min)(max_draft_length, t.size() - n - 1)).drafts, t.size() - n - 1);
      std::size_t accepted = 0;
      while (accepted < drafts && t.holds(n + accepted, accepted + 1)) ++accepted;
      const double draft = static_cast<double>(drafts) * costs.step, verify = costs.pass[drafts + 1];
      policy.record({.position = n, .drafted = drafts, .accepted = accepted, .draft_seconds = draft, .verify_seconds = verify});
      n += accepted + 1;
      all.time += draft + verify, all.tokens += static_cast<double>(accepted + 1), all.passes += 1;
      all.drafted += static_cast<double>(drafts), all.accepted += static_cast<double>(accepted);
    }
  return all;
}

void print_row(const std::string& name, const outcome& o, const draft_costs& costs) {
  const double per_token = o.time / o.tokens / costs.pass[1];
  std::printf("| %s | %.3f | %.2f | %.2f | %.2f | ", name.c_str(), per_token, 1 / per_token, o.tokens / o.passes, o.drafted / o.passes);
  if (o.drafted > 0)
    std::printf("%.0f %% |\n", 100 * o.accepted / o.drafted);
  else
    std::printf("– |\n");
}

}  // namespace

int main(int argc, char** argv) try {
  std::vector<std::string> files;
  std::string costs_file;
  std::uint64_t seed = 1;
  CLI::App app(
      "Feeds traces of decoded texts to draft-length policies and prints the time per token each would have needed, plain decoding = 1.\n"
      "A trace is what examples/speculate --trace writes; docs/trace.md says what is in it and what is made up where it saw nothing.");
  app.add_option("TRACE", files, "Traces, one JSON object a line; more than one is one text after the other")->required();
  app.add_option("--costs", costs_file, "What steps and passes cost: a report of bench/decode --json; without it the traces' own times");
  app.add_option("--seed", seed, "Of the coins for drafts that the trace did not see")->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& wrong) {
    return app.exit(wrong) == 0 ? 0 : 2;
  }

  std::vector<trace> traces;
  for (const std::string& file : files) read_traces(file, traces);
  std::erase_if(traces, [](const trace& t) { return t.empty(); });
  if (traces.empty()) refuse("there is no pass behind a prompt");
  const draft_costs costs = costs_file.empty() ? costs_of(traces) : read_costs(costs_file);
  std::vector<text> texts;
  std::size_t tokens = 0;
  for (const trace& t : traces) {
    texts.emplace_back(t, seed);
    tokens += texts.back().size();
  }

  std::printf("%zu tokens; a draft costs %.3g plain passes, a pass of 2, 4, 8 rows %.3g, %.3g, %.3g\n\n", tokens,
              costs.step / costs.pass[1], costs.pass[2] / costs.pass[1], costs.pass[4] / costs.pass[1], costs.pass[8] / costs.pass[1]);
  std::printf("| policy | time per token | speed | tokens per pass | drafts per pass | acceptance |\n|---|---|---|---|---|---|\n");
  print_row("plain", replay(fixed(0), texts, costs), costs);
  for (std::size_t k = 1; k <= 8; ++k) print_row("fixed " + std::to_string(k), replay(fixed(k), texts, costs), costs);
  print_row("heuristic", replay(heuristic(), texts, costs), costs);
  print_row("adaptive", replay(adaptive(), texts, costs), costs);
} catch (const std::exception& problem) {
  std::cerr << "replay: " << problem.what() << "\n";
  return 1;
}
