// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// How what bench/decode.cpp collects is shown: one JSON object, or the same figures as Markdown tables.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "decode_passes.hpp"
#include "decode_texts.hpp"
#include "machine.hpp"

namespace bench {

using nlohmann::ordered_json;

struct samples {
  std::vector<double> one_stream, four_streams;  // GB/s of reading memory
  pass_samples passes;
  std::map<std::size_t, std::size_t> chosen_experts;  // of all layers, by rows
  std::vector<long_pass> long_context;
  text_samples texts;
  schedules imposed;
};

inline ordered_json to_json(const std::vector<double>& values) {
  const summary s(values);
  return {{"median", s.median}, {"low", s.low}, {"high", s.high}};
}

/// Adds the passes' figures to a report.
inline void add_passes(ordered_json& out, const samples& all, const weight_facts& weights) {
  const pass_samples& s = all.passes;
  const double read = (std::max)(summary(all.one_stream).median, summary(all.four_streams).median);
  std::vector<double> per_second, gigabytes, share;
  for (const double ms : s.pass_ms.at(1)) {
    per_second.push_back(1000 / ms);
    gigabytes.push_back(static_cast<double>(weights.read) / ms / 1e6);
    share.push_back(gigabytes.back() / read);
  }
  out["read_gb_per_second"] = {{"one_stream", to_json(all.one_stream)}, {"four_streams", to_json(all.four_streams)}};
  for (const auto& [key, read_at] : {std::pair{"one_stream", &all.one_stream}, std::pair{"four_streams", &all.four_streams}})
    out["read_gb_per_second"][key]["best"] = *std::max_element(read_at->begin(), read_at->end());
  out["plain"] = {{"ms_per_token", to_json(s.pass_ms.at(1))},
                  {"tokens_per_second", to_json(per_second)},
                  {"gb_per_second", to_json(gigabytes)},
                  {"share_of_read", to_json(share)}};
  for (const auto& [m, ms] : s.pass_ms) out["verify"].push_back({{"rows", m}, {"ms", to_json(ms)}, {"cost", to_json(s.pass_cost.at(m))}});
  if (!all.chosen_experts.empty())
    for (ordered_json& v : out["verify"]) {
      const std::size_t one = all.chosen_experts.at(1), chosen = all.chosen_experts.at(v["rows"].get<std::size_t>());
      const double more = 1 + static_cast<double>((chosen - one) * weights.expert) / static_cast<double>(weights.read);
      std::vector<double> cost = s.pass_cost.at(v["rows"].get<std::size_t>());
      for (double& c : cost) c /= more;
      v["chosen_experts"] = chosen, v["bytes"] = more, v["cost_per_byte"] = to_json(cost);
    }
  out["choose_ms"] = to_json(s.choose_ms);
  out["draft_step"] = {{"ms", to_json(s.draft_ms)}, {"cost", to_json(s.draft_cost)}};
  for (const auto& [k, ms] : s.round_ms)
    out["round"].push_back({{"drafts", k}, {"ms", to_json(ms)}, {"cost", to_json(s.round_cost.at(k))}});
  out["prefill_tokens_per_second"] = to_json(s.prefill);
}

inline void add_texts(ordered_json& out, const text_samples& s, const pass_samples& p) {
  for (const auto& [k, c] : s.counts) {
    const double per_pass = static_cast<double>(c.tokens) / static_cast<double>(c.rounds() + c.plain_passes());
    out["end_to_end"].push_back({{"drafts", k},
                                 {"tokens_per_second", to_json(s.tokens_per_second.at(k))},
                                 {"speedup", to_json(s.speedup.at(k))},
                                 {"acceptance", c.acceptance_rate()},
                                 {"tokens_per_pass", per_pass}});
    if (p.pass_cost.empty()) continue;
    const double cost = summary(p.pass_cost.at(k + 1)).median + static_cast<double>(k) * summary(p.draft_cost).median;
    out["end_to_end"].back()["predicted_speedup"] = per_pass / cost;
  }
}

inline void add_schedules(ordered_json& out, const schedules& s) {
  out["imposed"]["plain_tokens_per_second"] = to_json(s.plain);
  for (const auto& [key, here] : s.imposed)
    out["imposed"]["schedules"].push_back({{"acceptance", key.first},
                                           {"drafts", key.second == adaptive_length ? ordered_json("adaptive") : ordered_json(key.second)},
                                           {"tokens_per_second", to_json(here.tokens_per_second)},
                                           {"speedup", to_json(here.speedup)},
                                           {"tokens_per_pass", here.tokens_per_pass}});
}

namespace detail {

inline std::string text(const ordered_json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }
inline std::string number(const ordered_json& value) {
  char digits[32];
  const double v = value.get<double>();
  std::snprintf(digits, sizeof digits, v < 1000 ? "%.3g" : "%.0f", v);
  return digits;
}
inline void row(const std::string& what, const ordered_json& s, const char* unit) {
  std::printf("| %s | %s%s | %s – %s |\n", what.c_str(), number(s["median"]).c_str(), unit, number(s["low"]).c_str(),
              number(s["high"]).c_str());
}

inline void print_passes(const ordered_json& r) {
  std::printf("\n| | median | quartiles |\n|---|---|---|\n");
  row("reading memory, one stream a thread", r["read_gb_per_second"]["one_stream"], " GB/s");
  row("reading memory, four streams a thread", r["read_gb_per_second"]["four_streams"], " GB/s");
  row("plain pass", r["plain"]["ms_per_token"], " ms");
  row("plain passes", r["plain"]["tokens_per_second"], " tokens/s");
  row("its " + text(r["weights"]["read_bytes"]) + " bytes of weights", r["plain"]["gb_per_second"], " GB/s");
  row("as a share of reading memory", r["plain"]["share_of_read"], "");
  for (const auto& v : r["verify"])
    if (v["rows"] != 1) row("V(" + text(v["rows"]) + "): a pass of " + text(v["rows"]) + " rows", v["cost"], " plain passes");
  for (const auto& v : r["verify"])
    if (v.contains("bytes") && v["rows"] != 1)
      row("V(" + text(v["rows"]) + ") / bytes with its " + text(v["chosen_experts"]) + " experts, " + number(v["bytes"]),
          v["cost_per_byte"], "");
  row("choosing a token", r["choose_ms"], " ms");
  row("draft step", r["draft_step"]["ms"], " ms");
  row("draft step", r["draft_step"]["cost"], " plain passes");
  for (const auto& v : r["round"]) row("round with " + text(v["drafts"]) + " drafts", v["cost"], " plain passes");
  row("prompt", r["prefill_tokens_per_second"], " tokens/s");
}

inline void print_long_context(const ordered_json& r) {
  std::printf("\n| positions in the cache | plain pass | more than with %s positions |\n|---|---|---|\n", text(r["context"]).c_str());
  for (const auto& at : r["long_context"])
    std::printf("| %s | %s ms | %s %% |\n", text(at["positions"]).c_str(), number(at["ms"]["median"]).c_str(),
                number(at["share"]["median"]).c_str());
}

inline void print_texts(const ordered_json& r) {
  std::printf("\nTexts of %s tokens from %zu prompts, the same in every row:\n\n", text(r["new_tokens"]).c_str(), prompts.size());
  std::printf(
      "| drafts | tokens/s | quartiles | against plain | quartiles | predicted | acceptance | tokens per pass "
      "|\n|---|---|---|---|---|---|---|---|\n");
  for (const auto& e : r["end_to_end"]) {
    const auto &speed = e["tokens_per_second"], &gain = e["speedup"];
    const std::string predicted = e.contains("predicted_speedup") ? number(e["predicted_speedup"]) : "";
    std::printf("| %s | %.0f | %.0f – %.0f | %.2f | %.2f – %.2f | %s | %.0f %% | %.2f |\n", text(e["drafts"]).c_str(),
                speed["median"].get<double>(), speed["low"].get<double>(), speed["high"].get<double>(), gain["median"].get<double>(),
                gain["low"].get<double>(), gain["high"].get<double>(), predicted.c_str(), 100 * e["acceptance"].get<double>(),
                e["tokens_per_pass"].get<double>());
  }
}

inline void print_schedules(const ordered_json& r) {
  std::printf("\nA text of %s tokens at an imposed acceptance of each draft, the assistant's steps paid:\n\n",
              text(r["new_tokens"]).c_str());
  std::printf("| acceptance | drafts | tokens/s | against plain | quartiles | tokens per pass |\n|---|---|---|---|---|---|\n");
  for (const auto& e : r["imposed"]["schedules"])
    std::printf("| %s | %s | %s | %s | %s – %s | %s |\n", number(e["acceptance"]).c_str(), text(e["drafts"]).c_str(),
                number(e["tokens_per_second"]["median"]).c_str(), number(e["speedup"]["median"]).c_str(),
                number(e["speedup"]["low"]).c_str(), number(e["speedup"]["high"]).c_str(), number(e["tokens_per_pass"]).c_str());
}

}  // namespace detail

/// The report as Markdown.
inline void print_report(const ordered_json& r) {
  using detail::text, detail::number;
  const auto name = [&](const char* key) {
    const std::filesystem::path path(text(r[key]));
    return (path.parent_path().filename() / path.filename()).string();
  };
  std::printf("%s with %s, backend %s, SIMD %s, threads %s, keys and values in %s\n%s; %s; outrider %s\n", name("target").c_str(),
              name("assistant").c_str(), text(r["backend"]).c_str(), text(r["simd"]).c_str(), text(r["threads"]).c_str(),
              text(r["kv"]).c_str(), text(r["cpu"]).c_str(), text(r["compiler"]).c_str(), text(r["outrider"]).c_str());
  std::printf("%s rounds; passes, drafts and prompt at %s positions; the text is that of %s\n", text(r["rounds"]).c_str(),
              text(r["context"]).c_str(), text(r["checked_against"]).c_str());
  std::printf("%s parameters, %s bytes of weights in use; loaded in %s s; at most %s bytes of memory after a prompt and a pass\n",
              text(r["weights"]["parameters"]).c_str(), text(r["weights"]["used_bytes"]).c_str(), number(r["load_seconds"]).c_str(),
              text(r["peak_memory_bytes"]).c_str());
  if (r.contains("plain")) detail::print_passes(r);
  if (r.contains("long_context")) detail::print_long_context(r);
  if (r.contains("end_to_end")) detail::print_texts(r);
  if (r.contains("imposed")) detail::print_schedules(r);
}

}  // namespace bench
