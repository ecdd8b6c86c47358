// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Elements of one type to elements of another, a piece at a time.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "outrider/backend/parallel.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/dequantize.hpp"
#include "outrider/core/quantize.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/error.hpp"
#include "outrider/io/tensor_writer.hpp"
#include "outrider/io/tensors.hpp"

namespace outrider::gemma4 {

namespace detail {

/// Elements converted at a time: whole blocks of every type, and few enough that the memory for them does not matter.
inline constexpr std::size_t piece_elements = std::size_t{1} << 20;

/// Calls f(std::type_identity<W>{}) with the storage of an element type. False if there is none.
template <class F>
bool with_storage(io::dtype type, const F& f) {
  switch (type) {
    case io::dtype::f32:
      return f(std::type_identity<float>{}), true;
    case io::dtype::f16:
      return f(std::type_identity<f16>{}), true;
    case io::dtype::bf16:
      return f(std::type_identity<bf16>{}), true;
    case io::dtype::q4_0:
      return f(std::type_identity<q4_0>{}), true;
    case io::dtype::q4_1:
      return f(std::type_identity<q4_1>{}), true;
    case io::dtype::q5_0:
      return f(std::type_identity<q5_0>{}), true;
    case io::dtype::q5_1:
      return f(std::type_identity<q5_1>{}), true;
    case io::dtype::q8_0:
      return f(std::type_identity<q8_0>{}), true;
    case io::dtype::q2_k:
      return f(std::type_identity<q2_k>{}), true;
    case io::dtype::q3_k:
      return f(std::type_identity<q3_k>{}), true;
    case io::dtype::q4_k:
      return f(std::type_identity<q4_k>{}), true;
    case io::dtype::q5_k:
      return f(std::type_identity<q5_k>{}), true;
    case io::dtype::q6_k:
      return f(std::type_identity<q6_k>{}), true;
    case io::dtype::iq4_nl:
      return f(std::type_identity<iq4_nl>{}), true;
    case io::dtype::iq4_xs:
      return f(std::type_identity<iq4_xs>{}), true;
    case io::dtype::mxfp4:
      return f(std::type_identity<mxfp4>{}), true;
    default:
      return false;
  }
}

/// Whole units of work on all cores, where the compiler has threads.
template <class Body>
void spread(std::size_t count, std::size_t grain, const Body& body) noexcept {
#if defined(_OPENMP)
  openmp(openmp::default_threads()).for_ranges(count, grain, body);
#else
  serial().for_ranges(count, grain, body);
#endif
}

inline constexpr std::size_t blocks_per_thread = 256;

template <class W>
void widen(std::span<const std::byte> bytes, std::size_t n, float* out) noexcept {
  spread(n / elements_of<W>, blocks_per_thread, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      W w;  // may lie anywhere in a file
      std::memcpy(static_cast<void*>(&w), bytes.data() + i * sizeof(W), sizeof(W));
      if constexpr (elements_of<W> == 1)
        out[i] = to_float(w);
      else
        dequantize(w, out + i * elements_of<W>);
    }
  });
}

/// False if a value is beyond what W can stand for.
template <class W>
bool narrow(const float* x, std::size_t n, std::byte* out) noexcept {
  std::atomic<bool> good = true;
  spread(n / elements_of<W>, blocks_per_thread, [&](std::size_t begin, std::size_t end) {
    bool all = true;
    for (std::size_t i = begin; i < end; ++i) {
      W w;
      if constexpr (elements_of<W> == 1) {
        w = W(x[i]);
        all = all && (std::isfinite(to_float(w)) || !std::isfinite(x[i]));
      } else {
        all = quantize(x + i * elements_of<W>, w) && all;
      }
      std::memcpy(out + i * sizeof(W), static_cast<const void*>(&w), sizeof(W));
    }
    if (!all) good = false;
  });
  return good;
}

template <class W>
inline constexpr bool can_quantize = elements_of<W> == 1 || requires(const float* x, W& w) {
  quantize(x, w);
};

/// The one tensor that is a list of token ids.
inline constexpr std::string_view token_ordering_name = "masked_embedding.token_ordering";

