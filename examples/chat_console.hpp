// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The keyboard of chat.cpp: lines from standard input, and Ctrl-C.
#pragma once
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <optional>
#include <string>
#include <system_error>

/// Ctrl-C from now on is noted instead of ending the program. One object at a time.
class interrupt_watch {
 public:
  interrupt_watch() {
    // Where a standard stream is closed, the pipe would take its number, and the program read its own signals as lines.
    for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
      if (::fcntl(stream, F_GETFD) < 0) [[maybe_unused]]
        const int taken = ::open("/dev/null", O_RDONLY);
    if (::pipe(pipe()) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
    for (const int end : {pipe()[0], pipe()[1]}) {
      ::fcntl(end, F_SETFL, O_NONBLOCK);
      ::fcntl(end, F_SETFD, FD_CLOEXEC);
    }
    struct sigaction action = {};
    action.sa_handler = [](int) {
      const int error_number = errno;
      [[maybe_unused]] const auto ignored = ::write(pipe()[1], "", 1);  // full: it is noted already
      errno = error_number;
    };
    action.sa_flags = SA_RESTART;  // an answer that waits for a slow reader goes on being written; poll() ends all the same
    ::sigaction(SIGINT, &action, nullptr);
  }
  interrupt_watch(const interrupt_watch&) = delete;
  interrupt_watch& operator=(const interrupt_watch&) = delete;

  /// Readable once Ctrl-C was pressed: unlike a flag, poll() cannot miss it.
  [[nodiscard]] int descriptor() const noexcept { return pipe()[0]; }
  /// Whether Ctrl-C was pressed since clear().
  [[nodiscard]] bool pressed() const noexcept {
    pollfd watched{descriptor(), POLLIN, 0};
    return ::poll(&watched, 1, 0) == 1;
  }
  void clear() noexcept {
    std::array<char, 64> bytes;
    while (::read(descriptor(), bytes.data(), bytes.size()) > 0) {
    }
  }

 private:
  static int* pipe() noexcept {  // read end, write end; a signal handler finds its things in static storage
    static int ends[2];
    return ends;
  }
};

/// Standard input, line by line.
class line_reader {
 public:
  /// The next line without its end; nothing at the end of the input, or when Ctrl-C is pressed while waiting for it. Throws
  /// std::system_error if the input cannot be read.
  std::optional<std::string> next(interrupt_watch& interrupts) {
    interrupts.clear();
    for (;;) {
      if (const std::size_t end = pending_.find('\n', searched_); end != pending_.npos) return take(end, 1);
      searched_ = pending_.size();
      if (ended_) return pending_.empty() ? std::nullopt : take(pending_.size(), 0);
      std::array<pollfd, 2> watched{{{STDIN_FILENO, POLLIN, 0}, {interrupts.descriptor(), POLLIN, 0}}};
      if (::poll(watched.data(), watched.size(), -1) < 0) continue;  // EINTR: the pipe has it
      if (watched[1].revents != 0) return std::nullopt;
      std::array<char, 4096> bytes;
      const auto count = ::read(STDIN_FILENO, bytes.data(), bytes.size());
      if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (count < 0) throw std::system_error(errno, std::generic_category(), "standard input cannot be read");
      ended_ = count == 0;
      pending_.append(bytes.data(), static_cast<std::size_t>(count));
    }
  }

 private:
  std::optional<std::string> take(std::size_t length, std::size_t end) {
    std::string line = pending_.substr(0, length);
    pending_.erase(0, length + end);
    searched_ = 0;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    return line;
  }

  std::string pending_;
  std::size_t searched_ = 0;  // so far no line ends in pending_
  bool ended_ = false;
};
