// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A launch from begin to end: blocks one after another, a fiber for each thread. A part of emulation.hpp.
#pragma once
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cuda_emulation/machine.hpp"

namespace outrider::cuda_emulation {

/// What every thread does around the kernel.
inline void run_thread() {
  machine.body(machine.argument);
  thread& t = *machine.running;
  if (!t.copies.empty()) fail(t, "left the kernel with asynchronous copies under way");
  if (machine.arrived != 0) {
    const thread& other = machine.threads[machine.first_arrived];
    fail(t, "left the kernel while " + name(other) + " waits in " + waiting_place(other));
  }
  t.now = state::done, --machine.live;
  warp_state& w = machine.warps[t.warp];
  w.live &= ~(1u << t.lane);
  for_each_lane(&machine.threads[std::size_t{t.warp} * 32], w.waiting, [&](const thread& waiting) {  // for this one, perhaps
    if (w.waiting >> waiting.lane & 1) try_complete(waiting.warp, waiting.mask);
  });
}

[[noreturn]] inline void thread_main() {  // a fiber serves one thread of every block
  for (;;) {
    try {
      run_thread();
    } catch (const abandoned&) {
    }
    hand_over();
  }
}

/// Everybody waits: who, and where; neighbours that wait in one place are named once.
inline std::string standstill() {
  std::string text = "block " + name(blockIdx) + ": every thread waits for another;", last;
  for (unsigned i = 0; i < machine.count; ++i)
    if (const thread& t = machine.threads[i]; t.now != state::done && waiting_place(t) != last)
      text += " " + name(t) + " in " + (last = waiting_place(t)) + ";";
  return text;
}

inline void run_block() {
  auto& m = machine;
  m.live = m.count, m.arrived = 0, m.epoch = 0, ++m.serial, m.last_barrier = {"start of the kernel", 0};
  m.ready.clear();
  std::fill(m.dynamic_bytes.begin(), m.dynamic_bytes.end(), std::byte{0xff});  // NaN, -1
  std::fill(m.warps.begin(), m.warps.end(), warp_state{});
  for (unsigned i = 0; i < m.count; ++i) {
    m.warps[i / 32].live |= 1u << (i % 32);
    make_ready(m.threads[i]);
  }
  while (m.live != 0) {
    if (m.ready.empty())
      m.failure = standstill();
    else
      fiber::switch_to(choose().own);  // they go on among themselves; back when none of them can, or one has failed
    if (m.failure.empty()) continue;
    for (unsigned i = 0; i < m.count; ++i) {  // others still wait somewhere in the kernel
      m.threads[i].copies.clear();
      m.threads[i].own.start(&thread_main, i);
    }
    throw error(std::exchange(m.failure, {}));
  }
}

/// Calls body(argument) as every thread of the grid. Throws `error`.
inline void run(dim3 grid, dim3 block, std::size_t shared_bytes, void (*body)(void*), void* argument) {
  auto& m = machine;
  const std::size_t threads = std::size_t{block.x} * block.y * block.z, blocks = std::size_t{grid.x} * grid.y * grid.z;
  if (threads == 0 || threads > most_threads || blocks == 0) throw error("launch: invalid grid or block");
  m.count = static_cast<unsigned>(threads);
  if (m.threads.empty()) m.threads.resize(most_threads);
  for (unsigned i = 0; i < m.count; ++i) {
    thread& t = m.threads[i];
    t.index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
    t.linear = i, t.lane = i % 32, t.warp = i / 32;
    if (!t.own.started()) t.own.start(&thread_main, i);
  }
  m.warps.resize((m.count + 31) / 32);
  m.dynamic_bytes.resize(shared_bytes);
  m.body = body, m.argument = argument;
  blockDim = block, gridDim = grid;
  m.random = random_choice(settings.seed);
  std::vector<std::size_t> order(settings.seed == 0 ? 0 : blocks);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[m.random.below(i)]);
  for (std::size_t i = 0; i < blocks; ++i) {
    const std::size_t b = order.empty() ? i : order[i];
    blockIdx = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y), static_cast<unsigned>(b / grid.x / grid.y)};
    run_block();
  }
}
template <class Body>
void run(dim3 grid, dim3 block, std::size_t shared_bytes, Body body) {
  run(
      grid, block, shared_bytes, [](void* p) { (*static_cast<Body*>(p))(); }, &body);
}

}  // namespace outrider::cuda_emulation
