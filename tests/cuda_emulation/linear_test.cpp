// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "cuda_emulation/immediate_queue.hpp"
// The emulation comes before the kernels.
#include "outrider/backend/cuda/linear.cuh"
#include "outrider/backend/cuda/warp.cuh"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <vector>

#include "contract/fixture.hpp"
#include "contract/stored_weights.hpp"

namespace device = outrider::device;
using contract::padded;
using contract::random_numbers;
using outrider::bf16;
using outrider::device_space;
using outrider::elements_of;
using outrider::f16;
using outrider::token_id;
namespace emulation = outrider::cuda_emulation;

namespace {

// ---------------------------------------------------------------- memory of a device

/// Rows of objects that end with the last of them, so that AddressSanitizer sees an access beyond. `shift` objects come before the first
/// row.
template <class T>
class device_rows {
 public:
  device_rows(std::size_t rows, std::size_t cols, std::size_t extra = 0, std::size_t shift = 0)
      : rows_(rows), cols_(cols), stride_(cols + extra), count_(shift + (rows == 0 ? 0 : (rows - 1) * stride_ + cols)) {
    start_ = static_cast<T*>(std::malloc(std::max<std::size_t>(count_ * sizeof(T), 1)));
    if (count_ != 0) std::memset(static_cast<void*>(start_), 0xff, count_ * sizeof(T));  // NaN, -1
    data_ = start_ + shift;
  }
  device_rows(const device_rows&) = delete;
  device_rows& operator=(const device_rows&) = delete;
  ~device_rows() { std::free(start_); }

  [[nodiscard]] T* row(std::size_t r) const { return data_ + r * stride_; }
  [[nodiscard]] device::rows<T> view() const { return {data_, rows_, cols_, stride_}; }
  [[nodiscard]] device::weights<T> weights() const { return {data_, rows_, cols_ * elements_of<T>, stride_}; }

  /// The elements, and the padding only if it was written.
  [[nodiscard]] padded<T> result() const {
    padded<T> copy(rows_, cols_);
    std::vector<unsigned char> untouched(count_ * sizeof(T), 0xff);
    for (std::size_t r = 0; r < rows_ && cols_ != 0; ++r) {
      for (std::size_t c = 0; c < cols_; ++c) copy(r, c) = row(r)[c];
      const std::size_t first = static_cast<std::size_t>(row(r) - start_) * sizeof(T);
      std::memcpy(untouched.data() + first, row(r), cols_ * sizeof(T));
    }
    CHECK((count_ == 0 || std::memcmp(untouched.data(), start_, count_ * sizeof(T)) == 0));
    return copy;
  }

