// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "cuda_emulation/immediate_queue.hpp"

#include "outrider/backend/cuda/attention.cuh"

#include <algorithm>
#include <memory>

#include "contract/fixture.hpp"
#include "outrider/core/dequantize.hpp"
#include "outrider/core/quantize.hpp"

namespace {

using namespace contract;
using outrider::block_format;
using outrider::device_space;
using outrider::elements_of;
using outrider::key_window;
using outrider::kv_view;
using outrider::q8_0;
using outrider::reference;
using outrider::device::head_parts;
using outrider::device::rows;
using outrider::device::span_lengths;
namespace emu = outrider::cuda_emulation;

using stored_types = outrider::type_list<float, bf16, f16, q8_0>;

outrider::device::queue& queue() {
  static outrider::device::queue q;
  return q;
}
template <class T>
rows<T> there(matrix_view<T> v) {
  return {v.data, v.rows, v.cols, v.stride};
}

/// Memory of exactly this size, so that AddressSanitizer sees one element too many. Filled with bytes that make NaNs of every type.
template <class T>
class exact {
 public:
  explicit exact(std::size_t count) : data_(static_cast<T*>(std::malloc(count * sizeof(T)))), count_(count) {
    std::memset(static_cast<void*>(data_.get()), 0xff, count * sizeof(T));
  }
  [[nodiscard]] T* data() const noexcept { return data_.get(); }
  [[nodiscard]] bool same_bits_as(const exact& other) const { return count_ == other.count_ && same_bits(data(), other.data(), count_); }

 private:
  struct release {
    void operator()(T* memory) const noexcept { std::free(memory); }
  };
  std::unique_ptr<T, release> data_;
  std::size_t count_;
};

/// A cache "in device memory", and how many slots its blocks have. Ring: one block.
template <class Kv>
class cache_memory {
 public:
  cache_memory(bool ring, std::size_t slots, std::size_t heads, std::size_t head_dim)
      : block_rows_(ring ? slots : 16), ring_(ring), heads_(heads), head_dim_(head_dim), table_((slots + block_rows_ - 1) / block_rows_) {
    for (std::size_t i = 0; i < (slots + block_rows_ - 1) / block_rows_; ++i)
      table_.data()[i] = blocks_.emplace_back(2 * heads * block_rows_ * head_dim / elements_of<Kv>).data();
  }
  [[nodiscard]] kv_view<Kv> here() const noexcept { return {table_.data(), block_rows_, ring_ ? block_rows_ : 0, heads_, head_dim_}; }
  [[nodiscard]] kv_view<Kv, device_space> there() const noexcept {
    return {table_.data(), block_rows_, ring_ ? block_rows_ : 0, heads_, head_dim_};
  }
  [[nodiscard]] bool same_bits_as(const cache_memory& other) const {
    return std::equal(blocks_.begin(), blocks_.end(), other.blocks_.begin(), [](auto& a, auto& b) { return a.same_bits_as(b); });
  }

 private:
  std::size_t block_rows_;
  bool ring_;
  std::size_t heads_, head_dim_;
  std::vector<exact<Kv>> blocks_;
  exact<Kv*> table_;
};

/// What append has to write, by its definition.
template <class Kv>
void store(Kv* to, const float* x, std::size_t d) {
  for (std::size_t i = 0; i < d; i += elements_of<Kv>, ++to)
    if constexpr (block_format<Kv>) {
      if (!quantize(x + i, *to)) to->d = f16(std::numeric_limits<float>::quiet_NaN());
    } else {
      *to = static_cast<Kv>(x[i]);
    }
}

/// Keys and values of positions begin … end - 1, as they were drawn. Stored as Kv in any layout; and their exact values as floats.
struct drawn_keys {
  std::size_t begin, end, heads, head_dim;
  padded<float> keys, values;

