// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What the golden tests share: the recorded cases of tests/golden, the models they belong to, and comparison by bound or by bits.
#pragma once
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/core/space_copy.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "outrider/io/safetensors.hpp"

namespace models {

using namespace outrider;
using gemma4::attention_kind;

/// Whether matmul_prompt rounds as matmul does, so that the bits of a prompt do not depend on its chunks. A backend where it does not
/// specialises this in its test.
template <class B>
inline constexpr bool prompts_are_exact = true;

/// The models are far too small to share out between threads, so most tests use one. Those named for it prove that the number of threads
/// changes no bit.
inline constexpr execution one_thread{1};

/// The float32 cases that have everything: stages, keys, drafts, rounds.
inline constexpr const char* float_cases[] = {"e2b", "e4b", "dense31b", "moe26b", "unified12b"};

inline const std::filesystem::path source_directory = OUTRIDER_SOURCE_DIR;
inline const std::filesystem::path golden_directory = source_directory / "tests/golden";

inline nlohmann::json read_json(const std::filesystem::path& file) { return nlohmann::json::parse(std::ifstream(file)); }

/// One case of tests/golden: its tensors and its numbers, see the README there.
class golden {
 public:
  explicit golden(const std::string& name)
      : directory(golden_directory / name),
        json(read_json(directory / "expected.json")),
        tensors_(io::load_safetensors(directory / "expected.safetensors")) {}

  std::filesystem::path directory;
  nlohmann::json json;

  [[nodiscard]] bool has(const std::string& name) const { return tensors_.find(name) != nullptr; }
  [[nodiscard]] std::vector<std::size_t> shape(const std::string& name) const { return tensors_.at(name).shape; }
  [[nodiscard]] std::vector<float> floats(const std::string& name) const { return read<float>(name, io::dtype::f32); }
  [[nodiscard]] std::vector<token_id> ids(const std::string& name) const {
    const std::vector<std::int64_t> wide = read<std::int64_t>(name, io::dtype::i64);
    return {wide.begin(), wide.end()};
  }
  [[nodiscard]] double tolerance(const char* what) const { return json.at("tolerance").at(what); }

  /// "p0", "p1" and, where there are more prompts, "x0" …
  [[nodiscard]] std::vector<std::string> prompts() const {
    std::vector<std::string> names;
    for (const char* name : {"p0", "p1", "x0", "x1", "x2"})
      if (has(name + std::string(".prompt"))) names.emplace_back(name);
    return names;
  }
  /// The numbers of "p0" or "p1".
  [[nodiscard]] const nlohmann::json& numbers(const std::string& prompt) const { return json.at("prompts").at(prompt == "p0" ? 0 : 1); }
  /// Prompt and recorded continuation in one.
  [[nodiscard]] std::vector<token_id> text(const std::string& prompt) const {
    std::vector<token_id> all = ids(prompt + ".prompt");
    const std::vector<token_id> greedy = ids(prompt + ".greedy");
    all.insert(all.end(), greedy.begin(), greedy.end());
    return all;
  }

 private:
  template <class T>
  std::vector<T> read(const std::string& name, io::dtype type) const {
    const io::tensor& t = tensors_.at(name);
    REQUIRE(t.type == type);
    std::vector<T> values(t.bytes.size() / sizeof(T));
    std::memcpy(values.data(), t.bytes.data(), t.bytes.size());
    return values;
  }

  io::tensor_set tensors_;
};

/// A target and its assistant on backend B.
template <class B>
struct model_pair {
  gemma4::model<B> target;
  gemma4::assistant<B> assistant;
  context_of<B> ctx;

