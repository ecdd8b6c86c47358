// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The kernels of pointwise.cuh and norm.cuh on the CPU: against the reference, and the fused ops against the ops they stand for.
#include "kernel_fixture.hpp"
//
#include <limits>
#include <vector>

#include "outrider/backend/cuda/pointwise.cuh"

namespace {

using namespace kernel_test;
using outrider::int8_block;
using outrider::pointwise_ops;
using outrider::reference;

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

/// Row lengths with every kind of end: short of a vector of four, of a warp's step (128 columns) and of a block's (1024, 4096).
constexpr std::size_t widths[] = {0, 1, 3, 4, 5, 31, 32, 33, 127, 128, 129, 511, 512, 513, 1024, 1027, 4096, 4097};

/// As in the contract: (n + 1)·u for the mean, half of it in the root, and eight roundings.
double rms_norm_bound(float want, std::size_t n) { return (static_cast<double>(n) / 2 + 8) * u * std::abs(double{want}); }

}  // namespace

// ------------------------------------------------------------------------------------------------ element by element

TEST_CASE("add, scale and copy are exact for every width and stride, in place too") {
  constexpr std::uint64_t seed = 2101;
  CAPTURE(seed);
  random_numbers random(seed);
  for (const std::size_t n : widths)
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t extra : sizes{0, 3, 4}) {
        INFO("n = ", n, ", m = ", m, ", extra = ", extra);
        const auto x = padded<float>(m, n, extra).fill(random.uniforms()), y = padded<float>(m, n, extra).fill(random.uniforms(1000));
        padded<float> sum(m, n), product(m, n);
        for (std::size_t r = 0; r < m; ++r)
          for (std::size_t c = 0; c < n; ++c) {
            sum(r, c) = x(r, c) + y(r, c);
            product(r, c) = x(r, c) * 0.7f;
          }
        const padded<float> blank(m, n, extra);
        check_same(result_of(blank, [&](auto& q, auto& out) { device::add(q, on_device(out), on_device(x), on_device(y)); }), sum);
        check_same(result_of(x, [&](auto& q, auto& out) { device::add(q, on_device(out), on_device(out), on_device(y)); }), sum);
        check_same(result_of(y, [&](auto& q, auto& out) { device::add(q, on_device(out), on_device(x), on_device(out)); }), sum);
        check_same(result_of(x, [&](auto& q, auto& out) { device::scale(q, on_device(out), on_device(out), 0.7f); }), product);
        check_same(result_of(blank, [&](auto& q, auto& out) { device::copy(q, on_device(out), on_device(x)); }), x);
      }
}

TEST_CASE("gelu_mul and softcap are as close to the reference as their roundings allow") {
  // gelu: the inner polynomial 5·u, damped by tanh below 3·u, tanh 8·u, five more roundings. softcap: 8·u for tanh, four more.
  constexpr std::uint64_t seed = 2102;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t n : widths)
    for (const std::size_t extra : sizes{0, 3, 4}) {
      constexpr std::size_t m = 2;
      INFO("n = ", n, ", extra = ", extra);
      auto gate = padded<float>(m, n, extra).fill(random.uniforms(6)), up = padded<float>(m, n, extra).fill(random.uniforms(3));
      if (n > 4) gate(0, 0) = 1e15f, gate(0, 1) = -1e15f, gate(0, 2) = 0, gate(0, 3) = 1e-30f;
      padded<float> want(m, n);
      pointwise_ops<reference>::gelu_mul(plain, want.view(), gate.read(), up.read());
      const auto gelu = result_of(padded<float>(m, n, extra),
                                  [&](auto& q, auto& out) { device::gelu_mul(q, on_device(out), on_device(gate), on_device(up)); });
      check_within(gelu, want, [&](std::size_t r, std::size_t c) { return 16 * u * std::abs(double{gate(r, c)} * double{up(r, c)}); });
      check_same(result_of(up, [&](auto& q, auto& out) { device::gelu_mul(q, on_device(out), on_device(gate), on_device(out)); }), gelu);

      const auto logits = padded<float>(m, n, extra).fill(random.uniforms(80));
      pointwise_ops<reference>::softcap(plain, want.view(), logits.read(), 30);
      check_within(result_of(logits, [&](auto& q, auto& out) { device::softcap(q, on_device(out), on_device(out), 30); }), want,
                   [](std::size_t, std::size_t) { return 12 * u * 30; });
    }
}

