// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What tests of kernels over rows share: rows of blocks, and the question whether a row's bits depend on its company.
#pragma once
#include "kernel_fixture.hpp"
//
#include <cstddef>
#include <cstring>
#include <vector>

#include "outrider/core/int8.hpp"

namespace kernel_test {

using outrider::int8_block;

/// Rows of blocks; what lies between them is as it was.
class block_rows {
 public:
  block_rows(std::size_t m, std::size_t blocks, std::size_t extra)
      : cols_(blocks), stride_(blocks + extra), blocks_(m * stride_), rows_(m) {
    if (!blocks_.empty()) std::memset(static_cast<void*>(blocks_.data()), 0x6b, blocks_.size() * sizeof(int8_block));
  }
  matrix_view<int8_block> view() { return {blocks_.data(), rows_, cols_, stride_}; }
  const int8_block& operator()(std::size_t r, std::size_t b) const { return blocks_[r * stride_ + b]; }
  bool same_elements(const block_rows& other) const {
    bool same = rows_ == other.rows_ && cols_ == other.cols_;
    for (std::size_t r = 0; same && r < rows_; ++r)
      for (std::size_t b = 0; same && b < cols_; ++b) same = std::memcmp(&(*this)(r, b), &other(r, b), sizeof(int8_block)) == 0;
    return same;
  }
  bool padding_untouched() const {
    const std::vector<unsigned char> untouched(sizeof(int8_block), 0x6b);
    for (std::size_t r = 0; r < rows_; ++r)
      for (std::size_t b = cols_; b < stride_; ++b)
        if (std::memcmp(&blocks_[r * stride_ + b], untouched.data(), sizeof(int8_block)) != 0) return false;
    return true;
  }

 private:
  std::size_t cols_, stride_;
  std::vector<int8_block> blocks_;
  std::size_t rows_;
};
/// Row r of `to` = the numbers that row r of the blocks stands for.
inline void widen(matrix_view<float, device_space> to, const block_rows& blocks) {
  for (std::size_t r = 0; r < to.rows; ++r)
    for (std::size_t c = 0; c < to.cols; ++c) to.row(r)[c] = blocks(r, c / 32).d * static_cast<float>(blocks(r, c / 32).q[c % 32]);
}

/// op(queue, operands, place) over matrices that have, in row `place`, the rows given here, and NaN elsewhere: what it leaves in that row of all
/// operands does not depend on the place, on the number of rows, or on where the memory of a row begins.
template <class Op>
void check_company_does_not_matter(const std::vector<padded<float>>& rows, Op op) {
  const auto result = [&](std::size_t m, std::size_t place, std::size_t shift) {
    std::vector<padded<float>> all;
    std::vector<matrix_view<float, device_space>> operands;
    for (const padded<float>& row : rows) {
      padded<float>& matrix = all.emplace_back(m, row.cols() + shift, 3 * shift);
      for (std::size_t c = 0; c < row.cols(); ++c) matrix(place, shift + c) = row(0, c);
      operands.push_back(on_device(matrix).slice_cols(shift, row.cols()));
    }
    device::queue& q = the_queue();
    op(q, operands, place);
    q.wait();
    std::vector<float> left;
    for (const auto& operand : operands) left.insert(left.end(), operand.row(place), operand.row(place) + operand.cols);
    return left;
  };
  const std::vector<float> alone = result(1, 0, 0);
  for (const std::size_t m : sizes{1, 2, 9})
    for (const std::size_t shift : sizes{0, 1, 2}) {
      INFO("m = ", m, ", shift = ", shift);
      CHECK(same_bits(result(m, m / 2, shift), alone));
    }
}

}  // namespace kernel_test
