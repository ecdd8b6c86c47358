// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Streams, events, and launches of kernels. A part of runtime.hpp.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_emulation/run.hpp"
#include "cuda_emulation/runtime_blocks.hpp"
#include "cuda_emulation/runtime_state.hpp"
#include "cuda_emulation/vocabulary.hpp"

struct CUstream_st {
  bool blocking = true;  // the default stream waits for it
  std::deque<std::function<void()>> pending;
  std::uint64_t submitted = 0, done = 0;
};
struct CUevent_st {
  std::shared_ptr<CUstream_st> stream;  // null: nothing to wait for
  std::uint64_t position = 0;
};
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;
inline constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
inline constexpr unsigned cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;
enum cudaFuncAttribute : int { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

namespace outrider::cuda_emulation {

// ---------------------------------------------------------------- handles

/// What a handle of CUDA's stands for, until it is destroyed.
template <class T>
class handle_list {
 public:
  T* add(T object = {}) {
    ++runtime.objects;
    return objects_.emplace_back(std::make_shared<T>(std::move(object))).get();
  }
  [[nodiscard]] std::shared_ptr<T> find(const T* handle) const {
    const auto found = place_of(handle);
    return found == objects_.end() ? nullptr : *found;
  }
  cudaError_t remove(const T* handle) {
    const auto found = place_of(handle);
    if (found == objects_.end()) return cudaErrorInvalidResourceHandle;
    --runtime.objects;
    objects_.erase(found);
    return cudaSuccess;
  }
  [[nodiscard]] auto begin() const { return objects_.begin(); }
  [[nodiscard]] auto end() const { return objects_.end(); }

 private:
  [[nodiscard]] auto place_of(const T* handle) const {
    return std::find_if(objects_.begin(), objects_.end(), [&](const auto& object) { return object.get() == handle; });
  }
  std::vector<std::shared_ptr<T>> objects_;
};
inline handle_list<CUstream_st> streams;
inline handle_list<CUevent_st> events;

// ---------------------------------------------------------------- work

inline void do_work(const std::function<void()>& work) {
  if (!runtime.failure.empty()) return;
  const device_access access;
  work();
}
inline void finish(CUstream_st& stream, std::uint64_t position) {
  while (stream.done < position) {
    const auto work = std::move(stream.pending.front());
    stream.pending.pop_front(), ++stream.done;
    do_work(work);
  }
}
inline void finish(const CUevent_st& event) {
  if (event.stream) finish(*event.stream, event.position);
}
enum class which_streams : bool { blocking, all };
inline void finish(which_streams which) {
  for (const auto& s : streams)
    if (s->blocking || which == which_streams::all) finish(*s, s->submitted);
}
/// Of the default stream: all that it waits for.
inline void finish(cudaStream_t stream) {
  if (stream)
    finish(*stream, stream->submitted);
  else
    finish(which_streams::blocking);
}

inline bool is_stream(cudaStream_t stream) { return !stream || streams.find(stream); }

/// Adds work to a stream. The default stream's is done at once, after that of the streams it waits for.
inline cudaError_t submit(cudaStream_t stream, std::function<void()> work) {
  if (!stream) {
    finish(which_streams::blocking);
    do_work(work);
    return cudaSuccess;
  }
  const auto found = streams.find(stream);
  if (!found) return cudaErrorInvalidResourceHandle;
  found->pending.push_back(std::move(work));
  ++found->submitted;
  if (!runtime.settings.late) finish(stream);
  return cudaSuccess;
}

// ---------------------------------------------------------------- kernels

/// A launch with its own copies of the arguments.
class kernel_call {
 public:
  /// Makes `out` this call, if the device can carry it out. `unasked`: shared memory that needs no cudaFuncSetAttribute, beyond 48 KiB.
  static cudaError_t make(kernel_call& out, const void* kernel, dim3 grid, dim3 block, void* const* arguments, std::size_t shared_bytes) {
    const auto known = kernels.find(kernel);
    if (known == kernels.end()) return cudaErrorInvalidDeviceFunction;
    if (runtime.settings.major < 8) return cudaErrorNoKernelImageForDevice;
    const bool no_grid = grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535;
    const bool no_block = block.x == 0 || block.y == 0 || block.z == 0 || block.x > most_threads || block.y > most_threads || block.z > 64;
    if (no_grid || no_block || block.x * block.y * block.z > most_threads) return cudaErrorInvalidConfiguration;
    if (shared_bytes > std::min(known->second.most_dynamic_shared, runtime.settings.most_dynamic_shared)) return cudaErrorInvalidValue;
    const auto& sizes = known->second.argument_sizes;
    if (!arguments && !sizes.empty()) return cudaErrorInvalidValue;
    out = {};
    out.kernel_ = kernel, out.grid_ = grid, out.block_ = block, out.shared_bytes_ = shared_bytes;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      out.arguments_.emplace_back((sizes[i] + sizeof(argument_unit) - 1) / sizeof(argument_unit));
      std::memcpy(out.arguments_.back().data(), arguments[i], sizes[i]);
    }
    return cudaSuccess;
  }

