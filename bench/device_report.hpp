// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What bench/device.cpp says: one JSON object, and the same figures as a table with the goal beside each that has one.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "device_passes.hpp"
#include "machine.hpp"
#include "outrider/version.hpp"

namespace bench {

using nlohmann::ordered_json;

struct arguments {
  std::string shape = "12b", weights = "bf16", kv = "bf16", json_file;
  std::size_t repeat = 15, context = 512;
};

/// What a figure should come to, at least or at most.
struct goal {
  double value;
  bool at_least;

  [[nodiscard]] bool met_by(double figure) const noexcept { return at_least ? figure >= value : figure <= value; }
};

/// Goals are for models that are larger than the device's caches.
inline std::optional<goal> goal_of(const std::string& figure, const std::string& shape) {
  if (shape == "tiny") return {};
  if (figure == "share_of_read" && shape == "12b") return goal{0.80, true};
  if (figure == "verify_2") return goal{1.03, false};
  if (figure == "verify_4") return goal{1.05, false};
  if (figure == "verify_8") return goal{1.10, false};
  if (figure == "draft_step") return goal{0.05, false};
  return {};
}

/// Median and quartiles, and the goal if `figure` has one.
inline ordered_json with_goal(const std::vector<double>& samples, const arguments& args, const std::string& figure = {}) {
  const summary s(samples);
  ordered_json out{{"median", s.median}, {"low", s.low}, {"high", s.high}};
  if (const auto wanted = goal_of(figure, args.shape)) out["goal"] = wanted->value, out["met"] = wanted->met_by(s.median);
  return out;
}

/// read: GB/s of reading device memory.
inline ordered_json report_of(const arguments& args, const device_samples& s, const std::vector<double>& read, std::size_t bytes_read) {
  ordered_json out;
  out["outrider"] = OUTRIDER_VERSION, out["compiler"] = compiler();
  out["shape"] = args.shape, out["weights"] = args.weights, out["kv"] = args.kv;
  out["context"] = args.context, out["rounds"] = args.repeat, out["weight_bytes"] = bytes_read;
  const double bandwidth = summary(read).median;
  std::vector<double> share;
  for (const double ms : s.pass_ms.at(1)) share.push_back(static_cast<double>(bytes_read) / ms / 1e6 / bandwidth);
  out["read_gb_per_second"] = with_goal(read, args);
  out["plain_ms"] = with_goal(s.pass_ms.at(1), args);
  out["share_of_read"] = with_goal(share, args, "share_of_read");
  for (const auto& [m, cost] : s.pass_cost)
    if (m != 1) out["verify_" + std::to_string(m)] = with_goal(cost, args, "verify_" + std::to_string(m));
  out["draft_step_ms"] = with_goal(s.draft_ms, args);
  out["draft_step"] = with_goal(s.draft_cost, args, "draft_step");
  out["round_ms"] = with_goal(s.round_ms, args);
  out["round"] = with_goal(s.round_cost, args);
  out["prompt_tokens_per_second"] = with_goal(s.prompt, args);
  if (!s.graphs.pass_ms.empty()) {
    if (s.launches != 0) out["launches"] = s.launches;
    out["graph_queue_ms"] = with_goal(s.graphs.queue_ms, args), out["graph_pass_ms"] = with_goal(s.graphs.pass_ms, args);
    out["single_queue_ms"] = with_goal(s.singly.queue_ms, args), out["single_pass_ms"] = with_goal(s.singly.pass_ms, args);
  }
  return out;
}

namespace detail {

inline std::string number(double value) {
  char digits[32];
  std::snprintf(digits, sizeof digits, value < 1000 ? "%.3g" : "%.0f", value);
  return digits;
}

inline void print_row(const ordered_json& report, const std::string& key, const std::string& what, const char* unit) {
  if (!report.contains(key)) return;
  const ordered_json& figure = report[key];
  const auto at = [&](const char* of) { return number(figure[of].get<double>()); };
  const std::string verdict =
      figure.contains("goal") ? "goal " + at("goal") + ": " + (figure["met"].get<bool>() ? "met" : "missed") : std::string();
  std::printf("| %s | %s%s | %s – %s | %s |\n", what.c_str(), at("median").c_str(), unit, at("low").c_str(), at("high").c_str(),
              verdict.c_str());
}

}  // namespace detail

/// The table. device: what it runs on, for people.
inline void print_report(const ordered_json& r, const std::string& device) {
  const auto text = [&](const char* key) { return r[key].is_string() ? r[key].get<std::string>() : r[key].dump(); };
  const auto row = [&](const std::string& key, const std::string& what, const char* unit) { detail::print_row(r, key, what, unit); };
  std::printf("%s with random weights in %s, keys and values in %s, behind %s tokens; %s rounds\n%s; outrider %s, %s\n",
              text("shape").c_str(), text("weights").c_str(), text("kv").c_str(), text("context").c_str(), text("rounds").c_str(),
              device.c_str(), text("outrider").c_str(), text("compiler").c_str());
  std::printf("Speculation leaves the text as it is.\n\n| | median | quartiles | |\n|---|---|---|---|\n");
  row("read_gb_per_second", "reading device memory", " GB/s");
  row("plain_ms", "plain token", " ms");
  row("share_of_read", "its " + text("weight_bytes") + " bytes of weights, as a share of reading memory", "");
  for (const std::size_t m : rows_timed)
    row("verify_" + std::to_string(m), "V(" + std::to_string(m) + "): a pass of " + std::to_string(m) + " rows", " plain tokens");
  row("draft_step_ms", "draft step", " ms");
  row("draft_step", "draft step", " plain tokens");
  row("round", "round of " + std::to_string(drafts_timed) + " drafts", " plain tokens");
  row("prompt_tokens_per_second", "prompt of " + text("context") + " tokens", " tokens/s");
  const std::string launches = r.contains("launches") ? " of " + text("launches") + " launches" : "";
  row("graph_pass_ms", "pass" + launches + ", sent as a graph", " ms");
  row("graph_queue_ms", "of that, before the host waits", " ms");
  row("single_pass_ms", "pass" + launches + ", sent one by one", " ms");
  row("single_queue_ms", "of that, before the host waits", " ms");
}

}  // namespace bench
