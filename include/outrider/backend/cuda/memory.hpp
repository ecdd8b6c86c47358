// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Memory of the CUDA device: buffers in device_space, copies between it and the host. Defined in cuda/memory.cuh.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "outrider/core/extents.hpp"
#include "outrider/core/space.hpp"
#include "outrider/core/space_copy.hpp"
#include "outrider/core/storage.hpp"
#include "outrider/error.hpp"

namespace outrider {

/// A CUDA device of this machine.
struct cuda_device {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  std::size_t memory = 0;  // bytes
};

/// The devices that programs may use, in the order of CUDA's numbers; ops run on number 0, which CUDA_VISIBLE_DEVICES chooses.
/// Errors: device_unavailable with a sentence if there is none, or if the driver is too old for the toolkit of this build.
[[nodiscard]] std::vector<cuda_device> cuda_devices();

namespace device {

/// What ops run on, for people: "NVIDIA H200, compute capability 9.0"; "CUDA" where there is none.
[[nodiscard]] std::string_view title() noexcept;

enum class direction : std::uint8_t { in, out, within };  // host to device, device to host, on the device

/// Memory aligned to 256 bytes, with whatever is in it. Errors: out_of_memory, which names what was wanted and what is free; device_unavailable.
[[nodiscard]] void* allocate(std::size_t bytes);
/// The same, zeroed.
[[nodiscard]] void* allocate_zeros(std::size_t bytes);
void release(void* memory) noexcept;
/// Bytes that allocate() could still give out, about. Errors: device_unavailable.
[[nodiscard]] std::size_t free_bytes();

/// Behind everything this thread has asked for and before what it asks for next; the host's side may be used at once. Errors: device_failed, from the copy or from an op before it.
void copy_bytes(void* to, const void* from, std::size_t bytes, direction way);
/// The same for rows of `width` bytes.
void copy_byte_rows(void* to, std::size_t to_stride, const void* from, std::size_t from_stride, std::size_t width, std::size_t rows,
                    direction way);

template <direction Way>
struct copies {
  template <class T>
  static void copy(T* to, const T* from, std::size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    copy_bytes(to, from, count * sizeof(T), Way);
  }
  template <class T>
  static void copy_rows(T* to, std::size_t to_stride, const T* from, std::size_t from_stride, std::size_t rows, std::size_t cols) {
    static_assert(std::is_trivially_copyable_v<T>);
    copy_byte_rows(to, to_stride * sizeof(T), from, from_stride * sizeof(T), cols * sizeof(T), rows, Way);
  }
};

}  // namespace device

template <>
struct space_copy<host_space, device_space> : device::copies<device::direction::in> {};
template <>
struct space_copy<device_space, host_space> : device::copies<device::direction::out> {};
template <>
struct space_copy<device_space, device_space> : device::copies<device::direction::within> {};

template <>
struct space_limits<device_space> {
  static std::size_t free_bytes() { return device::free_bytes(); }
};

/// Device memory, zero-filled as host memory is.
template <class T>
class buffer<T, device_space> {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  buffer() = default;
  explicit buffer(std::size_t size) : size_(size) {
    if (size == 0) return;
    const auto bytes = checked_multiply(size, sizeof(T));
    if (!bytes)
      throw error(error_code::out_of_memory,
                  "outrider: no memory for " + std::to_string(size) + " elements of " + std::to_string(sizeof(T)) + " bytes");
    data_ = static_cast<T*>(device::allocate_zeros(*bytes));
  }
  buffer(buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  buffer& operator=(buffer&& other) noexcept {
    buffer taken(std::move(other));
    std::swap(data_, taken.data_);
    std::swap(size_, taken.size_);
    return *this;
  }
  ~buffer() {
    if (data_) device::release(data_);
  }

  [[nodiscard]] T* data() noexcept { return data_; }
  [[nodiscard]] const T* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace outrider
