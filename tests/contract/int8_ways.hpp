// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The ways to multiply bytes, one by one, whichever of them the kernel table of this machine prefers.
#pragma once
#include <string>
#include <tuple>

#include "grouped_weights.hpp"
#include "outrider/backend/highway.hpp"
#include "outrider/backend/highway/int8_ways-inl.h"
#include "outrider/backend/reference.hpp"

namespace contract {

using outrider::linear_ops;
using outrider::reference;

/// A way's kernels against the definition.
template <class Table>
void check_way(const Table& table) {
  constexpr std::uint64_t seed = 721;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context ctx;
  for_each_grouped([&]<class W>() {
    for (const block_bits kind : {block_bits::random, block_bits::zeros, block_bits::ones, block_bits::extreme})
      for (const std::size_t n : sizes{5, 16 * 9 + 3}) {
        const grouped_weights<W> w(random, n, 2 * W::elements, kind);
        const std::size_t groups = w.view().groups();
        for (const std::size_t m : sizes{1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 35})
          for (const std::size_t cut : {std::size_t{0}, groups / 3, groups}) {
            INFO("bits ", static_cast<int>(kind), ", n = ", n, ", m = ", m, ", cut at group ", cut);
            const int8_rows x(activations(random, m, w.cols), 0);
            padded<float> got(m, n), want(m, n);
            std::vector<float*> out;
            std::vector<const int8_block*> rows;
            for (std::size_t r = 0; r < m; ++r) {
              out.push_back(got.view().row(r));
              rows.push_back(x.read().row(r));
            }
            const auto& kernels = std::get<outrider::detail::int8_kernels<grouped<W>>>(table);
            kernels.matmul(out.data(), rows.data(), m, w.view(), cut, groups);
            kernels.matmul(out.data(), rows.data(), m, w.view(), 0, cut);
            linear_ops<reference, grouped<W>>::matmul(ctx, want.view(), x.read(), w.view());
            check_exact(got, want);
          }
      }
  });
}

TEST_CASE("products of 16 bits, which every machine has, give the bits of the definition") {
  check_way(outrider::HWY_NAMESPACE::widening::int8_table(outrider::grouped_types{}));
}

#if HWY_ARCH_X86
TEST_CASE("maddubs gives the bits of the definition") {
  check_way(outrider::HWY_NAMESPACE::maddubs::int8_table(outrider::grouped_types{}));
}

TEST_CASE("dot products of bytes give the bits of the definition") {
#if !defined(OUTRIDER_EMULATED_VNNI)
  if (!outrider::HWY_NAMESPACE::has_vnni()) {
    MESSAGE("not run here: the CPU has no dot products of bytes for vectors of this width; they are checked by emulation alone");
    return;
  }
#endif
  check_way(outrider::HWY_NAMESPACE::vnni::int8_table(outrider::grouped_types{}));
}
#if OUTRIDER_HAVE_AMX
TEST_CASE("tiles of bytes give the bits of the definition") {
#if !defined(OUTRIDER_EMULATED_AMX)
  if (!outrider::HWY_NAMESPACE::has_amx()) {
    MESSAGE("not run here: the CPU has no AMX, or the system does not lend it; its tiles are checked by emulation alone");
    return;
  }
#endif
  check_way(outrider::HWY_NAMESPACE::amx::int8_table(outrider::grouped_types{}));
}
#endif
#endif

}  // namespace contract
