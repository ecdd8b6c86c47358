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

#include "outrider/backend/highway/kernel_table.hpp"

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
#include "outrider/backend/highway/attention-inl.h"
#include "outrider/backend/highway/linear-inl.h"
#include "outrider/backend/highway/pointwise-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace outrider {
namespace HWY_NAMESPACE {

inline const char* target_name() noexcept { return hwy::TargetName(HWY_TARGET); }

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
template <class... W, class... Kv>
constexpr detail::kernel_table table_of(type_list<W...>, type_list<Kv...>) {
  return {
      .target = target_name,
      .linear = {detail::linear_kernels<W>{matmul<W>, gathered<W>, widen<W>}...},
      .pointwise = {rms_norm, rope, gelu_mul, add, scale, softcap, argmax, weighted_sum},
      .attention = {detail::attention_kernels<Kv>{attend<Kv>}...},
  };
}
#endif

/// Null on targets without vectors. (Highway's dispatch tables cannot hold noexcept functions.)
inline const detail::kernel_table* kernels() {
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  static constexpr detail::kernel_table table = table_of(weight_types{}, kv_types{});
  return &table;
#else
  return nullptr;
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace outrider
HWY_AFTER_NAMESPACE();

#endif
