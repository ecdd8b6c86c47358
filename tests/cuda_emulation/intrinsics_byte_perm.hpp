// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Two additions to emulation.hpp: __byte_perm, and copy_async of a vector into shared memory that is read by smaller elements.
#pragma once
#include "emulation.hpp"

/// Four of the eight bytes of high:low, chosen by three bits of each of the four low nibbles of `selector`.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const std::uint64_t bytes = std::uint64_t{high} << 32 | low;
  unsigned out = 0;
  for (unsigned i = 0; i < 4; ++i) out |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return out;
}

namespace outrider::device {

template <class Element, class T>
  requires(sizeof(T) > sizeof(Element))
void copy_async(const emu::shared_view<Element>& to, int i, const T* from) {
  static_assert(sizeof(T) == 8 || sizeof(T) == 16);
  constexpr int elements = sizeof(T) / sizeof(Element);
  emu::thread& t = *emu::machine.running;
  if (reinterpret_cast<std::uintptr_t>(from) % sizeof(T) != 0) emu::fail(t, "copy_async: the source is not aligned");
  to.check(i, elements);
  for (int e = 0; e < elements; ++e) copy_async(to, i + e, reinterpret_cast<const Element*>(from) + e);
}

}  // namespace outrider::device