  model_pair(gemma4::model<B> t, gemma4::assistant<B> a) : target(std::move(t)), assistant(std::move(a)), ctx(one_thread) {}
  explicit model_pair(const std::filesystem::path& directory, execution how = one_thread)
      : target(gemma4::load_model<B>(directory / "target")), assistant(gemma4::load_assistant<B>(directory / "assistant")), ctx(how) {}
};

/// A target's cache and workspace, for passes that a session does not make: with an observer, or with hidden states of all rows.
template <class B, class Kv = float>
struct passes {
  const gemma4::model<B>* target;
  context_of<B>* ctx;
  gemma4::workspace<B> workspace;
  kv_cache<B, Kv> cache;

  passes(const gemma4::model<B>& model, context_of<B>& context, std::size_t max_rows, std::size_t max_positions = 256)
      : target(&model), ctx(&context), workspace(model.config(), max_rows, max_rows), cache(model.kv_layers(), max_rows, max_positions) {}

  template <class Observer = gemma4::no_observer>
  gemma4::forward_result<B> forward(std::span<const token_id> tokens, std::size_t wanted, row_kind kind, Observer&& observe = {}) {
    return target->forward(*ctx, workspace, cache, tokens, wanted, kind, observe);
  }
};

/// The values of a view, wherever they lie.
template <class T, class Space>
std::vector<float> copy_of(const matrix_view<T, Space>& rows) {
  std::vector<std::remove_const_t<T>> values(rows.rows * rows.cols);
  copy_across(matrix_view<std::remove_const_t<T>>{values.data(), rows.rows, rows.cols, rows.cols}, rows);
  return {values.begin(), values.end()};
}

/// The logits of all rows of a prompt, one pass.
template <class B>
std::vector<float> prompt_logits(const gemma4::model<B>& target, std::span<const token_id> tokens) {
  context_of<B> ctx{one_thread};
  passes<B> run(target, ctx, tokens.size());
  return copy_of(run.forward(tokens, tokens.size(), row_kind::prompt).logits);
}

/// Keys, then values, of positions begin … end - 1: [heads, end - begin, head_dim] each, as the golden files have them.
template <class Kv>
struct keys_and_values {
  std::vector<float> keys, values;