  template <class Key, class Value>
  drawn_keys(std::size_t first, std::size_t last, std::size_t h, std::size_t d, Key key, Value value)
      : begin(first), end(last), heads(h), head_dim(d), keys(last, h * d), values(last, h * d) {
    for (std::size_t p = first; p < last; ++p)
      for (std::size_t c = 0; c < h * d; ++c) keys(p, c) = key(p), values(p, c) = value(p);
  }
  /// The elements of a position.
  [[nodiscard]] static float* view_of(padded<float>& of, std::size_t position) { return of.view().row(position); }
  template <class Kv>
  [[nodiscard]] cache_memory<Kv> stored(bool ring, std::size_t slots) const {
    cache_memory<Kv> memory(ring, slots, heads, head_dim);
    for (std::size_t p = begin; p < end; ++p)
      for (std::size_t h = 0; h < heads; ++h) {
        store(memory.here().key(p, h), keys.row(p) + h * head_dim, head_dim);
        store(memory.here().value(p, h), values.row(p) + h * head_dim, head_dim);
      }
    return memory;
  }
  template <class Kv>
  [[nodiscard]] cache_memory<float> widened() const {
    const auto as_kv = stored<Kv>(false, end);
    cache_memory<float> memory(false, end, heads, head_dim);
    const auto widen = [&](float* to, const Kv* from) {
      for (std::size_t i = 0; i < head_dim; i += elements_of<Kv>)
        if constexpr (block_format<Kv>)
          dequantize(from[i / elements_of<Kv>], to + i);
        else
          to[i] = outrider::to_float(from[i]);
    };
    for (std::size_t p = begin; p < end; ++p)
      for (std::size_t h = 0; h < heads; ++h) {
        widen(memory.here().key(p, h), as_kv.here().key(p, h));
        widen(memory.here().value(p, h), as_kv.here().value(p, h));
      }
    return memory;
  }
};

/// attend of the rows of q, into a result with padding.
template <class Kv>
padded<float> attend(const padded<float>& q, const cache_memory<Kv>& cache, key_window window) {
  padded<float> out(q.rows(), q.cols(), 3);
  outrider::device::attend<Kv>(queue(), there(out.view()), there(q.view()), cache.there(), window);
  return out;
}
padded<float> attend_by_definition(const padded<float>& q, const cache_memory<float>& cache, key_window window) {
  context_of<reference> ctx;
  padded<float> out(q.rows(), q.cols());
  outrider::attention_ops<reference, float>::attend(ctx, out.view(), q.view(), cache.here(), window);
  return out;
}

/// What rounding explains, relative to the largest value; as in the contract of attention: weights through their arguments, through exp (two
/// of them, 2 ulp each, above and below), and sums of n terms.
double bound(double score_error, double range, std::size_t n, double largest) {
  return (4 * (score_error + u * range) + (16 + 3 * static_cast<double>(n) + 8) * u) * largest;
}
/// A score of d products of queries up to 1/2 and keys up to `largest` is off by (d + 2) · u times the sum of their sizes, at most.
double uniform_bound(std::size_t d, std::size_t n, double largest) {
  const double most = static_cast<double>(d) / 2 * largest;
  return bound(static_cast<double>(d + 2) * u * most, 2 * most, n, largest);
}
template <class Kv>
inline constexpr double largest_stored = block_format<Kv> ? 1 + 0x1p-11 : 1;

// ------------------------------------------------------------------------------------------------ append

TEST_CASE("append writes what its type makes of a row into the slots of its position, and nothing else") {
  constexpr std::uint64_t seed = 1601;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_type(stored_types{}, [&]<class Kv>() {
    for (const bool ring : {false, true})
      for (const std::size_t d : sizes{1, 9, 32, 160, 256, 288})
        for (const std::size_t heads : sizes{1, 3})
          for (const std::size_t m : sizes{0, 1, 5, 20}) {
            if (d % elements_of<Kv> != 0) continue;
            INFO("ring = ", ring, ", d = ", d, ", heads = ", heads, ", m = ", m);
            const std::size_t first = random.below(40), slots = ring ? 37 : 64;
            const auto k = padded<float>(m, heads * d, 3).fill(random.uniforms(100)),
                       v = padded<float>(m, heads * d, 2).fill(random.uniforms());
            const cache_memory<Kv> got(ring, slots, heads, d), want(ring, slots, heads, d);
            for (std::size_t r = 0; r < m; ++r)
              for (std::size_t h = 0; h < heads; ++h) {
                store(want.here().key(first + r, h), k.row(r) + h * d, d);
                store(want.here().value(first + r, h), v.row(r) + h * d, d);
              }
            outrider::device::append<Kv>(queue(), got.there(), there(k.view()), there(v.view()), first);
            CHECK(got.same_bits_as(want));
          }
  });
}

TEST_CASE("append of blocks: no numbers, numbers too large or too small for a scale, ties and zeros") {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  constexpr std::size_t m = 12;
  padded<float> k(m, 64);
  for (std::size_t i = 0; i < 64; ++i) {
    const auto x = static_cast<float>(static_cast<int>(i * 37 % 128) - 63);
    const float rows_at_i[m] = {i == 40 ? nan : x,
                                i == 3 ? infinity : x,
                                i == 63 ? -infinity : x,
                                1e30f * x,
                                1e5f * x,
                                0,
                                i == 5 ? -0.0f : 0,
                                1e-38f * x,
                                1e-44f * x,
                                (x + 0.5f) * 127 / 64,
                                i == 0 ? 127.0f : x / 2,
                                i == 0 ? -127.0f : x + 0.5f};
    for (std::size_t r = 0; r < m; ++r) k(r, i) = rows_at_i[r];
  }
  const cache_memory<q8_0> got(false, m, 1, 64), want(false, m, 1, 64);
  for (std::size_t r = 0; r < m; ++r) {
    store(want.here().key(r, 0), k.row(r), 64);
    store(want.here().value(r, 0), k.row(r), 64);
  }
  outrider::device::append<q8_0>(queue(), got.there(), there(k.read()), there(k.read()), 0);
  for (std::size_t r = 0; r < m; ++r) {
    CAPTURE(r);
    CHECK(same_bits(got.here().key(r, 0), want.here().key(r, 0), 2));
    CHECK(same_bits(got.here().value(r, 0), want.here().value(r, 0), 2));
  }
}

TEST_CASE("append of more rows than a ring has slots keeps the last of each slot, in any order of blocks") {
  constexpr std::uint64_t seed = 1602;
  CAPTURE(seed);
  random_numbers random(seed);
  const auto k = padded<float>(12, 8).fill(random.uniforms()), v = padded<float>(12, 8).fill(random.uniforms());
  for (const std::uint64_t order : {0u, 1u, 2u, 3u}) {
    emu::settings.seed = order;
    const cache_memory<float> got(true, 5, 1, 8);
    outrider::device::append<float>(queue(), got.there(), there(k.view()), there(v.view()), 2);
    emu::settings.seed = 0;
    for (std::size_t r = 7; r < 12; ++r) {
      CHECK(same_bits(got.here().key(2 + r, 0), k.row(r), 8));
      CHECK(same_bits(got.here().value(2 + r, 0), v.row(r), 8));
    }
  }
}

// ------------------------------------------------------------------------------------------------ attend

struct heads_case {
  std::size_t q_heads, kv_heads;
};
constexpr heads_case groups[] = {{1, 1}, {2, 1}, {3, 1}, {4, 2}, {8, 1}, {9, 1}, {16, 1}, {12, 2}, {3, 2}, {5, 3}, {2, 3}, {16, 16}};

template <class Kv, class Query>
void check_attend(const heads_case& heads, const drawn_keys& drawn, bool ring, std::size_t m, key_window window, Query query) {
  INFO("q_heads = ", heads.q_heads, ", kv_heads = ", heads.kv_heads, ", d = ", drawn.head_dim, ", ring = ", ring, ", m = ", m,
       ", first_end = ", window.first_end, ", width = ", window.width);
  const auto q = padded<float>(m, heads.q_heads * drawn.head_dim, 3).fill(query);
  const auto cache = drawn.stored<Kv>(ring, ring ? window.width + m : drawn.end);
  const auto got = attend(q, cache, window), want = attend_by_definition(q, drawn.widened<Kv>(), window);
  check_within(got, want, [&](std::size_t r, std::size_t) {
    return uniform_bound(drawn.head_dim, window.end(r) - window.begin(r), largest_stored<Kv>);
  });
}

TEST_CASE("attend agrees with its definition for every head size and group of query heads") {
  constexpr std::uint64_t seed = 1603;
  CAPTURE(seed);
  random_numbers random(seed);
  const auto draw = [&](std::size_t) { return random.uniform(); };
  for_each_type(stored_types{}, [&]<class Kv>() {
    for (const std::size_t d : sizes{1, 7, 32, 64, 96, 128, 256, 300, 512})
      for (const heads_case& heads : groups) {
        if (d % elements_of<Kv> != 0) continue;
        const bool ring = random.below(2) == 0;
        const std::size_t m = 1 + random.below(3), start = random.below(60), width = ring ? 1 + random.below(40) : key_window::unlimited;
        const key_window window{start + 1, width};
        const drawn_keys drawn(window.begin(0), start + m, heads.kv_heads, d, draw, draw);
        check_attend<Kv>(heads, drawn, ring, m, window, random.uniforms(0.5f));
      }
  });
}

TEST_CASE("attend agrees with its definition over many keys, in spans of several tiles") {
  constexpr std::uint64_t seed = 1604;
  CAPTURE(seed);
  random_numbers random(seed);
  // Later keys are larger, so that the largest score changes in most tiles and spans.
  const auto rising = [&](std::size_t p) { return random.uniform() * static_cast<float>(1 + p % 1000) / 1000; };
  for_each_type(stored_types{}, [&]<class Kv>() {
    for (const std::size_t d : sizes{32, 64}) {
      const drawn_keys drawn(0, 17000, 1, d, rising, rising);
      check_attend<Kv>({2, 1}, drawn, false, 1, {17000, key_window::unlimited}, random.uniforms(0.5f));
      check_attend<Kv>({2, 1}, drawn, false, 2, {16000, 9000}, random.uniforms(0.5f));
    }
  });
}

TEST_CASE("a row without keys gives zeros, and no rows or heads give nothing") {
  const cache_memory<bf16> cache(false, 16, 2, 64);
  const auto q = padded<float>(3, 256).fill([] { return 1.0f; });
  for (const key_window window : {key_window{7, 0}, key_window{0, 0}})
    check_same(attend(q, cache, window), padded<float>(3, 256).fill([] { return 0.0f; }));
  CHECK(attend(padded<float>(0, 256), cache, {1, 1}).rows() == 0);
  CHECK(attend(padded<float>(2, 0), cache, {1, 1}).padding_untouched());
}

TEST_CASE("scores without bounds: infinities of one sign weigh nothing, of the other are no numbers, and a NaN is seen by its head alone") {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::size_t d : sizes{8, 64}) {
    drawn_keys drawn(
        0, 40, 2, d, [](std::size_t) { return 0.0f; }, [](std::size_t p) { return static_cast<float>(p); });
    const auto q = padded<float>(1, 4 * d).fill([] { return 1.0f; });
    const auto got_with = [&](std::size_t first, std::size_t last, float key) {
      drawn_keys changed = drawn;
      for (std::size_t p = first; p < last; ++p) changed.keys(p, 0) = key;  // of the first KV head
      return attend(q, changed.stored<float>(false, 40), {40, key_window::unlimited});
    };
    const auto hidden = got_with(0, 32, -infinity);  // two whole spans, as if these positions were not there
    for (std::size_t c = 0; c < 2 * d; ++c) CHECK(std::abs(hidden(0, c) - 35.5f) <= bound(0, 0, 8, 39));
    for (const auto& [first, last, key] : {std::tuple{0u, 40u, -infinity}, std::tuple{20u, 21u, infinity}, std::tuple{20u, 21u, nan}}) {
      const auto got = got_with(first, last, key);
      CHECK(std::all_of(got.row(0), got.row(0) + 2 * d, [](float x) { return std::isnan(x); }));
      for (std::size_t c = 2 * d; c < 4 * d; ++c) CHECK(std::abs(got(0, c) - 19.5f) <= bound(0, 0, 40, 39));
    }
  }
}

