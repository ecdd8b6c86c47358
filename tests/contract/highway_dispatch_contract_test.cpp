// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <hwy/targets.h>

#include <cstdint>
#include <string_view>

#include "outrider/backend/highway_dispatch.hpp"
#include "outrider/error.hpp"

namespace {

/// highway_dispatch on a machine that knows nothing better than Target. On a machine that does not know Target, the next best.
template <std::int64_t Target>
struct at_most {};

/// While one lives, dispatch chooses among the targets of `allowed` only.
struct restricted {
  explicit restricted(std::int64_t allowed) {
    hwy::SetSupportedTargetsForTest(0);
    hwy::SetSupportedTargetsForTest(hwy::SupportedTargets() & allowed);
  }
  restricted(const restricted&) = delete;
  restricted& operator=(const restricted&) = delete;
  ~restricted() { hwy::SetSupportedTargetsForTest(0); }
};

template <std::int64_t Target>
struct at_most_context : outrider::basic_highway_dispatch_context<outrider::serial> {
  explicit at_most_context(outrider::execution how = {}, const restricted& = restricted(~(Target - 1)))  // better targets have lower bits
      : outrider::basic_highway_dispatch_context<outrider::serial>(how) {}
};

}  // namespace

template <std::int64_t Target>
struct outrider::backend_traits<at_most<Target>> : outrider::backend_traits<outrider::highway_dispatch_serial> {
  using context = at_most_context<Target>;
};
template <std::int64_t Target, class W>
struct outrider::linear_ops<at_most<Target>, W> : outrider::linear_ops<outrider::highway_dispatch_serial, W> {};
template <std::int64_t Target>
struct outrider::pointwise_ops<at_most<Target>> : outrider::pointwise_ops<outrider::highway_dispatch_serial> {};
template <std::int64_t Target, class Kv>
struct outrider::attention_ops<at_most<Target>, Kv> : outrider::attention_ops<outrider::highway_dispatch_serial, Kv> {};

#if HWY_ARCH_X86
#define OUTRIDER_TESTED_BACKENDS outrider::highway_dispatch, at_most<HWY_AVX2>, at_most<HWY_SSSE3>
#else
#define OUTRIDER_TESTED_BACKENDS outrider::highway_dispatch, outrider::highway_dispatch_serial
#endif
#include "ops_contract.hpp"

namespace {

TEST_CASE("dispatch names the best target of the machine, and follows when fewer are allowed") {
  const std::string_view best = outrider::backend_traits<outrider::highway_dispatch>::simd();
  CHECK(best != "SCALAR");
  CHECK(best != "EMU128");
#if HWY_ARCH_X86
  if (hwy::SupportedTargets() & HWY_AVX2) CHECK(std::string_view(at_most_context<HWY_AVX2>().kernels().target()).substr(0, 4) == "AVX2");
  const std::string_view slow = at_most_context<HWY_SSSE3>().kernels().target();
  CHECK((slow == "SSSE3" || slow == "SSE2"));
#endif
  CHECK(outrider::backend_traits<outrider::highway_dispatch>::simd() == best);
}

#if HWY_STATIC_TARGET == HWY_SCALAR || HWY_STATIC_TARGET == HWY_EMU128
TEST_CASE("a CPU without any of the vector instruction sets is refused in one sentence, not slowed down") {
  const restricted to_nothing(HWY_SCALAR | HWY_EMU128);
  try {
    const outrider::context_of<outrider::highway_dispatch> ctx(outrider::execution{});
    FAIL("a context for a CPU without vectors was made");
  } catch (const outrider::error& e) {
    CHECK(e.code() == outrider::error_code::argument_invalid);
    CHECK(std::string_view(e.what()).find("none of the vector instruction sets") != std::string_view::npos);
  }
}
#endif

}  // namespace
