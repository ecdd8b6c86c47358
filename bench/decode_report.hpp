// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What bench/decode.cpp collects and how it is shown: one JSON object, or the same figures as Markdown tables.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "machine.hpp"
#include "outrider/decode/statistics.hpp"
#include "outrider/gemma4/config.hpp"
#include "outrider/io/tensors.hpp"

namespace bench {

using nlohmann::ordered_json;

inline constexpr std::size_t most_rows = 9;  // V(M) is measured for M = 1 … 9

/// Bytes of weights a decoded row reads: the matrices of the text stack with the head in full, chosen experts only; not the tables that
/// are only looked up, and not the dead keys and values of sharing layers.
inline std::size_t weight_bytes(const outrider::io::tensor_set& tensors, const outrider::gemma4::text_config& c) {
  std::string prefix = "model.language_model.";
  if (!tensors.find(prefix + "embed_tokens.weight")) prefix = "model.";
  std::size_t sum = 0;
  for (const auto& [name, tensor] : tensors) {
    const bool head = name == (c.tied_head ? prefix + "embed_tokens.weight" : "lm_head.weight");
    if (!head && (!name.starts_with(prefix) || tensor.shape.size() < 2 || name.find("embed_tokens") != name.npos)) continue;
    const bool keys_or_values = name.find("self_attn.k_proj") != name.npos || name.find("self_attn.v_proj") != name.npos;
    if (keys_or_values && !c.owns_kv(std::stoul(name.substr(prefix.size() + std::string("layers.").size())))) continue;
    const bool experts = name.find(".experts.") != name.npos;
    sum += experts ? tensor.bytes.size() / c.experts * c.experts_per_token : tensor.bytes.size();
  }
  return sum;
}

/// A sample of every figure per round.
struct samples {
  std::vector<double> one_stream, four_streams;                           // GB/s of reading memory
  std::vector<double> prefill;                                            // tokens/s
  std::vector<double> draft_ms, draft_cost;                               // a draft step, also in plain passes
  std::array<std::vector<double>, most_rows + 1> pass_ms, pass_cost;      // by rows, also in plain passes
  std::map<std::size_t, std::vector<double>> tokens_per_second, speedup;  // of texts, by drafts a round; against plain
  std::map<std::size_t, outrider::statistics> counts;                     // of all texts, the same in every round
};

inline ordered_json to_json(const std::vector<double>& values) {
  const summary s(values);
  return {{"median", s.median}, {"low", s.low}, {"high", s.high}};
}

/// Adds the figures to a report; `bytes` of weights are what a plain pass reads.
inline void add_figures(ordered_json& out, const samples& s, std::size_t bytes) {
  const double read = (std::max)(summary(s.one_stream).median, summary(s.four_streams).median);
  std::vector<double> per_second, gigabytes, share;
  for (const double ms : s.pass_ms[1]) {
    per_second.push_back(1000 / ms);
    gigabytes.push_back(static_cast<double>(bytes) / ms / 1e6);
    share.push_back(gigabytes.back() / read);
  }
  out["read_gb_per_second"] = {{"one_stream", to_json(s.one_stream)}, {"four_streams", to_json(s.four_streams)}};
  out["plain"] = {{"ms_per_token", to_json(s.pass_ms[1])},
                  {"tokens_per_second", to_json(per_second)},
                  {"weight_bytes", bytes},
                  {"gb_per_second", to_json(gigabytes)},
                  {"share_of_read", to_json(share)}};
  for (std::size_t m = 1; m <= most_rows; ++m)
    out["verify"].push_back({{"rows", m}, {"ms", to_json(s.pass_ms[m])}, {"cost", to_json(s.pass_cost[m])}});
  out["draft_step"] = {{"ms", to_json(s.draft_ms)}, {"cost", to_json(s.draft_cost)}};
  out["prefill_tokens_per_second"] = to_json(s.prefill);
  for (const auto& [drafts, c] : s.counts) {
    const double per_pass = static_cast<double>(c.tokens) / static_cast<double>(c.rounds() + c.plain_passes());
    const double cost = summary(s.pass_cost.at(drafts + 1)).median + static_cast<double>(drafts) * summary(s.draft_cost).median;
    out["end_to_end"].push_back({{"drafts", drafts},
                                 {"tokens_per_second", to_json(s.tokens_per_second.at(drafts))},
                                 {"speedup", to_json(s.speedup.at(drafts))},
                                 {"predicted_speedup", per_pass / cost},
                                 {"acceptance", c.acceptance_rate()},
                                 {"tokens_per_pass", per_pass}});
  }
}

/// The same figures as Markdown.
inline void print_table(const ordered_json& r) {
  const auto text = [](const ordered_json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); };
  const auto name = [&](const char* key) {
    const std::filesystem::path path(text(r[key]));
    return (path.parent_path().filename() / path.filename()).string();
  };
  const auto number = [](const ordered_json& value) {
    char digits[32];
    const double v = value.get<double>();
    std::snprintf(digits, sizeof digits, v < 1000 ? "%.3g" : "%.0f", v);
    return std::string(digits);
  };
  const auto row = [&](const std::string& what, const ordered_json& s, const char* unit) {
    std::printf("| %s | %s%s | %s – %s |\n", what.c_str(), number(s["median"]).c_str(), unit, number(s["low"]).c_str(),
                number(s["high"]).c_str());
  };
  std::printf("%s with %s, backend %s, SIMD %s, threads %s, keys and values in %s\n%s; %s; outrider %s\n", name("target").c_str(),
              name("assistant").c_str(), text(r["backend"]).c_str(), text(r["simd"]).c_str(), text(r["threads"]).c_str(),
              text(r["kv"]).c_str(), text(r["cpu"]).c_str(), text(r["compiler"]).c_str(), text(r["outrider"]).c_str());
  std::printf("%s rounds; passes, drafts and prompt at %s positions; texts of %s tokens from %s prompts, the same in every row\n\n",
              text(r["rounds"]).c_str(), text(r["context"]).c_str(), text(r["new_tokens"]).c_str(), text(r["prompts"]).c_str());