 private:
  std::size_t rows_, cols_, stride_, count_;
  T *start_, *data_;
};

device_rows<float>& fill(device_rows<float>& to, const padded<float>& from, std::size_t first_row) {
  const auto view = to.view();
  for (std::size_t r = 0; r < view.rows; ++r)
    for (std::size_t c = 0; c < view.cols; ++c) view.row(r)[c] = from(first_row + r, c);
  return to;
}

/// A random matrix as floats, and how to lay it out as W.
template <class W>
struct stored {
  stored(random_numbers& random, std::size_t n, std::size_t k) : blocks(n, std::vector<W>(k / elements_of<W>)), values(n, k) {
    for (std::size_t r = 0; r < n; ++r)
      for (std::size_t b = 0; b < blocks[r].size(); ++b) {
        blocks[r][b] = contract::random_weight<W>(random, contract::numbers::any);
        outrider::for_each_weight(&blocks[r][b], elements_of<W>,
                                  [&](std::size_t i, float value) { values(r, b * elements_of<W> + i) = value; });
      }
  }
  void lay_out(device_rows<W>& to, std::size_t first, std::size_t step = 1) const {
    for (std::size_t r = 0; r < to.view().rows; r += step) std::copy(blocks[first + r].begin(), blocks[first + r].end(), to.row(r));
  }
  std::vector<std::vector<W>> blocks;
  padded<float> values;
};

template <class Body>
void for_each_weight_type(Body body) {
  const auto one = [&]<class W>() {
    INFO("weights of type ", outrider::io::name_of(outrider::io::dtype_of<W>));
    body.template operator()<W>();
  };
  [&]<class... W>(outrider::type_list<W...>) { (one.template operator()<W>(), ...); }(outrider::weight_types{});
}

/// Row lengths around an octet, a warp's octets, and the columns between two barriers, in whole blocks of W.
template <class W>
std::vector<std::size_t> row_lengths() {
  std::vector<std::size_t> all;
  for (const std::size_t k : contract::sizes{0, 1, 7, 8, 9, 255, 256, 264, 512, 520, 1032, 2056, 2571})
    if (const std::size_t whole = (k + elements_of<W> - 1) / elements_of<W> * elements_of<W>; all.empty() || all.back() != whole)
      all.push_back(whole);
  return all;
}

constexpr std::uint64_t schedules[] = {0, 1, 2, 3};
struct with_seed {
  explicit with_seed(std::uint64_t seed) { emulation::settings.seed = seed; }
  ~with_seed() { emulation::settings.seed = 0; }
};

// ---------------------------------------------------------------- what a product is

float butterfly(std::array<float, 32> v) {
  for (std::size_t step = 16; step > 0; step /= 2)
    for (std::size_t lane = 0; lane < step; ++lane) v[lane] += v[lane + step];
  return v[0];
}

/// The order of summation of linear.cuh.
float product(const float* x, const float* w, std::size_t k) {
  std::array<float, 32> sum{};
  for (std::size_t c = 0; c < (k + 7) / 8 * 8; ++c) {
    float& own = sum[c / 8 % 32];
    own = c < k ? std::fma(w[c], x[c], own) : std::fma(0.0f, 0.0f, own);
  }
  return butterfly(sum);
}

/// want(r, c) = product of row r / rows_per_x of x with the row of w that weight_row(r, c) names.
template <class WeightRow>
padded<float> products(const padded<float>& x, const padded<float>& w, std::size_t rows, std::size_t cols, std::size_t rows_per_x,
                       WeightRow weight_row) {
  padded<float> want(rows, cols);
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < cols; ++c) want(r, c) = product(x.row(r / rows_per_x), w.row(weight_row(r, c)), x.cols());
  return want;
}

bool same_part(const padded<float>& got, const padded<float>& want, std::size_t first_row, std::size_t first_col) {
  for (std::size_t r = 0; r < got.rows(); ++r)
    if (!contract::same_bits(got.row(r), want.row(first_row + r) + first_col, got.cols())) return false;
  return true;
}

struct shape {
  std::size_t rows, cols;
};
using shapes = std::initializer_list<shape>;

/// Strides and first elements that allow vectors, and that do not.
struct layout {
  std::size_t extra, shift;
};
constexpr layout layouts[] = {{0, 0}, {4, 4}, {3, 0}, {4, 1}};

}  // namespace

// ---------------------------------------------------------------- reductions

