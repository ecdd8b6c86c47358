// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// queue.hpp, carried out: a list of launches, and the graphs that lists became.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "outrider/backend/cuda/check.cuh"
#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/launch.cuh"
#include "outrider/backend/cuda/memory.cuh"
#include "outrider/backend/cuda/queue.hpp"

namespace outrider::device {

/// Launches in the order in which they were asked for, with copies of their arguments. Memory is kept when it is emptied.
class launch_list {
 public:
  void add(const call& c) {
    entries_.push_back({c.kernel, c.grid, c.block, c.shared_bytes, arguments_.size(), c.count});
    for (std::size_t i = 0; i < c.count; ++i) {
      const std::size_t begin = (bytes_.size() + alignment - 1) / alignment * alignment;
      bytes_.resize(begin + c.sizes[i]);
      std::memcpy(bytes_.data() + begin, c.arguments[i], c.sizes[i]);
      arguments_.push_back({begin, c.sizes[i]});
    }
    for (const std::size_t number : {reinterpret_cast<std::size_t>(c.kernel), std::size_t{c.grid.x}, std::size_t{c.grid.y},
                                     std::size_t{c.grid.z}, std::size_t{c.block.x}, c.shared_bytes})
      shape_ = (shape_ ^ number) * 0x9E3779B97F4A7C15u;
  }
  void clear() noexcept {
    entries_.clear();
    arguments_.clear();
    bytes_.clear();
    shape_ = 0;
  }
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }

  /// Launch i in CUDA's terms, valid until the next call.
  [[nodiscard]] cudaKernelNodeParams parameters(std::size_t i) {
    const entry& e = entries_[i];
    addresses_.clear();
    for (std::size_t a = 0; a < e.argument_count; ++a) addresses_.push_back(bytes_.data() + arguments_[e.first_argument + a].begin);
    cudaKernelNodeParams node{};
    node.func = const_cast<void*>(e.kernel);
    node.gridDim = e.grid;
    node.blockDim = e.block;
    node.sharedMemBytes = static_cast<unsigned>(e.shared_bytes);
    node.kernelParams = addresses_.data();
    return node;
  }

  /// A number for the kernels and their grids, whatever the arguments.
  [[nodiscard]] std::size_t shape() const noexcept { return shape_; }
  /// Whether both have the same kernels and grids.
  [[nodiscard]] bool same_shape(const launch_list& other) const noexcept {
    return shape_ == other.shape_ && std::equal(entries_.begin(), entries_.end(), other.entries_.begin(), other.entries_.end());
  }
  /// Whether launch i has the same arguments in both, for lists of the same shape.
  [[nodiscard]] bool same_arguments(const launch_list& other, std::size_t i) const noexcept {
    const std::size_t begin = entries_[i].first_argument, end = begin + entries_[i].argument_count;
    for (std::size_t a = begin; a < end; ++a)
      if (std::memcmp(bytes_.data() + arguments_[a].begin, other.bytes_.data() + other.arguments_[a].begin, arguments_[a].size) != 0)
        return false;
    return true;
  }

 private:
  static constexpr std::size_t alignment = 16;  // of the strictest argument

  struct entry {
    kernel_handle kernel;
    dim3 grid, block;
    std::size_t shared_bytes;
    std::size_t first_argument, argument_count;  // places in arguments_

    bool operator==(const entry& other) const noexcept {
      const auto same = [](const dim3& x, const dim3& y) { return x.x == y.x && x.y == y.y && x.z == y.z; };
      return kernel == other.kernel && same(grid, other.grid) && same(block, other.block) && shared_bytes == other.shared_bytes;
    }
  };
  struct range {
    std::size_t begin, size;
  };
  std::vector<entry> entries_;
  std::vector<range> arguments_;
  std::vector<std::byte> bytes_;  // operator new's alignment is 16
  std::vector<void*> addresses_;
  std::size_t shape_ = 0;
};

