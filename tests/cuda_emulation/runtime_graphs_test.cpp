// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Graphs of kernels in the emulated runtime library.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "cuda_emulation/runtime_fixture.hpp"

using namespace cuda_emulation_test;

namespace {

/// append(to, value) as a node.
struct append_node {
  int* to;
  int value;
  void* arguments[2] = {&to, &value};
  append_node(int* to_, int value_) : to(to_), value(value_) {}
  append_node(const append_node&) = delete;
  append_node& operator=(const append_node&) = delete;
  [[nodiscard]] cudaKernelNodeParams parameters() {
    cudaKernelNodeParams p{};
    p.func = const_cast<void*>(handle_of(&append));
    p.gridDim = p.blockDim = dim3(1);
    p.kernelParams = arguments;
    return p;
  }
};

struct graph_fixture : fixture {
  cudaGraph_t graph = nullptr;
  graph_fixture() { REQUIRE_SUCCESS(cudaGraphCreate(&graph, 0)); }
  ~graph_fixture() {
    if (graph) CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  }
  graph_fixture(const graph_fixture&) = delete;
  graph_fixture& operator=(const graph_fixture&) = delete;

  cudaGraphNode_t add(int* to, int value, const std::vector<cudaGraphNode_t>& dependencies) const {
    append_node node(to, value);
    const cudaKernelNodeParams p = node.parameters();
    cudaGraphNode_t made = nullptr;
    CHECK(cudaGraphAddKernelNode(&made, graph, dependencies.data(), dependencies.size(), &p) == cudaSuccess);
    return made;
  }
  [[nodiscard]] cudaGraphExec_t instantiate() const {
    cudaGraphExec_t executable = nullptr;
    REQUIRE_SUCCESS(cudaGraphInstantiate(&executable, graph, 0));
    return executable;
  }
};

}  // namespace

TEST_CASE_FIXTURE(graph_fixture, "a chain runs in its order, with the arguments its nodes were given") {
  const device_ints a(8);
  const stream_holder s;
  const auto one = add(a.data, 11, {}), two = add(a.data, 12, {one});
  add(a.data, 13, {two});
  const auto executable = instantiate();
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    emu::settings.seed = seed;
    REQUIRE_SUCCESS(cudaMemset(a.data, 0, 32));
    CHECK(cudaGraphLaunch(executable, s.stream) == cudaSuccess);
    CHECK(a.values() == std::vector<int>{3, 11, 12, 13, 0, 0, 0, 0});
  }
  CHECK(runtime.counters.graphs_instantiated == 1);
  CHECK(runtime.counters.graph_launches == 8);
  CHECK(runtime.counters.launches == 0);
  CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
  CHECK(cudaGraphLaunch(executable, s.stream) == cudaErrorInvalidValue);
}

TEST_CASE_FIXTURE(graph_fixture, "independent nodes run in an order drawn from the seed, dependent ones behind what they wait for") {
  const device_ints a(8);
  const auto one = add(a.data, 1, {}), two = add(a.data, 2, {});
  add(a.data, 3, {});
  add(a.data, 4, {one, two});
  const auto executable = instantiate();
  std::set<std::vector<int>> orders;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    emu::settings.seed = seed;
    REQUIRE_SUCCESS(cudaMemset(a.data, 0, 32));
    CHECK(cudaGraphLaunch(executable, nullptr) == cudaSuccess);
    const auto values = a.values();
    if (seed == 0) CHECK(values == std::vector<int>{4, 1, 2, 3, 4, 0, 0, 0});
    const auto place = [&](int value) { return std::find(values.begin() + 1, values.end(), value) - values.begin(); };
    CHECK(values[0] == 4);
    CHECK(place(4) > place(1));
    CHECK(place(4) > place(2));
    orders.insert(values);
  }
  CHECK(orders.size() == 8);  // of 24, those with 4 behind 1 and 2
  CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
}

TEST_CASE_FIXTURE(graph_fixture, "a node of an instance gets another call; the graph keeps the old one") {
  const device_ints a(4), b(4);
  const auto one = add(a.data, 1, {});
  add(a.data, 2, {one});
  const auto executable = instantiate();
  append_node other(b.data, 5);
  const cudaKernelNodeParams p = other.parameters();
  CHECK(cudaGraphExecKernelNodeSetParams(executable, one, &p) == cudaSuccess);
  other.value = 6;  // too late
  CHECK(cudaGraphLaunch(executable, nullptr) == cudaSuccess);
  CHECK(a.values() == std::vector<int>{1, 2, 0, 0});
  CHECK(b.values() == std::vector<int>{1, 5, 0, 0});
  CHECK(runtime.counters.node_updates == 1);
  const auto second = instantiate();
  CHECK(cudaGraphLaunch(second, nullptr) == cudaSuccess);
  CHECK(a.values() == std::vector<int>{3, 2, 1, 2});
  CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
  CHECK(cudaGraphExecDestroy(second) == cudaSuccess);
}