  [[nodiscard]] const void* kernel() const { return kernel_; }

  void run() const {
    std::vector<void*> addresses;
    for (const auto& argument : arguments_) addresses.push_back(const_cast<argument_unit*>(argument.data()));
    const auto apply = kernels.at(kernel_).apply;
    try {
      cuda_emulation::run(grid_, block_, shared_bytes_, [&] { apply(kernel_, addresses.data()); });
    } catch (const error& e) {
      runtime.fail(e.what());
    }
  }

 private:
  struct alignas(16) argument_unit {
    std::byte bytes[16];
  };
  const void* kernel_ = nullptr;
  dim3 grid_, block_;
  std::size_t shared_bytes_ = 0;
  std::vector<std::vector<argument_unit>> arguments_;
};

}  // namespace outrider::cuda_emulation

namespace outrider::cuda_emulation::cuda_names {

inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  return call_device("cudaFuncSetAttribute", [&] {
    const auto known = kernels.find(kernel);
    if (known == kernels.end()) return cudaErrorInvalidDeviceFunction;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0) return cudaErrorInvalidValue;
    if (static_cast<std::size_t>(value) > runtime.settings.most_dynamic_shared) return cudaErrorInvalidValue;
    known->second.most_dynamic_shared = static_cast<std::size_t>(value);
    return cudaSuccess;
  });
}
inline cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void* const* arguments, std::size_t shared_bytes,
                                    cudaStream_t stream) {
  return call_working_device("cudaLaunchKernel", [&] {
    kernel_call call;
    const cudaError_t code = kernel_call::make(call, kernel, grid, block, arguments, shared_bytes);
    if (code != cudaSuccess) return code;
    ++runtime.counters.launches;
    return submit(stream, [call = std::move(call)] { call.run(); });
  });
}

// ---------------------------------------------------------------- streams and events

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return call_working_device("cudaStreamCreateWithFlags", [&] {
    if (flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
    *stream = streams.add();
    (*stream)->blocking = flags == cudaStreamDefault;
    return cudaSuccess;
  });
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return call_working_device("cudaStreamCreate", [&] {
    *stream = streams.add();
    return cudaSuccess;
  });
}
/// What the stream still has to do is done.
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return call_device("cudaStreamDestroy", [&] {
    if (const auto found = streams.find(stream)) finish(found.get());
    return streams.remove(stream);
  });
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return call_device("cudaStreamSynchronize", [&] {
    if (!is_stream(stream)) return cudaErrorInvalidResourceHandle;
    ++runtime.counters.synchronisations;
    finish(stream);
    runtime.throw_failure();
    return cudaSuccess;
  });
}
inline cudaError_t cudaDeviceSynchronize() {
  return call_device("cudaDeviceSynchronize", [] {
    ++runtime.counters.synchronisations;
    finish(which_streams::all);
    runtime.throw_failure();
    return cudaSuccess;
  });
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0) {
  return call_working_device("cudaStreamWaitEvent", [&] {
    const auto found = events.find(event);
    if (!found) return cudaErrorInvalidResourceHandle;
    if (flags != 0) return cudaErrorInvalidValue;
    return submit(stream, [what = *found] { finish(what); });
  });
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call_working_device("cudaEventCreateWithFlags", [&] {
    if (flags > (cudaEventBlockingSync | cudaEventDisableTiming)) return cudaErrorInvalidValue;
    *event = events.add();
    return cudaSuccess;
  });
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return call_device("cudaEventDestroy", [&] { return events.remove(event); });
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
  return call_working_device("cudaEventRecord", [&] {
    const auto found = events.find(event);
    if (!found || !is_stream(stream)) return cudaErrorInvalidResourceHandle;
    if (!stream) finish(stream);
    *found = stream ? CUevent_st{streams.find(stream), stream->submitted} : CUevent_st{};
    return cudaSuccess;
  });
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return call_device("cudaEventSynchronize", [&] {
    const auto found = events.find(event);
    if (!found) return cudaErrorInvalidResourceHandle;
    ++runtime.counters.synchronisations;
    finish(*found);
    runtime.throw_failure();
    return cudaSuccess;
  });
}

}  // namespace outrider::cuda_emulation::cuda_names
