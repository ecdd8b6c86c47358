// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The emulated machine: the threads of a block, who of them may run, and where they meet. A part of emulation.hpp.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda_emulation/fiber.hpp"
#include "cuda_emulation/math.hpp"

// ---------------------------------------------------------------- keywords and built-in names

#define __global__
#define __device__
#define __host__
#define __constant__ inline
#define __shared__ static  // blocks run one at a time; `static`, not thread_local, because ASan guards the former only
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
inline uint3 threadIdx{}, blockIdx{};
inline dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

namespace outrider::cuda_emulation {

/// What CUDA leaves undefined, found.
struct error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline struct settings_type {
  std::uint64_t seed = 0;   // 0: threads, blocks and independent nodes of graphs in index order; else a random order per seed
  bool check_races = true;  // of shared_array and dynamic_shared
} settings;

struct site {  // std::source_location, which clang 14 lacks
  const char* file = "";
  int line = 0;
  static constexpr site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
  bool operator==(const site&) const = default;
  [[nodiscard]] std::string text() const {
    return std::string(file).substr(std::string(file).find_last_of('/') + 1) + ":" + std::to_string(line);
  }
};

/// Uniform below a bound; the same numbers everywhere (SplitMix64).
class random_choice {
 public:
  explicit random_choice(std::uint64_t seed) : state_(seed) {}
  std::size_t below(std::size_t bound) {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return static_cast<std::size_t>((z >> 32) * bound >> 32);
  }

 private:
  std::uint64_t state_;
};

// ---------------------------------------------------------------- what the machine knows

struct thread;
/// Computes the results of an operation of a warp, when all lanes of `part` wait in it.
using warp_operation = void (*)(thread* lanes, unsigned part);

enum class state { ready, at_barrier, in_warp_operation, done };

struct shadow;  // shared_memory.hpp
struct copy_under_way {
  void* to;
  const void* from;
  std::size_t bytes;
  unsigned group;
  shadow* cells;  // of `count` elements, every `stride`th, the first being number `element`
  int element, count, stride;
};

struct thread {
  uint3 index{};
  unsigned linear = 0, lane = 0, warp = 0;
  state now = state::done;
  const char* what = "";  // the operation it waits in, and where
  site where;
  warp_operation operation = nullptr;
  unsigned mask = 0, source = 0;
  std::uint64_t value = 0, result = 0;
  std::vector<copy_under_way> copies;
  unsigned copy_group = 0;
  fiber own;
};

struct warp_state {  // bit = lane
  unsigned live = 0, waiting = 0;
  unsigned named = 0;  // the union of the masks of the lanes that wait
  unsigned epoch = 0;  // full __syncwarps since the block began
};

inline constexpr unsigned most_threads = 1024;

/// Threads that may run, in the order in which they became ready.
class ready_queue {
 public:
  void clear() { size_ = 0; }
  [[nodiscard]] bool empty() const { return size_ == 0; }
  void push(unsigned thread) { at(size_++) = static_cast<std::uint16_t>(thread); }
  unsigned pop() {
    const unsigned thread = at(0);
    ++begin_, --size_;
    return thread;
  }
  unsigned pop(random_choice& random) {
    std::swap(at(0), at(static_cast<unsigned>(random.below(size_))));
    return pop();
  }

