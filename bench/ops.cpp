// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Ops of the CPU backend one by one, with Google Benchmark: products for M rows, attention, norm and gate. Every case is compared with the
// reference backend before it is timed. Shapes are those of the tiny pair (in the cache) and of E2B (weights from memory).
#include <benchmark/benchmark.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <iostream>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "machine.hpp"
#include "outrider/backend/cpu.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/layers/kv_cache.hpp"

namespace {

using namespace outrider;
using backend_timed = cpu;
using floats = matrix<float, host_space>;
using sizes = std::initializer_list<std::size_t>;

constexpr double u = 0x1p-24;  // rounding of one float operation, relative
unsigned threads = 0;

template <class T>
constexpr const char* name_of = "f32";
template <>
constexpr const char* name_of<bf16> = "bf16";
template <>
constexpr const char* name_of<f16> = "f16";
template <>
constexpr const char* name_of<q8_0> = "q8_0";

/// Uniform in [-1, 1), the same in every run.
template <class T>
void fill(T* out, std::size_t count) {
  std::mt19937 engine(1);
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<T>(static_cast<float>(engine() >> 8) * 0x1p-23f - 1);
}
floats random_rows(std::size_t rows, std::size_t cols) {
  floats x(rows, cols);
  fill(x.view().data, rows * cols);
  return x;
}

/// |got − want| <= bound everywhere, or no figure for this op.
void require_close(const std::string& op, const floats& got, const floats& want, double bound) {
  for (std::size_t r = 0; r < got.rows(); ++r)
    for (std::size_t c = 0; c < got.cols(); ++c) {
      const double error = std::abs(double{got.view()(r, c)} - double{want.view()(r, c)});
      if (error <= bound) continue;
      throw std::runtime_error(op + " is off by " + std::to_string(error) + " from backend reference, rounding explains " +
                               std::to_string(bound) + "; no figures from a wrong op");
    }
}

/// Runs op(tag, ctx, out) on both backends and compares: the tag's type names the backend.
template <class Op>
void verify(const std::string& name, std::size_t rows, std::size_t cols, double bound, Op op) {
  floats got(rows, cols), want(rows, cols);
  context_of<backend_timed> ctx(execution{threads});
  context_of<reference> plain;
  op(backend_timed{}, ctx, got.view());
  op(reference{}, plain, want.view());
  require_close(name, got, want, bound);
}

/// Billions per second, in the columns' own names.
void count(benchmark::State& state, double bytes, double flops) {
  using benchmark::Counter;
  state.counters["GB"] = Counter(bytes / 1e9, Counter::kIsIterationInvariantRate);
  if (flops != 0) state.counters["GFLOP"] = Counter(flops / 1e9, Counter::kIsIterationInvariantRate);
}

// ------------------------------------------------------------------------------------------------ matmul

/// One weight [n, k] in as many copies as no cache holds if it is large: a decoder finds its weights in memory, not in the cache.
template <class W>
struct copies {
  static constexpr std::size_t large = std::size_t{1} << 20, together = std::size_t{192} << 20;  // bytes
  std::size_t n, k, number;
  buffer<W, host_space> elements;