/// A list as a graph: a chain of kernels that goes out with one call.
class launch_graph {
 public:
  /// The graph of `list`, the `place`th that is sent between two waits, and what went wrong with it.
  launch_graph(launch_list& list, std::size_t place, failure& failed) : place_(place) {
    failed = OUTRIDER_CUDA_OUTCOME(cudaGraphCreate(&graph_, 0));
    nodes_.resize(list.size());
    for (std::size_t i = 0; i < list.size() && failed.code == cudaSuccess; ++i) {
      const cudaKernelNodeParams node = list.parameters(i);
      failed = OUTRIDER_CUDA_OUTCOME(cudaGraphAddKernelNode(&nodes_[i], graph_, i ? &nodes_[i - 1] : nullptr, i ? 1 : 0, &node));
    }
    if (failed.code == cudaSuccess) failed = OUTRIDER_CUDA_OUTCOME(cudaGraphInstantiate(&executable_, graph_, 0));
    list_ = list;
  }
  launch_graph(launch_graph&& other) noexcept
      : list_(std::move(other.list_)),
        place_(other.place_),
        nodes_(std::move(other.nodes_)),
        graph_(std::exchange(other.graph_, nullptr)),
        executable_(std::exchange(other.executable_, nullptr)) {}
  launch_graph& operator=(launch_graph&& other) noexcept {
    std::swap(list_, other.list_);
    std::swap(place_, other.place_);
    std::swap(nodes_, other.nodes_);
    std::swap(graph_, other.graph_);
    std::swap(executable_, other.executable_);
    return *this;
  }
  ~launch_graph() {
    if (executable_) static_cast<void>(cudaGraphExecDestroy(executable_));
    if (graph_) static_cast<void>(cudaGraphDestroy(graph_));
  }

  [[nodiscard]] bool fits(const launch_list& list, std::size_t place) const noexcept { return place_ == place && list_.same_shape(list); }

  /// Renews the arguments that differ in `list`, which fits, and launches.
  [[nodiscard]] failure launch(launch_list& list, cudaStream_t stream) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (list_.same_arguments(list, i)) continue;
      const cudaKernelNodeParams node = list.parameters(i);
      const failure failed = OUTRIDER_CUDA_OUTCOME(cudaGraphExecKernelNodeSetParams(executable_, nodes_[i], &node));
      if (failed.code != cudaSuccess) return failed;
    }
    std::swap(list_, list);
    return OUTRIDER_CUDA_OUTCOME(cudaGraphLaunch(executable_, stream));
  }

 private:
  launch_list list_;  // as the graph has it
  std::size_t place_;
  std::vector<cudaGraphNode_t> nodes_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

struct queue::state : std::enable_shared_from_this<queue::state> {
  cudaStream_t stream = nullptr;
  cudaEvent_t passed = nullptr;  // what other queues of the thread wait for
  void* scratch = nullptr;
  token_id* exchange = nullptr;
  launch_list list;                                                  // not yet sent
  std::size_t sent = 0;                                              // lists since the last wait
  std::vector<std::size_t> seen;                                     // shapes of lists that were sent once
  std::vector<launch_graph> graphs;                                  // of lists that came again, the last used one first
  std::vector<std::pair<kernel_handle, std::size_t>> shared_limits;  // kernels that may have more shared memory than 48 KiB, and how much
  failure failed;                                                    // the first since the last wait()

  bool may_use_graphs = true;

  /// A list goes out when somebody waits or when it is that long, so that the device begins while the rest of a pass is asked for.
  static constexpr std::size_t longest_list = 128, shortest_graph = 8, most_graphs = 256;

  state() {
    if (const cuda_device d = cuda_devices().front(); d.major < 8)
      throw error(error_code::device_unavailable, "outrider: " + d.name + " has compute capability " + std::to_string(d.major) + "." +
                                                      std::to_string(d.minor) + ", the CUDA backend needs 8.0 or later");
    try {
      OUTRIDER_CUDA_CHECK(cudaStreamCreate(&stream));
      OUTRIDER_CUDA_CHECK(cudaEventCreateWithFlags(&passed, cudaEventDisableTiming));
      scratch = allocate(scratch_bytes);
      void* memory = nullptr;
      OUTRIDER_CUDA_CHECK(cudaMallocHost(&memory, exchange_count * sizeof(token_id)));
      exchange = static_cast<token_id*>(memory);
    } catch (...) {
      end();
      throw;
    }
  }
  state(const state&) = delete;
  state& operator=(const state&) = delete;
  ~state() { end(); }

