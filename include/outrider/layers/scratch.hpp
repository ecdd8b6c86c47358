// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>

#include "outrider/backend/traits.hpp"
#include "outrider/config.hpp"
#include "outrider/core/storage.hpp"

namespace outrider {

/// Storage for intermediate rows whose width differs from layer to layer (heads of 256 and 512, single- and double-wide MLPs): one buffer,
/// sized for the largest, viewed as contiguous [rows, cols] by each.
template <class T, class B>
class scratch {
 public:
  scratch() = default;
  scratch(std::size_t max_rows, std::size_t max_cols) : storage_(max_rows, max_cols) {}

  /// A contiguous view of rows × cols elements, holding whatever the last user left.
  [[nodiscard]] matrix_for<T, B> view(std::size_t rows, std::size_t cols) noexcept {
    OUTRIDER_ASSERT(rows * cols <= storage_.rows() * storage_.cols());
    return {storage_.view().data, rows, cols, cols};
  }

 private:
  matrix<T, space_of<B>> storage_;
};

}  // namespace outrider