namespace {

template <int Count>
__global__ void sum_of_warp(float* at_once, float* one_by_one, const float* in) {
  const int lane = static_cast<int>(threadIdx.x);
  float v[Count];
  for (int i = 0; i < Count; ++i) {
    v[i] = in[lane * Count + i];
    const float sum = device::warp_sum(v[i]);
    if (lane == (i * 32 / Count)) one_by_one[i] = sum;
  }
  device::warp_sums(v);
  constexpr int held = Count > 32 ? Count / 32 : 1;
  for (int i = 0; i < held; ++i)
    if (Count >= 32 || lane % (32 / Count) == 0) at_once[lane * Count / 32 + i] = v[i];
}

template <int Count>
void check_sums_of_warp(random_numbers& random) {
  CAPTURE(Count);
  std::vector<float> in(32 * Count), at_once(Count), one_by_one(Count), want(Count);
  for (float& v : in) v = random.uniform();
  device::queue q;
  device::launch(q, &sum_of_warp<Count>, 1, 32, 0, at_once.data(), one_by_one.data(), in.data());
  for (std::size_t i = 0; i < Count; ++i) {
    std::array<float, 32> lanes;
    for (std::size_t lane = 0; lane < 32; ++lane) lanes[lane] = in[lane * Count + i];
    want[i] = butterfly(lanes);
  }
  CHECK(contract::same_bits(one_by_one, want));
  CHECK(contract::same_bits(at_once, want));
}

template <int Threads>
__global__ void reduce_block(float* sums, float* doubled, float* largest, const float* in) {
  sums[threadIdx.x] = device::block_sum<Threads>(in[threadIdx.x]);
  doubled[threadIdx.x] = device::block_sum<Threads>(2 * in[threadIdx.x]);
  largest[threadIdx.x] = device::block_max<Threads>(in[threadIdx.x]);
}

template <int Threads>
void check_reductions_of_block(random_numbers& random) {
  CAPTURE(Threads);
  std::vector<float> in(Threads), sums(Threads), doubled(Threads), largest(Threads);
  for (float& v : in) v = random.uniform();
  device::queue q;
  device::launch(q, &reduce_block<Threads>, 1, Threads, 0, sums.data(), doubled.data(), largest.data(), in.data());
  float want = 0;
  for (std::size_t first = 0; first < Threads; first += 32) {
    std::array<float, 32> lanes;
    std::copy_n(in.begin() + static_cast<std::ptrdiff_t>(first), 32, lanes.begin());
    want = first == 0 ? butterfly(lanes) : want + butterfly(lanes);
  }
  CHECK(contract::same_bits(sums, std::vector<float>(Threads, want)));
  CHECK(contract::same_bits(doubled, std::vector<float>(Threads, 2 * want)));
  CHECK(contract::same_bits(largest, std::vector<float>(Threads, *std::max_element(in.begin(), in.end()))));
}

}  // namespace

TEST_CASE("a warp's sums have the same bits one by one and many at once") {
  random_numbers random(701);
  for (const std::uint64_t seed : schedules) {
    const with_seed s(seed);
    check_sums_of_warp<1>(random);
    check_sums_of_warp<2>(random);
    check_sums_of_warp<8>(random);
    check_sums_of_warp<32>(random);
    check_sums_of_warp<64>(random);
  }
}

TEST_CASE("every thread of a block gets its sum and its maximum") {
  random_numbers random(702);
  for (const std::uint64_t seed : schedules) {
    const with_seed s(seed);
    check_reductions_of_block<32>(random);
    check_reductions_of_block<64>(random);
    check_reductions_of_block<1024>(random);
  }
}

TEST_CASE("maxima pass over what is not a number, unless there is nothing else") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr std::size_t threads = 128;
  std::vector<float> in(threads, nan), sums(threads), doubled(threads), largest(threads);
  device::queue q;
  const auto reduce = [&] {
    device::launch(q, &reduce_block<threads>, 1, threads, 0, sums.data(), doubled.data(), largest.data(), in.data());
    return largest;
  };
  for (const float x : reduce()) CHECK(std::isnan(x));
  in[70] = -3;
  CHECK(reduce() == std::vector<float>(threads, -3));
  in[3] = -2;
  CHECK(reduce() == std::vector<float>(threads, -2));
}

// ---------------------------------------------------------------- products

TEST_CASE("matmul: every row and output has the bits of the definition, whatever is beside it, its layout and the schedule") {
  constexpr std::uint64_t seed = 703;
  CAPTURE(seed);
  random_numbers random(seed);
  device::queue q;
  std::uint64_t schedule = 0;
  for_each_weight_type([&]<class W>() {
    constexpr std::size_t most_rows = 19, most_outputs = 17;
    for (const std::size_t k : row_lengths<W>()) {
      const auto x = padded<float>(most_rows, k).fill(random.uniforms());
      const stored<W> w(random, most_outputs, k);
      const padded<float> want = products(x, w.values, most_rows, most_outputs, 1, [](std::size_t, std::size_t c) { return c; });
      for (const shape& part : shapes{{1, 1}, {1, 9}, {5, 3}, {2, 8}, {3, 11}, {5, 9}, {8, 17}, {9, 13}, {19, 8}})
        for (const layout& l : layouts) {
          const std::size_t m = part.rows, n = part.cols;
          const with_seed s(schedule++ % 4);
          INFO("k = ", k, ", m = ", m, ", n = ", n, ", extra = ", l.extra, ", shift = ", l.shift,
               ", schedule = ", emulation::settings.seed);
          const std::size_t first_row = random.below(most_rows - m + 1), first_output = random.below(most_outputs - n + 1);
          device_rows<float> xs(m, k, l.extra, l.shift), out(m, n, l.extra, l.shift);
          device_rows<W> ws(n, k / elements_of<W>, l.extra, l.shift);
          fill(xs, x, first_row);
          w.lay_out(ws, first_output);
          device::matmul<W>(q, out.view(), xs.view(), ws.weights());
          CHECK(same_part(out.result(), want, first_row, first_output));
        }
    }
  });
}

