// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

#include "outrider/config.hpp"

namespace outrider {

// How a CPU backend spreads work: a policy is a class whose objects are made for a number of threads, belong to a context, and serve one thread
// of the program at a time. It has
//   for_ranges(count, grain, body)     calls body(begin, end), which must not throw, until 0 … count - 1 are covered, in ranges whose inner
//                                      borders are multiples of grain; returns when all is done. body must not call for_ranges itself.
//   threads()                          how many threads take part, the calling one included
//   default_threads()                  static: one per core that the process may use
// Ranges never share an output, so the split cannot change a result. This is the only file with an OpenMP directive.

namespace detail {

/// Ranges of a job: never smaller than grain, and some for each thread, so that one which is held up delays no more than its own.
struct range_cutter {
  std::size_t count, grain, pieces, ranges;

  range_cutter(std::size_t count_, std::size_t grain_, unsigned threads) noexcept
      : count(count_),
        grain(grain_),
        pieces(count_ / grain_),
        ranges(threads == 1 ? 1 : (std::min)(pieces, ranges_per_thread * std::size_t{threads})) {}

  [[nodiscard]] std::size_t begin(std::size_t i) const noexcept { return i == ranges ? count : pieces * i / ranges * grain; }

  /// Does a job of one range at most on the calling thread; false if there are more.
  template <class Body>
  bool whole(Body& body) const noexcept {
    if (ranges > 1) return false;
    if (count != 0) body(std::size_t{0}, count);
    return true;
  }

  static constexpr std::size_t ranges_per_thread = 8;
};

inline unsigned usable_cores() noexcept {
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return static_cast<unsigned>((std::max)(1, CPU_COUNT(&allowed)));
#endif
  return (std::max)(1u, std::thread::hardware_concurrency());
}

/// Tells the core that this thread waits in a loop.
inline void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // "yield" takes no time on most cores
#else
  std::this_thread::yield();
#endif
}

}  // namespace detail

/// Everything on the calling thread.
class serial {
 public:
  explicit serial(unsigned /*threads*/ = 1) noexcept {}
  [[nodiscard]] static unsigned default_threads() noexcept { return 1; }
  [[nodiscard]] unsigned threads() const noexcept { return 1; }
  template <class Body>
  void for_ranges(std::size_t count, std::size_t /*grain*/, Body&& body) noexcept {
    if (count != 0) body(std::size_t{0}, count);
  }
};

/// Threads of its own that stay. Each takes ranges of its own share of a job, one after the other, and then helps those that are behind; so the
/// same thread meets the same weights in every pass, and yet a job ends on time if another program holds a core. Between jobs a thread
/// watches for the next one for some tens of microseconds, longer than a pass is ever serial, and then sleeps.
class thread_pool {
 public:
  /// Of `threads`, at least 1 and at most most_threads. Throws std::system_error if the system gives no more of them.
  explicit thread_pool(unsigned threads) : threads_(std::clamp(threads, 1u, most_threads)), shares_(std::make_unique<share[]>(threads_)) {
    workers_.reserve(threads_ - 1);
    try {
      for (unsigned t = 1; t < threads_; ++t) workers_.emplace_back([this, t] { work(t); });
    } catch (const std::system_error& problem) {
      stop();
      throw std::system_error(problem.code(), "outrider: the system gives no more than " + std::to_string(workers_.size() + 1) + " of " +
                                                  std::to_string(threads_) + " threads");
    } catch (...) {
      stop();
      throw;
    }
  }
  thread_pool(const thread_pool&) = delete;
  thread_pool& operator=(const thread_pool&) = delete;
  ~thread_pool() { stop(); }

  static constexpr unsigned most_threads = 4096;
  [[nodiscard]] static unsigned default_threads() noexcept { return (std::min)(detail::usable_cores(), most_threads); }
  [[nodiscard]] unsigned threads() const noexcept { return threads_; }

