// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The kernel table of one target. A target without vectors has none: the kernels would be slower than the plain loops of `reference`.
#if defined(OUTRIDER_BACKEND_HIGHWAY_TABLE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUTRIDER_BACKEND_HIGHWAY_TABLE_INL_H_
#undef OUTRIDER_BACKEND_HIGHWAY_TABLE_INL_H_
#else
#define OUTRIDER_BACKEND_HIGHWAY_TABLE_INL_H_
#endif

#include <hwy/highway.h>
#if HWY_ARCH_X86 && !defined(_MSC_VER)
#include <cpuid.h>
#if HWY_ARCH_X86_64 && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "outrider/backend/highway/kernel_table.hpp"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
#include "outrider/backend/highway/attention-inl.h"
#include "outrider/backend/highway/int8_ways-inl.h"
#include "outrider/backend/highway/linear-inl.h"
#include "outrider/backend/highway/pointwise-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace outrider {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

inline const char* target_name() noexcept { return hwy::TargetName(HWY_TARGET); }

template <class... W, class... Kv>
constexpr detail::kernel_table table_of(const char* (*target)() noexcept,
                                        detail::one_per_type<detail::int8_kernels, grouped_types>::type int8, type_list<W...>,
                                        type_list<Kv...>) {
  return {
      .target = target,
      .linear = {detail::linear_kernels<W>{matmul<W>, gathered<W>, widen<W>}...},
      .int8 = int8,
      .pointwise = {rms_norm, rope, gelu_mul, add, scale, softcap, quantize_row, argmax, weighted_sum},
      .attention = {detail::attention_kernels<Kv>{add_keys<Kv>, join_parts}...},
  };
}

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
inline const char* target_name_with_vnni() noexcept { return HWY_CAP_GE512 ? "AVX3 with VNNI" : "AVX2 with VNNI"; }

/// Whether the CPU has the dot products of bytes in vectors of this target's width: no Highway target that is common says so.
inline bool has_vnni() noexcept {
#if defined(_MSC_VER)
  return false;
#else
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, HWY_CAP_GE512 ? 0 : 1, &a, &b, &c, &d)) return false;
  return HWY_CAP_GE512 ? (c >> 11 & 1) != 0 : (a >> 4 & 1) != 0;
#endif
}
#endif

#if HWY_TARGET <= HWY_AVX2 && OUTRIDER_HAVE_AMX
inline const char* target_name_with_amx() noexcept { return "AVX3 with VNNI and AMX"; }

/// Whether the CPU has tiles of bytes and the system lends their registers, which a process has to ask for.
inline bool has_amx() noexcept {
#if defined(__linux__) && HWY_ARCH_X86_64
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned tile = 1u << 24, int8 = 1u << 25, os_saves = 1u << 27;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & os_saves) == 0) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & tile) == 0 || (d & int8) == 0) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned tile_state = 3u << 17;
  constexpr long request_permission = 0x1023, tile_data = 18;
  return (low & tile_state) == tile_state && ::syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

#endif

/// Null on targets without vectors. (Highway's dispatch tables cannot hold noexcept functions.)
inline const detail::kernel_table* kernels() {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  return nullptr;
#elif HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
  static constexpr detail::kernel_table without = table_of(target_name, maddubs::int8_table(grouped_types{}), weight_types{}, kv_types{});
  static constexpr detail::kernel_table with =
      table_of(target_name_with_vnni, vnni::int8_table(grouped_types{}), weight_types{}, kv_types{});
#if OUTRIDER_HAVE_AMX
  static constexpr detail::kernel_table with_tiles =
      table_of(target_name_with_amx, amx::int8_table(grouped_types{}), weight_types{}, kv_types{});
  static const detail::kernel_table* const best = !has_vnni() ? &without : has_amx() ? &with_tiles : &with;
#else
  static const detail::kernel_table* const best = has_vnni() ? &with : &without;
#endif
  return best;
#else
  static constexpr detail::kernel_table table = table_of(target_name, widening::int8_table(grouped_types{}), weight_types{}, kv_types{});
  return &table;
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace outrider
HWY_AFTER_NAMESPACE();

#endif
