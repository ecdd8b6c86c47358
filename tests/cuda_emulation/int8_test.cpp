// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// The kernels of int8.cuh on the CPU: the bits of the definition for every format, shape, stride and order of threads.
#include "immediate_queue.hpp"
//
#include <cstdlib>
#include <cstring>
#include <vector>

#include "contract/grouped_weights.hpp"
#include "outrider/backend/cuda/int8.cuh"

namespace {

using namespace contract;
using outrider::device_space;
using outrider::linear_ops;
using outrider::reference;
namespace device = outrider::device;

/// Memory of the exact size, so that AddressSanitizer sees overruns; `shift` bytes behind a multiple of 16.
template <class T>
class device_copy {
 public:
  device_copy(const T* from, std::size_t count, std::size_t shift = 0)
      : memory_(static_cast<std::byte*>(std::malloc(count * sizeof(T) + shift + 1))), shift_(shift), bytes_(count * sizeof(T)) {
    if (std::byte* exact = static_cast<std::byte*>(std::realloc(memory_, bytes_ + shift + (bytes_ + shift == 0)))) memory_ = exact;
    if (bytes_ != 0) std::memcpy(memory_ + shift_, from, bytes_);
  }
  device_copy(const device_copy&) = delete;
  device_copy& operator=(const device_copy&) = delete;
  ~device_copy() { std::free(memory_); }
  [[nodiscard]] T* data() const noexcept { return reinterpret_cast<T*>(memory_ + shift_); }