// ------------------------------------------------------------------------------------------------ norms and rotations

TEST_CASE("rms_norm agrees with the reference for every width, and norm_add has the bits of rms_norm and add") {
  constexpr std::uint64_t seed = 2103;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t n : widths)
    for (const std::size_t m : sizes{0, 1, 5})
      for (const std::size_t extra : sizes{0, 3})
        for (const bool weighted : {false, true}) {
          if (m == 5 && n > 1024) continue;
          INFO("n = ", n, ", m = ", m, ", extra = ", extra, ", weighted = ", weighted);
          const auto x = padded<float>(m, n, extra).fill(random.uniforms(30)), h = padded<float>(m, n, extra).fill(random.uniforms(30));
          const auto weights = padded<float>(1, n).fill(random.uniforms(2));
          const float* weight = weighted ? weights.data() : nullptr;
          padded<float> want(m, n);
          pointwise_ops<reference>::rms_norm(plain, want.view(), x.read(), weight, 1e-6f);

          const auto norm = result_of(padded<float>(m, n, extra),
                                      [&](auto& q, auto& out) { device::rms_norm(q, on_device(out), on_device(x), weight, 1e-6f); });
          check_within(norm, want, [&](std::size_t r, std::size_t c) { return rms_norm_bound(want(r, c), n); });
          check_same(result_of(x, [&](auto& q, auto& out) { device::rms_norm(q, on_device(out), on_device(out), weight, 1e-6f); }), norm);

          const auto sum = result_of(h, [&](auto& q, auto& out) { device::add(q, on_device(out), on_device(out), on_device(norm)); });
          check_same(result_of(h, [&](auto& q, auto& out) { device::norm_add(q, on_device(out), on_device(x), weight, 1e-6f); }), sum);
        }
}

TEST_CASE("rms_norm of small rows: eps is added below the root") {
  // mean(x²) = 1e-6 in every row, so the root is that of 2e-6.
  for (const std::size_t n : sizes{5, 600}) {
    const auto x = padded<float>(1, n).fill([] { return -1e-3f; });
    const auto want = padded<float>(1, n).fill([] { return static_cast<float>(-std::sqrt(0.5)); });
    const auto norm =
        result_of(x, [&](auto& q, auto& out) { device::rms_norm(q, on_device(out), on_device(std::as_const(out)), nullptr, 1e-6f); });
    // Beside the bound of other rows: u of 1e-3f twice, in its square, and of 1e-6f, each half in the root, and u of x itself.
    check_within(norm, want, [&](std::size_t, std::size_t) { return rms_norm_bound(1, n) + 3 * u; });
  }
}

TEST_CASE("rms_norm of large residuals is finite and of zeros is zero") {
  for (const std::size_t n : sizes{300, 2000}) {
    CAPTURE(n);
    const auto large = padded<float>(1, n).fill([] { return 1e15f; }), zeros = padded<float>(1, n).fill([] { return 0.0f; });
    const auto norm = [&](const padded<float>& x) {
      return result_of(x, [&](auto& q, auto& out) { device::rms_norm(q, on_device(out), on_device(out), nullptr, 1e-6f); });
    };
    check_within(norm(large), padded<float>(1, n).fill([] { return 1.0f; }),
                 [&](std::size_t, std::size_t) { return rms_norm_bound(1, n); });
    check_same(norm(zeros), zeros);
  }
}

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
            const auto norm = result_of(x, [&](auto& q, auto& out) { device::rms_norm(q, on_device(out), on_device(out), weight, 1e-6f); });
            const auto fused = result_of(
                x, [&](auto& q, auto& out) { device::norm_rope(q, on_device(out), weight, 1e-6f, on_device(cos), on_device(sin)); });
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

