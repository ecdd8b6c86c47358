// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

/// 1234567 as "1.2 MB".
inline std::string readable(std::uint64_t bytes) {
  double value = static_cast<double>(bytes);
  const char* unit = "bytes";
  for (const char* larger : {"kB", "MB", "GB", "TB"}) {
    if (value < 1000) break;
    value /= 1000;
    unit = larger;
  }
  char text[32];
  std::snprintf(text, sizeof text, value < 10 && bytes >= 1000 ? "%.1f %s" : "%.0f %s", value, unit);
  return text;
}

/// A bar on standard error if that is a terminal, from `patience` on and until all is done; silent elsewhere.
class progress_bar {
 public:
  using clock = std::chrono::steady_clock;

  explicit progress_bar(bool wanted, clock::duration patience = {})
      : shown_(wanted && isatty(STDERR_FILENO)), next_(clock::now() + patience) {}
  ~progress_bar() { erase(); }

  void operator()(std::uint64_t done, std::uint64_t all) {
    if (done == all) erase();
    const auto now = clock::now();
    if (!shown_ || done == all || now < next_) return;
    next_ = now + std::chrono::milliseconds(50);
    drawn_ = true;
    constexpr int width = 40;
    const double share = static_cast<double>(done) / static_cast<double>(all);
    const int filled = static_cast<int>(share * width);
    std::fprintf(stderr, "\r[%s%s] %3.0f %%, %s of %s ", std::string(static_cast<std::size_t>(filled), '#').c_str(),
                 std::string(static_cast<std::size_t>(width - filled), ' ').c_str(), 100 * share, readable(done).c_str(),
                 readable(all).c_str());
  }

 private:
  void erase() {
    if (drawn_) std::fputs("\r\x1b[K", stderr);
    drawn_ = false;
  }

  bool shown_, drawn_ = false;
  clock::time_point next_;
};