 private:
  std::byte* memory_;
  std::size_t shift_, bytes_;
};

/// A matrix in groups whose groups are `extra` records further apart than they are long, with NaN scales between.
template <class W>
struct device_weights {
  device_weights(const grouped_weights<W>& w, std::size_t extra)
      : stride(w.view().stride + extra), shape(w.view()), memory(spread(w).data(), length()) {}
  [[nodiscard]] weight_view<grouped<W>, device_space> view() const noexcept { return {memory.data(), shape.rows, shape.cols, stride}; }
  /// The last group has no records behind it.
  [[nodiscard]] std::size_t length() const noexcept { return shape.groups() == 0 ? 0 : (shape.groups() - 1) * stride + shape.stride; }
  std::vector<grouped<W>> spread(const grouped_weights<W>& w) const {
    std::vector<grouped<W>> records(length());
    if (!records.empty()) std::memset(static_cast<void*>(records.data()), 0xff, records.size() * sizeof(grouped<W>));
    for (std::size_t g = 0; g < shape.groups(); ++g) std::copy_n(w.view().group(g), shape.stride, records.data() + g * stride);
    return records;
  }
  std::size_t stride;
  weight_view<grouped<W>> shape;
  device_copy<grouped<W>> memory;
};

matrix_view<float, device_space> on_device(padded<float>& p) {
  const auto v = p.view();
  return {v.data, v.rows, v.cols, v.stride};
}

/// op(queue, out, x, w) on the device against `want`. Where threads run in a random order the result is the same.
template <class W, class Op>
void check_product(const padded<float>& want, std::size_t extra, const int8_rows& x, const device_weights<W>& w, std::uint64_t seed,
                   std::size_t shift, Op op) {
  CAPTURE(seed);
  CAPTURE(shift);
  const auto from = x.read();
  const std::size_t length = from.rows == 0 ? 0 : (from.rows - 1) * from.stride + from.cols;  // nothing behind the last row
  const device_copy<int8_block> blocks(from.data, length, shift);
  outrider::cuda_emulation::settings.seed = seed;
  padded<float> got(want.rows(), want.cols(), extra);
  device::queue q;
  op(q, on_device(got), matrix_view<const int8_block, device_space>{blocks.data(), from.rows, from.cols, from.stride}, w.view());
  q.wait();
  outrider::cuda_emulation::settings.seed = 0;
  check_exact(got, want);
}

template <class W>
padded<float> defined_product(const int8_rows& x, const grouped_weights<W>& w) {
  outrider::reference_context plain;
  padded<float> want(x.read().rows, w.rows);
  linear_ops<reference, grouped<W>>::matmul(plain, want.view(), x.read(), w.view());
  return want;
}

template <class W>
void check_matmul(random_numbers& random, const grouped_weights<W>& w, std::size_t m, std::size_t extra, std::uint64_t seed,
                  std::size_t shift = 0) {
  INFO("n = ", w.rows, ", k = ", w.cols, ", m = ", m, ", extra = ", extra);
  const int8_rows x(activations(random, m, w.cols, m / 2), extra);
  check_product(defined_product(x, w), extra, x, device_weights<W>(w, extra), seed, shift,
                [](auto& q, auto out, auto in, auto weights) { device::int8_matmul<W>(q, out, in, weights); });
}

TEST_CASE("int8 products have the bits of the definition for every format, shape and stride, in every order of threads") {
  constexpr std::uint64_t seed = 901;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_grouped([&]<class W>() {
    constexpr std::size_t parts = grouped<W>::parts;
    std::uint64_t order = 0;
    for (const std::size_t k : sizes{0, 256, parts == 1 ? 32u : 768u, parts == 1 ? 352u : 1280u})
      for (const std::size_t n : sizes{1, 16, 17, 53}) {
        const grouped_weights<W> w(random, n, k);
        for (const std::size_t m : sizes{0, 1, 2, 7, 8, 9, 17}) check_matmul(random, w, m, m % 2 == 0 ? 3 : 0, order++ % 4);
      }
  });
}

TEST_CASE("int8 products do not need aligned rows of x") {
  constexpr std::uint64_t seed = 902;
  CAPTURE(seed);
  random_numbers random(seed);
  const grouped_weights<outrider::q4_0> w(random, 33, 32 * 11);
  const grouped_weights<outrider::q6_k> nested(random, 33, 512);
  for (const std::size_t shift : sizes{4, 8, 12})
    for (const std::size_t m : sizes{1, 5, 16}) {
      check_matmul(random, w, m, 1, shift / 4, shift);
      check_matmul(random, nested, m, 1, shift / 4, shift);
    }
}

TEST_CASE("an int8 product of many columns goes through its stages again and again") {
  constexpr std::uint64_t seed = 903;
  CAPTURE(seed);
  random_numbers random(seed);
  const grouped_weights<outrider::q4_0> simple(random, 5, 15360 + 96);
  const grouped_weights<outrider::q5_k> nested(random, 18, 15360);
  for (const std::uint64_t order : {0u, 1u}) {
    check_matmul(random, simple, 3, 0, order);
    check_matmul(random, nested, 9, 0, order);
  }
}

template <class W, int Tiles, int Rows>
void check_shape(random_numbers& random) {
  constexpr std::size_t full = 8 * Tiles;
  for (const std::size_t k : sizes{grouped<W>::elements, 40 * 32 / grouped<W>::elements * grouped<W>::elements}) {
    const grouped_weights<W> w(random, 16 * 6 + 3, k);
    const device_weights<W> weights(w, 1);
    for (const std::size_t m : {full, full + 1}) {
      INFO("tiles = ", Tiles, ", rows = ", Rows, ", k = ", k, ", m = ", m);
      const int8_rows x(activations(random, m, k, 1), 2);
      check_product(defined_product(x, w), 1, x, weights, m % 4, 0, [](auto& q, auto out, auto in, auto matrix) {
        device::launch_int8_product<W, Tiles, Rows>(q, out, in, matrix, nullptr, (out.rows + full - 1) / full);
      });
    }
  }
}

TEST_CASE("int8 products are the same however they are cut into tiles of rows") {
  constexpr std::uint64_t seed = 904;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_grouped([&]<class W>() {
    check_shape<W, 1, 2>(random);
    check_shape<W, 2, 1>(random);
    check_shape<W, 2, 2>(random);
    check_shape<W, 4, 2>(random);
  });
}

TEST_CASE("int8 products of large matrices and long prompts run in blocks of several warps") {
  constexpr std::uint64_t seed = 905;
  CAPTURE(seed);
  random_numbers random(seed);
  const grouped_weights<outrider::q4_0> tall(random, 16 * 397 + 5, 64);  // more groups than are split for more than two rows
  for (const std::size_t m : sizes{1, 3, 11}) check_matmul(random, tall, m, 0, m % 4);
  const grouped_weights<outrider::q4_0> taller(random, 16 * 1061 + 3, 32);  // more than are split for one
  check_matmul(random, taller, 1, 0, 1);
  const grouped_weights<outrider::q8_0> wide(random, 16 * 27, 288);
  check_matmul(random, wide, 300, 2, 2);
}

template <class W>
void check_split(random_numbers& random, const grouped_weights<W>& w, const device_weights<W>& weights, std::size_t m, int dot_warps,
                 std::size_t shift) {
  using shape = device::int8_split<W>;
  INFO("n = ", w.rows, ", k = ", w.cols, ", m = ", m, ", dot warps = ", dot_warps);
  const int8_rows x(activations(random, m, w.cols, m / 2), m % 3);
  check_product(defined_product(x, w), m % 2, x, weights, (m + static_cast<std::size_t>(dot_warps)) % 4, shift,
                [&](auto& q, auto out, auto in, auto matrix) {
                  const int count = static_cast<int>(m), warps = dot_warps + shape::pairs(count);
                  device::launch(q, &device::int8_split_product<W>, static_cast<unsigned>(matrix.groups()),
                                 static_cast<unsigned>(32 * warps), shape::shared_bytes(count, dot_warps), out, in, matrix, nullptr);
                });
}

TEST_CASE("int8 products are the same however many warps share a group") {
  constexpr std::uint64_t seed = 910;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_grouped([&]<class W>() {
    constexpr std::size_t part = 32 * grouped<W>::parts;  // a record
    for (const std::size_t records : {std::size_t{1}, 9 * 8 / grouped<W>::parts, 90 / grouped<W>::parts}) {
      const grouped_weights<W> w(random, 19, records * part);
      const device_weights<W> weights(w, 1);
      for (const int dot_warps : {1, 2, 3})
        for (const std::size_t m : sizes{1, 2, 5, 8}) check_split(random, w, weights, m, dot_warps, m == 5 ? 4 : 0);
    }
  });
}

TEST_CASE("blocks that share a group fit into shared memory, several on a multiprocessor") {
  for_each_grouped([&]<class W>() {
    using shape = device::int8_split<W>;
    for (int m = 1; m <= 8; ++m)
      for (const std::size_t parts : sizes{0, 1, 8, 9, 48, 480})
        for (const std::size_t together : sizes{1, 2, 3, 8}) {
          INFO("m = ", m, ", parts = ", parts, ", together = ", together);
          const int warps = shape::dot_warps(m, parts, together);
          const std::size_t bytes = shape::shared_bytes(m, warps);
          CHECK(warps >= 1);
          CHECK(warps + shape::pairs(m) <= shape::most_warps());
          CHECK((together > 2 && warps > 1 ? 3 : 2) * (bytes + 1024) <= 227 * 1024);
          CHECK(bytes <= 99 * 1024);
          CHECK((warps == 1 || static_cast<std::size_t>(8 * (warps - 1)) < parts));  // each has a unit
        }
  });
}

TEST_CASE("int8 products are exact where integers and scales are at their ends") {
  constexpr std::uint64_t seed = 906;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_grouped([&]<class W>() {
    for (const block_bits kind : {block_bits::zeros, block_bits::ones, block_bits::extreme})
      for (const float sign : {1.0f, -1.0f, 0.0f}) {  // 0: signs in turn
        INFO("bits ", static_cast<int>(kind), ", sign ", sign);
        const grouped_weights<W> w(random, 33, 256, kind);
        padded<float> floats(9, w.cols);
        for (std::size_t r = 0; r < floats.rows(); ++r)
          for (std::size_t c = 0; c < floats.cols(); ++c) floats(r, c) = sign != 0 ? sign : (c + r) % 2 == 0 ? 1.0f : -1.0f;  // q = ±127
        const int8_rows x(floats, 0);
        check_product(defined_product(x, w), 0, x, device_weights<W>(w, 0), 0, 0,
                      [](auto& q, auto out, auto in, auto weights) { device::int8_matmul<W>(q, out, in, weights); });
      }
  });
}

TEST_CASE("a row of an int8 product has the bits it has alone") {
  constexpr std::uint64_t seed = 907;
  CAPTURE(seed);
  random_numbers random(seed);
  const grouped_weights<outrider::q6_k> w(random, 20, 512);
  const device_weights<outrider::q6_k> weights(w, 0);
  const padded<float> source = activations(random, 19, w.cols, 4);  // row 4 is NaN
  const auto product = [&](std::size_t first, std::size_t count) {
    std::vector<std::size_t> rows(count);
    for (std::size_t i = 0; i < count; ++i) rows[i] = first + i;
    const int8_rows x(pick<float>(source, rows), 0);
    padded<float> out(count, w.rows);
    device::queue q;
    const auto v = x.read();
    device::int8_matmul<outrider::q6_k>(q, on_device(out), {v.data, v.rows, v.cols, v.stride}, weights.view());
    q.wait();
    return out.bits();
  };
  const std::vector<row_bits> together = product(0, 19);
  for (const std::size_t first : sizes{0, 3, 4, 7, 8, 18}) {
    CAPTURE(first);
    CHECK(product(first, 1)[0] == together[first]);
  }
}

template <class W, int Rows>
void launch_experts(device::queue& q, device::rows<float> out, device::rows<const int8_block> x, device::weights<grouped<W>> w,
                    const std::int32_t* experts) {
  if constexpr (Rows == 0)
    device::int8_expert_matmul<W>(q, out, x, w, experts);
  else
    device::launch_int8_product<W, 1, Rows>(q, out, x, w, experts, out.rows);
}

TEST_CASE("int8 expert products take every row through its experts") {
  constexpr std::uint64_t seed = 908;
  constexpr std::size_t count = 5;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for_each_grouped([&]<class W>() {
    for (const std::size_t n : sizes{0, 16, 48}) {
      const grouped_weights<W> w(random, count * n, 256);
      const device_weights<W> weights(w, 1);
      for (const std::size_t m : sizes{0, 1, 7})
        for (const std::size_t active : sizes{1, 2}) {
          INFO("n = ", n, ", m = ", m, ", active = ", active);
          std::vector<std::int32_t> chosen(m * active);
          for (std::int32_t& e : chosen) e = random.index(count);
          const device_copy<std::int32_t> experts(chosen.data(), chosen.size());
          const int8_rows x(activations(random, m, w.cols), 1);
          padded<float> want(m * active, n);
          linear_ops<reference, grouped<W>>::expert_matmul(plain, want.view(), x.read(), w.view(), chosen.data());
          check_product(want, 2, x, weights, m % 4, 0,
                        [&](auto& q, auto out, auto in, auto matrix) { launch_experts<W, 0>(q, out, in, matrix, experts.data()); });
          if (m == 7 && n != 0)
            check_product(want, 0, x, weights, 3, 0,
                          [&](auto& q, auto out, auto in, auto matrix) { launch_experts<W, 2>(q, out, in, matrix, experts.data()); });
        }
    }
  });
}

TEST_CASE("rows gathered from groups are the floats of the stored format bit for bit") {
  constexpr std::uint64_t seed = 909;
  CAPTURE(seed);
  random_numbers random(seed);
  outrider::reference_context plain;
  for_each_grouped([&]<class W>() {
    for (const block_bits kind : {block_bits::random, block_bits::ones, block_bits::extreme})
      for (const float factor : {1.0f, 39.25f}) {
        INFO("bits ", static_cast<int>(kind), ", factor ", factor);
        const grouped_weights<W> w(random, 37, 512, kind);
        const device_weights<W> weights(w, 1);
        const std::vector<token_id> ids{36, 0, 15, 16, 16, 31};
        const device_copy<token_id> device_ids(ids.data(), ids.size());
        for (const std::size_t m : {std::size_t{0}, ids.size()}) {
          padded<float> got(m, w.cols, 3), want(m, w.cols);
          linear_ops<reference, W>::gather_rows(plain, want.view(), w.as_stored(), ids.data(), factor);
          device::queue q;
          device::int8_gather_rows<W>(q, on_device(got), weights.view(), device_ids.data(), factor);
          q.wait();
          check_exact(got, want);
        }
      }
  });
}

}  // namespace