/// Element i of a list of token ids, which are whole numbers below 2^24 and so exact in every type such lists have. Throws tensor_mismatch.
inline std::int32_t id_at(const io::tensor& t, std::size_t i) {
  const auto refuse = [&](const std::string& what) {
    throw error(error_code::tensor_mismatch, t.file + ": tensor '" + t.name + "' " + what);
  };
  const auto load = [&](auto value) {
    std::memcpy(&value, t.bytes.data() + i * sizeof value, sizeof value);
    constexpr std::int32_t end = 1 << 24;
    if (!(value >= 0 && value < static_cast<decltype(value)>(end)) ||
        value != static_cast<decltype(value)>(static_cast<std::int32_t>(value)))
      refuse("has " + std::to_string(value) + " at place " + std::to_string(i) + ", allowed are token ids: whole numbers below 2^24");
    return static_cast<std::int32_t>(value);
  };
  if (t.type == io::dtype::i64) return load(std::int64_t{});
  if (t.type == io::dtype::i32) return load(std::int32_t{});
  if (t.type != io::dtype::f32) refuse("has elements of type " + std::string(io::name_of(t.type)) + ", allowed are I32, I64 and F32");
  return load(float{});
}

/// convert_tensor for a list of token ids, between I64, I32 and F32.
inline void convert_ids(const io::tensor& from, io::dtype to, const io::byte_sink& sink) {
  const std::size_t count = from.bytes.size() / io::describe(from.type).bytes;
  const auto convert = [&]<class To>(std::type_identity<To>) {
    std::vector<To> piece;
    for (std::size_t done = 0; done < count; done += piece.size()) {
      piece.resize((std::min)(piece_elements, count - done));
      for (std::size_t i = 0; i < piece.size(); ++i) piece[i] = static_cast<To>(id_at(from, done + i));
      sink(std::as_bytes(std::span(piece)));
    }
  };
  if (to == io::dtype::i64)
    convert(std::type_identity<std::int64_t>{});
  else if (to == io::dtype::i32)
    convert(std::type_identity<std::int32_t>{});
  else
    convert(std::type_identity<float>{});
}

}  // namespace detail

/// Whether every element is a value that `to`, one of F16 and BF16, has.
[[nodiscard]] inline bool is_exact_in(const io::tensor& t, io::dtype to) {
  bool exact = true;
  const bool known = detail::with_storage(t.type, [&]<class W>(std::type_identity<W>) {
    constexpr std::size_t piece = detail::piece_elements / elements_of<W> * sizeof(W);
    std::vector<float> x;
    for (std::size_t at = 0; exact && at < t.bytes.size(); at += piece) {
      const auto bytes = t.bytes.subspan(at, (std::min)(piece, t.bytes.size() - at));
      x.resize(bytes.size() / sizeof(W) * elements_of<W>);
      detail::widen<W>(bytes, x.size(), x.data());
      exact = std::all_of(x.begin(), x.end(), [&](float v) {
        const float back = to == io::dtype::f16 ? to_float(f16(v)) : to_float(bf16(v));
        return std::memcmp(&back, &v, sizeof v) == 0;
      });
    }
  });
  return known && exact;
}

/// Hands the elements of `from`, as elements of type `to`, to `sink`: a piece of a few MiB at a time, on all cores. Bytes are copied where the
/// type stays. Errors: tensor_mismatch for elements that are no numbers of a known type, or that `to` cannot hold: a block format holds no
/// infinity and no NaN, a short one no number beyond its range.
inline void convert_tensor(const io::tensor& from, io::dtype to, const io::byte_sink& sink) {
  const io::dtype_description &source = io::describe(from.type), &target = io::describe(to);
  const std::size_t count = from.bytes.size() / source.bytes * source.elements;
  std::vector<float> values;
  std::vector<std::byte> out;
  for (std::size_t done = 0; done < count; done += detail::piece_elements) {
    const std::size_t n = (std::min)(detail::piece_elements, count - done);
    const auto bytes = from.bytes.subspan(done / source.elements * source.bytes, n / source.elements * source.bytes);
    if (from.type == to) {
      sink(bytes);
    } else {
      values.resize(n);
      out.resize(n / target.elements * target.bytes);
      const bool known =
          detail::with_storage(from.type, [&]<class W>(std::type_identity<W>) { detail::widen<W>(bytes, n, values.data()); });
      bool fits = true, writable = false;
      static_cast<void>(detail::with_storage(to, [&]<class W>(std::type_identity<W>) {
        if constexpr (detail::can_quantize<W>) {
          writable = true;
          fits = detail::narrow<W>(values.data(), n, out.data());
        }
      }));
      const auto refuse = [&](const std::string& what) {
        throw error(error_code::tensor_mismatch, from.file + ": tensor '" + from.name + "' " + what);
      };
      if (!known || !writable)
        refuse("has elements of type " + std::string(source.name) + ", which cannot become " + std::string(target.name));
      if (!fits)
        refuse("has a value that " + std::string(target.name) +
               (target.elements == 1 ? " cannot hold: it is too large" : " cannot hold: too large, infinite or no number"));
      sink(out);
    }
  }
}

}  // namespace outrider::gemma4
