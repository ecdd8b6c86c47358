// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <memory>

#include "outrider/core/scalar.hpp"

namespace outrider::device {

/// What a thread has asked the device for, in order. Launches are kept until there are many, somebody waits, memory is copied or given back, or
/// another queue of the thread is used, and go out together: a list of some length that has been seen before goes out as a CUDA graph in which only the arguments that changed are renewed, so that a draft step or a pass costs a few
/// calls of the driver.
/// Several queues of one thread see each other's work as if they were one. A queue may go to another thread after wait(). Launching never
/// fails: what goes wrong is remembered and thrown by wait(), or by the next copy.
class queue {
 public:
  struct state;  // CUDA's own types, known to cuda/queue.cuh

  /// Errors: device_unavailable if there is no device or its driver is too old; out_of_memory.
  queue();
  queue(const queue&) = delete;
  queue& operator=(const queue&) = delete;
  ~queue();

  /// Until all that was asked for is done. Errors: device_failed, from anything that this thread has asked for since the last wait(), of this queue
  /// or of one used before it. Each failure is thrown once.
  void wait();

  /// Launches that were asked for and not sent yet.
  [[nodiscard]] std::size_t kept() const noexcept;
  /// Launches that were asked for since the last wait().
  [[nodiscard]] std::size_t launches() const noexcept;

  /// Whether lists that come again go out as graphs (they do, unless told otherwise). For measurements.
  void use_graphs(bool yes) noexcept;

  /// Memory of the device that an op may use until the next op begins.
  static constexpr std::size_t scratch_bytes = std::size_t{64} << 20;
  [[nodiscard]] void* scratch() const noexcept;

  /// Ids in memory of the host that the device reaches too.
  static constexpr std::size_t exchange_count = 1024;
  [[nodiscard]] token_id* exchange() const noexcept;

  [[nodiscard]] state& own() noexcept { return *state_; }

 private:
  std::shared_ptr<state> state_;  // shared with what remembers the thread's last queue
};

}  // namespace outrider::device
