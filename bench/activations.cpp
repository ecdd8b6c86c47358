// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What int8 activations cost in fidelity, next to what the quantised weights cost already, and what keys and values in fewer bits cost:
// Kullback-Leibler divergence of the distributions over the next token and agreement of the likeliest one, over texts drawn at random from
// the unquantised model itself.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iostream>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "outrider/backend/cpu.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "outrider/text/tokenizer.hpp"

namespace {

using namespace outrider;
using text = std::vector<token_id>;

struct arguments {
  std::string original = OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/gguf/target-bf16.gguf";
  std::vector<std::string> targets;
  std::size_t texts = 16, length = 512;
  unsigned threads = 0;
};

/// Calls body(r) for every row of the passes in which all sessions read a text.
template <class Body, class... Session>
void read(const text& t, Body body, Session&... sessions) {
  (sessions.clear(), ...);
  for (std::size_t begin = 0; begin < t.size(); begin += max_draft_length) {
    const auto rows = std::span(t).subspan(begin, (std::min)(max_draft_length, t.size() - begin));
    (sessions.verify(rows), ...);
    (sessions.commit(rows.size()), ...);
    for (std::size_t r = 0; r < rows.size(); ++r) body(r);
  }
}

/// log softmax of a row of logits.
std::vector<double> log_probabilities(matrix_view<const float> logits, std::size_t row) {
  std::vector<double> p(logits.row(row), logits.row(row) + logits.cols);
  const double most = *std::max_element(p.begin(), p.end());
  double sum = 0;
  for (const double x : p) sum += std::exp(x - most);
  for (double& x : p) x -= most + std::log(sum);
  return p;
}

/// Texts behind <bos>, each token drawn with its probability.
std::vector<text> draw_texts(const gemma4::model<cpu>& model, context_of<cpu>& ctx, const arguments& args, token_id bos) {
  std::mt19937 random(1);
  gemma4::session<cpu> session(model, ctx);
  std::vector<text> texts(args.texts, text{bos});
  for (text& t : texts) {
    session.clear();
    while (t.size() < args.length) {
      session.verify(std::span(t).last(1));
      session.commit(1);
      const std::vector<double> p = log_probabilities(session.logits(), 0);
      double left = static_cast<double>(random()) / 0x1p32;
      std::size_t id = 0;
      for (; id + 1 < p.size() && (left -= std::exp(p[id])) >= 0; ++id) {
      }
      t.push_back(static_cast<token_id>(id));
    }
  }
  return texts;
}

/// How far one model's distributions are from another's.
struct distance {
  std::vector<double> divergences;  // KL(a ‖ b) per position, in nats
  std::size_t agreements = 0;