// ------------------------------------------------------------------------------------------------ quantize

TEST_CASE("quantize has the bits of the definition, whatever a block holds") {
  constexpr std::uint64_t seed = 2107;
  CAPTURE(seed);
  random_numbers random(seed);
  const std::vector<float> special{infinity, -infinity, not_a_number, 0x1p-149f, -0x1p-140f, 1e-31f,
                                   1e-30f,   1.1e-30f,  3e38f,        -3.4e38f,  -0.0f};
  for (const std::size_t blocks : sizes{0, 1, 3, 4, 15, 16, 17, 40})
    for (const std::size_t m : sizes{0, 1, 2, 14})
      for (const std::size_t extra : sizes{0, 1, 4}) {
        INFO("blocks = ", blocks, ", m = ", m, ", extra = ", extra);
        auto x = padded<float>(m, 32 * blocks, extra).fill(random.uniforms(100));
        for (std::size_t r = 2; blocks != 0 && r < m; ++r) {  // a special value among others, and alone
          x(r, random.below(32)) = special[(r - 2) % special.size()];
          const std::size_t last = 32 * (blocks - 1);
          for (std::size_t c = 0; c < 32; ++c) x(r, last + c) = c == r ? special[(r - 2) % special.size()] : 0.0f;
        }
        if (m > 1 && blocks > 1)  // ties: the factor is 1
          for (std::size_t c = 0; c < 32; ++c) x(1, 32 + c) = c == 5 ? -127.0f : static_cast<float>(c) - 15.5f;
        block_rows want(m, blocks, 0);
        for (std::size_t r = 0; r < m; ++r)
          for (std::size_t b = 0; b < blocks; ++b) outrider::quantize(want.view()(r, b), x.row(r) + 32 * b);
        const auto got =
            result_of(block_rows(m, blocks, extra), [&](auto& q, auto& out) { device::quantize(q, on_device(out.view()), on_device(x)); });
        CHECK(got.same_elements(want));
      }
}

TEST_CASE("gelu_mul_quantize has the bits of gelu_mul and quantize") {
  constexpr std::uint64_t seed = 2108;
  CAPTURE(seed);
  random_numbers random(seed);
  for (const std::size_t blocks : sizes{0, 1, 5, 18})
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t extra : sizes{0, 1}) {
        INFO("blocks = ", blocks, ", m = ", m, ", extra = ", extra);
        const auto gate = padded<float>(m, 32 * blocks, extra).fill(random.uniforms(6));
        const auto up = padded<float>(m, 32 * blocks, extra).fill(random.uniforms(3));
        const auto product = result_of(padded<float>(m, 32 * blocks, extra),
                                       [&](auto& q, auto& out) { device::gelu_mul(q, on_device(out), on_device(gate), on_device(up)); });
        const auto want = result_of(block_rows(m, blocks, extra),
                                    [&](auto& q, auto& out) { device::quantize(q, on_device(out.view()), on_device(product)); });
        const auto fused = result_of(block_rows(m, blocks, extra), [&](auto& q, auto& out) {
          device::gelu_mul_quantize(q, on_device(out.view()), on_device(gate), on_device(up));
        });
        CHECK(fused.same_elements(want));
      }
}

// ------------------------------------------------------------------------------------------------ sums and rows of others

TEST_CASE("weighted_sum agrees with the reference") {
  // s fused roundings at most, and one in the reference.
  constexpr std::uint64_t seed = 2109;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t n : widths)
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t s : sizes{0, 1, 2, 8})
        for (const std::size_t extra : sizes{0, 3}) {
          INFO("n = ", n, ", m = ", m, ", s = ", s, ", extra = ", extra);
          const auto x = padded<float>(m * s, n, extra).fill(random.uniforms()),
                     weights = padded<float>(m, s, extra).fill(random.uniforms());
          padded<float> want(m, n);
          pointwise_ops<reference>::weighted_sum(plain, want.view(), x.read(), weights.read());
          const auto got = result_of(padded<float>(m, n, extra), [&](auto& q, auto& out) {
            device::weighted_sum(q, on_device(out), on_device(x), on_device(weights));
          });
          check_within(got, want, [&](std::size_t r, std::size_t c) {
            double sum = 0;
            for (std::size_t j = 0; j < s; ++j) sum += std::abs(double{weights(r, j)} * double{x(r * s + j, c)});
            return static_cast<double>(s + 2) * u * sum;
          });
        }
}