  template <class Body>
  void for_ranges(std::size_t count, std::size_t grain, Body&& body) noexcept {
    const detail::range_cutter cut(count, grain, threads_);
    if (cut.whole(body)) return;
    using body_type = std::remove_reference_t<Body>;
    OUTRIDER_ASSERT(left_.load(std::memory_order_relaxed) == 0);  // one job at a time, and none from inside another
    job_ = {&cut, const_cast<void*>(static_cast<const void*>(&body)),
            [](void* what, std::size_t begin, std::size_t end) noexcept { (*static_cast<body_type*>(what))(begin, end); }};
    left_.store(static_cast<std::uint32_t>(cut.ranges), std::memory_order_relaxed);
    const std::uint32_t number = number_.load(std::memory_order_relaxed) + 1;
    for (unsigned t = 0; t < threads_; ++t)
      shares_[t].state.store(pack(number, cut.ranges * t / threads_, cut.ranges * (t + 1) / threads_), std::memory_order_release);
    number_.store(number, std::memory_order_seq_cst);  // before the look at who sleeps
    number_.notify_all();

    take_part(0, number);
    for (unsigned spins = 0;;) {
      const std::uint32_t left = left_.load(std::memory_order_acquire);
      if (left == 0) return;
      if (++spins < patience) {
        detail::relax();
      } else {
        left_.wait(left, std::memory_order_acquire);  // the core of a thread that has a range is taken: leave it ours
      }
    }
  }

 private:
  static constexpr unsigned patience = 2000;  // looks, each some ten to thirty nanoseconds

  struct job {
    const detail::range_cutter* cut;
    void* body;
    void (*call)(void* body, std::size_t begin, std::size_t end) noexcept;
  };
  /// The ranges of one thread that nobody has taken, with the number of their job: one word, so that a thread which looks late, when the
  /// next job is there already, cannot take a range for the wrong one. Who has taken a range may read job_ until he has reported it done.
  struct alignas(64) share {
    std::atomic<std::uint64_t> state{0};
  };
  // 16 bits for a range: 8 for each thread.
  static constexpr std::uint64_t pack(std::uint32_t number, std::size_t next, std::size_t end) noexcept {
    return std::uint64_t{number} << 32 | static_cast<std::uint64_t>(next) << 16 | static_cast<std::uint64_t>(end);
  }

  void take_part(unsigned self, std::uint32_t number) noexcept {
    for (unsigned i = 0; i < threads_; ++i) {
      std::atomic<std::uint64_t>& state = shares_[(self + i) % threads_].state;
      std::uint64_t now = state.load(std::memory_order_acquire);
      while (now >> 32 == number && (now >> 16 & 0xffff) < (now & 0xffff)) {
        if (!state.compare_exchange_weak(now, now + 0x10000, std::memory_order_acquire)) continue;
        const std::size_t range = now >> 16 & 0xffff;
        job_.call(job_.body, job_.cut->begin(range), job_.cut->begin(range + 1));
        if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_one();
        now = state.load(std::memory_order_acquire);
      }
    }
  }

  void work(unsigned self) noexcept {
    for (std::uint32_t seen = 0;;) {
      std::uint32_t number = number_.load(std::memory_order_acquire);
      for (unsigned spins = 0; number == seen && spins < patience; ++spins) {
        detail::relax();
        number = number_.load(std::memory_order_acquire);
      }
      if (number == seen) {
        number_.wait(seen, std::memory_order_acquire);
        continue;
      }
      if (stopping_.load(std::memory_order_acquire)) return;
      seen = number;
      take_part(self, number);
    }
  }

  void stop() noexcept {
    stopping_.store(true, std::memory_order_release);
    number_.fetch_add(1, std::memory_order_release);
    number_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  unsigned threads_;
  std::unique_ptr<share[]> shares_;
  std::vector<std::thread> workers_;
  job job_{};
  alignas(64) std::atomic<std::uint32_t> number_{0};  // of the last job
  alignas(64) std::atomic<std::uint32_t> left_{0};    // its ranges that are not done
  std::atomic<bool> stopping_{false};
};

#if defined(_OPENMP)
/// An OpenMP team, for programs whose other work runs on one. Its waiting threads spin, which costs milliseconds a job where another program
/// holds a core.
class openmp {
 public:
  explicit openmp(unsigned threads) noexcept : threads_((std::max)(1u, threads)) {}
  [[nodiscard]] static unsigned default_threads() noexcept { return static_cast<unsigned>((std::max)(1, omp_get_num_procs())); }
  [[nodiscard]] unsigned threads() const noexcept { return threads_; }

  template <class Body>
  void for_ranges(std::size_t count, std::size_t grain, Body&& body) noexcept {
    const detail::range_cutter cut(count, grain, threads_);
    if (cut.whole(body)) return;
      // The team always has all threads, even if some find nothing to do: with another size libgomp would allocate and start a new one.
      // clang-format off
#pragma omp parallel for num_threads(static_cast<int>(threads_)) schedule(dynamic, 1)
    // clang-format on
    for (std::size_t i = 0; i < cut.ranges; ++i) body(cut.begin(i), cut.begin(i + 1));
  }

 private:
  unsigned threads_;
};
#endif

}  // namespace outrider
