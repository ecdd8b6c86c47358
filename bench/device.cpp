// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// How fast a pair of a released shape decodes on a CUDA device, beside how fast the device reads its memory. Weights are random, so nothing
// has to be downloaded: times do not depend on them. Nothing is reported unless speculation leaves the text as it is.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_model.hpp"
#include "device_passes.hpp"
#include "device_read.hpp"
#include "device_report.hpp"
#include "outrider/backend/cuda.hpp"
#include "outrider/core/storage.hpp"

namespace {

using namespace bench;

/// GB/s of the fastest way to read: with as many blocks of threads as suit the device. Reads 4 GiB, or half of what is free.
std::vector<double> read_bandwidth() {
  const std::size_t bytes = (std::min)(std::size_t{4} << 30, device::free_bytes() / 2) / 4096 * 4096;
  buffer<std::byte, device_space> memory(bytes);
  fill_on_device(memory.data(), bytes);
  std::vector<double> best{0};
  for (const int blocks : {1, 2, 4, 8, 16}) {
    std::vector<double> rates;
    static_cast<void>(read_on_device(memory.data(), bytes, blocks));
    for (int i = 0; i < 11; ++i) rates.push_back(static_cast<double>(bytes) / read_on_device(memory.data(), bytes, blocks) / 1e6);
    if (summary(rates).median > summary(best).median) best = rates;
  }
  return best;
}

template <class Kv>
ordered_json measure(const arguments& args) {
  const std::vector<double> read = read_bandwidth();
  const pair_config config = config_of(args.shape);
  const random_tensors tensors(config, args.weights == "q4_0" ? io::dtype::q4_0 : io::dtype::bf16);
  random_pair<cuda, Kv> pair(config, tensors, args.context);
  const ids prompt = prompt_of(args.context, config.target.vocab_size);
  check_text(pair, prompt);
  pass_timer<cuda, Kv> timer(pair, prompt);
  device_samples unused, samples;
  timer.round(unused);  // makes the graphs
  for (std::size_t i = 0; i < args.repeat; ++i) timer.round(samples);
  return report_of(args, samples, read, tensors.bytes_read);
}

}  // namespace

int main(int argc, char** argv) try {
  arguments args;
  CLI::App app(
      "Measures how a Gemma 4 pair of a released shape, with random weights, decodes on a CUDA device: its share of the rate at which the\n"
      "device reads memory, passes of 2, 4 and 8 rows, draft steps, rounds, a prompt, and launches as a graph and one by one.\n"
      "A goal that is missed is reported, and no error.");
  app.add_option("--shape", args.shape, "Whose shape: a released pair's, or tiny, to try the program")
      ->capture_default_str()
      ->check(CLI::IsMember(std::vector<std::string>(shape_names.begin(), shape_names.end())));
  app.add_option("--weights", args.weights, "The type of all matrices")->capture_default_str()->check(CLI::IsMember({"bf16", "q4_0"}));
  app.add_option("--kv", args.kv, "How keys and values are stored")->capture_default_str()->check(CLI::IsMember({"f32", "bf16", "q8_0"}));
  app.add_option("--repeat", args.repeat, "Rounds: samples of every figure")->capture_default_str()->check(CLI::Range(1, 10000));
  app.add_option("--context", args.context, "Length of the timed prompt, and positions in the cache when passes are timed")
      ->capture_default_str()
      ->check(CLI::Range(rows_timed.back(), std::size_t{1} << 17));
  app.add_option("--json", args.json_file, "Write the figures to this file, too");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& wrong) {
    return app.exit(wrong) == 0 ? 0 : 2;
  }

  const cuda_device device = cuda_devices().front();
  ordered_json result = args.kv == "bf16" ? measure<bf16>(args) : args.kv == "q8_0" ? measure<q8_0>(args) : measure<float>(args);
  result["device"] = {{"name", device.name},
                      {"compute_capability", std::to_string(device.major) + "." + std::to_string(device.minor)},
                      {"multiprocessors", device.multiprocessors},
                      {"memory_bytes", device.memory}};
  print_report(result, device.name + ", compute capability " + std::to_string(device.major) + "." + std::to_string(device.minor) + ", " +
                           std::to_string(device.multiprocessors) + " multiprocessors, " + std::to_string(device.memory >> 30) + " GiB");
  if (!args.json_file.empty() && !(std::ofstream(args.json_file) << result.dump(2) << std::endl))
    throw std::runtime_error(args.json_file + " cannot be written");
} catch (const std::exception& problem) {
  std::cerr << "device: " << problem.what() << "\n";
  return 1;
}