TEST_CASE("gather_ids lays the table rows named side by side") {
  constexpr std::uint64_t seed = 2110;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t w : sizes{0, 1, 3, 33, 300})
    for (const std::size_t m : sizes{0, 1, 3})
      for (const std::size_t s : sizes{0, 1, 4}) {
        INFO("w = ", w, ", m = ", m, ", s = ", s);
        const auto table = padded<token_id>(6, w, 2).fill(random.indexes(1000));
        const auto from = padded<std::int32_t>(m, s, 1).fill(random.indexes(6));
        padded<token_id> want(m, s * w);
        pointwise_ops<reference>::gather_ids(plain, want.view(), table.read(), from.read());
        check_same(result_of(padded<token_id>(m, s * w, 3),
                             [&](auto& q, auto& out) { device::gather_ids(q, on_device(out), on_device(table), on_device(from)); }),
                   want);
      }
}

TEST_CASE("scatter_logits fills with less than the least and puts every logit into its column") {
  constexpr std::uint64_t seed = 2111;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for (const std::size_t n : sizes{1, 5, 64, 4095, 4096, 9001})
    for (const std::size_t c : sizes{1, 3, 300})
      for (const std::size_t m : sizes{0, 1, 3})
        for (const std::size_t extra : sizes{0, 3}) {
          if (c > n) continue;
          INFO("n = ", n, ", c = ", c, ", m = ", m, ", extra = ", extra);
          const auto x = padded<float>(m, c, extra).fill(random.uniforms(20));
          const std::size_t stride = n / c;
          const auto ids = padded<token_id>(m, c, extra).fill([&, i = std::size_t{0}]() mutable {
            return static_cast<token_id>((i++ % c) * stride + random.below(stride));  // distinct, all over the row
          });
          padded<float> want(m, n);
          pointwise_ops<reference>::scatter_logits(plain, want.view(), x.read(), ids.read());
          check_same(result_of(padded<float>(m, n, extra),
                               [&](auto& q, auto& out) { device::scatter_logits(q, on_device(out), on_device(x), on_device(ids)); }),
                     want);
        }
}

// ------------------------------------------------------------------------------------------------ what bits may not depend on

