// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The rotations of norm.cuh on the CPU: against the reference, and norm_rope against the ops it stands for. What their bits may not depend on is
// in norm_test.cpp.
#include "kernel_fixture.hpp"
//
#include <utility>
#include <vector>

#include "outrider/backend/cuda/norm.cuh"

namespace {

using namespace kernel_test;
using outrider::pointwise_ops;
using outrider::reference;

constexpr float eps = 1e-6f;

}  // namespace

TEST_CASE("rope_table has the functions of the angle rounded to float, for more positions than one launch takes, read at once") {
  // The last place of a value below 1 is u at most, and both sides round a double that is off far less.
  constexpr std::uint64_t seed = 2104;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t m : sizes{0, 1, 127, 128, 129, 300})
    for (const std::size_t h : sizes{0, 1, 33, 128, 130}) {
      if (m > 129 && h != 33) continue;
      INFO("m = ", m, ", h = ", h);
      const auto positions = padded<std::int32_t>(m, 1).fill([&, i = 0]() mutable { return i++ == 0 ? 2147483647 : random.index(262144); });
      const auto frequencies = padded<float>(1, h).fill([i = 0.0]() mutable { return static_cast<float>(std::pow(1e6, i -= 0.01)); });
      padded<float> want_cos(m, h), want_sin(m, h);
      pointwise_ops<reference>::rope_table(plain, want_cos.view(), want_sin.view(), positions.data(), frequencies.data());
      const auto table = [&](bool sines) {
        return result_of(padded<float>(m, h, 3), [&](auto& q, auto& out) {
          padded<float> other(m, h, 1);
          std::vector<std::int32_t> host(positions.data(), positions.data() + m);
          device::rope_table(q, on_device(sines ? other : out), on_device(sines ? out : other), host.data(), frequencies.data());
          host.assign(m, -1);
          q.wait();
          CHECK(other.padding_untouched());
        });
      };
      check_within(table(false), want_cos, [](std::size_t, std::size_t) { return u; });
      check_within(table(true), want_sin, [](std::size_t, std::size_t) { return u; });
    }
}

TEST_CASE("rope agrees with the reference, and norm_rope has the bits of rms_norm and rope") {
  // Of a·c − b·s: a product's rounding and a fused one's, and the reference's.
  constexpr std::uint64_t seed = 2105;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t h : sizes{0, 1, 2, 7, 16, 63, 64, 128, 255, 256, 257, 600})
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t heads : sizes{1, 2, 5})
        for (const std::size_t extra : sizes{0, 3}) {
          if (h > 64 && heads == 2) continue;
          INFO("h = ", h, ", m = ", m, ", heads = ", heads, ", extra = ", extra);
          const auto cos = padded<float>(m, h, extra).fill(random.uniforms()), sin = padded<float>(m, h, extra).fill(random.uniforms());
          const auto x = padded<float>(m * heads, 2 * h, extra).fill(random.uniforms(8));
          const auto weights = padded<float>(1, 2 * h).fill(random.uniforms(2));
          const auto rotated = [&](const padded<float>& from) {
            return result_of(from, [&](auto& q, auto& out) { device::rope(q, on_device(out), on_device(cos), on_device(sin)); });
          };
          padded<float> want = x;
          pointwise_ops<reference>::rope(plain, want.view(), cos.read(), sin.read());
          check_within(rotated(x), want, [&](std::size_t r, std::size_t c) {
            const std::size_t i = c < h ? c : c - h;
            const double a = std::abs(double{x(r, c)}), b = std::abs(double{x(r, c < h ? c + h : i)});
            return 3.01 * u * (a * std::abs(double{cos(r / heads, i)}) + b * std::abs(double{sin(r / heads, i)}));
          });
          for (const float* weight : {static_cast<const float*>(nullptr), weights.data()}) {
            const auto norm = result_of(x, [&](auto& q, auto& out) { device::rms_norm(q, on_device(out), on_device(out), weight, eps); });
            const auto fused = result_of(
                x, [&](auto& q, auto& out) { device::norm_rope(q, on_device(out), weight, eps, on_device(cos), on_device(sin)); });
            check_same(fused, rotated(norm));
          }
        }
}

TEST_CASE("a frequency of zero passes coordinates through exactly") {
  random_numbers random(2106);
  const auto frequencies = padded<float>(1, 16).fill([i = 0]() mutable { return i++ < 4 ? 1.0f : 0.0f; });
  const std::int32_t position = 77;
  padded<float> cos(1, 16), sin(1, 16);
  const auto x = padded<float>(2, 32).fill(random.uniforms());
  const auto y = result_of(x, [&](auto& q, auto& out) {
    device::rope_table(q, on_device(cos), on_device(sin), &position, frequencies.data());
    device::rope(q, on_device(out), on_device(std::as_const(cos)), on_device(std::as_const(sin)));
  });
  for (std::size_t c = 0; c < 32; ++c) {
    CAPTURE(c);
    CHECK((y(1, c) == x(1, c)) == (c % 16 >= 4));
  }
}
