// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Queues, device memory and what goes wrong with them, with CUDA's library emulated.
#include <doctest/doctest.h>

#include <cstddef>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <vector>

#include "cuda_emulation/emulation.hpp"
#include "outrider/backend/cuda.hpp"
#include "outrider/core/storage.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/layers/head.hpp"

namespace {

using namespace outrider;
using cuda_emulation::runtime;
using ops = pointwise_ops<cuda>;

/// A fresh machine for every test.
struct fixture {
  fixture() { runtime.reset(); }
  ~fixture() { runtime.reset(); }
};

/// A row of floats on the device.
class device_row {
 public:
  explicit device_row(std::vector<float> values) : memory_(1, values.size()) {
    space_copy<host_space, device_space>::copy(memory_.view().data, values.data(), values.size());
  }
  [[nodiscard]] matrix_view<float, device_space> view() { return memory_.view(); }
  [[nodiscard]] std::vector<float> values() const {
    std::vector<float> out(memory_.cols());
    space_copy<device_space, host_space>::copy(out.data(), memory_.view().data, out.size());
    return out;
  }

 private:
  matrix<float, device_space> memory_;
};

/// `count` times x ← x · factor.
void scale_often(cuda_context& ctx, device_row& x, std::size_t count, float factor) {
  for (std::size_t i = 0; i < count; ++i) ops::scale(ctx, x.view(), x.view(), factor);
}

template <class Call>
std::string sentence(error_code code, Call call) {
  try {
    call();
  } catch (const error& e) {
    CHECK(e.code() == code);
    return e.what();
  }
  FAIL_CHECK("nothing was thrown");
  return "";
}
bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

TEST_CASE_FIXTURE(fixture, "ops wait until somebody does, or a copy comes") {
  cuda_context ctx;
  device_row x({1, 2});
  const std::size_t before = runtime.counters.launches;
  scale_often(ctx, x, 3, 2);
  CHECK(ctx.queue().kept() == 3);
  CHECK(ctx.queue().launches() == 3);
  CHECK(runtime.counters.launches == before);
  CHECK(x.values() == std::vector<float>{8, 16});
  CHECK(ctx.queue().kept() == 0);
  CHECK(runtime.counters.launches == before + 3);
}

TEST_CASE_FIXTURE(fixture, "a list that comes again goes out as a graph, and only what changed is renewed") {
  cuda_context ctx;
  device_row x({1}), y({1});
  const auto pass = [&](float last) {
    scale_often(ctx, x, 9, 2);
    scale_often(ctx, y, 1, last);
    ctx.wait();
  };
  pass(2);
  CHECK(runtime.counters.graphs_instantiated == 0);
  pass(2);
  CHECK(runtime.counters.graphs_instantiated == 1);
  CHECK(runtime.counters.graph_launches == 1);
  const std::size_t launches = runtime.counters.launches;
  pass(2);
  CHECK(runtime.counters.node_updates == 0);
  pass(3);
  CHECK(runtime.counters.node_updates == 1);
  pass(3);
  CHECK(runtime.counters.node_updates == 1);
  CHECK(runtime.counters.graphs_instantiated == 1);
  CHECK(runtime.counters.graph_launches == 4);
  CHECK(runtime.counters.launches == launches);
  CHECK(x.values() == std::vector<float>{0x1p45f});
  CHECK(y.values() == std::vector<float>{72});
}

TEST_CASE_FIXTURE(fixture, "without graphs the results are the same") {
  cuda_context ctx;
  ctx.queue().use_graphs(false);
  device_row x({1});
  for (int pass = 0; pass < 3; ++pass) {
    scale_often(ctx, x, 10, 2);
    ctx.wait();
  }
  CHECK(runtime.counters.graphs_instantiated == 0);
  CHECK(x.values() == std::vector<float>{0x1p30f});
}

TEST_CASE_FIXTURE(fixture, "long lists go out in pieces, each a graph of its own") {
  cuda_context ctx;
  device_row x({1});
  const auto pass = [&] {
    for (int i = 0; i < 150; ++i) {
      scale_often(ctx, x, 1, 2);
      scale_often(ctx, x, 1, 0.5f);
    }
    CHECK(ctx.queue().kept() < 128);
    CHECK(ctx.queue().launches() == 300);
    ctx.wait();
    CHECK(ctx.queue().launches() == 0);
  };
  pass();
  pass();
  CHECK(runtime.counters.graphs_instantiated == 3);
  pass();
  CHECK(runtime.counters.graphs_instantiated == 3);
  CHECK(runtime.counters.node_updates == 0);
  CHECK(x.values() == std::vector<float>{1});
}

TEST_CASE_FIXTURE(fixture, "queues of one thread see each other's work, whatever the order of streams") {
  runtime.settings.late = true;
  cuda_context a, b;
  device_row x({1}), one({1});
  for (int round = 0; round < 3; ++round) {
    scale_often(a, x, 2, 3);
    ops::add(b, x.view(), x.view(), one.view());
    scale_often(a, x, 1, 5);
  }
  CHECK(x.values() == std::vector<float>{101480});
  b.wait();
  a.wait();
}

TEST_CASE_FIXTURE(fixture, "choices come back through memory that both sides reach") {
  cuda_context ctx;
  matrix<float, device_space> x(3, 4);
  const std::vector<float> values{0, 1, 2, 3, 9, 1, 2, 3, 0, 1, 7, 3};
  space_copy<host_space, device_space>::copy(x.view().data, values.data(), values.size());
  std::vector<token_id> out(3);
  most_likely<cuda>(ctx, out, x.view());
  CHECK(out == std::vector<token_id>{3, 0, 2});
}

TEST_CASE_FIXTURE(fixture,
                  "a call that fails is thrown by the next wait, with the call, its place and CUDA's words; then all is well again") {
  cuda_context ctx;
  device_row x({1});
  runtime.fault = {"cudaLaunchKernel", cudaErrorIllegalAddress, 1};
  scale_often(ctx, x, 3, 2);
  const std::string text = sentence(error_code::device_failed, [&] { ctx.wait(); });
  CAPTURE(text);
  for (const char* part : {"cudaLaunchKernel(", "queue.cuh:", "an illegal memory access was encountered", "cudaErrorIllegalAddress"})
    CHECK(has(text, part));
  CHECK_NOTHROW(ctx.wait());
  scale_often(ctx, x, 1, 2);
  CHECK(x.values() == std::vector<float>{4});
}

TEST_CASE_FIXTURE(fixture, "a failure before a copy is thrown by the copy") {
  cuda_context ctx;
  device_row x({1});
  runtime.fault = {"cudaLaunchKernel", cudaErrorUnknown, 0};
  scale_often(ctx, x, 1, 2);
  CHECK(has(sentence(error_code::device_failed, [&] { static_cast<void>(x.values()); }), "cudaLaunchKernel("));
}

TEST_CASE_FIXTURE(fixture, "failures while graphs are renewed or sent are thrown too") {
  for (const char* call : {"cudaGraphLaunch", "cudaGraphExecKernelNodeSetParams"}) {
    CAPTURE(call);
    runtime.reset();
    cuda_context ctx;
    device_row x({1});
    scale_often(ctx, x, 10, 2);
    ctx.wait();
    runtime.fault = {call, cudaErrorUnknown, 0};
    std::string text;
    for (const float factor : {2.0f, 3.0f}) {
      scale_often(ctx, x, 10, factor);
      try {
        ctx.wait();
      } catch (const error& e) {
        text = e.what();
      }
    }
    CHECK(has(text, call));
    runtime.fault = {};
    scale_often(ctx, x, 10, 2);
    CHECK_NOTHROW(ctx.wait());
  }
}

TEST_CASE_FIXTURE(fixture, "where a graph cannot be made its launches go out singly") {
  for (const char* call : {"cudaGraphCreate", "cudaGraphAddKernelNode", "cudaGraphInstantiate"}) {
    CAPTURE(call);
    runtime.reset();
    const std::size_t before = runtime.objects;
    cuda_context ctx;
    device_row x({1});
    const std::size_t with_context = runtime.objects;
    runtime.fault = {call, cudaErrorMemoryAllocation, 0};
    for (int pass = 0; pass < 2; ++pass) {
      scale_often(ctx, x, 10, 2);
      CHECK_NOTHROW(ctx.wait());
    }
    CHECK(runtime.fault.function == "");
    CHECK(runtime.objects == with_context);
    CHECK(x.values() == std::vector<float>{0x1p20f});
    CHECK(with_context > before);
  }
}

TEST_CASE_FIXTURE(fixture, "a failure in what a queue keeps when it ends is thrown by the next copy or wait of the thread") {
  device_row x({1});
  const auto fail = [&] {
    cuda_context ctx;
    runtime.fault = {"cudaLaunchKernel", cudaErrorUnknown, 0};
    scale_often(ctx, x, 1, 2);
  };
  fail();
  CHECK(has(sentence(error_code::device_failed, [&] { static_cast<void>(x.values()); }), "cudaLaunchKernel("));
  CHECK(x.values() == std::vector<float>{1});
  fail();
  cuda_context other;
  CHECK(has(sentence(error_code::device_failed, [&] { other.wait(); }), "cudaLaunchKernel("));
  fail();
  scale_often(other, x, 1, 2);
  CHECK(has(sentence(error_code::device_failed, [&] { other.wait(); }), "cudaLaunchKernel("));
  CHECK_NOTHROW(other.wait());
}

TEST_CASE_FIXTURE(fixture, "two queues in turn have their graphs, also where only one of them is waited for") {
  cuda_context drafter, target;
  device_row x({1}), y({1});
  const auto round = [&] {
    scale_often(drafter, x, 9, 2);
    scale_often(target, y, 9, 0.5f);
    target.wait();
  };
  for (int i = 0; i < 2; ++i) round();
  const std::size_t launches = runtime.counters.launches;
  for (int i = 0; i < 3; ++i) round();
  CHECK(runtime.counters.launches == launches);
  CHECK(runtime.counters.graphs_instantiated == 2);
  CHECK(x.values() == std::vector<float>{0x1p45f});
}

TEST_CASE_FIXTURE(fixture, "a failure survives memory that is given back before anybody waits") {
  cuda_context ctx;
  device_row x({1});
  runtime.fault = {"cudaLaunchKernel", cudaErrorUnknown, 0};
  {
    device_row y({1});
    scale_often(ctx, y, 1, 2);
  }
  CHECK(has(sentence(error_code::device_failed, [&] { ctx.wait(); }), "cudaLaunchKernel("));
}

TEST_CASE_FIXTURE(fixture, "a failure on one queue of a thread is thrown by the wait of the next") {
  cuda_context drafter, target;
  device_row x({1});
  runtime.fault = {"cudaLaunchKernel", cudaErrorUnknown, 0};
  scale_often(drafter, x, 1, 2);
  scale_often(target, x, 1, 2);
  CHECK(has(sentence(error_code::device_failed, [&] { target.wait(); }), "cudaLaunchKernel("));
}

TEST_CASE_FIXTURE(fixture, "a graph whose renewal failed is not used again") {
  cuda_context ctx;
  device_row x({1}), y({1});
  const auto pass = [&](float first, float second) {
    scale_often(ctx, x, 5, first);
    scale_often(ctx, y, 5, second);
  };
  for (int i = 0; i < 3; ++i) {
    pass(1, 1);
    ctx.wait();
  }
  runtime.fault = {"cudaGraphExecKernelNodeSetParams", cudaErrorUnknown, 3};
  pass(2, 2);
  CHECK_THROWS_AS(ctx.wait(), error);
  for (int i = 0; i < 3; ++i) {
    pass(1, 1);
    ctx.wait();
  }
  CHECK(x.values() == std::vector<float>{1});
  CHECK(y.values() == std::vector<float>{1});
}

TEST_CASE_FIXTURE(fixture, "what a queue keeps when it ends is done") {
  device_row x({1});
  {
    cuda_context ctx;
    scale_often(ctx, x, 3, 2);
  }
  CHECK(x.values() == std::vector<float>{8});
}

TEST_CASE_FIXTURE(fixture, "contexts that need different amounts of shared memory do not take it from each other") {
  cuda_context a, b;
  constexpr std::size_t n = 2 * 16, k = 4096;  // rows so long that a block has many warps
  const buffer<grouped<q4_0>, device_space> weights(n / 16 * (k / 32));
  const weight_view<grouped<q4_0>, device_space> w{weights.data(), n, k, k / 32};
  matrix<int8_block, device_space> x(8, k / 32);
  matrix<float, device_space> out(8, n);
  for (int round = 0; round < 3; ++round)
    for (const std::size_t rows : std::initializer_list<std::size_t>{8, 1, 4}) {
      linear_ops<cuda, grouped<q4_0>>::matmul(rows == 1 ? b : a, out.first_rows(rows), x.first_rows(rows), w);
      CHECK_NOTHROW((rows == 1 ? b : a).wait());
    }
}

TEST_CASE_FIXTURE(fixture, "out of device memory: what was needed and what is free") {
  cuda_context ctx;
  runtime.settings.total_memory = std::size_t{100} << 20;
  const std::string text = sentence(error_code::out_of_memory, [] { buffer<float, device_space> large(std::size_t{50} << 20); });
  CAPTURE(text);
  CHECK(has(text, "200 MiB needed"));
  CHECK(has(text, "MiB free"));
  CHECK_THROWS_AS((buffer<double, device_space>(~std::size_t{0} / 4)), error);
  CHECK_NOTHROW(buffer<float, device_space>(1000));
}

TEST_CASE_FIXTURE(fixture, "a model that does not fit on the device says what all of its weights need") {
  const auto file = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "examples/data/tiny-kjv/gguf/target-q8_0.gguf";
  const std::size_t before = runtime.objects;
  for (const std::size_t mebibytes : std::initializer_list<std::size_t>{1, 3}) {
    CAPTURE(mebibytes);
    runtime.settings.total_memory = mebibytes << 20;
    const std::string text = sentence(error_code::out_of_memory, [&] { static_cast<void>(gemma4::load_model<cuda>(file)); });
    CAPTURE(text);
    CHECK(has(text, "target-q8_0.gguf: its weights need "));
    CHECK(has(text, (" MiB of device memory, " + std::to_string(mebibytes) + " MiB were free").c_str()));
    CHECK(runtime.objects == before);
  }
}

TEST_CASE_FIXTURE(fixture, "device memory is zero when it is new") {
  const buffer<float, device_space> memory(100);
  std::vector<float> values(100, 1);
  space_copy<device_space, host_space>::copy(values.data(), memory.data(), values.size());
  CHECK(values == std::vector<float>(100, 0));
}

TEST_CASE_FIXTURE(fixture, "no driver, no device, an old driver and an old device are told apart, in a sentence") {
  runtime.settings.driver_version = 0;
  CHECK(has(sentence(error_code::device_unavailable, [] { cuda_context ctx; }), "no NVIDIA driver is installed"));
  runtime.settings.driver_version = 12020;
  CHECK(
      has(sentence(error_code::device_unavailable, [] { cuda_context ctx; }), "supports CUDA 12.2, this program was built with CUDA 13.0"));
  runtime.reset();
  runtime.settings.devices = 0;
  CHECK(has(sentence(error_code::device_unavailable, [] { static_cast<void>(cuda_devices()); }), "no CUDA device"));
  runtime.reset();
  CHECK(cudaSetDevice(0) == cudaSuccess);
  runtime.settings.devices = 2;
  CHECK(cudaSetDevice(1) == cudaSuccess);
  CHECK(has(sentence(error_code::device_unavailable, [] { cuda_context ctx; }), "set to CUDA device 1"));
  CHECK(has(sentence(error_code::device_unavailable, [] { buffer<float, device_space> memory(1); }), "set to CUDA device 1"));
  runtime.reset();
  runtime.settings.major = 7, runtime.settings.minor = 5;
  CHECK(has(sentence(error_code::device_unavailable, [] { cuda_context ctx; }), "compute capability 7.5, the CUDA backend needs 8.0"));
}

TEST_CASE_FIXTURE(fixture, "devices are listed with what people ask of them") {
  runtime.settings.devices = 2;
  runtime.settings.total_memory = std::size_t{24} << 30;
  const std::vector<cuda_device> devices = cuda_devices();
  REQUIRE(devices.size() == 2);
  CHECK(devices[1].name == "emulated device");
  CHECK(devices[1].major == 8);
  CHECK(devices[1].memory == std::size_t{24} << 30);
}

TEST_CASE_FIXTURE(fixture, "nothing of a context is left behind, not even when it could not be made") {
  const std::size_t before = runtime.objects;
  {
    cuda_context ctx;
    device_row x({1});
    scale_often(ctx, x, 10, 2);
    ctx.wait();
    scale_often(ctx, x, 10, 2);
    ctx.wait();
  }
  CHECK(runtime.objects == before);
  for (const char* call : {"cudaStreamCreate", "cudaEventCreateWithFlags", "cudaMalloc", "cudaMallocHost"}) {
    CAPTURE(call);
    runtime.fault = {call, cudaErrorUnknown, 0};
    CHECK_THROWS_AS(cuda_context(), error);
    CHECK(runtime.objects == before);
  }
}

}  // namespace
