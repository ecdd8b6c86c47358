// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <tuple>

#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/queue.hpp"

namespace outrider::device {

/// Multiprocessors that launches are cut for, those of an H200, whichever device they go to: a queue would have to ask each device once, and a
/// wrong number costs a part of one round of blocks. No bit depends on it.
inline constexpr std::size_t wide_device = 132;

/// One launch: a kernel, its shape, and addresses of its arguments, which push() copies.
struct call {
  kernel_handle kernel;
  dim3 grid, block;
  std::size_t shared_bytes;
  void* const* arguments;
  const std::size_t* sizes;  // of the arguments
  std::size_t count;         // of the arguments
};
/// Defined in queue.cuh.
void push(queue& q, const call& c) noexcept;

/// Queues kernel<<<grid, block, shared_bytes>>>(arguments…). Nothing if the grid is empty.
template <class... Parameters, class... Arguments>
void launch(queue& q, void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes, Arguments&&... arguments) noexcept {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments));
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  std::tuple<Parameters...> values(static_cast<Parameters>(arguments)...);
  std::apply(
      [&](auto&... each) {
        void* const addresses[] = {&each...};
        const std::size_t sizes[] = {sizeof(each)...};
        push(q, {handle_of(kernel), grid, block, shared_bytes, addresses, sizes, sizeof...(each)});
      },
      values);
}

}  // namespace outrider::device