// ------------------------------------------------------------------------------------------------ the same bits

TEST_CASE("a row has the bits it has alone: among others, in either layout, under any order of threads") {
  constexpr std::uint64_t seed = 1605;
  CAPTURE(seed);
  random_numbers random(seed);
  const auto draw = [&](std::size_t) { return random.uniform(); };
  for_each_type(stored_types{}, [&]<class Kv>() {
    for (const std::size_t d : sizes{96, 64, 256, 512})
      for (const std::size_t width : sizes{21, 70}) {
        constexpr std::size_t m = 4, start = 90;
        INFO("d = ", d, ", width = ", width);
        const key_window window{start + 1, width};
        const drawn_keys drawn(window.begin(0), start + m, 1, d, draw, draw);
        const auto ring = drawn.stored<Kv>(true, width + m), growing = drawn.stored<Kv>(false, start + m);
        const auto q = padded<float>(m, 4 * d, 1).fill(random.uniforms());
        const auto together = attend(q, ring, window);
        for (std::size_t r = 0; r < m; ++r) {
          padded<float> one(1, 4 * d, 5);
          std::copy(q.row(r), q.row(r) + 4 * d, one.view().row(0));
          const auto alone = attend(one, growing, {start + 1 + r, width});
          CHECK(same_bits(alone.row(0), together.row(r), 4 * d));
        }
        for (const std::uint64_t order : {1u, 2u, 3u}) {
          emu::settings.seed = order;
          check_same(attend(q, growing, window), together);
        }
        emu::settings.seed = 0;
      }
  });
}