TEST_CASE("matmul: weights or activations alone may lie where no vector does") {
  constexpr std::uint64_t seed = 710;
  CAPTURE(seed);
  random_numbers random(seed);
  device::queue q;
  struct layout_of_both {
    layout x, w;
  };
  for_each_weight_type([&]<class W>() {
    constexpr std::size_t m = 5, n = 9, k = 768;
    const auto x = padded<float>(m, k).fill(random.uniforms());
    const stored<W> w(random, n, k);
    const padded<float> want = products(x, w.values, m, n, 1, [](std::size_t, std::size_t c) { return c; });
    for (const layout_of_both& lies : {layout_of_both{{0, 1}, {0, 0}}, {{1, 0}, {0, 0}}, {{0, 0}, {0, 1}}, {{0, 0}, {1, 0}}}) {
      INFO("x: extra = ", lies.x.extra, ", shift = ", lies.x.shift, ", w: extra = ", lies.w.extra, ", shift = ", lies.w.shift);
      device_rows<float> xs(m, k, lies.x.extra, lies.x.shift), out(m, n);
      device_rows<W> ws(n, k / elements_of<W>, lies.w.extra, lies.w.shift);
      fill(xs, x, 0);
      w.lay_out(ws, 0);
      device::matmul<W>(q, out.view(), xs.view(), ws.weights());
      contract::check_same(out.result(), want);
    }
  });
}

TEST_CASE("matmul: many outputs, of which a warp takes on eight") {
  constexpr std::uint64_t seed = 711;
  CAPTURE(seed);
  random_numbers random(seed);
  device::queue q;
  std::uint64_t schedule = 0;
  const auto check = [&]<class W>(std::size_t k) {
    constexpr std::size_t n = 4099;
    const stored<W> w(random, n, k);
    device_rows<W> ws(n, k);
    w.lay_out(ws, 0);
    for (const std::size_t m : contract::sizes{5, 9, 17}) {
      INFO("k = ", k, ", m = ", m);
      const with_seed s(schedule++ % 4);
      const auto x = padded<float>(m, k).fill(random.uniforms());
      device_rows<float> xs(m, k), out(m, n);
      fill(xs, x, 0);
      device::matmul<W>(q, out.view(), xs.view(), ws.weights());
      contract::check_same(out.result(), products(x, w.values, m, n, 1, [](std::size_t, std::size_t c) { return c; }));
    }
  };
  for (const std::size_t k : contract::sizes{8, 264}) {
    check.template operator()<bf16>(k);
    check.template operator()<f16>(k);
  }
  check.template operator()<bf16>(1032);
}

TEST_CASE("matmul: the schedule changes no bit") {
  constexpr std::uint64_t seed = 704;
  CAPTURE(seed);
  random_numbers random(seed);
  device::queue q;
  for_each_weight_type([&]<class W>() {
    constexpr std::size_t m = 5, n = 37, k = 768;
    const auto x = padded<float>(m, k).fill(random.uniforms());
    const stored<W> w(random, n, k);
    device_rows<float> xs(m, k), out(m, n);
    device_rows<W> ws(n, k / elements_of<W>);
    fill(xs, x, 0);
    w.lay_out(ws, 0);
    const padded<float> want = products(x, w.values, m, n, 1, [](std::size_t, std::size_t c) { return c; });
    for (const std::uint64_t schedule : schedules) {
      CAPTURE(schedule);
      const with_seed s(schedule);
      device::matmul<W>(q, out.view(), xs.view(), ws.weights());
      contract::check_same(out.result(), want);
    }
  });
}

