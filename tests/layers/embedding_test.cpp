// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/layers/embedding.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <type_traits>

#include "outrider/backend/reference.hpp"

namespace {

/// The factor of a table of type W.
template <class W>
float factor_of(std::size_t width) {
  const outrider::weight_view<W> table{nullptr, 0, width, width / outrider::elements_of<W>};
  return outrider::embedding<outrider::reference>::scaled_by_root(table, width).factor;
}

}  // namespace

TEST_CASE("pitfall 34: the root of the width is rounded to bf16 for a table of any type but F32") {
  struct size {
    std::size_t width;
    float rounded;
  };
  const auto check = []<class W>(size s) {
    CHECK(factor_of<W>(s.width) == (std::is_same_v<W, float> ? std::sqrt(static_cast<float>(s.width)) : s.rounded));
  };
  const auto check_all = [&]<class... W>(outrider::type_list<W...>, size s) { (check.template operator()<W>(s), ...); };
  for (const size s : {size{1536, 39.25f}, {2560, 50.5f}, {3840, 62.0f}, {2816, 53.0f}, {5376, 73.5f}})
    check_all(outrider::weight_types{}, s);
}