/// Every row of a pass, alone and as one of the first of a shorter pass.
template <class Kv>
void check_rows_alone(const padded<float>& q, const cache_memory<Kv>& cache, key_window window) {
  const auto together = attend(q, cache, window);
  for (const std::size_t rows : {std::size_t{1}, std::size_t{3}})
    for (std::size_t r = 0; r + rows <= q.rows(); ++r) {
      padded<float> some(rows, q.cols(), 5);
      for (std::size_t i = 0; i < rows; ++i) std::copy(q.row(r + i), q.row(r + i) + q.cols(), some.view().row(i));
      const auto got = attend(some, cache, {window.first_end + r, window.width});
      for (std::size_t i = 0; i < rows; ++i) {
        INFO("row ", r + i, " of a pass of ", rows, " from ", r);
        CHECK(same_bits(got.row(i), together.row(r + i), q.cols()));
      }
    }
}

TEST_CASE("rows that share blocks have the bits they have alone, wherever their windows and spans begin and end") {
  constexpr std::uint64_t seed = 1607;
  CAPTURE(seed);
  random_numbers random(seed);
  const auto draw = [&](std::size_t) { return random.uniform(); };
  for_each_type(stored_types{}, [&]<class Kv>() {
    for (const std::size_t d : sizes{32, 64})
      for (const heads_case& heads : {heads_case{1, 1}, heads_case{4, 2}, heads_case{3, 1}, heads_case{3, 2}})
        for (const std::size_t width : {std::size_t{0}, std::size_t{1}, std::size_t{5}, std::size_t{40}, key_window::unlimited}) {
          constexpr std::size_t m = 9;
          const std::size_t start = random.below(50);
          INFO("d = ", d, ", q_heads = ", heads.q_heads, ", kv_heads = ", heads.kv_heads, ", width = ", width, ", start = ", start);
          const drawn_keys drawn(0, start + m, heads.kv_heads, d, draw, draw);
          check_rows_alone(padded<float>(m, heads.q_heads * d, 1).fill(random.uniforms()), drawn.stored<Kv>(false, start + m),
                           {start + 1, width});
        }
  });
}

