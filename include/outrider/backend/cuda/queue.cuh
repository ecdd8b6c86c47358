// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// queue.hpp, carried out.
#pragma once
#include <algorithm>
#include <cstddef>
#include <exception>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "outrider/backend/cuda/check.cuh"
#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/launch.cuh"
#include "outrider/backend/cuda/launch_graph.cuh"
#include "outrider/backend/cuda/memory.cuh"
#include "outrider/backend/cuda/queue.hpp"

namespace outrider::device {

struct queue::state : std::enable_shared_from_this<queue::state> {
  cudaStream_t stream = nullptr;
  cudaEvent_t passed = nullptr;  // what other queues of the thread wait for
  void* scratch = nullptr;
  token_id* exchange = nullptr;
  launch_list list;                  // not yet sent
  std::size_t sent = 0;              // lists since the last wait
  std::size_t launches = 0;          // since the last wait()
  std::vector<std::size_t> seen;     // shapes of lists that were sent once
  std::list<launch_graph> graphs;    // of lists that came again, the last used one first
  std::vector<kernel_handle> large;  // kernels that were let have more than 48 KiB of shared memory
  failure failed;                    // the first since the last wait()

  bool may_use_graphs = true;

  /// A list goes out when somebody waits or when it is that long, so that the device begins while the rest of a pass is asked for.
  static constexpr std::size_t longest_list = 128, shortest_graph = 8, most_graphs = 256;
  static constexpr int most_shared_bytes = 99 * 1024;  // what every device since 8.0 gives a block

  state() {
    const std::vector<cuda_device> devices = cuda_devices();
    require_first_device();
    if (const cuda_device& d = devices.front(); d.major < 8)
      throw error(error_code::device_unavailable, "outrider: " + d.name + " has compute capability " + std::to_string(d.major) + "." +
                                                      std::to_string(d.minor) + ", the CUDA backend needs 8.0 or later");
    try {
      OUTRIDER_CUDA_CHECK(cudaStreamCreate(&stream));
      OUTRIDER_CUDA_CHECK(cudaEventCreateWithFlags(&passed, cudaEventDisableTiming));
      scratch = allocate(scratch_bytes);
      void* memory = nullptr;
      OUTRIDER_CUDA_CHECK(cudaMallocHost(&memory, exchange_count * sizeof(token_id)));
      exchange = static_cast<token_id*>(memory);
      std::fill_n(exchange, exchange_count, 0);
    } catch (...) {
      end();
      throw;
    }
  }
  state(const state&) = delete;
  state& operator=(const state&) = delete;
  ~state() { end(); }

  /// The queue this thread used last: what it keeps has to be sent before anything of this thread that comes later.
  static std::shared_ptr<state> last() { return is_thread_over() ? nullptr : remembered().used.lock(); }
  static void remember_last(const std::shared_ptr<state>& used) {
    if (!is_thread_over()) remembered().used = used;
  }
  /// What went wrong with a queue of this thread that is no more, once.
  static failure left_behind() { return is_thread_over() ? failure{} : std::exchange(remembered().failed, {}); }

  /// Sends what is kept.
  void send() noexcept {
    if (list.size() == 0) return;
    if (failed.code == cudaSuccess)
      try_to([&] { remember(may_use_graphs && list.size() >= shortest_graph ? send_as_graph() : send_singly()); });
    list.clear();
    ++sent;
  }
  /// Keeps a launch, and sends when there are many.
  void keep(const call& c) noexcept {
    try_to([&] {
      allow_shared(c.kernel, c.shared_bytes);
      list.add(c);
    });
    ++launches;
    if (list.size() == longest_list) send();
  }
  void remember(const failure& f) noexcept {
    if (failed.code == cudaSuccess) failed = f;
  }
  /// Does what takes host memory, and remembers if there is none.
  template <class Work>
  void try_to(Work work) noexcept {
    try {
      work();
    } catch (const std::exception&) {
      remember({cudaErrorMemoryAllocation, "operator new", __FILE__, __LINE__});
    }
  }

  /// Lets a kernel have more dynamic shared memory than 48 KiB. The limit belongs to the kernel, not to a queue, and is never lowered, so that
  /// queues need not agree.
  void allow_shared(kernel_handle kernel, std::size_t bytes) {
    if (bytes <= 48 * 1024 || std::find(large.begin(), large.end(), kernel) != large.end()) return;
    const failure f = OUTRIDER_CUDA_OUTCOME(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared_bytes));
    remember(f);
    if (f.code == cudaSuccess) large.push_back(kernel);
  }

