// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What the benches share: what they say about the machine, how they condense samples, and how fast memory is read here and now.
#pragma once
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "outrider/core/storage.hpp"

namespace bench {

/// The processor's own name, "unknown" where the system does not tell.
inline std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr((std::min)(line.find(':') + 2, line.size()));
  return "unknown";
}

/// Compiler, version, and the flags where the build passes them as OUTRIDER_CXX_FLAGS.
inline std::string compiler() {
#if defined(__clang__)
  std::string text = "clang " __clang_version__;
#else
  std::string text = "gcc " __VERSION__;
#endif
#if defined(OUTRIDER_CXX_FLAGS)
  text += " " OUTRIDER_CXX_FLAGS;
#endif
#if !defined(__OPTIMIZE__)
  text += " (not optimised)";
#endif
  return text;
}

template <class Work>
double milliseconds(Work&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

/// The most memory this process has held at a time, in bytes; pages of mapped files that were touched included.
inline std::size_t peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
#if defined(__APPLE__)
  return static_cast<std::size_t>(usage.ru_maxrss);
#else
  return static_cast<std::size_t>(usage.ru_maxrss) * 1024;
#endif
}

/// Median and quartiles of at least one sample.
struct summary {
  double low = 0, median = 0, high = 0;

  explicit summary(std::vector<double> samples) {
    std::sort(samples.begin(), samples.end());
    const std::size_t last = samples.size() - 1;
    low = samples[last / 4];
    median = (samples[last / 2] + samples[last - last / 2]) / 2;
    high = samples[last - last / 4];
  }
};

/// Reads a buffer that no cache holds, as weights are read: every thread its own contiguous part.
class memory_reader {
 public:
  explicit memory_reader(unsigned threads) : threads_(threads), words_(bytes() / sizeof(std::uint64_t)) {
#if defined(MADV_HUGEPAGE)
    // In small pages a core reads a fifth less (Zen 4). Refused or not, the figure is this machine's.
    constexpr std::size_t page = 4096;
    const auto begin = (reinterpret_cast<std::uintptr_t>(words_.data()) + page - 1) / page * page;
    static_cast<void>(madvise(reinterpret_cast<void*>(begin), bytes() - page, MADV_HUGEPAGE));
#endif
    for (std::uint64_t& word : words_.span()) word = 1;  // pages never written are all one page of zeros, in the cache
  }

  /// GB/s (10^9 bytes) of one pass over the buffer, each thread following `Streams` places of its part at once.
  template <std::size_t Streams>
  double gigabytes_per_second() {
    const auto* memory = reinterpret_cast<const lanes*>(words_.data());
    const std::size_t lines = words_.size() * sizeof(std::uint64_t) / line_bytes / threads_;  // of a thread
    const std::size_t length = (lines / Streams - 1) | 1;  // of a stream; odd, so that streams differ in their cache sets
    std::atomic<std::uint64_t> total{0};                   // keeps the loads alive
    const auto read = [&](std::size_t begin) {
      lanes a{}, b{}, c{}, d{};
      for (std::size_t i = 0; i < length; ++i)
        for (std::size_t s = 0; s < Streams; ++s) {
          const lanes* line = memory + (begin + s * length + i) * (line_bytes / sizeof(lanes));
          a += line[0], b += line[1], c += line[2], d += line[3];
        }
      const lanes sum = a + b + c + d;
      total += sum[0] + sum[1];
    };
    const double ms = milliseconds([&] {
      std::vector<std::thread> others;
      for (unsigned t = 1; t < threads_; ++t) others.emplace_back(read, t * lines);
      read(0);
      for (std::thread& other : others) other.join();
    });
    sink_ = total;
    return static_cast<double>(length * Streams * threads_ * line_bytes) / ms / 1e6;
  }

 private:
  using lanes [[gnu::vector_size(16), gnu::may_alias]] = std::uint64_t;
  static constexpr std::size_t line_bytes = 64;

  /// Four times the last cache, within 256 MiB and 1 GiB.
  static std::size_t bytes() {
    long cache = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
    cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    return std::clamp(4 * static_cast<std::size_t>((std::max)(cache, 0L)), std::size_t{256} << 20, std::size_t{1} << 30);
  }

  unsigned threads_;
  outrider::buffer<std::uint64_t, outrider::host_space> words_;
  volatile std::uint64_t sink_ = 0;
};

}  // namespace bench