TEST_CASE("rows that share blocks have the bits they have alone in spans of several tiles") {
  constexpr std::uint64_t seed = 1608;
  CAPTURE(seed);
  random_numbers random(seed);
  // The spans in which the rows begin outweigh all others.
  const auto key = [&](std::size_t p) { return p < 288 ? random.uniform() : -1.0f; };
  const drawn_keys drawn(0, 17010, 1, 64, key, [&](std::size_t) { return random.uniform(); });
  const auto cache = drawn.stored<bf16>(false, 17010);
  const auto q = padded<float>(4, 2 * 64).fill([&] { return std::abs(random.uniform()); });
  // Spans of 144 keys, which rows begin at either end of a tile and of a span.
  for (const std::size_t begin : sizes{141, 144 + 62, 0}) check_rows_alone(q, cache, {begin + 17000 - 300, 17000 - 300});
}

TEST_CASE("a pass in which spans become longer has the bits of its rows") {
  constexpr std::uint64_t seed = 1609;
  CAPTURE(seed);
  random_numbers random(seed);
  const auto draw = [&](std::size_t) { return random.uniform(); };
  constexpr std::size_t heads = 64, d = 64, m = 6;  // heads for 16 spans at a time
  const span_lengths length(head_parts(heads, heads), d);
  REQUIRE(length(256) != length(257));
  const auto cache = drawn_keys(0, 253 + m, heads, d, draw, draw).stored<bf16>(false, 253 + m);
  check_rows_alone(padded<float>(m, heads * d).fill(random.uniforms()), cache, {254, key_window::unlimited});
}

