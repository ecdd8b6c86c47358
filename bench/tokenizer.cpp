// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// How fast texts become ids and ids texts, on one core: ordinary text, and single words of 64 KiB and 1 MiB, whose times show that a long
// word costs n log n. A text that does not come back from its ids gets no figure.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "machine.hpp"
#include "outrider/io/mapped_file.hpp"
#include "outrider/text/tokenizer.hpp"

namespace {

using namespace outrider;

struct sample_text {
  std::string name, text;
};

/// The lines of the files, shuffled and repeated up to 4 MiB: words as they are, in an order that no cache has seen.
std::string shuffled_lines(const std::vector<std::string>& files) {
  std::vector<std::string> lines;
  for (const std::string& file : files) {
    const std::string text = io::read_text_file(file);
    for (std::size_t begin = 0, end; begin < text.size(); begin = end) {
      end = (std::min)(text.find('\n', begin), text.size() - 1) + 1;
      if (text.find("▁") == text.npos) lines.push_back(text.substr(begin, end - begin));
    }
  }
  if (lines.empty()) throw std::runtime_error("the files have no line to measure with");
  std::mt19937 random(1);
  std::string text;
  while (text.size() < (std::size_t{4} << 20)) text += lines[random() % lines.size()];
  return text;
}
std::vector<std::string> headers() {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(OUTRIDER_SOURCE_DIR "/include"))
    if (entry.is_regular_file()) files.push_back(entry.path().string());
  for (const char* page : {"README.md", "docs/design.md", "docs/contributing.md", "docs/performance.md"})
    files.push_back(std::string(OUTRIDER_SOURCE_DIR "/") + page);
  return files;
}

void measure(const tokenizer& tokens, const sample_text& sample, std::size_t repeat) {
  std::vector<double> encode, decode;
  std::size_t ids = 0;
  for (std::size_t i = 0; i < repeat; ++i) {
    std::vector<token_id> encoded;
    std::string decoded;
    const double megabytes = static_cast<double>(sample.text.size()) / 1e6;
    encode.push_back(megabytes / (bench::milliseconds([&] { encoded = tokens.encode(sample.text, {.add_bos = false}); }) / 1e3));
    decode.push_back(megabytes / (bench::milliseconds([&] { decoded = tokens.decode_bytes(encoded); }) / 1e3));
    if (decoded != sample.text) throw std::runtime_error(sample.name + " does not come back from its ids");
    ids = encoded.size();
  }
  std::cout << std::left << std::setw(20) << sample.name << std::right << std::setw(9) << sample.text.size() << std::setw(9) << ids;
  for (const bench::summary s : {bench::summary(std::move(encode)), bench::summary(std::move(decode))})
    std::cout << std::fixed << std::setprecision(1) << std::setw(9) << s.median << " (" << s.low << " to " << s.high << ")";
  std::cout << std::endl;
}

}  // namespace

int main(int argc, char** argv) try {
  std::string vocabulary = OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/target";
  std::vector<std::string> files;
  std::size_t repeat = 15;
  CLI::App app("Measures how fast a tokenizer encodes and decodes, on one core.");
  app.add_option("--tokenizer", vocabulary, "tokenizer.json, a directory with one, or a GGUF file; the tiny pair's if not given");
  app.add_option("--text", files, "Files whose lines are the text; this library's own if not given");
  app.add_option("--repeat", repeat, "Samples of every figure")->capture_default_str()->check(CLI::Range(1, 10000));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& wrong) {
    return app.exit(wrong) == 0 ? 0 : 2;
  }

  double load = 0;
  const tokenizer tokens = [&] {
    std::optional<tokenizer> loaded;
    load = bench::milliseconds([&] { loaded.emplace(tokenizer::from_file(vocabulary)); });
    return *std::move(loaded);
  }();
  std::cout << bench::cpu_model() << ", " << bench::compiler() << "\n"
            << vocabulary << ": " << tokens.vocab_size() << " tokens, " << tokens.merges().size() << " merges, loaded in " << load
            << " ms\n"
            << "text                    bytes      ids   encode, decode: MB/s, median (quartiles) of " << repeat << "\n";
  std::vector<sample_text> samples{{"lines", shuffled_lines(files.empty() ? headers() : files)}};
  for (const std::size_t kib : {std::size_t{64}, std::size_t{1024}})
    for (const auto& [name, letter] : {std::pair{"one letter", 'a'}, std::pair{"spaces", ' '}, std::pair{"newlines", '\n'}})
      samples.push_back({std::string(name) + ", " + std::to_string(kib) + " KiB", std::string(kib << 10, letter)});
  for (const sample_text& sample : samples) measure(tokens, sample, repeat);
} catch (const std::exception& problem) {
  std::cerr << "tokenizer: " << problem.what() << "\n";
  return 1;
}
