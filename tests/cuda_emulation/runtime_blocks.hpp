// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Blocks of device memory and of pinned memory. A part of runtime.hpp.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>

#include "cuda_emulation/fiber.hpp"
#include "cuda_emulation/runtime_state.hpp"

namespace outrider::cuda_emulation {

class block_list {
 public:
  /// New memory of exactly this size, aligned as CUDA's is, full of NaNs; null if there is none.
  void* add(std::size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, bytes) != 0) return nullptr;
    std::memset(memory, 0xff, std::min(bytes, std::size_t{1} << 20));  // more would cost more than it finds
    sizes_.emplace(place_of(memory), bytes);
    bytes_ += bytes, ++runtime.objects;
    return memory;
  }
  /// False if it is not the beginning of a block.
  bool remove(void* memory) {
    const auto found = sizes_.find(place_of(memory));
    if (found == sizes_.end()) return false;
    bytes_ -= found->second, --runtime.objects;
    sizes_.erase(found);
    std::free(memory);
    return true;
  }
  /// Whether all of the range lies in one block.
  [[nodiscard]] bool contains(const void* p, std::size_t bytes) const {
    const auto after = sizes_.upper_bound(place_of(p));
    if (after == sizes_.begin()) return false;
    const auto& [begin, size] = *std::prev(after);
    return place_of(p) - begin <= size && bytes <= size - (place_of(p) - begin);
  }
  /// Whether any of it lies in a block.
  [[nodiscard]] bool touches(const void* p, std::size_t bytes) const {
    const auto end = sizes_.lower_bound(place_of(p) + bytes);
    if (end == sizes_.begin()) return false;
    const auto& [begin, size] = *std::prev(end);
    return place_of(p) < begin + size;
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  template <class F>
  void for_each(F f) const {
    for (const auto& [begin, size] : sizes_) f(reinterpret_cast<void*>(begin), size);
  }

 private:
  static std::uintptr_t place_of(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }
  std::map<std::uintptr_t, std::size_t> sizes_;
  std::size_t bytes_ = 0;
};
inline block_list device_blocks, pinned_blocks;

/// While one lives, device memory may be touched. AddressSanitizer watches the first MiB of each block, which is quick to mark.
class device_access {
 public:
  device_access() {
#if defined(__SANITIZE_ADDRESS__)
    if (depth++ == 0)
      device_blocks.for_each([](void* p, std::size_t bytes) { __asan_unpoison_memory_region(p, std::min(bytes, watched)); });
#endif
  }
  ~device_access() {
#if defined(__SANITIZE_ADDRESS__)
    if (--depth == 0) device_blocks.for_each([](void* p, std::size_t bytes) { __asan_poison_memory_region(p, std::min(bytes, watched)); });
#endif
  }
  device_access(const device_access&) = delete;
  device_access& operator=(const device_access&) = delete;

 private:
  [[maybe_unused]] static constexpr std::size_t watched = std::size_t{1} << 20;
  [[maybe_unused]] static inline int depth = 0;
};

}  // namespace outrider::cuda_emulation