 private:
  // A static object of a program may use a queue when the thread's own variables are gone.
  static bool& is_thread_over() {
    static thread_local bool over = false;
    return over;
  }
  struct last_used {
    std::weak_ptr<state> used;
    failure failed;  // of a queue that is no more
    ~last_used() { is_thread_over() = true; }
  };
  static last_used& remembered() {
    static thread_local last_used last;
    return last;
  }

  void end() noexcept {
    if (stream) {
      send();  // other queues may wait for it
      remember(OUTRIDER_CUDA_OUTCOME(cudaStreamSynchronize(stream)));
      if (failed.code != cudaSuccess && !is_thread_over()) remembered().failed = failed;
    }
    graphs.clear();
    if (passed) static_cast<void>(cudaEventDestroy(passed));
    if (stream) static_cast<void>(cudaStreamDestroy(stream));
    if (scratch) release(scratch);
    if (exchange) static_cast<void>(cudaFreeHost(exchange));
  }

  failure send_singly() {
    for (std::size_t i = 0; i < list.size(); ++i) {
      const cudaKernelNodeParams p = list.parameters(i);
      const failure f = OUTRIDER_CUDA_OUTCOME(cudaLaunchKernel(p.func, p.gridDim, p.blockDim, p.kernelParams, p.sharedMemBytes, stream));
      if (f.code != cudaSuccess) return f;
    }
    return {};
  }

  /// A list that comes for the first time goes out singly: making a graph costs more than that, and many a prompt's length never comes again.
  failure send_as_graph() {
    auto found = std::find_if(graphs.begin(), graphs.end(), [&](const launch_graph& g) { return g.fits(list, sent); });
    if (found == graphs.end()) {
      const auto known = std::find(seen.begin(), seen.end(), list.shape() + sent);
      if (known == seen.end()) {
        if (seen.size() == most_graphs) seen.erase(seen.begin());
        seen.push_back(list.shape() + sent);
        return send_singly();
      }
      seen.erase(known);
      if (graphs.size() == most_graphs) {
        const failure f = OUTRIDER_CUDA_OUTCOME(cudaStreamSynchronize(stream));  // the oldest may be under way
        if (f.code != cudaSuccess) return f;
        graphs.pop_back();
      }
      failure f;
      found = graphs.emplace(graphs.begin(), list, sent, f);
      if (f.code != cudaSuccess) {  // no room for it, for instance
        graphs.pop_front();
        static_cast<void>(cudaGetLastError());
        return send_singly();
      }
    }
    graphs.splice(graphs.begin(), graphs, found);
    const failure f = graphs.front().launch(list, stream);
    if (f.code != cudaSuccess) graphs.pop_front();
    return f;
  }
};

void send_kept() noexcept {
  if (const auto last = queue::state::last()) {
    last->send();
    last->sent = 0;
  }
}
void check_kept() {
  check(queue::state::left_behind());
  if (const auto last = queue::state::last()) check(std::exchange(last->failed, {}));
}

/// Keeps a launch. Another queue of this thread is sent first, and this one's stream waits for it and takes over what went wrong with it.
void push(queue& q, const call& c) noexcept {
  queue::state& own = q.own();
  if (const auto last = queue::state::last(); last.get() != &own) {
    if (last) {
      last->send();
      last->sent = 0;  // its lists begin anew, so that they are the same ones again
      last->remember(OUTRIDER_CUDA_OUTCOME(cudaEventRecord(last->passed, last->stream)));
      own.remember(OUTRIDER_CUDA_OUTCOME(cudaStreamWaitEvent(own.stream, last->passed, 0)));
      own.remember(std::exchange(last->failed, {}));
    }
    own.remember(queue::state::left_behind());
    queue::state::remember_last(own.shared_from_this());
  }
  own.keep(c);
}

queue::queue() : state_(std::make_shared<state>()) {}
queue::~queue() = default;

void queue::wait() {
  state_->send();
  state_->sent = state_->launches = 0;
  state_->remember(state::left_behind());
  state_->remember(OUTRIDER_CUDA_OUTCOME(cudaStreamSynchronize(state_->stream)));
  if (state::last() == state_) state::remember_last(nullptr);
  check(std::exchange(state_->failed, {}));
}
std::size_t queue::kept() const noexcept { return state_->list.size(); }
std::size_t queue::launches() const noexcept { return state_->launches; }
void queue::use_graphs(bool yes) noexcept { state_->may_use_graphs = yes; }
void* queue::scratch() const noexcept { return state_->scratch; }
token_id* queue::exchange() const noexcept { return state_->exchange; }

}  // namespace outrider::device
