// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Grouped weights and int8 blocks for tests.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "fixture.hpp"
#include "outrider/core/dequantize.hpp"
#include "outrider/core/grouped.hpp"
#include "outrider/core/int8.hpp"
#include "outrider/core/storage.hpp"
#include "outrider/io/dtype_of.hpp"
#include "stored_weights.hpp"

namespace contract {

using outrider::grouped;
using outrider::host_space;
using outrider::int8_block;

/// What the blocks of a matrix hold.
enum class block_bits {
  random,   // any codes, scales of an ordinary size
  zeros,    // the lowest codes everywhere: all bits 0
  ones,     // the highest: all bits 1
  extreme,  // q8_0's -128, else random; scales that are zero, subnormal, negative or large
};

/// A matrix as stored and in groups.
template <class W>
struct grouped_weights {
  std::vector<W> stored;
  outrider::buffer<grouped<W>, host_space> groups;
  std::size_t rows, cols;

  grouped_weights(random_numbers& random, std::size_t rows_, std::size_t cols_, block_bits kind = block_bits::random)
      : groups((rows_ + 15) / 16 * (cols_ / W::elements)), rows(rows_), cols(cols_) {
    for (std::size_t i = 0; i < rows * cols / W::elements; ++i) stored.push_back(block(random, kind, i));
    for (std::size_t first = 0; first < rows; first += 16)
      outrider::group(groups.data() + first / 16 * view().stride, as_stored(), first, (std::min)(std::size_t{16}, rows - first));
  }

  [[nodiscard]] weight_view<W> as_stored() const noexcept { return {stored.data(), rows, cols, cols / W::elements}; }
  [[nodiscard]] weight_view<grouped<W>> view() const noexcept { return {groups.data(), rows, cols, cols / W::elements}; }

 private:
  static W block(random_numbers& random, block_bits kind, std::size_t i) {
    W out = random_weight<W>(random, numbers::any);
    if (kind == block_bits::zeros || kind == block_bits::ones) {
      const f16 d = out.d;
      std::memset(static_cast<void*>(&out), kind == block_bits::zeros ? 0 : 0xff, sizeof(W));
      out.d = d;
      if constexpr (requires { out.dmin; }) out.dmin = d;
    }
    if (kind == block_bits::extreme) {
      constexpr std::uint16_t scales[] = {0, 0x8000, 1, 0x83ff, 0x7bff, 0xfbff, 0x3c00};  // ±0, subnormals, ±65504, 1
      out.d.bits = scales[i % std::size(scales)];
      if constexpr (std::is_same_v<W, outrider::q8_0>) std::fill(std::begin(out.qs), std::end(out.qs), std::int8_t{-128});
    }
    return out;
  }
};

/// Calls body.operator()<W>() for the W of every format of grouped_types.
template <class Body>
void for_each_grouped(Body body) {
  [&]<class... W>(outrider::type_list<grouped<W>...>) {
    const auto one = [&]<class Type>() {
      INFO("format ", outrider::io::name_of(outrider::io::dtype_of<Type>));
      body.template operator()<Type>();
    };
    (one.template operator()<W>(), ...);
  }(outrider::grouped_types{});
}

/// Rows of int8 blocks `stride` apart; what lies between is NaN.
class int8_rows {
 public:
  int8_rows(std::size_t rows, std::size_t cols, std::size_t extra = 0) : rows_(rows), cols_(cols), stride_(cols + extra) {
    int8_block poisoned{};
    poisoned.d = poisoned.sum = poison<float>();
    blocks_.assign(rows * stride_, poisoned);
  }
  /// The blocks of x [rows, 32 · cols].
  int8_rows(const padded<float>& x, std::size_t extra) : int8_rows(x.rows(), x.cols() / 32, extra) {
    for (std::size_t r = 0; r < rows_; ++r)
      for (std::size_t b = 0; b < cols_; ++b) outrider::quantize(blocks_[r * stride_ + b], x.row(r) + 32 * b);
  }
  [[nodiscard]] matrix_view<int8_block> view() noexcept { return {blocks_.data(), rows_, cols_, stride_}; }
  [[nodiscard]] matrix_view<const int8_block> read() const noexcept { return {blocks_.data(), rows_, cols_, stride_}; }
  [[nodiscard]] bool same_bits_as(const int8_rows& other) const noexcept {
    return blocks_.size() == other.blocks_.size() && same_bits(blocks_.data(), other.blocks_.data(), blocks_.size());
  }

 private:
  std::size_t rows_, cols_, stride_;
  std::vector<int8_block> blocks_;
};

/// Activations with a block that counts as zero, one of equal numbers, outliers, and a NaN in row `odd`.
inline padded<float> activations(random_numbers& random, std::size_t rows, std::size_t cols, std::size_t odd = stranger) {
  padded<float> x(rows, cols);
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < cols; ++c) {
      const std::size_t kind = (r + c / 32) % 7;
      x(r, c) = kind == 0 ? 1e-37f * random.uniform() : kind == 1 ? -3.0f : random.uniform() * (random.below(50) == 0 ? 30.0f : 1.0f);
      if (r == odd && c == cols / 2) x(r, c) = std::numeric_limits<float>::quiet_NaN();
    }
  return x;
}

/// The same floats bit for bit; any NaN equals any NaN.
inline void check_exact(const padded<float>& got, const padded<float>& want) {
  for (std::size_t r = 0; r < got.rows(); ++r)
    for (std::size_t c = 0; c < got.cols(); ++c) {
      if (same_bits(&got(r, c), &want(r, c), 1) || (std::isnan(got(r, c)) && std::isnan(want(r, c)))) continue;
      INFO("r = ", r, ", c = ", c, ", got(r, c) = ", got(r, c), ", want(r, c) = ", want(r, c));
      FAIL_CHECK("an element differs from the definition");
      return;
    }
  CHECK(got.padding_untouched());
}

}  // namespace contract