  /// The queue this thread used last: what it keeps has to be sent before anything of this thread that comes later.
  static std::weak_ptr<state>& last() {
    static thread_local std::weak_ptr<state> used;
    return used;
  }

  /// Sends what is kept.
  void send() noexcept {
    if (list.size() == 0) return;
    if (failed.code == cudaSuccess) remember(may_use_graphs && list.size() >= shortest_graph ? send_as_graph() : send_singly());
    list.clear();
    ++sent;
  }
  void remember(const failure& f) noexcept {
    if (failed.code == cudaSuccess) failed = f;
  }

  /// More dynamic shared memory than 48 KiB has to be asked for, once a kernel.
  void allow_shared(kernel_handle kernel, std::size_t bytes) noexcept {
    if (bytes <= 48 * 1024) return;
    const auto known = std::find_if(shared_limits.begin(), shared_limits.end(), [&](const auto& limit) { return limit.first == kernel; });
    if (known != shared_limits.end() && known->second >= bytes) return;
    remember(OUTRIDER_CUDA_OUTCOME(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes))));
    if (known != shared_limits.end())
      known->second = bytes;
    else
      shared_limits.emplace_back(kernel, bytes);
  }

 private:
  void end() noexcept {
    graphs.clear();
    if (stream) static_cast<void>(cudaStreamSynchronize(stream));
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
    const auto found = std::find_if(graphs.begin(), graphs.end(), [&](const launch_graph& g) { return g.fits(list, sent); });
    if (found != graphs.end()) {
      std::rotate(graphs.begin(), found, found + 1);
      return graphs.front().launch(list, stream);
    }
    const auto known = std::find(seen.begin(), seen.end(), list.shape() + sent);
    if (known == seen.end()) {
      if (seen.size() == most_graphs) seen.erase(seen.begin());
      seen.push_back(list.shape() + sent);
      return send_singly();
    }
    seen.erase(known);
    if (graphs.size() == most_graphs) graphs.pop_back();
    failure f;
    launch_graph graph(list, sent, f);
    if (f.code != cudaSuccess) return f;
    graphs.insert(graphs.begin(), std::move(graph));
    return graphs.front().launch(list, stream);
  }
};

void send_kept() {
  if (const auto last = queue::state::last().lock()) {
    last->send();
    last->sent = 0;
    check(std::exchange(last->failed, {}));
  }
}

/// Keeps a launch. Another queue of this thread is sent first, and this one's stream waits for it.
void push(queue& q, const call& c) noexcept {
  queue::state& own = q.own();
  std::weak_ptr<queue::state>& remembered = queue::state::last();
  if (const auto last = remembered.lock(); last.get() != &own) {
    if (last) {
      last->send();
      last->remember(OUTRIDER_CUDA_OUTCOME(cudaEventRecord(last->passed, last->stream)));
      own.remember(OUTRIDER_CUDA_OUTCOME(cudaStreamWaitEvent(own.stream, last->passed, 0)));
    }
    remembered = own.weak_from_this();
  }
  own.allow_shared(c.kernel, c.shared_bytes);
  own.list.add(c);
  if (own.list.size() == queue::state::longest_list) own.send();
}

queue::queue() : state_(std::make_shared<state>()) {}
queue::~queue() = default;

void queue::wait() {
  state_->send();
  state_->sent = 0;
  state_->remember(OUTRIDER_CUDA_OUTCOME(cudaStreamSynchronize(state_->stream)));
  if (queue::state::last().lock() == state_) queue::state::last().reset();
  check(std::exchange(state_->failed, {}));
}
std::size_t queue::kept() const noexcept { return state_->list.size(); }
void queue::use_graphs(bool yes) noexcept { state_->may_use_graphs = yes; }
void* queue::scratch() const noexcept { return state_->scratch; }
token_id* queue::exchange() const noexcept { return state_->exchange; }

}  // namespace outrider::device