  copies(std::size_t rows, std::size_t cols)
      : n(rows), k(cols), number(n * k * sizeof(W) < large ? 1 : divide_up(together, n * k * sizeof(W))), elements(number * n * k) {
    fill(elements.data(), n * k);
    for (std::size_t i = 1; i < number; ++i) std::memcpy(elements.data() + i * n * k, elements.data(), n * k * sizeof(W));
    const floats x = random_rows(4, k);
    // Elements are below 1, so Σ|x·w| <= k; each of k terms meets at most k roundings, the reference one more.
    const double terms = static_cast<double>(k);
    verify("matmul", 4, n, (terms + 2) * u * terms,
           [&]<class B>(B, context_of<B>& ctx, matrix_view<float> out) { linear_ops<B, W>::matmul(ctx, out, x.view(), weight(0)); });
  }
  [[nodiscard]] weight_view<W> weight(std::size_t i) const { return {elements.data() + i % number * n * k, n, k, k}; }
};

template <class W>
void time_matmul(benchmark::State& state, std::size_t m, std::size_t n, std::size_t k) {
  static std::optional<copies<W>> held;  // cases of one weight follow each other: each weight is made and verified once
  if (!held || held->n != n || held->k != k) held.emplace(n, k);
  context_of<backend_timed> ctx(execution{threads});
  const floats x = random_rows(m, k);
  floats out(m, n);
  std::size_t i = 0;
  for (auto _ : state) linear_ops<backend_timed, W>::matmul(ctx, out.view(), x.view(), held->weight(i++));
  count(state, static_cast<double>(n * k * sizeof(W)), 2 * static_cast<double>(m * n * k));
}

// ------------------------------------------------------------------------------------------------ attend

/// M rows at the end of `keys` positions, shaped like a sliding layer of E2B: 8 query heads on 1 head of 256, here with no window. Long
/// contexts in several layers, as in a model: by the time its turn comes again, a layer's keys are no longer in the cache.
template <class Kv>
void time_attend(benchmark::State& state, std::size_t m, std::size_t keys) {
  constexpr std::size_t d = 256, heads = 8, chunk = 128;
  const std::vector<kv_layer_shape> layers(keys < 8192 ? 1 : 8, kv_layer_shape{1, d, 0});
  kv_cache<backend_timed, Kv> cache(layers, chunk, keys);
  context_of<backend_timed> ctx(execution{threads});
  cache.reserve(keys);
  const floats k = random_rows(chunk, d);
  floats v = random_rows(chunk, d), q = random_rows(m, heads * d), out(m, heads * d);
  for (float& value : std::span(v.view().data, chunk * d)) value = std::abs(value);  // a mean well away from zero
  pointwise_ops<backend_timed>::scale(ctx, q.view(), q.view(), 1.0f / 16);           // scores of a few units
  for (std::size_t l = 0; l < layers.size(); ++l)
    for (std::size_t p = 0; p < keys; p += chunk) attention_ops<backend_timed, Kv>::append(ctx, cache.layer(l), k.view(), v.view(), p);
  const kv_view<const Kv> view = std::as_const(cache).layer(0);
  const key_window window{keys - m + 1, key_window::unlimited};

  // A score is off by (d + 2)·u·Σ|q·k| <= (d + 2)·u·d/16; four times that in the quotient of sums, plus 3·keys·u of summing and 32·u of exp.
  const double score = (d + 2) * u * d / 16, bound = 4 * score + (3 * static_cast<double>(keys) + 32) * u;
  verify("attend", m, heads * d, bound,
         [&]<class B>(B, context_of<B>& c, matrix_view<float> to) { attention_ops<B, Kv>::attend(c, to, q.view(), view, window); });
  std::size_t l = 0;
  for (auto _ : state)
    attention_ops<backend_timed, Kv>::attend(ctx, out.view(), q.view(), std::as_const(cache).layer(l++ % layers.size()), window);
  count(state, static_cast<double>(2 * keys * view.stride() * sizeof(Kv)), 4 * static_cast<double>(m * heads * d * keys));
}

// ------------------------------------------------------------------------------------------------ rms_norm, gelu_mul

void time_rms_norm(benchmark::State& state, std::size_t m, std::size_t n) {
  context_of<backend_timed> ctx(execution{threads});
  const floats x = random_rows(m, n), weight = random_rows(1, n);
  floats out(m, n);
  // Half of a sum's n·u, and 8 roundings, of an element that is at most √n.
  verify(
      "rms_norm", m, n, (static_cast<double>(n) / 2 + 8) * u * std::sqrt(static_cast<double>(n)),
      [&]<class B>(B, context_of<B>& c, matrix_view<float> to) { pointwise_ops<B>::rms_norm(c, to, x.view(), weight.view().data, 1e-6f); });
  for (auto _ : state) pointwise_ops<backend_timed>::rms_norm(ctx, out.view(), x.view(), weight.view().data, 1e-6f);
  count(state, static_cast<double>(2 * m * n * sizeof(float)), 0);
}

void time_gelu_mul(benchmark::State& state, std::size_t m, std::size_t n) {
  context_of<backend_timed> ctx(execution{threads});
  const floats gate = random_rows(m, n), up = random_rows(m, n);
  floats out(m, n);
  // Polynomial, tanh, sum and products: 16 roundings of a product below 1.
  verify("gelu_mul", m, n, 16 * u,
         [&]<class B>(B, context_of<B>& c, matrix_view<float> to) { pointwise_ops<B>::gelu_mul(c, to, gate.view(), up.view()); });
  for (auto _ : state) pointwise_ops<backend_timed>::gelu_mul(ctx, out.view(), gate.view(), up.view());
  count(state, static_cast<double>(3 * m * n * sizeof(float)), 0);
}

/// Adds a case; wall time, since the ops may run on several threads.
template <class Time>
void add(const std::string& name, Time time) {
  benchmark::RegisterBenchmark(name.c_str(), time)->UseRealTime();
}
std::string shape(std::size_t n, std::size_t k) { return std::to_string(n) + "x" + std::to_string(k); }

template <class W>
void add_matmuls() {
  constexpr std::pair<std::size_t, std::size_t> shapes[] = {{384, 128}, {2048, 128}, {2048, 1536}, {6144, 1536}, {1536, 6144}};
  for (const auto& [n, k] : shapes)
    for (const std::size_t m : sizes{1, 2, 4, 8, 16})
      add("matmul/" + std::string(name_of<W>) + "/" + shape(n, k) + "/M:" + std::to_string(m),
          [m, n = n, k = k](benchmark::State& state) { time_matmul<W>(state, m, n, k); });
}
template <class Kv>
void add_attends() {
  for (const std::size_t keys : sizes{128, 1024, 8192})
    for (const std::size_t m : sizes{1, 5})
      add("attend/" + std::string(name_of<Kv>) + "/keys:" + std::to_string(keys) + "/M:" + std::to_string(m),
          [m, keys](benchmark::State& state) { time_attend<Kv>(state, m, keys); });
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app("Times the ops of backend cpu one by one, each compared with backend reference first.");
  app.add_option("--threads", threads, "Threads; one per core if not given")->check(CLI::Range(1, 1024));
  app.footer("Options of Google Benchmark work too: --benchmark_filter=REGEX, --benchmark_min_time=SECONDS, --benchmark_format=json …");
  app.allow_extras();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& wrong) {
    return app.exit(wrong) == 0 ? 0 : 2;
  }
  std::vector<std::string> rest = app.remaining();
  std::vector<char*> words{argv[0]};
  for (std::string& word : rest) words.push_back(word.data());
  int count = static_cast<int>(words.size());
  benchmark::Initialize(&count, words.data());
  if (benchmark::ReportUnrecognizedArguments(count, words.data())) return 2;

  benchmark::AddCustomContext("cpu", bench::cpu_model());
  benchmark::AddCustomContext("simd", std::string(backend_traits<backend_timed>::simd()));
  benchmark::AddCustomContext("compiler", bench::compiler());
  benchmark::AddCustomContext("threads", std::to_string(context_of<backend_timed>(execution{threads}).threads()));
  add_matmuls<float>();
  add_matmuls<bf16>();
  add_matmuls<f16>();
  add_attends<float>();
  add_attends<bf16>();
  add_attends<q8_0>();
  for (const std::size_t m : sizes{1, 8}) {
    add("rms_norm/1536/M:" + std::to_string(m), [m](benchmark::State& state) { time_rms_norm(state, m, 1536); });
    add("gelu_mul/6144/M:" + std::to_string(m), [m](benchmark::State& state) { time_gelu_mul(state, m, 6144); });
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
} catch (const std::exception& problem) {
  std::cerr << "ops: " << problem.what() << "\n";
  return 1;
}