  void add(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += std::exp(a[i]) * (a[i] - b[i]);
    divergences.push_back(sum);
    const auto best = [](const std::vector<double>& p) { return std::max_element(p.begin(), p.end()) - p.begin(); };
    if (best(a) == best(b)) ++agreements;
  }
  void print(const char* what) {
    std::sort(divergences.begin(), divergences.end());
    const auto n = static_cast<double>(divergences.size());
    double mean = 0;
    for (const double d : divergences) mean += d / n;
    std::printf("  %-44s %.6f   %.6f   %.2f %%\n", what, mean, divergences[static_cast<std::size_t>(0.99 * n)],
                100 * static_cast<double>(agreements) / n);
  }
};

void compare(const gemma4::model<cpu>& original, const std::string& target, context_of<cpu>& ctx, const std::vector<text>& texts) {
  const auto stored = gemma4::load_model<cpu>(target, {gemma4::weight_form::stored, {}});
  const auto grouped = gemma4::load_model<cpu>(target, {gemma4::weight_form::grouped, {}});
  gemma4::session<cpu> exact(original, ctx), floats(stored, ctx), integers(grouped, ctx);
  distance of_weights, of_activations, of_both;
  const auto compare_row = [&](std::size_t r) {
    const auto p = log_probabilities(exact.logits(), r), q = log_probabilities(floats.logits(), r),
               s = log_probabilities(integers.logits(), r);
    of_weights.add(p, q);
    of_activations.add(q, s);
    of_both.add(p, s);
  };
  for (const text& t : texts) read(t, compare_row, exact, floats, integers);
  std::printf("\n%s%s\n", target.c_str(), grouped.int8_activations() ? "" : ": has no products with int8 activations");
  of_weights.print("its weights, with float activations");
  of_activations.print("int8 against float activations");
  of_both.print("its weights, with int8 activations");
}

/// The same model with keys and values stored as Kv, against float.
template <class Kv>
void compare_keys(const gemma4::model<cpu>& model, const char* what, context_of<cpu>& ctx, const std::vector<text>& texts) {
  gemma4::session<cpu> exact(model, ctx);
  gemma4::session<cpu, Kv> rounded(model, ctx);
  distance apart;
  double error = 0, size = 0;  // sums of squares of the logits, each row from its mean, which no distribution depends on
  const auto compare_row = [&](std::size_t r) {
    const auto a = exact.logits(), b = rounded.logits();
    double mean = 0, shift = 0;
    for (std::size_t i = 0; i < a.cols; ++i) mean += a(r, i), shift += double{b(r, i)} - double{a(r, i)};
    mean /= static_cast<double>(a.cols), shift /= static_cast<double>(a.cols);
    for (std::size_t i = 0; i < a.cols; ++i) {
      error += std::pow(double{b(r, i)} - double{a(r, i)} - shift, 2);
      size += std::pow(double{a(r, i)} - mean, 2);
    }
    apart.add(log_probabilities(a, r), log_probabilities(b, r));
  };
  for (const text& t : texts) read(t, compare_row, exact, rounded);
  apart.print(what);
  std::printf("  %-44s %.6f of the logits' own spread, rms\n", "", std::sqrt(error / size));
}

}  // namespace

int main(int argc, char** argv) try {
  arguments args;
  for (const char* type : {"q8_0", "q4_0", "q4_k_m"})
    args.targets.push_back(std::string(OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/gguf/target-") + type + ".gguf");
  CLI::App app(
      "Measures what int8 activations cost in fidelity, next to what the quantised weights cost already, and what keys and values in "
      "fewer\n"
      "bits cost. Without options: the tiny target of examples/data in three quantised types.");
  auto* original = app.add_option("--original", args.original, "The model whose weights are not quantised: directory or GGUF file");
  app.add_option("--target", args.targets, "The same model quantised, GGUF files")->needs(original);
  app.add_option("--texts", args.texts, "How many texts are drawn from the original")->capture_default_str()->check(CLI::Range(1, 10000));
  app.add_option("--length", args.length, "Their tokens")->capture_default_str()->check(CLI::Range(2, 1 << 20));
  app.add_option("--threads", args.threads, "Threads; one per core if not given")->check(CLI::Range(1, 1024));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& wrong) {
    return app.exit(wrong) == 0 ? 0 : 2;
  }
  context_of<cpu> ctx(execution{args.threads});
  const auto place = gemma4::locate_model(args.original);
  const auto model = gemma4::load_model<cpu>(place);
  const std::vector<text> texts = draw_texts(model, ctx, args, tokenizer::from_file(place).bos());
  std::printf("%zu texts of %zu tokens, drawn from %s\n", args.texts, args.length, args.original.c_str());
  std::printf("  %-44s KL mean    99 %% below  same likeliest token\n", "");
  compare_keys<bf16>(model, "keys and values in bf16", ctx, texts);
  compare_keys<q8_0>(model, "keys and values in q8_0", ctx, texts);
  for (const std::string& target : args.targets) compare(model, target, ctx, texts);
} catch (const std::exception& problem) {
  std::cerr << "activations: " << problem.what() << "\n";
  return 1;
}