TEST_CASE("what a row does not see does not reach it, not even as a number that is none, or as the sign of a zero") {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  constexpr std::size_t m = 4, start = 44, width = 29;  // the first row sees a whole span from 16 on, the last one up to 48
  for (const std::size_t d : sizes{8, 64})
    for (const float bad : {nan, infinity, -infinity}) {
      CAPTURE(bad);
      const auto key = [](std::size_t) { return 0.0f; };
      const auto value = [](std::size_t p) { return static_cast<float>(p); };
      drawn_keys drawn(0, start + m, 1, d, key, value);
      const auto q = padded<float>(m, 2 * d).fill([] { return 1.0f; });
      const auto want = attend(q, drawn.stored<float>(false, start + m), {start + 1, width});
      for (std::size_t p = 0; p < start + m; ++p) {  // where row 1 does not look
        if (p + width >= start + 2 && p < start + 2) continue;
        std::fill_n(drawn.view_of(drawn.keys, p), d, bad);
        std::fill_n(drawn.view_of(drawn.values, p), d, bad);
      }
      const auto got = attend(q, drawn.stored<float>(false, start + m), {start + 1, width});
      CHECK(same_bits(got.row(1), want.row(1), 2 * d));
      CHECK(std::isnan(got(0, 0)));
    }
  // Products that round to a zero below: + 0 · value would make it one above.
  drawn_keys drawn(
      0, start + m, 1, 64, [](std::size_t p) { return p % 16 == 0 ? 40.0f : -40.0f; },
      [](std::size_t p) { return p % 2 == 0 ? -1e-45f : 1.0f; });
  check_rows_alone(padded<float>(m, 64).fill([] { return 0.01f; }), drawn.stored<float>(false, start + m), {start + 1, width});
}

TEST_CASE("passes that go through the queue's memory in pieces of some rows or some heads have the same bits") {
  constexpr std::uint64_t seed = 1606;
  CAPTURE(seed);
  random_numbers random(seed);
  const auto draw = [&](std::size_t) { return random.uniform(); };
  constexpr std::size_t begin = 40, keys = 100, m = 11, spans = 8;
  const key_window window{begin + keys, keys};
  for (const heads_case& heads : {heads_case{4, 2}, heads_case{16, 1}, heads_case{5, 3}, heads_case{6, 6}})
    for (const std::size_t d : sizes{8, 64}) {
      const auto cache = drawn_keys(begin, begin + keys + m, heads.kv_heads, d, draw, draw).stored<bf16>(false, begin + keys + m);
      const auto q = padded<float>(m, heads.q_heads * d).fill(random.uniforms());
      const auto whole = attend(q, cache, window);
      const std::size_t query_bytes = spans * (d + 2) * sizeof(float), most = (m + 8) * (heads.q_heads + 8) * query_bytes;
      auto* const memory = static_cast<unsigned char*>(queue().scratch());
      for (const std::size_t queries : sizes{8, 9, 16, 24, 25, 47, 64, 100}) {
        INFO("q_heads = ", heads.q_heads, ", kv_heads = ", heads.kv_heads, ", d = ", d, ", queries = ", queries);
        const std::size_t bytes = queries * query_bytes + 4;
        std::fill(memory + bytes, memory + most, static_cast<unsigned char>(0x6b));
        padded<float> got(m, heads.q_heads * d, 3);
        outrider::device::attend_within<bf16>(bytes, queue(), there(got.view()), there(q.view()), cache.there(), window);
        check_same(got, whole);
        CHECK(std::all_of(memory + bytes, memory + most, [](unsigned char byte) { return byte == 0x6b; }));
      }
    }
}

TEST_CASE("heads so many and so large that no row fits into the queue's memory") {
  constexpr std::size_t q_heads = 48, d = 4096, keys = 40, m = 2;  // 3 spans' sums, in room for 4: 3 MiB a row
  constexpr std::size_t bytes = std::size_t{2} << 20;
  const drawn_keys drawn(
      0, keys + m, 1, d, [](std::size_t) { return 0.0f; }, [](std::size_t p) { return static_cast<float>(p); });
  const auto cache = drawn.stored<bf16>(false, keys + m);
  const auto q = padded<float>(m, q_heads * d).fill([] { return 1.0f; });
  padded<float> got(m, q_heads * d);
  outrider::device::attend_within<bf16>(bytes, queue(), there(got.view()), there(q.view()), cache.there(), {keys, keys});
  check_within(got, attend_by_definition(q, drawn.widened<bf16>(), {keys, keys}),
               [&](std::size_t r, std::size_t) { return bound(0, 0, keys, static_cast<double>(keys + r)); });
}

}  // namespace
