// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Weights of every storage type behind one face, so that a test of linear_ops is compiled once per backend and loops over the types when
// it runs.
#pragma once
#include "fixture.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/dequantize.hpp"
#include "outrider/io/dtype_of.hpp"

namespace contract {

/// Which numbers a matrix is filled with: any, or multiples of 1/16 whose products can be summed exactly.
enum class numbers { any, sixteenths };

/// Random bits with scales of an ordinary size.
template <outrider::block_format W>
W random_weight(random_numbers& random, numbers kind) {
  std::uint8_t bytes[sizeof(W)];
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random.below(256));
  W block;
  std::memcpy(&block, bytes, sizeof(W));
  const auto scale = [&] { return f16(kind == numbers::any ? random.uniform() : 0x1p-4f); };
  if constexpr (requires { block.d; }) block.d = scale();
  if constexpr (requires { block.m; }) block.m = scale();
  if constexpr (requires { block.dmin; }) block.dmin = scale();
  if constexpr (requires { block.e; }) block.e = static_cast<std::uint8_t>(kind == numbers::any ? 120 + random.below(8) : 124);
  return block;
}
template <class W>
W random_weight(random_numbers& random, numbers kind) {
  return static_cast<W>(kind == numbers::any ? random.uniform() : random.grid());
}

/// A matrix as stored, and the floats that it stands for.
class stored_weights {
 public:
  /// Bits of 1 throughout: a NaN in every format, but for MXFP4 whose weights are infinite.
  stored_weights(std::size_t rows, std::size_t cols, std::size_t stride_bytes)
      : values(rows, cols), stride_(stride_bytes), bytes_(rows * stride_bytes, std::byte{0xff}) {}

  template <class W>
  void fill_row(std::size_t r, random_numbers& random, numbers kind) {
    for (std::size_t i = 0; i < values.cols() / outrider::elements_of<W>; ++i) {
      const W weight = random_weight<W>(random, kind);
      std::memcpy(bytes_.data() + r * stride_ + i * sizeof(W), &weight, sizeof(W));
      outrider::for_each_weight(&weight, outrider::elements_of<W>,
                                [&](std::size_t j, float value) { values(r, i * outrider::elements_of<W> + j) = value; });
    }
  }

  /// The rows as they are stored; the stride counts bytes.
  [[nodiscard]] weight_view<std::byte> view() const noexcept { return {bytes_.data(), values.rows(), values.cols(), stride_}; }

  padded<float> values;

 private:
  std::size_t stride_;
  std::vector<std::byte> bytes_;
};

/// A storage type: how to make a matrix of it, and backend B's products with one.
template <class B>
struct weight_format {
  using context = context_of<B>;
  using weights = weight_view<std::byte>;

  std::string_view name;
  std::size_t block;  // weights per stored object
  /// Fills every `step`th row, the others and the `extra` objects behind each row stay as they are.
  stored_weights (*make)(random_numbers& random, std::size_t rows, std::size_t cols, std::size_t extra, numbers kind, std::size_t step);
  void (*matmul)(context& ctx, matrix_view<float> out, matrix_view<const float> x, weights w);
  void (*matmul_prompt)(context& ctx, matrix_view<float> out, matrix_view<const float> x, weights w);
  void (*expert_matmul)(context& ctx, matrix_view<float> out, matrix_view<const float> x, weights w, const std::int32_t* experts);
  void (*gathered_matmul)(context& ctx, matrix_view<float> out, matrix_view<const float> x, weights w, matrix_view<const token_id> ids);
  void (*gather_rows)(context& ctx, matrix_view<float> out, weights w, const token_id* ids, float factor);

  [[nodiscard]] stored_weights random_matrix(random_numbers& random, std::size_t rows, std::size_t cols, std::size_t extra = 0,
                                             numbers kind = numbers::any, std::size_t step = 1) const {
    return make(random, rows, cols, extra, kind, step);
  }
  /// The least number of whole blocks that hold k columns, in columns.
  [[nodiscard]] std::size_t whole(std::size_t k) const noexcept { return (k + block - 1) / block * block; }
  /// The lengths a row can have.
  [[nodiscard]] std::vector<std::size_t> row_lengths() const {
    std::vector<std::size_t> all;
    for (const std::size_t k : lengths)
      if (all.empty() || all.back() != whole(k)) all.push_back(whole(k));
    return all;
  }
};

template <class W>
weight_view<W> typed(weight_view<std::byte> w) noexcept {
  return {reinterpret_cast<const W*>(w.data), w.rows, w.cols, w.stride / sizeof(W)};
}

template <class B, class W>
weight_format<B> format_of() {
  using context = context_of<B>;
  using ops = outrider::linear_ops<B, W>;
  using rows = matrix_view<const float>;
  using bytes = weight_view<std::byte>;
  return {
      .name = outrider::io::name_of(outrider::io::dtype_of<W>),
      .block = outrider::elements_of<W>,
      .make =
          [](random_numbers& random, std::size_t count, std::size_t cols, std::size_t extra, numbers kind, std::size_t step) {
            stored_weights w(count, cols, (cols / outrider::elements_of<W> + extra) * sizeof(W));
            for (std::size_t r = 0; r < count; r += step) w.fill_row<W>(r, random, kind);
            return w;
          },
      .matmul = [](context& ctx, matrix_view<float> out, rows x, bytes w) { ops::matmul(ctx, out, x, typed<W>(w)); },
      .matmul_prompt = [](context& ctx, matrix_view<float> out, rows x, bytes w) { ops::matmul_prompt(ctx, out, x, typed<W>(w)); },
      .expert_matmul = [](context& ctx, matrix_view<float> out, rows x, bytes w,
                          const std::int32_t* experts) { ops::expert_matmul(ctx, out, x, typed<W>(w), experts); },
      .gathered_matmul = [](context& ctx, matrix_view<float> out, rows x, bytes w,
                            matrix_view<const token_id> ids) { ops::gathered_matmul(ctx, out, x, typed<W>(w), ids); },
      .gather_rows = [](context& ctx, matrix_view<float> out, bytes w, const token_id* ids,
                        float factor) { ops::gather_rows(ctx, out, typed<W>(w), ids, factor); },
  };
}

/// Calls body(format) for every storage type of weight_types.
template <class B, class Body>
void for_each_format(Body body) {
  const std::vector<weight_format<B>> formats = []<class... W>(outrider::type_list<W...>) {
    return std::vector{format_of<B, W>()...};
  }(outrider::weight_types{});
  for (const weight_format<B>& format : formats) {
    INFO("weights of type ", format.name);
    body(format);
  }
}

}  // namespace contract