TEST_CASE_FIXTURE(graph_fixture, "late: a launch keeps the calls it was made with, and outlives the instance") {
  const device_ints a(4);
  const stream_holder s;
  const auto one = add(a.data, 1, {});
  const auto executable = instantiate();
  runtime.settings.late = true;
  CHECK(cudaGraphLaunch(executable, s.stream) == cudaSuccess);
  append_node other(a.data, 2);
  const cudaKernelNodeParams p = other.parameters();
  CHECK(cudaGraphExecKernelNodeSetParams(executable, one, &p) == cudaSuccess);
  CHECK(cudaGraphLaunch(executable, s.stream) == cudaSuccess);
  CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
  CHECK(cudaStreamSynchronize(s.stream) == cudaSuccess);
  CHECK(a.values() == std::vector<int>{2, 1, 2, 0});
}

TEST_CASE_FIXTURE(graph_fixture, "what a graph refuses") {
  const device_ints a(4);
  append_node node(a.data, 1);
  cudaKernelNodeParams p = node.parameters();
  const auto one = add(a.data, 1, {});
  cudaGraphNode_t made = nullptr, foreign = nullptr;
  cudaGraph_t other = nullptr;
  REQUIRE_SUCCESS(cudaGraphCreate(&other, 0));
  REQUIRE_SUCCESS(cudaGraphAddKernelNode(&foreign, other, nullptr, 0, &p));
  const auto with = [&](const std::vector<cudaGraphNode_t>& dependencies) {
    return cudaGraphAddKernelNode(&made, graph, dependencies.data(), dependencies.size(), &p);
  };
  CHECK(with({nullptr}) == cudaErrorInvalidValue);
  CHECK(with({foreign}) == cudaErrorInvalidValue);
  CHECK(with({one, one}) == cudaErrorInvalidValue);
  CHECK(cudaGraphAddKernelNode(&made, graph, nullptr, 1, &p) == cudaErrorInvalidValue);
  CHECK(cudaGraphAddKernelNode(&made, graph, nullptr, 0, nullptr) == cudaErrorInvalidValue);
  p.blockDim = dim3(1025);
  CHECK(with({}) == cudaErrorInvalidConfiguration);
  p = node.parameters();
  p.sharedMemBytes = 48 * 1024 + 1;
  CHECK(with({}) == cudaErrorInvalidValue);
  p = node.parameters();
  p.kernelParams = nullptr;
  CHECK(with({}) == cudaErrorInvalidValue);
  p = node.parameters();
  p.extra = node.arguments;
  CHECK(with({}) == cudaErrorNotSupported);
  p = node.parameters();
  p.func = &node;
  CHECK(with({}) == cudaErrorInvalidDeviceFunction);
  p = node.parameters();

  const auto executable = instantiate();
  const auto later = add(a.data, 2, {one});
  CHECK(cudaGraphExecKernelNodeSetParams(executable, foreign, &p) == cudaErrorInvalidValue);
  CHECK(cudaGraphExecKernelNodeSetParams(executable, later, &p) == cudaErrorInvalidValue);
  CHECK(cudaGraphExecKernelNodeSetParams(executable, one, nullptr) == cudaErrorInvalidValue);
  p.gridDim = dim3(0);
  CHECK(cudaGraphExecKernelNodeSetParams(executable, one, &p) == cudaErrorInvalidConfiguration);
  p = node.parameters();
  CHECK(cudaGraphExecKernelNodeSetParams(executable, one, &p) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) != cudaSuccess);
  graph = nullptr;
  CHECK(cudaGraphExecKernelNodeSetParams(executable, one, &p) == cudaErrorInvalidValue);
  CHECK(cudaGraphLaunch(executable, nullptr) == cudaSuccess);  // that much still works
  CHECK(a.values() == std::vector<int>{1, 1, 0, 0});
  CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
  CHECK(cudaGraphDestroy(other) == cudaSuccess);
}

TEST_CASE_FIXTURE(graph_fixture, "a kernel that fails in a graph ends the launch") {
  const device_ints a(4);
  int* data = a.data;
  void* arguments[] = {&data};
  cudaKernelNodeParams p{};
  p.func = const_cast<void*>(handle_of(&race));
  p.gridDim = dim3(1), p.blockDim = dim3(32), p.kernelParams = arguments;
  cudaGraphNode_t first = nullptr;
  REQUIRE_SUCCESS(cudaGraphAddKernelNode(&first, graph, nullptr, 0, &p));
  add(a.data, 1, {first});
  const auto executable = instantiate();
  CHECK(cudaGraphLaunch(executable, nullptr) == cudaErrorLaunchFailure);
  CHECK(cudaGraphLaunch(executable, nullptr) == cudaErrorLaunchFailure);
  CHECK_THROWS_AS(cudaDeviceSynchronize(), emu::error);
  CHECK(a.values() == std::vector<int>(4, 0));
  CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
}
