// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "outrider/core/space.hpp"
#include "outrider/core/space_copy.hpp"
#include "outrider/core/storage.hpp"

namespace outrider::testing {

struct copy_count {
  std::size_t calls = 0, elements = 0;
};

/// A device's memory without a device. It lies in host memory, but its addresses are disguised: a program that follows one crashes, be it
/// by a pointer, where the type system does not look. Copies into it and out of it are counted, by element type.
struct counting_space {
  template <class T>
  static inline copy_count in{};  // from the host
  template <class T>
  static inline copy_count out{};  // to the host

  /// What the device says it has left.
  static inline std::size_t free_bytes = ~std::size_t{0};

  /// The address behind a disguise, for those who play the device, and back. No processor has mapped memory there.
  template <class T>
  [[nodiscard]] static T* reveal(T* p) noexcept {
    return p ? reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(p) ^ mask) : nullptr;
  }
  template <class T>
  [[nodiscard]] static T* disguise(T* p) noexcept {
    return reveal(p);
  }

 private:
  static constexpr std::uintptr_t mask = std::uintptr_t{1} << (sizeof(std::uintptr_t) * 8 - 10);
};

}  // namespace outrider::testing

namespace outrider {

template <class T>
class buffer<T, testing::counting_space> {
 public:
  buffer() = default;
  explicit buffer(std::size_t size) : memory_(size) {}

  [[nodiscard]] T* data() noexcept { return testing::counting_space::disguise(memory_.data()); }
  [[nodiscard]] const T* data() const noexcept { return testing::counting_space::disguise(memory_.data()); }
  [[nodiscard]] std::size_t size() const noexcept { return memory_.size(); }

 private:
  buffer<T, host_space> memory_;
};

template <>
struct space_limits<testing::counting_space> {
  static std::size_t free_bytes() noexcept { return testing::counting_space::free_bytes; }
};

/// With rows in one call, as a device would have it.
template <>
struct space_copy<host_space, testing::counting_space> {
  template <class T>
  static void copy(T* to, const T* from, std::size_t count) noexcept {
    copy_rows(to, count, from, count, 1, count);
  }
  template <class T>
  static void copy_rows(T* to, std::size_t to_stride, const T* from, std::size_t from_stride, std::size_t rows, std::size_t cols) noexcept {
    ++testing::counting_space::in<T>.calls;
    testing::counting_space::in<T>.elements += rows * cols;
    for (std::size_t r = 0; r < rows; ++r) std::copy_n(from + r * from_stride, cols, testing::counting_space::reveal(to) + r * to_stride);
  }
};

/// Without, as the least that is asked for.
template <>
struct space_copy<testing::counting_space, host_space> {
  template <class T>
  static void copy(T* to, const T* from, std::size_t count) noexcept {
    ++testing::counting_space::out<T>.calls;
    testing::counting_space::out<T>.elements += count;
    std::copy_n(testing::counting_space::reveal(from), count, to);
  }
};

template <>
struct space_copy<testing::counting_space, testing::counting_space> {
  template <class T>
  static void copy(T* to, const T* from, std::size_t count) noexcept {
    std::copy_n(testing::counting_space::reveal(from), count, testing::counting_space::reveal(to));
  }
};

}  // namespace outrider
