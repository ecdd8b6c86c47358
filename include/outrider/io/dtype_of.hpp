// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include "outrider/core/blocks.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/io/tensors.hpp"

namespace outrider::io {

/// The element type under which files store a weight type W of core/scalar.hpp or core/blocks.hpp.
template <class W>
inline constexpr dtype dtype_of = W::no_file_stores_this;
template <>
inline constexpr dtype dtype_of<float> = dtype::f32;
template <>
inline constexpr dtype dtype_of<bf16> = dtype::bf16;
template <>
inline constexpr dtype dtype_of<f16> = dtype::f16;
template <>
inline constexpr dtype dtype_of<q4_0> = dtype::q4_0;
template <>
inline constexpr dtype dtype_of<q4_1> = dtype::q4_1;
template <>
inline constexpr dtype dtype_of<q5_0> = dtype::q5_0;
template <>
inline constexpr dtype dtype_of<q5_1> = dtype::q5_1;
template <>
inline constexpr dtype dtype_of<q8_0> = dtype::q8_0;
template <>
inline constexpr dtype dtype_of<q2_k> = dtype::q2_k;
template <>
inline constexpr dtype dtype_of<q3_k> = dtype::q3_k;
template <>
inline constexpr dtype dtype_of<q4_k> = dtype::q4_k;
template <>
inline constexpr dtype dtype_of<q5_k> = dtype::q5_k;
template <>
inline constexpr dtype dtype_of<q6_k> = dtype::q6_k;
template <>
inline constexpr dtype dtype_of<iq4_nl> = dtype::iq4_nl;
template <>
inline constexpr dtype dtype_of<iq4_xs> = dtype::iq4_xs;
template <>
inline constexpr dtype dtype_of<mxfp4> = dtype::mxfp4;

}  // namespace outrider::io
