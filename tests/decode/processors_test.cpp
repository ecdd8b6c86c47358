// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/decode/processors.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/io/safetensors.hpp"
#include "support/refusal.hpp"

namespace {

using namespace outrider;
using testing::mentions;
using testing::refusal;

constexpr float infinite = std::numeric_limits<float>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

float largest_of(const std::vector<float>& row) {
  float largest = -infinite;
  for (const float s : row) largest = s > largest ? s : largest;
  return largest;
}

std::vector<candidate> process(const sampling_options& options, std::vector<float> row, const std::vector<token_id>& text = {},
                               const std::vector<token_id>& ids = {}) {
  row_processor processor(options);
  processor.penalise(row, text);
  const auto kept = processor.candidates(row, ids, largest_of(row));
  return {kept.begin(), kept.end()};
}

std::vector<token_id> ids_of(const std::vector<candidate>& kept) {
  std::vector<token_id> ids;
  for (const candidate& c : kept) ids.push_back(c.id);
  return ids;
}

/// The definition, slowly: everything sorted, best first and lower ids first, then cut.
std::vector<token_id> kept_by_definition(const sampling_options& o, const std::vector<float>& row) {
  std::vector<candidate> all;
  for (std::size_t c = 0; c < row.size(); ++c)
    if (row[c] > -infinite) all.push_back({static_cast<token_id>(c), score_of(row[c], largest_of(row), o.temperature)});
  std::stable_sort(all.begin(), all.end(), [](const candidate& a, const candidate& b) { return a.score > b.score; });
  if (o.top_k > 0 && o.top_k < all.size())
    while (all.back().score < all[o.top_k - 1].score) all.pop_back();
  if (o.top_p < 1) {
    const double total = total_weight(all);
    double before = 0;
    std::size_t count = 0;
    for (; count < all.size() && before < o.top_p * total; ++count) before += std::exp(all[count].score);
    all.resize(count);
  }
  while (o.min_p > 0 && all.back().score < std::log(o.min_p)) all.pop_back();
  std::vector<token_id> ids = ids_of(all);
  std::sort(ids.begin(), ids.end());
  return ids;
}

// --- options

TEST_CASE("the default options and all limits of what is allowed are accepted") {
  check({});
  check({.temperature = 100, .top_k = 1, .top_p = 1e-9, .min_p = 1, .repetition_penalty = 1e-3});
  check({.presence_penalty = -2, .frequency_penalty = 2});
}

TEST_CASE("an option outside what is allowed is refused by name, with the value") {
  const auto refuses = [](const sampling_options& options, const char* name, const char* value) {
    const std::string sentence = refusal(error_code::argument_invalid, [&] { check(options); });
    CAPTURE(sentence);
    CHECK(mentions(sentence, "outrider: ", name, value, "must be"));
    CHECK(refusal(error_code::argument_invalid, [&] { row_processor processor(options); }) == sentence);
  };
  for (const double bad : {nan, double{infinite}, -double{infinite}, -0.5}) refuses({.temperature = bad}, "temperature", "");
  refuses({.temperature = -0.5}, "temperature", "-0.5");
  for (const double bad : {nan, double{infinite}, 0.0, -1.0, 1.5}) refuses({.top_p = bad}, "top_p", "");
  refuses({.top_p = 1.5}, "top_p", "1.5");
  for (const double bad : {nan, double{infinite}, -0.25, 1.25}) refuses({.min_p = bad}, "min_p", "");
  refuses({.min_p = -0.25}, "min_p", "-0.25");
  for (const double bad : {nan, double{infinite}, 0.0, -1.0}) refuses({.repetition_penalty = bad}, "repetition penalty", "");
  refuses({.repetition_penalty = 0}, "repetition penalty", "0.0");
  for (const double bad : {nan, double{infinite}, -double{infinite}}) {
    refuses({.presence_penalty = bad}, "presence penalty", "");
    refuses({.frequency_penalty = bad}, "frequency penalty", "");
  }
}

// --- penalties

TEST_CASE("the repetition penalty divides what is positive and multiplies what is negative, once per token") {
  row_processor processor({.repetition_penalty = 2});
  for (int call = 0; call < 2; ++call) {  // the second finds the first's traces, if it left any
    std::vector<float> row{4, -4, 0, 4, -infinite};
    processor.penalise(row, std::vector<token_id>{0, 1, 1, 0, 0, 2, 4});
    CHECK(row == std::vector<float>{2, -8, 0, 4, -infinite});
  }
}

TEST_CASE("presence counts once, frequency each time, both behind the repetition penalty") {
  row_processor processor({.repetition_penalty = 2, .presence_penalty = 1, .frequency_penalty = 0.5});
  std::vector<float> row{4, -4, 3};
  processor.penalise(row, std::vector<token_id>{0, 1, 0, 0});
  CHECK(row == std::vector<float>{4.0f / 2 - 1 - 1.5f, -8 - 1 - 0.5f, 3});
}

TEST_CASE("tokens that the row has no column for are passed over") {
  row_processor processor({.presence_penalty = 1});
  std::vector<float> row{4, 4};
  processor.penalise(row, std::vector<token_id>{-1, 2, (std::numeric_limits<token_id>::max)(), 1});
  CHECK(row == std::vector<float>{4, 3});
}

TEST_CASE("negative penalties favour what was said") {
  row_processor processor({.presence_penalty = -1, .frequency_penalty = -1});
  std::vector<float> row{4, 4};
  processor.penalise(row, std::vector<token_id>{1, 1});
  CHECK(row == std::vector<float>{4, 7});
}

// --- filters

TEST_CASE("what ties with the k-th stays") {
  CHECK(ids_of(process({.temperature = 1, .top_k = 2}, {1, 3, 2, 2, 2, 0})) == std::vector<token_id>{1, 2, 3, 4});
  CHECK(ids_of(process({.temperature = 1, .top_k = 1}, {5, 5, 5})) == std::vector<token_id>{0, 1, 2});
}

TEST_CASE("k as large as the row, or larger, keeps all") {
  for (const std::size_t k : {std::size_t{3}, std::size_t{4}, (std::numeric_limits<std::size_t>::max)()})
    CHECK(ids_of(process({.temperature = 1, .top_k = k}, {1, 3, 2})) == std::vector<token_id>{0, 1, 2});
}

TEST_CASE("top-p keeps the token that reaches the threshold, and the lower of equal ids") {
  CHECK(ids_of(process({.temperature = 1, .top_p = 0.5}, {0, 0, 0, 0})) == std::vector<token_id>{0, 1});
  CHECK(ids_of(process({.temperature = 1, .top_p = 0.51}, {0, 0, 0, 0})) == std::vector<token_id>{0, 1, 2});
  CHECK(ids_of(process({.temperature = 1, .top_p = 1e-12}, {0, 1, 1, 0})) == std::vector<token_id>{1});
}

TEST_CASE("top-p breaks ties by token, not by column") {
  CHECK(ids_of(process({.temperature = 1, .top_p = 0.5}, {0, 0, 0, 0}, {}, {9, 7, 3, 8})) == std::vector<token_id>{7, 3});
}

TEST_CASE("min-p 1 keeps the largest and its equals") {
  CHECK(ids_of(process({.temperature = 0.3, .min_p = 1}, {2, 7, 7, 6.999f})) == std::vector<token_id>{1, 2});
}

TEST_CASE("masked tokens and NaN are never candidates, under any filter") {
  const std::vector<float> row{-infinite, 1, std::numeric_limits<float>::quiet_NaN(), -infinite, 0, -infinite};
  for (const sampling_options& options : {sampling_options{.temperature = 1},
                                          {.temperature = 1, .top_k = 4},
                                          {.temperature = 1, .top_k = 5},
                                          {.temperature = 1, .top_p = 0.999},
                                          {.temperature = 1, .min_p = 1e-30}})
    CHECK(ids_of(process(options, row)) == std::vector<token_id>{1, 4});
}

TEST_CASE("one token that is not masked is kept by every filter") {
  std::vector<float> row(100, -infinite);
  row[63] = -1e30f;
  for (const sampling_options& options : {sampling_options{.temperature = 1e-3},
                                          {.temperature = 100, .top_k = 4},
                                          {.temperature = 1, .top_p = 1e-9},
                                          {.temperature = 1, .min_p = 1}}) {
    const auto kept = process(options, row);
    REQUIRE(kept.size() == 1);
    CHECK(kept[0].id == 63);
    CHECK(kept[0].score == 0);
  }
}

TEST_CASE("the smallest temperature leaves the largest all the weight, the largest temperature shares it out") {
  const std::vector<float> row{1, 3, 2};
  CHECK(total_weight(process({.temperature = 5e-324}, row)) == 1);
  CHECK(total_weight(process({.temperature = 1.7e308}, row)) == doctest::Approx(3));
  CHECK(ids_of(process({.temperature = 5e-324, .top_p = 0.9}, row)) == std::vector<token_id>{1});
}

TEST_CASE("an infinite logit takes all the weight") {
  const auto kept = process({.temperature = 1, .top_p = 0.9}, {1, infinite, 2});
  REQUIRE(kept.size() == 1);
  CHECK(kept[0].id == 1);
}

TEST_CASE("any filter on any row keeps what the definition keeps") {
  std::mt19937 random(123);
  const auto uniform = [&](double low, double high) { return std::uniform_real_distribution<double>(low, high)(random); };
  for (int trial = 0; trial < 1500; ++trial) {
    const auto size = static_cast<std::size_t>(1 + trial % 7 * 80 + trial % 11);
    std::vector<float> row(size);
    const double spread = std::exp(uniform(-6, 5)), grid = trial % 3 == 0 ? spread / 2 : 0;  // a grid makes ties
    for (float& s : row) {
      const double value = std::normal_distribution<double>(0, spread)(random);
      s = uniform(0, 1) < 0.05 ? -infinite : static_cast<float>(grid > 0 ? std::round(value / grid) * grid : value);
    }
    if (trial % 5 == 0) std::sort(row.begin(), row.end());  // the order in which every logit is a new best
    row[static_cast<std::size_t>(trial) % size] = 0;
    sampling_options o{.temperature = std::exp(uniform(-3, 3))};
    if (trial & 1) o.top_k = static_cast<std::size_t>(uniform(1, static_cast<double>(size) * 1.2 + 1));
    if (trial & 2) o.top_p = uniform(0.01, 0.9999);
    if (trial & 4) o.min_p = std::exp(uniform(-12, 0));
    CAPTURE(trial);
    CAPTURE(size);
    CHECK(ids_of(process(o, row)) == kept_by_definition(o, row));
  }
}

// --- tests/golden/sampling

template <class T>
std::vector<T> tensor(const io::tensor_set& tensors, const std::string& name) {
  const io::tensor& t = tensors.at(name);
  std::vector<T> values(t.bytes.size() / sizeof(T));
  std::memcpy(values.data(), t.bytes.data(), t.bytes.size());
  return values;
}

TEST_CASE("scores, probabilities and kept tokens are those of huggingface transformers") {
  const std::filesystem::path directory = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "tests/golden/sampling";
  const auto json = nlohmann::json::parse(std::ifstream(directory / "expected.json"));
  const io::tensor_set tensors = io::load_safetensors(directory / "expected.safetensors");
  const std::size_t count = tensors.at("rows").shape[0], vocabulary = tensors.at("rows").shape[1];
  const auto rows = tensor<float>(tensors, "rows");
  const double score_tolerance = json["tolerance"]["scores"], probability_tolerance = json["tolerance"]["probs"];
  REQUIRE(json["sets"].size() >= 19);

  for (const auto& entry : json["sets"].items()) {
    const std::string& set = entry.key();
    const auto& about = entry.value();
    const auto& parameters = about["parameters"];
    const sampling_options options{.temperature = parameters.value("temperature", 1.0),
                                   .top_k = parameters.value("top_k", std::size_t{0}),
                                   .top_p = parameters.value("top_p", 1.0),
                                   .min_p = parameters.value("min_p", 0.0),
                                   .repetition_penalty = parameters.value("repetition_penalty", 1.0)};
    row_processor processor(options);
    const auto want_scores = tensor<float>(tensors, "scores." + set), want = tensor<float>(tensors, "probs." + set);
    for (std::size_t r = 0; r < count; ++r) {
      CAPTURE(set);
      CAPTURE(r);
      const auto wide = tensor<std::int64_t>(tensors, "context." + std::to_string(r));
      const std::vector<token_id> text(wide.begin(), wide.end());
      std::vector<float> row(rows.begin() + static_cast<std::ptrdiff_t>(r * vocabulary),
                             rows.begin() + static_cast<std::ptrdiff_t>((r + 1) * vocabulary));
      processor.penalise(row, text);
      const float largest = largest_of(row);
      const auto kept = processor.candidates(row, {}, largest);
      CHECK(kept.size() == about["kept"][r].get<std::size_t>());

      // Of tokens that equal the last one kept, theirs are those that an unstable sort left: they are compared by score alone.
      std::vector<double> scores(vocabulary, -infinite), got, theirs;
      double lowest = infinite;
      for (const candidate& c : kept) {
        scores[static_cast<std::size_t>(c.id)] = c.score + double{largest} / options.temperature;
        got.push_back(scores[static_cast<std::size_t>(c.id)]);
        lowest = (std::min)(lowest, got.back());
      }
      const double total = total_weight(kept);
      double worst_score = 0, worst_probability = 0;
      std::size_t differently_kept = 0;
      for (std::size_t c = 0; c < vocabulary; ++c) {
        const float expected = want_scores[r * vocabulary + c];
        if (expected > -infinite) theirs.push_back(double{expected});
        if ((scores[c] > -infinite) != (expected > -infinite)) {
          const double score = double{row[c]} / options.temperature;
          if (std::abs(score - lowest) > score_tolerance) ++differently_kept;
          continue;
        }
        if (scores[c] > -infinite) worst_score = (std::max)(worst_score, std::abs(scores[c] - double{expected}));
        const double probability = scores[c] > -infinite ? std::exp(scores[c] - double{largest} / options.temperature) / total : 0;
        worst_probability = (std::max)(worst_probability, std::abs(probability - double{want[r * vocabulary + c]}));
      }
      CHECK(differently_kept == 0);
      CHECK(worst_score <= score_tolerance);
      CHECK(worst_probability <= probability_tolerance);
      std::sort(got.begin(), got.end());
      std::sort(theirs.begin(), theirs.end());
      REQUIRE(got.size() == theirs.size());
      for (std::size_t i = 0; i < got.size(); ++i) CHECK(std::abs(got[i] - theirs[i]) <= score_tolerance);
    }
  }
}

}  // namespace