TEST_CASE("matmul: a row takes nothing from rows of NaN beside it") {
  constexpr std::uint64_t seed = 705;
  CAPTURE(seed);
  random_numbers random(seed);
  device::queue q;
  for_each_weight_type([&]<class W>() {
    constexpr std::size_t m = 9, n = 10, k = 512;
    const auto x = padded<float>(m, k).fill(random.uniforms());
    const stored<W> w(random, n, k);
    device_rows<W> ws(n, k / elements_of<W>);
    w.lay_out(ws, 0);
    const padded<float> want = products(x, w.values, m, n, 1, [](std::size_t, std::size_t c) { return c; });
    for (const std::size_t rows : contract::sizes{2, 4, 9})
      for (std::size_t place = 0; place < rows; ++place) {
        INFO("rows = ", rows, ", place = ", place);
        device_rows<float> xs(rows, k), out(rows, n);
        std::copy_n(x.row(place), k, xs.row(place));
        device::matmul<W>(q, out.view(), xs.view(), ws.weights());
        CHECK(contract::same_bits(out.row(place), want.row(place), n));
      }
  });
}

TEST_CASE("the definition of a product is as accurate as its longest chain of roundings") {
  // A term meets one rounding per fmaf that follows in its accumulator, at most 8 * ceil(k / 256), then 5 in its warp; the reference,
  // summed in double, adds one. Each is a factor within 1 ± u; one more u covers the products of several.
  constexpr std::uint64_t seed = 706;
  CAPTURE(seed);
  random_numbers random(seed);
  for (const std::size_t k : contract::sizes{1, 4, 129, 512, 1043, 4105, 21504})
    for (int repeat = 0; repeat < 50; ++repeat) {
      const auto x = padded<float>(1, k).fill(random.uniforms()), w = padded<float>(1, k).fill(random.uniforms());
      double sum = 0, size = 0;
      for (std::size_t c = 0; c < k; ++c) {
        sum += double{x(0, c)} * double{w(0, c)};
        size += std::abs(double{x(0, c)} * double{w(0, c)});
      }
      const double roundings = static_cast<double>(8 * ((k + 255) / 256) + 5 + 1 + 1);
      CAPTURE(k);
      CHECK(std::abs(double{product(x.row(0), w.row(0), k)} - sum) <= roundings * contract::u * size);
    }
}

TEST_CASE("empty products: no rows, no outputs; without columns the sum is 0") {
  device::queue q;
  for_each_weight_type([&]<class W>() {
    constexpr std::size_t k = 256;
    device_rows<float> no_rows(0, k), x(2, k), nothing(2, 0), out(2, 3), no_out(0, 3), none(2, 0);
    device_rows<W> w(3, k / elements_of<W>), no_w(0, k / elements_of<W>), no_columns(3, 0);
    device_rows<std::int32_t> ids(2, 3), no_ids(2, 0);
    device::matmul<W>(q, no_out.view(), no_rows.view(), w.weights());
    device::matmul<W>(q, none.view(), x.view(), no_w.weights());
    device::expert_matmul<W>(q, no_out.view(), no_rows.view(), w.weights(), ids.view().data);
    device::expert_matmul<W>(q, none.view(), x.view(), no_w.weights(), ids.view().data);
    device::gathered_matmul<W>(q, none.view(), x.view(), w.weights(), no_ids.view());
    device::gather_rows<W>(q, no_rows.view(), w.weights(), ids.view().data, 1.0f);
    device::gather_rows<W>(q, nothing.view(), no_columns.weights(), ids.view().data, 1.0f);
    device::matmul<W>(q, out.view(), nothing.view(), no_columns.weights());
    contract::check_same(out.result(), padded<float>(2, 3).fill([] { return 0.0f; }));
  });
}