TEST_CASE("a row has the same bits whatever its alignment, its place and the rows beside it") {
  constexpr std::uint64_t seed = 2112;
  CAPTURE(seed);
  random_numbers random(seed);
  for (const std::size_t n : sizes{32, 512, 1056}) {
    CAPTURE(n);
    const auto x = padded<float>(1, n).fill(random.uniforms(8)), y = padded<float>(1, n).fill(random.uniforms(3));
    const auto weight = padded<float>(1, n).fill(random.uniforms(2));
    const auto cos = padded<float>(1, n / 2).fill(random.uniforms()), sin = padded<float>(1, n / 2).fill(random.uniforms());
    // Row `place` of `m` rows, each `shift` columns behind an aligned place; all others are NaN.
    const auto run = [&](std::size_t m, std::size_t place, std::size_t shift, auto op) {
      const auto at = [&](const padded<float>& row) {
        padded<float> all(m, row.cols() + shift, 3 * shift);
        for (std::size_t c = 0; c < row.cols(); ++c) all(place, shift + c) = row(0, c);
        return all;
      };
      const auto view = [&](padded<float>& all) { return on_device(all.view().slice_cols(shift, all.cols() - shift)); };
      padded<float> a = at(x), b = at(y), c = at(cos), s = at(sin), w = at(weight);
      device::queue& q = the_queue();
      op(q, view(a), view(b), view(c), view(s), w.row(place) + shift);
      q.wait();
      return std::vector<float>(a.row(place) + shift, a.row(place) + shift + n);
    };
    const auto check = [&](auto op) {
      const std::vector<float> alone = run(1, 0, 0, op);
      for (const std::size_t m : sizes{1, 2, 9})
        for (const std::size_t shift : sizes{0, 1, 2}) {
          INFO("m = ", m, ", shift = ", shift);
          CHECK(same_bits(run(m, m / 2, shift, op), alone));
        }
    };
    check([](auto& q, auto a, auto b, auto, auto, const float*) { device::add(q, a, a, b); });
    check([](auto& q, auto a, auto b, auto, auto, const float*) { device::gelu_mul(q, a, a, b); });
    check([](auto& q, auto a, auto, auto, auto, const float*) { device::softcap(q, a, a, 30); });
    check([](auto& q, auto a, auto, auto, auto, const float* w) { device::rms_norm(q, a, a, w, 1e-6f); });
    check([](auto& q, auto a, auto b, auto, auto, const float* w) { device::norm_add(q, a, b, w, 1e-6f); });
    check([](auto& q, auto a, auto, auto c, auto s, const float*) { device::rope(q, a, c, s); });
    check([](auto& q, auto a, auto, auto c, auto s, const float* w) { device::norm_rope(q, a, w, 1e-6f, c, s); });
    check([](auto& q, auto a, auto b, auto, auto, const float*) {
      std::vector<int8_block> blocks(a.rows * a.cols / 32);
      device::gelu_mul_quantize(q, {blocks.data(), a.rows, a.cols / 32, a.cols / 32}, a, b);
      q.wait();
      for (std::size_t r = 0; r < a.rows; ++r)
        for (std::size_t i = 0; i < a.cols; ++i)
          a.row(r)[i] = blocks[(r * a.cols + i) / 32].d * static_cast<float>(blocks[(r * a.cols + i) / 32].q[i % 32]);
    });
  }
}

TEST_CASE("every operand may have a stride and an alignment of its own") {
  constexpr std::uint64_t seed = 2114;
  CAPTURE(seed);
  random_numbers random(seed);
  constexpr std::size_t m = 3, n = 48;
  const auto as = [](const padded<float>& from, std::size_t extra) {
    padded<float> copy(from.rows(), from.cols(), extra);
    for (std::size_t r = 0; r < from.rows(); ++r)
      for (std::size_t c = 0; c < from.cols(); ++c) copy(r, c) = from(r, c);
    return copy;
  };
  const auto x = padded<float>(m, n).fill(random.uniforms(8)), y = padded<float>(m, n).fill(random.uniforms());
  const auto cos = padded<float>(m, n / 2).fill(random.uniforms()), sin = padded<float>(m, n / 2).fill(random.uniforms());
  const auto weights = padded<float>(1, n).fill(random.uniforms(2));
  const auto in_layout = [&](std::size_t of_out, std::size_t of_x, std::size_t of_y, std::size_t shift) {
    padded<float> shifted(1, n + shift);
    for (std::size_t c = 0; c < n; ++c) shifted(0, shift + c) = weights(0, c);
    const padded<float> blank(m, n, of_out), left = as(x, of_x), right = as(y, of_y), cosines = as(cos, of_x), sines = as(sin, of_y);
    const float* const weight = shifted.data() + shift;
    std::vector<padded<float>> all;
    const auto take = [&](const padded<float>& out, auto op) { all.push_back(result_of(out, op)); };
    take(blank, [&](auto& q, auto& out) { device::add(q, on_device(out), on_device(left), on_device(right)); });
    take(blank, [&](auto& q, auto& out) { device::rms_norm(q, on_device(out), on_device(left), weight, 1e-6f); });
    take(as(x, of_out), [&](auto& q, auto& out) { device::norm_add(q, on_device(out), on_device(right), weight, 1e-6f); });
    take(as(x, of_out),
         [&](auto& q, auto& out) { device::norm_rope(q, on_device(out), weight, 1e-6f, on_device(cosines), on_device(sines)); });
    take(blank,
         [&](auto& q, auto& out) { device::weighted_sum(q, on_device(out), on_device(left), on_device(right.view().slice_cols(0, 1))); });
    return all;
  };
  const auto want = in_layout(0, 0, 0, 0);
  for (const std::size_t of_out : sizes{0, 3, 4})
    for (const std::size_t of_x : sizes{0, 3, 4})
      for (const std::size_t of_y : sizes{0, 3, 4})
        for (const std::size_t shift : sizes{0, 1}) {
          INFO("of out = ", of_out, ", of x = ", of_x, ", of y = ", of_y, ", shift = ", shift);
          const auto got = in_layout(of_out, of_x, of_y, shift);
          for (std::size_t i = 0; i < want.size(); ++i) check_same(got[i], want[i]);
        }
}

