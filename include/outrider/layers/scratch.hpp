// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <span>

#include "outrider/backend/traits.hpp"
#include "outrider/config.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/space_copy.hpp"
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

/// Token ids that the host knows, where ops of B read them: themselves, or a copy in B's memory.
template <backend_tag B>
class id_room {
 public:
  id_room() = default;
  explicit id_room(std::size_t max_count) : there_(host_accessible<space_of<B>> ? 0 : max_count) {}

  /// Valid as long as `ids` and until the next call; at most max_count of them. Errors: those of a copy to B's memory.
  [[nodiscard]] const token_id* put(std::span<const token_id> ids) {
    if constexpr (host_accessible<space_of<B>>) {
      return ids.data();
    } else {
      OUTRIDER_ASSERT(ids.size() <= there_.size());
      space_copy<host_space, space_of<B>>::copy(there_.data(), ids.data(), ids.size());
      return there_.data();
    }
  }

 private:
  buffer<token_id, space_of<B>> there_;
};

}  // namespace outrider
