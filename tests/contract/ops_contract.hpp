// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The contract of backend/ops.hpp as tests, one body per behaviour, for any backend on host memory. A backend's test is three lines:
//   #include <its header>
//   #define OUTRIDER_TESTED_BACKENDS its_tag, another_tag
//   #include "ops_contract.hpp"
#pragma once

#if !defined(OUTRIDER_TESTED_BACKENDS)
#error "Define OUTRIDER_TESTED_BACKENDS as the backend tags to test before including ops_contract.hpp."
#endif

#include "attention_contract.hpp"
#include "choice_contract.hpp"
#include "fixture.hpp"
#include "int8_contract.hpp"
#include "linear_contract.hpp"
#include "pointwise_contract.hpp"

namespace contract {

TEST_CASE_TEMPLATE("a backend has every op, a name, and a context for any number of threads", B, OUTRIDER_TESTED_BACKENDS) {
  static_assert(outrider::backend<B>);
  static_assert(outrider::host_accessible<outrider::space_of<B>>);
  CHECK(!std::string_view(outrider::backend_traits<B>::name()).empty());
  CHECK(!std::string_view(outrider::backend_traits<B>::simd()).empty());
  for (const unsigned threads : {0u, 1u, 2u, 3u}) {
    const context_of<B> ctx(execution{threads});
    CHECK(ctx.threads() >= 1);
    if (threads != 0) CHECK(ctx.threads() <= threads);
  }
}

}  // namespace contract