TEST_CASE("grids have as many rows as CUDA allows") {
  for (const std::size_t m : sizes{0, 1, 65535, 65536, std::size_t{1} << 40}) {
    const dim3 grid = device::grid_over(m, 1000, 256);
    CHECK(grid.x == 4);
    CHECK(grid.y == (std::min)(m, std::size_t{65535}));
  }
}

TEST_CASE("kernels take the rows beyond the end of their grid in turn") {
  constexpr std::uint64_t seed = 2113;
  CAPTURE(seed);
  random_numbers random(seed);
  constexpr std::size_t m = 7, n = 64;
  const dim3 grid(1, 3);
  const auto x = padded<float>(m, n, 4).fill(random.uniforms(8)), y = padded<float>(m, n, 4).fill(random.uniforms());
  const padded<float> blank(m, n, 4);
  check_same(result_of(blank,
                       [&](auto& q, auto& out) {
                         device::launch(q, &device::map_rows<device::sum_of_two>, grid, 256, 0, on_device(out), on_device(x), on_device(y),
                                        device::sum_of_two{}, true);
                       }),
             result_of(blank, [&](auto& q, auto& out) { device::add(q, on_device(out), on_device(x), on_device(y)); }));

  const auto quantized = [&](auto op) { return result_of(block_rows(m, n / 32, 1), op); };
  CHECK(quantized([&](auto& q, auto& out) {
          device::launch(q, &device::quantize_rows<device::identity>, grid, 128, 0, on_device(out.view()), on_device(x), on_device(x),
                         device::identity{}, true);
        }).same_elements(quantized([&](auto& q, auto& out) { device::quantize(q, on_device(out.view()), on_device(x)); })));

  const auto weights = padded<float>(m, 1).fill(random.uniforms());
  check_same(result_of(blank,
                       [&](auto& q, auto& out) {
                         device::launch(q, &device::weighted_sum_rows<>, grid, 256, 0, on_device(out), on_device(x), on_device(weights),
                                        true);
                       }),
             result_of(blank, [&](auto& q, auto& out) { device::weighted_sum(q, on_device(out), on_device(x), on_device(weights)); }));

  const auto ids = padded<token_id>(m, 3).fill([i = 0]() mutable { return 5 * i++ % 64; });
  const auto logits = padded<float>(m, 3).fill(random.uniforms());
  check_same(result_of(blank,
                       [&](auto& q, auto& out) {
                         device::launch(q, &device::scatter_logit_rows<>, grid, 256, 0, on_device(out), on_device(logits), on_device(ids),
                                        true);
                       }),
             result_of(blank, [&](auto& q, auto& out) { device::scatter_logits(q, on_device(out), on_device(logits), on_device(ids)); }));

  const auto from = padded<std::int32_t>(m, 2).fill(random.indexes(m));
  const padded<token_id> none(m, 6);
  check_same(result_of(none,
                       [&](auto& q, auto& out) {
                         device::launch(q, &device::gather_id_rows<>, grid, 256, 0, on_device(out), on_device(ids), on_device(from));
                       }),
             result_of(none, [&](auto& q, auto& out) { device::gather_ids(q, on_device(out), on_device(ids), on_device(from)); }));
}
