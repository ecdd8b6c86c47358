// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Graphs of kernels, made node by node. A part of runtime.hpp.
#pragma once
#include <algorithm>
#include <cstddef>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda_emulation/runtime_state.hpp"
#include "cuda_emulation/runtime_streams.hpp"

struct CUgraph_st;
struct CUgraphNode_st {
  std::size_t number;                     // in its graph, in the order of making
  std::vector<std::size_t> dependencies;  // nodes that come before it
  outrider::cuda_emulation::kernel_call call;
};
struct CUgraph_st {
  std::vector<std::unique_ptr<CUgraphNode_st>> nodes;
};
struct CUgraphExec_st {
  std::weak_ptr<CUgraph_st> graph;  // whose nodes name the calls
  std::vector<CUgraphNode_st> nodes;
};
using cudaGraph_t = CUgraph_st*;
using cudaGraphNode_t = CUgraphNode_st*;
using cudaGraphExec_t = CUgraphExec_st*;

struct cudaKernelNodeParams {
  void* func;
  dim3 gridDim, blockDim;
  unsigned sharedMemBytes;
  void** kernelParams;
  void** extra;
};

namespace outrider::cuda_emulation {

inline handle_list<CUgraph_st> graphs;
inline handle_list<CUgraphExec_st> executables;

inline cudaError_t make_call(kernel_call& out, const cudaKernelNodeParams& p) {
  if (p.extra) return cudaErrorNotSupported;
  return kernel_call::make(out, p.func, p.gridDim, p.blockDim, p.kernelParams, p.sharedMemBytes);
}
inline const CUgraphNode_st* find_node(const CUgraph_st& graph, cudaGraphNode_t node) {
  const auto found = std::find_if(graph.nodes.begin(), graph.nodes.end(), [&](const auto& n) { return n.get() == node; });
  return found == graph.nodes.end() ? nullptr : found->get();
}

/// Runs the calls, each behind those it depends on, and otherwise in an order drawn from the seed.
inline void run_graph(const std::vector<CUgraphNode_st>& nodes) {
  random_choice random(settings.seed);
  std::vector<std::size_t> missing(nodes.size()), ready;
  for (const auto& n : nodes) {
    missing[n.number] = n.dependencies.size();
    if (n.dependencies.empty()) ready.push_back(n.number);
  }
  std::vector<std::vector<std::size_t>> dependents(nodes.size());
  for (const auto& n : nodes)
    for (const std::size_t before : n.dependencies) dependents[before].push_back(n.number);
  while (!ready.empty()) {
    const auto next = settings.seed == 0 ? std::min_element(ready.begin(), ready.end())
                                         : ready.begin() + static_cast<std::ptrdiff_t>(random.below(ready.size()));
    const std::size_t number = *next;
    ready.erase(next);
    nodes[number].call.run();
    if (!runtime.failure.empty()) return;
    for (const std::size_t after : dependents[number])
      if (--missing[after] == 0) ready.push_back(after);
  }
}

}  // namespace outrider::cuda_emulation

namespace outrider::cuda_emulation::cuda_names {

inline cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned flags) {
  return call_working_device("cudaGraphCreate", [&] {
    if (flags != 0) return cudaErrorInvalidValue;
    *graph = graphs.add();
    return cudaSuccess;
  });
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call_device("cudaGraphDestroy", [&] { return graphs.remove(graph); });
}

/// Behind the nodes of `dependencies`, which belong to the graph. The arguments are copied.
inline cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* dependencies, std::size_t count,
                                          const cudaKernelNodeParams* parameters) {
  return call_working_device("cudaGraphAddKernelNode", [&] {
    const auto found = graphs.find(graph);
    if (!found || !parameters || (count != 0 && !dependencies)) return cudaErrorInvalidValue;
    auto added = std::make_unique<CUgraphNode_st>();
    added->number = found->nodes.size();
    for (std::size_t i = 0; i < count; ++i) {
      const CUgraphNode_st* before = find_node(*found, dependencies[i]);
      if (!before) return cudaErrorInvalidValue;
      auto& numbers = added->dependencies;
      if (std::find(numbers.begin(), numbers.end(), before->number) != numbers.end()) return cudaErrorInvalidValue;
      numbers.push_back(before->number);
    }
    if (const cudaError_t code = make_call(added->call, *parameters); code != cudaSuccess) return code;
    *node = added.get();
    found->nodes.push_back(std::move(added));
    return cudaSuccess;
  });
}

inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags = 0) {
  return call_working_device("cudaGraphInstantiate", [&] {
    const auto found = graphs.find(graph);
    if (!found || flags != 0) return cudaErrorInvalidValue;
    CUgraphExec_st made{found, {}};
    for (const auto& node : found->nodes) made.nodes.push_back(*node);
    *executable = executables.add(std::move(made));
    ++runtime.counters.graphs_instantiated;
    return cudaSuccess;
  });
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return call_device("cudaGraphExecDestroy", [&] { return executables.remove(executable); });
}

/// Another call for a node, from the next launch on. The node is one of the graph it was made from, which still exists.
inline cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t executable, cudaGraphNode_t node,
                                                    const cudaKernelNodeParams* parameters) {
  return call_working_device("cudaGraphExecKernelNodeSetParams", [&] {
    const auto found = executables.find(executable);
    const auto graph = found ? found->graph.lock() : nullptr;
    const CUgraphNode_st* original = graph ? find_node(*graph, node) : nullptr;
    if (!original || original->number >= found->nodes.size() || !parameters) return cudaErrorInvalidValue;
    ++runtime.counters.node_updates;
    return make_call(found->nodes[original->number].call, *parameters);
  });
}

inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return call_working_device("cudaGraphLaunch", [&] {
    const auto found = executables.find(executable);
    if (!found) return cudaErrorInvalidValue;
    ++runtime.counters.graph_launches;
    return submit(stream, [nodes = found->nodes] { run_graph(nodes); });
  });
}

}  // namespace outrider::cuda_emulation::cuda_names