TEST_CASE("expert_matmul: each row has the bits of matmul with its own experts") {
  constexpr std::uint64_t seed = 707;
  CAPTURE(seed);
  random_numbers random(seed);
  device::queue q;
  std::uint64_t schedule = 0;
  for_each_weight_type([&]<class W>() {
    constexpr std::size_t experts = 4;
    for (const std::size_t k : contract::sizes{256, 768, 1536})
      for (const std::size_t n : contract::sizes{1, 7, 8})
        for (const shape& slots : shapes{{1, 1}, {1, 3}, {2, 2}, {5, 2}})
          for (const layout& l : layouts) {
            const std::size_t m = slots.rows, s = slots.cols;
            const with_seed with(schedule++ % 4);
            INFO("k = ", k, ", m = ", m, ", s = ", s, ", n = ", n, ", extra = ", l.extra, ", shift = ", l.shift);
            const auto x = padded<float>(m, k).fill(random.uniforms());
            const stored<W> w(random, experts * n, k);
            device_rows<float> xs(m, k, l.extra, l.shift), out(m * s, n, l.extra, l.shift);
            device_rows<W> ws(experts * n, k / elements_of<W>, l.extra, l.shift);
            device_rows<std::int32_t> chosen(1, m * s);
            fill(xs, x, 0);
            w.lay_out(ws, 0);
            std::generate_n(chosen.row(0), m * s, random.indexes(experts));
            device::expert_matmul<W>(q, out.view(), xs.view(), ws.weights(), chosen.row(0));
            const auto weight_row = [&](std::size_t i, std::size_t c) { return static_cast<std::size_t>(chosen.row(0)[i]) * n + c; };
            contract::check_same(out.result(), products(x, w.values, m * s, n, s, weight_row));
          }
  });
}

TEST_CASE("gathered_matmul: each output has the bits of matmul with the row named, and no other row is read") {
  constexpr std::uint64_t seed = 708;
  CAPTURE(seed);
  random_numbers random(seed);
  device::queue q;
  std::uint64_t schedule = 0;
  for_each_weight_type([&]<class W>() {
    constexpr std::size_t n = 40;
    for (const std::size_t k : contract::sizes{256, 768, 1536})
      for (const shape& named : shapes{{1, 1}, {1, 17}, {2, 4}, {5, 3}})
        for (const layout& l : layouts) {
          const std::size_t m = named.rows, c = named.cols;
          const with_seed with(schedule++ % 4);
          INFO("k = ", k, ", m = ", m, ", c = ", c, ", extra = ", l.extra, ", shift = ", l.shift);
          const auto x = padded<float>(m, k).fill(random.uniforms());
          const stored<W> w(random, n, k);
          device_rows<float> xs(m, k, l.extra, l.shift), out(m, c, l.extra, l.shift);
          device_rows<W> ws(n, k / elements_of<W>, l.extra, l.shift);
          device_rows<token_id> ids(m, c, l.extra);
          fill(xs, x, 0);
          w.lay_out(ws, 0, 2);  // the others stay NaN
          for (std::size_t r = 0; r < m; ++r) std::generate_n(ids.row(r), c, [&] { return 2 * random.index(n / 2); });
          device::gathered_matmul<W>(q, out.view(), xs.view(), ws.weights(), ids.view());
          const auto weight_row = [&](std::size_t r, std::size_t j) { return static_cast<std::size_t>(ids.row(r)[j]); };
          contract::check_same(out.result(), products(x, w.values, m, c, 1, weight_row));
        }
  });
}

TEST_CASE("gather_rows: the rows named, each weight multiplied once") {
  constexpr std::uint64_t seed = 709;
  CAPTURE(seed);
  random_numbers random(seed);
  device::queue q;
  for_each_weight_type([&]<class W>() {
    constexpr std::size_t n = 9;
    for (const std::size_t k : row_lengths<W>())
      for (const std::size_t m : contract::sizes{1, 4})
        for (const layout& l : layouts)
          for (const float factor : {1.0f, 39.25f, 0.1f}) {
            INFO("k = ", k, ", m = ", m, ", factor = ", factor, ", extra = ", l.extra, ", shift = ", l.shift);
            const stored<W> w(random, n, k);
            device_rows<W> ws(n, k / elements_of<W>, l.extra, l.shift);
            device_rows<float> out(m, k, l.extra, l.shift);
            device_rows<token_id> ids(1, m);
            w.lay_out(ws, 0);
            std::generate_n(ids.row(0), m, random.indexes(n));
            device::gather_rows<W>(q, out.view(), ws.weights(), ids.row(0), factor);
            padded<float> want(m, k);
            for (std::size_t r = 0; r < m; ++r)
              for (std::size_t c = 0; c < k; ++c) want(r, c) = w.values(static_cast<std::size_t>(ids.row(0)[r]), c) * factor;
            contract::check_same(out.result(), want);
          }
  });
}