  template <class Space>
  keys_and_values(kv_view<const Kv, Space> cache, std::size_t begin, std::size_t end) {
    std::vector<const Kv*> table(cache.ring_rows != 0 ? 1 : divide_up(end, cache.block_rows));
    space_copy<Space, host_space>::copy(table.data(), cache.blocks, table.size());
    cache.blocks = table.data();
    std::vector<Kv> row(cache.head_dim);
    const auto add = [&](std::vector<float>& to, const Kv* from) {
      space_copy<Space, host_space>::copy(row.data(), from, row.size());
      for (const Kv value : row) to.push_back(to_float(value));
    };
    for (std::size_t h = 0; h < cache.heads; ++h)
      for (std::size_t p = begin; p < end; ++p) {
        add(keys, local(cache).key(p, h));
        add(values, local(cache).value(p, h));
      }
  }
};

[[nodiscard]] inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Checks got against want, rows of `cols` elements. An element may be off by `absolute`, and by `roundings` roundings of the row's norm.
///
/// `absolute` is a tolerance of the case: eight times the rounding noise that was measured on the recording implementation itself, between
/// its own float32 paths and float64.
/// `roundings` is derived. u = 2^-24 is one rounding; a stage is computed from rows of norm ‖x‖ by products whose sums have at most n = 96
/// terms (the widest MLP of the cases). Roundings of a sum are of random sign, so it is off by about √n·u·‖x‖ ≈ 10·u·‖x‖, on either side;
/// a branch of a layer is three such products deep, a layer has up to three branches, and every branch is normed before it joins the
/// stream, so that no error grows but by what the layers add up: 10 · 3 · 3 ≈ 100 roundings a layer. A stage behind d layers is given
/// 100·(d + 1). For the first layers this is the tighter of the two bounds.
inline void check_close(const std::string& what, const std::vector<float>& got, const std::vector<float>& want, std::size_t cols,
                        double absolute, double roundings) {
  CAPTURE(what);
  REQUIRE(got.size() == want.size());
  std::size_t worst_row = 0;
  double worst_error = 0, worst_bound = 1;
  for (std::size_t begin = 0; begin < want.size(); begin += cols) {
    double norm = 0, error = 0;
    for (std::size_t i = begin; i < begin + cols; ++i) {
      norm += double{want[i]} * double{want[i]};
      const double off = std::abs(double{got[i]} - double{want[i]});
      if (!(off <= error)) error = off;  // a NaN stays
    }
    const double bound = (std::min)(absolute, roundings * 0x1p-24 * std::sqrt(norm));
    if (!(error * worst_bound <= worst_error * bound)) {
      worst_row = begin / cols;
      worst_error = error;
      worst_bound = bound;
    }
  }
  CAPTURE(worst_row);
  CHECK(worst_error <= worst_bound);
}
inline constexpr double roundings_per_layer = 100;

/// What a prompt leaves behind: the last row's results and the keys that later rows or the drafter can see.
struct prompt_outcome {
  std::vector<float> logits, hidden, keys;
};

template <class B>
prompt_outcome process_in_chunks(const gemma4::model<B>& target, context_of<B>& ctx, std::span<const token_id> tokens,
                                 const std::vector<std::size_t>& chunks, row_kind kind) {
  passes<B> run(target, ctx, *std::max_element(chunks.begin(), chunks.end()));
  prompt_outcome outcome;
  std::size_t done = 0;
  for (const std::size_t rows : chunks) {
    const std::size_t wanted = done + rows == tokens.size() ? 1 : 0;
    const auto result = run.forward(tokens.subspan(done, rows), wanted, kind);
    outcome = {copy_of(result.logits), copy_of(result.hidden), {}};
    run.cache.commit(rows);
    done += rows;
  }
  REQUIRE(done == tokens.size());
  for (std::size_t layer = 0; layer < run.cache.layer_count(); ++layer) {
    const bool sliding = target.config().layers[layer] == attention_kind::sliding;
    const std::size_t first = sliding && done > target.config().window ? done - target.config().window : 0;
    const keys_and_values<float> rows(std::as_const(run.cache).layer(layer), first, done);
    outcome.keys.insert(outcome.keys.end(), rows.keys.begin(), rows.keys.end());
    outcome.keys.insert(outcome.keys.end(), rows.values.begin(), rows.values.end());
  }
  return outcome;
}

/// Results and keys of every row of a pass over `tokens` behind `before`.
template <class B>
std::vector<std::vector<float>> rows_behind(const gemma4::model<B>& target, context_of<B>& ctx, std::span<const token_id> before,
                                            std::span<const token_id> tokens, bool together) {
  passes<B> run(target, ctx, (std::max)(tokens.size(), before.size()));
  if (!before.empty()) {
    run.forward(before, 0, row_kind::decode);
    run.cache.commit(before.size());
  }
  std::vector<std::vector<float>> rows;
  const std::size_t m = together ? tokens.size() : 1;
  for (std::size_t done = 0; done < tokens.size(); done += m) {
    const auto result = run.forward(tokens.subspan(done, m), m, row_kind::decode);
    run.cache.commit(m);
    for (std::size_t r = 0; r < m; ++r) {
      std::vector<float> row = copy_of(result.logits.slice_rows(r, 1));
      const std::vector<float> hidden = copy_of(result.hidden.slice_rows(r, 1));
      row.insert(row.end(), hidden.begin(), hidden.end());
      for (std::size_t layer = 0; layer < run.cache.layer_count(); ++layer) {
        const std::size_t position = before.size() + done + r;
        const keys_and_values<float> kv(std::as_const(run.cache).layer(layer), position, position + 1);
        row.insert(row.end(), kv.keys.begin(), kv.keys.end());
        row.insert(row.end(), kv.values.begin(), kv.values.end());
      }
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace models