 private:
  std::uint16_t& at(unsigned i) { return threads_[(begin_ + i) % most_threads]; }
  std::array<std::uint16_t, most_threads> threads_{};
  unsigned begin_ = 0, size_ = 0;
};

inline struct machine_type {
  std::vector<thread> threads;
  std::vector<warp_state> warps;
  ready_queue ready;
  thread* running = nullptr;
  unsigned count = 0, live = 0;             // threads of the block
  unsigned arrived = 0, first_arrived = 0;  // at the barrier
  unsigned epoch = 0;                       // barriers since the block began
  unsigned serial = 0;                      // of the block, over all launches
  site last_barrier;
  std::string failure;
  random_choice random{0};
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
  std::vector<std::byte> dynamic_bytes;  // of shared memory
} machine;

inline std::string name(uint3 i) { return "(" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")"; }
inline std::string name(const thread& t) { return "thread " + name(t.index); }
inline std::string waiting_place(const thread& t) { return std::string(t.what) + " at " + t.where.text(); }

template <class F>
void for_each_lane(thread* lanes, unsigned part, F f) {
  for (; part != 0; part &= part - 1) f(lanes[std::countr_zero(part)]);
}

// ---------------------------------------------------------------- who runs

struct abandoned {};
/// Ends the launch: unwinds the running thread to thread_main; run() then throws `error`, which names t.
[[noreturn, gnu::cold, gnu::noinline]] inline void fail(const thread& t, std::string_view text) {
  machine.failure = "block " + name(blockIdx) + " " + name(t) + ": " + std::string(text);
  throw abandoned{};
}

/// The same of a thread that waits: names the place first.
[[noreturn, gnu::cold, gnu::noinline]] inline void fail_waiting(const thread& t, const std::string& text) {
  fail(t, waiting_place(t) + text);
}

inline void make_ready(thread& t) {
  t.now = state::ready;
  machine.ready.push(t.linear);
}

/// The next thread to run, of those that may.
inline thread& choose() {
  thread& next = machine.threads[settings.seed == 0 ? machine.ready.pop() : machine.ready.pop(machine.random)];
  machine.running = &next, threadIdx = next.index;
  return next;
}

/// The running thread waits: another one goes on; run_block() does if there is none, or to report a failure. One place for all to wait in.
[[gnu::noinline]] inline void hand_over() {
  thread& self = *machine.running;
  if (machine.ready.empty() || !machine.failure.empty()) return fiber::switch_to(fiber::scheduler());
  if (thread& next = choose(); &next != &self) fiber::switch_to(next.own);
}

// ---------------------------------------------------------------- where threads meet

/// Completes the operation that `mask` names, once all its live lanes wait in it.
inline void try_complete(unsigned warp, unsigned mask) {
  warp_state& w = machine.warps[warp];
  const unsigned part = mask & w.live;
  if ((part & ~w.waiting) != 0) return;
  thread* lanes = &machine.threads[std::size_t{warp} * 32];
  lanes[std::countr_zero(part)].operation(lanes, part);
  w.waiting &= ~part, w.named &= ~mask;
  for_each_lane(lanes, part, make_ready);
}

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_meeting(const thread& t, const thread& other) {
  fail(t, waiting_place(t) + " meets " + other.what + " of " + name(other) + " at " + other.where.text() +
              "; one operation with one mask is wanted");
}

/// The running thread waits for the lanes of the mask, to carry out an operation with them. Returns its result.
inline std::uint64_t meet_warp(warp_operation operation, unsigned mask, std::uint64_t value, unsigned source, const char* what,
                               const site& where) {
  thread& t = *machine.running;
  t.operation = operation, t.mask = mask, t.value = value, t.source = source;
  t.what = what, t.where = where, t.now = state::in_warp_operation;
  if (!(mask >> t.lane & 1)) fail_waiting(t, ": the mask omits the calling lane");
  warp_state& w = machine.warps[t.warp];
  thread* lanes = &machine.threads[std::size_t{t.warp} * 32];
  unsigned others = w.waiting & mask;          // whom this one waits for
  if (others == 0 && (w.named >> t.lane & 1))  // or who waits for this one
    for_each_lane(lanes, w.waiting, [&](const thread& waiting) { others |= (waiting.mask >> t.lane & 1) << waiting.lane; });
  if (others != 0) {  // each newcomer agrees with one, so all agree
    const thread& other = lanes[std::countr_zero(others)];
    if (other.operation != operation || other.mask != mask || other.where != where) fail_meeting(t, other);
  }
  w.waiting |= 1u << t.lane, w.named |= mask;
  try_complete(t.warp, mask);
  hand_over();
  return t.result;
}

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_barrier(const thread& t, const thread& first) {
  fail_waiting(t, ", but " + name(first) + " is in the one at " + first.where.text());
}

/// The running thread waits for its block.
inline void meet_block(const site& where) {
  thread& t = *machine.running;
  t.what = "__syncthreads", t.where = where, t.now = state::at_barrier;
  if (machine.live != machine.count) fail_waiting(t, ", but another thread has left the kernel");
  if (machine.arrived == 0) machine.first_arrived = t.linear;
  const thread& first = machine.threads[machine.first_arrived];
  if (first.where != where) fail_barrier(t, first);
  if (++machine.arrived == machine.live) {
    machine.arrived = 0, machine.last_barrier = where, ++machine.epoch;
    for (unsigned i = 0; i < machine.count; ++i) make_ready(machine.threads[i]);
  }
  hand_over();
}

}  // namespace outrider::cuda_emulation
