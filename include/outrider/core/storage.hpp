// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "outrider/core/extents.hpp"
#include "outrider/core/space.hpp"
#include "outrider/core/view.hpp"
#include "outrider/error.hpp"

namespace outrider {

/// Owned elements of a trivial type in one memory space; move-only, fixed in size. Specialised per space; a device backend adds its own.
template <class T, class Space>
class buffer;

/// Host memory, aligned to a cache line (and the widest vector register), zero-filled so that results never depend on stale bytes.
template <class T>
class buffer<T, host_space> {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  static constexpr std::size_t alignment = 64;

  buffer() = default;
  explicit buffer(std::size_t size) : size_(size) {
    if (size == 0) return;
    const auto bytes = checked_multiply(size, sizeof(T));
    void* memory = bytes ? ::operator new (*bytes, std::align_val_t{alignment}, std::nothrow) : nullptr;
    if (!memory)
      throw error(error_code::out_of_memory,
                  "outrider: no memory for " + std::to_string(size) + " elements of " + std::to_string(sizeof(T)) + " bytes");
    std::memset(memory, 0, *bytes);
    data_.reset(static_cast<T*>(memory));
  }
  buffer(buffer&& other) noexcept : data_(std::move(other.data_)), size_(std::exchange(other.size_, 0)) {}
  buffer& operator=(buffer&& other) noexcept {
    data_ = std::move(other.data_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }

  [[nodiscard]] T* data() noexcept { return data_.get(); }
  [[nodiscard]] const T* data() const noexcept { return data_.get(); }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::span<T> span() noexcept { return {data_.get(), size_}; }
  [[nodiscard]] std::span<const T> span() const noexcept { return {data_.get(), size_}; }

 private:
  struct release {
    void operator()(T* memory) const noexcept { ::operator delete (memory, std::align_val_t{alignment}); }
  };
  std::unique_ptr<T, release> data_;
  std::size_t size_ = 0;
};

/// A buffer with the shape [rows, cols], rows contiguous.
template <class T, class Space>
class matrix {
 public:
  matrix() = default;
  matrix(std::size_t rows, std::size_t cols) : storage_(size_of(rows, cols)), rows_(rows), cols_(cols) {}

  [[nodiscard]] matrix_view<T, Space> view() noexcept { return {storage_.data(), rows_, cols_, cols_}; }
  [[nodiscard]] matrix_view<const T, Space> view() const noexcept { return {storage_.data(), rows_, cols_, cols_}; }
  [[nodiscard]] matrix_view<T, Space> first_rows(std::size_t count) noexcept { return view().first_rows(count); }
  [[nodiscard]] std::size_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::size_t cols() const noexcept { return cols_; }

 private:
  static std::size_t size_of(std::size_t rows, std::size_t cols) {
    const auto size = checked_multiply(rows, cols);
    if (!size)
      throw error(error_code::out_of_memory,
                  "outrider: a matrix of " + std::to_string(rows) + " × " + std::to_string(cols) + " elements does not fit into memory");
    return *size;
  }
  buffer<T, Space> storage_;
  std::size_t rows_ = 0, cols_ = 0;
};

}  // namespace outrider
