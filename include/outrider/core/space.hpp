// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <concepts>

namespace outrider {

struct host_space {};    // memory the CPU may dereference
struct device_space {};  // memory only a device may dereference

template <class Space>
inline constexpr bool host_accessible = std::same_as<Space, host_space>;

}  // namespace outrider
