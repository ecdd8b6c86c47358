// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Lists of launches, and the graphs they become.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "outrider/backend/cuda/check.cuh"
#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/launch.cuh"

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
  launch_graph(const launch_graph&) = delete;
  launch_graph& operator=(const launch_graph&) = delete;
  ~launch_graph() {
    if (executable_) static_cast<void>(cudaGraphExecDestroy(executable_));
    if (graph_) static_cast<void>(cudaGraphDestroy(graph_));
  }

  [[nodiscard]] bool fits(const launch_list& list, std::size_t place) const noexcept { return place_ == place && list_.same_shape(list); }

  /// Renews the arguments that differ in `list`, which fits, and launches. After a failure the graph is of no use.
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

}  // namespace outrider::device