  std::printf("| | median | quartiles |\n|---|---|---|\n");
  row("reading memory, one stream a thread", r["read_gb_per_second"]["one_stream"], " GB/s");
  row("reading memory, four streams a thread", r["read_gb_per_second"]["four_streams"], " GB/s");
  row("plain pass", r["plain"]["ms_per_token"], " ms");
  row("plain passes", r["plain"]["tokens_per_second"], " tokens/s");
  row("its " + text(r["plain"]["weight_bytes"]) + " bytes of weights", r["plain"]["gb_per_second"], " GB/s");
  row("as a share of reading memory", r["plain"]["share_of_read"], "");
  for (const auto& v : r["verify"])
    if (v["rows"] != 1) row("V(" + text(v["rows"]) + "): a pass of " + text(v["rows"]) + " rows", v["cost"], " plain passes");
  row("draft step", r["draft_step"]["ms"], " ms");
  row("draft step", r["draft_step"]["cost"], " plain passes");
  row("prompt", r["prefill_tokens_per_second"], " tokens/s");

  std::printf(
      "\n| drafts | tokens/s | quartiles | against plain | quartiles | predicted | acceptance | tokens per pass "
      "|\n|---|---|---|---|---|---|---|---|\n");
  for (const auto& e : r["end_to_end"]) {
    const auto &speed = e["tokens_per_second"], &gain = e["speedup"];
    std::printf("| %s | %.0f | %.0f – %.0f | %.2f | %.2f – %.2f | %.2f | %.0f %% | %.2f |\n", text(e["drafts"]).c_str(),
                speed["median"].get<double>(), speed["low"].get<double>(), speed["high"].get<double>(), gain["median"].get<double>(),
                gain["low"].get<double>(), gain["high"].get<double>(), e["predicted_speedup"].get<double>(),
                100 * e["acceptance"].get<double>(), e["tokens_per_pass"].get<double>());
  }
}

}  // namespace bench
