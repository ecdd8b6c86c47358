// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "outrider/core/extents.hpp"
#include "outrider/core/space.hpp"
#include "outrider/core/view.hpp"
#include "outrider/error.hpp"

namespace outrider {

/// Owned elements of a trivial type in one memory space; move-only, fixed in size. Specialised per space; a device backend adds its own.
template <class T, class Space>
class buffer;

/// Host memory, aligned to a cache line (and the widest vector register), zero-filled so that results never depend on stale bytes. Large
/// buffers cost nothing until they are touched: their zeros are the system's own fresh pages.
template <class T>
class buffer<T, host_space> {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  static constexpr std::size_t alignment = 64;

  buffer() = default;
  explicit buffer(std::size_t size) : size_(size) {
    if (size == 0) return;
    const auto bytes = checked_multiply(size, sizeof(T)), padded = bytes ? checked_add(*bytes, alignment) : bytes;
    block_ = padded ? std::calloc(*padded, 1) : nullptr;
    if (!block_)
      throw error(error_code::out_of_memory,
                  "outrider: no memory for " + std::to_string(size) + " elements of " + std::to_string(sizeof(T)) + " bytes");
    const auto address = reinterpret_cast<std::uintptr_t>(block_);
    data_ = reinterpret_cast<T*>((address + alignment - 1) / alignment * alignment);
  }
  buffer(buffer&& other) noexcept
      : block_(std::exchange(other.block_, nullptr)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  buffer& operator=(buffer&& other) noexcept {
    buffer taken(std::move(other));
    std::swap(block_, taken.block_);
    std::swap(data_, taken.data_);
    std::swap(size_, taken.size_);
    return *this;
  }
  ~buffer() { std::free(block_); }

  [[nodiscard]] T* data() noexcept { return data_; }
  [[nodiscard]] const T* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::span<T> span() noexcept { return {data_, size_}; }
  [[nodiscard]] std::span<const T> span() const noexcept { return {data_, size_}; }

 private:
  void* block_ = nullptr;  // what was allocated (unique_ptr would bring <memory> into every header of core/)
  T* data_ = nullptr;      // the first aligned address in block_
  std::size_t size_ = 0;
};

/// Tells the system that fresh memory will be filled whole, so that pages of some MiB serve it best: filling them costs far fewer faults. A
/// hint: it may do nothing.
inline void prefer_large_pages([[maybe_unused]] std::span<std::byte> memory) noexcept {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t page = std::uintptr_t{1} << 16;  // the largest that any Linux has as the ordinary one
  const auto begin = (reinterpret_cast<std::uintptr_t>(memory.data()) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(memory.data()) + memory.size()) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

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
