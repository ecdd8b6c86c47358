// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>

#include "fixture.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/dequantize.hpp"
#include "outrider/core/extents.hpp"
#include "outrider/core/kv_view.hpp"
#include "outrider/core/quantize.hpp"

namespace contract {

using outrider::attention_ops;
using outrider::block_format;
using outrider::elements_of;
using outrider::key_window;
using outrider::kv_types;
using outrider::kv_view;
using outrider::reference;

template <>
inline constexpr std::string_view name_of<outrider::q8_0> = "q8_0";
template <>
inline outrider::q8_0 poison<outrider::q8_0>() noexcept {
  outrider::q8_0 block{std::bit_cast<f16>(std::uint16_t{0x7fd5}), {}};
  std::fill(std::begin(block.qs), std::end(block.qs), std::int8_t{0x6b});
  return block;
}

/// The least head size of at least d that keys and values stored as Kv can have.
template <class Kv>
constexpr std::size_t whole(std::size_t d) noexcept {
  return outrider::divide_up(d, elements_of<Kv>) * elements_of<Kv>;
}
/// How far x may be from what a scalar type stores of it.
template <class Kv>
double rounding_of(double x) noexcept {
  if constexpr (std::is_same_v<Kv, bf16>) return 0x1p-8 * std::abs(x);
  if constexpr (std::is_same_v<Kv, f16>) return (std::max)(0x1p-11 * std::abs(x), 0x1p-25);  // below 2^-14 in steps of 2^-24
  return 0;
}
/// The largest magnitude that numbers of at most 1 have when they are stored: the scale of a block is rounded to 11 bits.
template <class Kv>
inline constexpr double largest = block_format<Kv> ? 1 + 0x1p-11 : 1;

/// to = the d numbers at x, as near as Kv has them: multiples of 1/16 up to 127/16 exactly.
template <class Kv>
void store_row(Kv* to, const float* x, std::size_t d) {
  for (std::size_t i = 0; i < d; i += elements_of<Kv>, ++to)
    if constexpr (block_format<Kv>) {
      const std::span block(x + i, elements_of<Kv>);
      if (std::all_of(block.begin(), block.end(), [](float v) { return std::abs(v) < 8 && std::nearbyint(16 * v) == 16 * v; })) {
        to->d = f16(1.0f / 16);
        std::transform(block.begin(), block.end(), to->qs, [](float v) { return static_cast<std::int8_t>(16 * v); });
      } else {
        quantize(x + i, *to);
      }
    } else {
      *to = static_cast<Kv>(x[i]);
    }
}
/// Element i of a row of zeros = a number that f16 has; in blocks the only one of its block that is not zero.
template <class Kv>
void store_one(Kv* row, std::size_t i, float value) {
  if constexpr (block_format<Kv>) {
    row[i / elements_of<Kv>] = {f16(value), {}};
    row[i / elements_of<Kv>].qs[i % elements_of<Kv>] = 1;
  } else {
    row[i] = static_cast<Kv>(value);
  }
}

enum class layout { growing, ring };

/// The memory behind a kv_view, every slot poisoned until written. A growing cache of `rows` positions has blocks of 16; a ring has
/// `rows` slots. Blocks are separate allocations, so reading past one is caught by a sanitizer.
template <class Kv>
class kv_memory {
 public:
  kv_memory(layout form, std::size_t rows, std::size_t heads, std::size_t head_dim)
      : form_(form), block_rows_(form == layout::ring ? rows : 16), heads_(heads), head_dim_(head_dim) {
    const std::size_t count = form == layout::ring ? 1 : outrider::divide_up(rows, block_rows_);
    for (std::size_t i = 0; i < count; ++i) blocks_.emplace_back(2 * heads * block_rows_ * head_dim / elements_of<Kv>, poison<Kv>());
    for (auto& block : blocks_) table_.push_back(block.data());
  }
  [[nodiscard]] kv_view<Kv> view() const noexcept {
    return {table_.data(), block_rows_, form_ == layout::ring ? block_rows_ : 0, heads_, head_dim_};
  }
  [[nodiscard]] kv_view<const Kv> read() const noexcept { return view(); }
  [[nodiscard]] bool same_bits_as(const kv_memory& other) const {
    bool same = blocks_.size() == other.blocks_.size();
    for (std::size_t i = 0; same && i < blocks_.size(); ++i) same = same_bits(blocks_[i], other.blocks_[i]);
    return same;
  }
  /// Writes keys and values of positions begin … end - 1 with numbers of `key` and `value`.
  template <class Key, class Value>
  void fill(std::size_t begin, std::size_t end, Key key, Value value) {
    std::vector<float> k(head_dim_), v(head_dim_);
    for (std::size_t p = begin; p < end; ++p)
      for (std::size_t h = 0; h < heads_; ++h) {
        for (std::size_t i = 0; i < head_dim_; ++i) k[i] = key(), v[i] = value();
        store_row(view().key(p, h), k.data(), head_dim_);
        store_row(view().value(p, h), v.data(), head_dim_);
      }
  }

  // The table points into the blocks: a copy would point into the original.
  kv_memory(const kv_memory&) = delete;
  kv_memory& operator=(const kv_memory&) = delete;

 private:
  layout form_;
  std::size_t block_rows_, heads_, head_dim_;
  std::vector<std::vector<Kv>> blocks_;
  std::vector<Kv*> table_;
};

/// What rounding explains for a query head whose n scores have an error of at most `score_error` each and lie within `range` of the
/// largest: a weight is off by 2·(score_error + u·range) through its argument, by 8·u (4 ulp) through exp, numerator and denominator
/// alike, and sums of n terms, with their rescaling from tile to tile, by 3·n·u. All of it relative to Σ p·|v| <= max |v|.
inline double attend_bound(double score_error, double range, std::size_t n, double largest_value) {
  return (4 * (score_error + u * range) + (16 + 3 * static_cast<double>(n) + 8) * u) * largest_value;
}

template <class Body>
void for_each_layout(Body body) {
  for (const layout form : {layout::growing, layout::ring}) {
    INFO((form == layout::growing ? "growing cache" : "ring"));
    body(form);
  }
}

// ------------------------------------------------------------------------------------------------ append

TEST_CASE_TEMPLATE("append rounds rows into the slots of their positions and touches no other slot", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 601;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for_each_type(kv_types{}, [&]<class Kv>() {
    for_each_layout([&](layout form) {
      for (const std::size_t d : sizes{8, 9, 64, 96}) {
        if (d % elements_of<Kv> != 0) continue;
        for (const std::size_t m : sizes{0, 1, 5, 20})
          for (const std::size_t first : sizes{0, 13, 29, 43}) {  // ends of blocks (16) and of the ring (37) lie inside
            INFO("d = ", d, ", m = ", m, ", first = ", first);
            const auto k = padded<float>(m, 2 * d, 3).fill(random.uniforms()), v = padded<float>(m, 2 * d, 3).fill(random.uniforms());
            const std::size_t slots = form == layout::ring ? 37 : 64;
            const kv_memory<Kv> got(form, slots, 2, d), want(form, slots, 2, d);
            for (std::size_t r = 0; r < m; ++r)
              for (std::size_t c = 0; c < 2 * d; c += elements_of<Kv>) {
                const std::size_t p = first + r, slot = form == layout::ring ? p % 37 : p % 16, block_rows = form == layout::ring ? 37 : 16;
                Kv* block = want.view().blocks[form == layout::ring ? 0 : p / 16];
                Kv& key = block[((c / d * block_rows + slot) * d + c % d) / elements_of<Kv>];
                Kv& value = block[(((2 + c / d) * block_rows + slot) * d + c % d) / elements_of<Kv>];
                if constexpr (block_format<Kv>)
                  quantize(&k(r, c), key), quantize(&v(r, c), value);
                else
                  key = static_cast<Kv>(k(r, c)), value = static_cast<Kv>(v(r, c));
              }
            attention_ops<B, Kv>::append(ctx, got.view(), k.view(), v.view(), first);
            CHECK(got.same_bits_as(want));
          }
      }
    });
  });
}

TEST_CASE_TEMPLATE("a value seen alone is the one appended, as near as its type has it", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 608;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for_each_type(kv_types{}, [&]<class Kv>() {
    for (const std::size_t d : sizes{32, 64, 96, 256, 512}) {
      CAPTURE(d);
      const auto k = padded<float>(1, d).fill(random.uniforms()), v = padded<float>(1, d).fill(random.uniforms(3));
      const kv_memory<Kv> memory(layout::growing, 1, 1, d);
      attention_ops<B, Kv>::append(ctx, memory.view(), k.view(), v.view(), 0);
      padded<float> got(1, d);
      attention_ops<B, Kv>::attend(ctx, got.view(), k.view(), memory.read(), {1, key_window::unlimited});
      for (std::size_t first = 0; first < d; first += 32) {
        float peak = 0;
        for (std::size_t i = 0; i < 32; ++i) peak = (std::max)(peak, std::abs(v(0, first + i)));
        for (std::size_t i = first; i < first + 32; ++i) {
          const double error = std::abs(double{got(0, i)} - double{v(0, i)});
          if constexpr (block_format<Kv>)  // half a step of peak / 127, and the rounding of the step itself; the quotient's is far smaller
            CHECK(error <= peak * (0.5 / 127 + 0x1p-11 + 4 * u));
          else
            CHECK(error <= rounding_of<Kv>(double{v(0, i)}));
        }
      }
    }
  });
}

TEST_CASE_TEMPLATE("what no block can stand for is seen as NaN, not as another number", B, OUTRIDER_TESTED_BACKENDS) {
  context_of<B> ctx(execution{1});
  for_each_type(kv_types{}, [&]<class Kv>() {
    if constexpr (block_format<Kv>)
      for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -1e30f})
        for (const bool in_key : {true, false}) {
          INFO("bad = ", bad, ", in_key = ", in_key);
          auto k = padded<float>(1, 64).fill([] { return 1.0f; }), v = k;
          (in_key ? k : v)(0, 40) = bad;
          const auto q = padded<float>(1, 64).fill([] { return 1.0f; });
          const kv_memory<Kv> memory(layout::growing, 1, 1, 64);
          attention_ops<B, Kv>::append(ctx, memory.view(), k.view(), v.view(), 0);
          padded<float> got(1, 64);
          attention_ops<B, Kv>::attend(ctx, got.view(), q.view(), memory.read(), {1, key_window::unlimited});
          CHECK(std::isnan(got(0, 0)) == in_key);
          CHECK(std::isnan(got(0, 40)));
        }
  });
}

// ------------------------------------------------------------------------------------------------ attend: arithmetic

/// Rows m starting at a position, seeing `width` keys each, in a cache that holds just what the rows may see.
struct attend_case {
  layout form;
  std::size_t head_dim, kv_heads, q_heads, m, start, width;
};

template <class B, class Kv, class Query, class Key, class Bound>
void check_attend(const attend_case& c, Query query, Key key, Bound bound) {
  if (!takes_case()) return;
  INFO("head_dim = ", c.head_dim, ", kv_heads = ", c.kv_heads, ", q_heads = ", c.q_heads, ", m = ", c.m, ", start = ", c.start,
       ", width = ", c.width);
  context_of<B> ctx(execution{1});
  context_of<reference> plain;
  const key_window window{c.start + 1, c.width};
  const std::size_t end = c.start + c.m;
  kv_memory<Kv> memory(c.form, c.form == layout::ring ? c.width + c.m : end + 16, c.kv_heads, c.head_dim);
  memory.fill(window.begin(0), end, key, key);
  const auto q = padded<float>(c.m, c.q_heads * c.head_dim, 3).fill(query);
  padded<float> got(c.m, c.q_heads * c.head_dim, 3), want(c.m, c.q_heads * c.head_dim);
  attention_ops<B, Kv>::attend(ctx, got.view(), q.view(), memory.read(), window);
  attention_ops<reference, Kv>::attend(plain, want.view(), q.view(), memory.read(), window);
  check_within(got, want, [&](std::size_t r, std::size_t) { return bound(window.end(r) - window.begin(r)); });
}

TEST_CASE_TEMPLATE("pitfall 128: attend agrees with the reference for every head size, GQA ratio and layout", B, OUTRIDER_TESTED_BACKENDS) {
  // Queries and keys are multiples of 1/16, so scores are exact in float and only the softmax and the weighted sum may round.
  constexpr std::uint64_t seed = 602;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_type(kv_types{}, [&]<class Kv>() {
    for_each_layout([&](layout form) {
      for (const std::size_t d : sizes{8, 16, 32, 64, 96, 256, 512}) {
        if (d % elements_of<Kv> != 0) continue;
        for (const std::size_t ratio : sizes{1, 2, 4, 8, 16})
          for (const std::size_t start : sizes{0, 5, 70}) {
            const std::size_t kv_heads = ratio == 16 ? 1 : 2;
            const attend_case c{form, d, kv_heads, kv_heads * ratio, 3, start, form == layout::ring ? 33 : key_window::unlimited};
            // |score| <= 512 · 1/4 · 1: no row has scores further apart than twice that.
            check_attend<B, Kv>(c, random.grids(4), random.grids(), [](std::size_t keys) { return attend_bound(0, 256, keys, 1); });
          }
      }
    });
  });
}

TEST_CASE_TEMPLATE("attend agrees with the reference on any numbers, for few and many keys", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 603;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_type(kv_types{}, [&]<class Kv>() {
    for_each_layout([&](layout form) {
      for (const std::size_t start : sizes{0, 1, 14, 15, 16, 31, 62, 63, 64, 65, 200, 513})
        for (const std::size_t m : sizes{0, 1, 2, 9}) {
          const attend_case c{form, 32, 2, 4, m, start, form == layout::ring ? 70 : key_window::unlimited};
          // A score sums 32 products of at most 1/2 each: its error is at most (32 + 2)·u·16, and |score| <= 16.
          check_attend<B, Kv>(c, random.uniforms(0.5f), random.uniforms(), [](std::size_t keys) {
            return attend_bound(34 * u * 16 * largest<Kv>, 32 * largest<Kv>, keys, largest<Kv>);
          });
        }
    });
  });
}

TEST_CASE_TEMPLATE("attend agrees with the reference over long contexts", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 606;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_type(kv_types{}, [&]<class Kv>() {
    for_each_layout([&](layout form) {
      for (const std::size_t start : sizes{250, 255, 700, 4090, 4095, 4096, 9000})
        for (const std::size_t m : sizes{1, 9}) {
          constexpr std::size_t d = whole<Kv>(16);
          const attend_case c{form, d, 2, 4, m, start, form == layout::ring ? 600 : key_window::unlimited};
          check_attend<B, Kv>(c, random.uniforms(0.5f), random.uniforms(), [](std::size_t keys) {
            return attend_bound((d + 2) * u * d / 2 * largest<Kv>, d * largest<Kv>, keys, largest<Kv>);
          });
        }
    });
  });
}

TEST_CASE_TEMPLATE("attend weighs two keys as computed by hand", B, OUTRIDER_TESTED_BACKENDS) {
  context_of<B> ctx(execution{1});
  for_each_type(kv_types{}, [&]<class Kv>() {
    constexpr std::size_t d = whole<Kv>(8);
    kv_memory<Kv> memory(layout::growing, 2, 1, d);
    memory.fill(
        0, 2, [] { return 0.0f; }, [] { return 0.0f; });
    store_one(memory.view().key(1, 0), 3, 1);
    store_one(memory.view().value(0, 0), 0, 1);
    store_one(memory.view().value(1, 0), 0, 5);
    auto q = padded<float>(1, d).fill([] { return 0.0f; }), want = q, got = padded<float>(1, d);
    q(0, 3) = std::log(3.0f);  // scores 0 and log 3: weights 1/4 and 3/4; no factor 1/√d (pitfall 27)
    want(0, 0) = 4;
    attention_ops<B, Kv>::attend(ctx, got.view(), q.view(), memory.read(), {2, key_window::unlimited});
    check_within(got, want, [](std::size_t, std::size_t) { return attend_bound(2 * u, 2, 2, 5); });
  });
}

TEST_CASE_TEMPLATE("pitfall 127: scores of ±1e4 stay finite and exact", B, OUTRIDER_TESTED_BACKENDS) {
  context_of<B> ctx(execution{1});
  for_each_type(kv_types{}, [&]<class Kv>() {
    // Scores are ±1e4 exactly; keys of one sign share the whole weight, so the result is the mean of their values.
    for (const int positive : {0, 1, 20, 40}) {
      CAPTURE(positive);
      constexpr std::size_t d = whole<Kv>(8);
      kv_memory<Kv> memory(layout::growing, 40, 1, d);
      memory.fill(
          0, 40, [] { return 0.0f; }, [] { return 0.0f; });
      for (std::size_t p = 0; p < 40; ++p) {
        store_one(memory.view().key(p, 0), 0, p * 7 % 40 < static_cast<std::size_t>(positive) ? 1.0f : -1.0f);
        memory.view().value(p, 0)[0] = memory.view().key(p, 0)[0];
      }
      auto q = padded<float>(1, d).fill([] { return 0.0f; }), want = q, got = padded<float>(1, d);
      q(0, 0) = 1e4f;
      want(0, 0) = positive == 0 ? -1.0f : 1.0f;
      attention_ops<B, Kv>::attend(ctx, got.view(), q.view(), memory.read(), {40, key_window::unlimited});
      check_within(got, want, [](std::size_t, std::size_t) { return attend_bound(0, 0, 40, 1); });
    }
  });
}

// ------------------------------------------------------------------------------------------------ attend: windows

/// With keys of zero every visible position has the same weight, and the values tell which ones were seen: their mean is the middle of
/// the window, off by half a position if either edge is off by one.
template <class B, class Kv>
void check_window(layout form, std::size_t slots, std::size_t written, std::size_t m, key_window window) {
  if (!takes_case()) return;
  INFO("m = ", m, ", first_end = ", window.first_end, ", width = ", window.width);
  context_of<B> ctx(execution{1});
  constexpr std::size_t counted = elements_of<Kv>, d = whole<Kv>(counted + 7);  // a block of its own for each number
  kv_memory<Kv> memory(form, slots, 1, d);                                      // what no row may see stays NaN
  memory.fill(
      window.begin(0), written, [] { return 0.0f; }, [] { return 0.0f; });
  for (std::size_t p = window.begin(0); p < written; ++p) {
    store_one(memory.view().value(p, 0), 0, static_cast<float>(p));  // up to 256: exact in bf16
    store_one(memory.view().value(p, 0), counted, 1);
  }
  const auto q = padded<float>(m, d).fill([] { return 1.0f; });
  padded<float> got(m, d), want = padded<float>(m, d).fill([] { return 0.0f; });
  for (std::size_t r = 0; r < m; ++r)
    if (window.begin(r) < window.end(r)) {
      want(r, 0) = static_cast<float>(window.begin(r) + window.end(r) - 1) / 2;
      want(r, counted) = 1;
    }
  attention_ops<B, Kv>::attend(ctx, got.view(), q.view(), memory.read(), window);
  check_within(got, want, [&](std::size_t r, std::size_t) {
    return attend_bound(0, 0, window.end(r) - window.begin(r), static_cast<double>(window.end(r)));
  });
}

TEST_CASE_TEMPLATE("pitfall 46: row r sees positions end - width to end - 1, and off by one in either direction fails", B,
                   OUTRIDER_TESTED_BACKENDS) {
  for_each_type(kv_types{}, [&]<class Kv>() {
    for (const std::size_t width : sizes{1, 3, 4, 15, 16, 17, 32, 33, key_window::unlimited})
      for (const std::size_t start : sizes{0, 1, 2, 3, 4, 5, 9, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200})
        for (const std::size_t m : sizes{1, 5}) {
          check_window<B, Kv>(layout::growing, start + m, start + m, m, {start + 1, width});
          if (width != key_window::unlimited) check_window<B, Kv>(layout::ring, width + m, start + m, m, {start + 1, width});
        }
  });
}

TEST_CASE_TEMPLATE("pitfall 60: a drafter's row sees the last width committed keys and not its own position", B, OUTRIDER_TESTED_BACKENDS) {
  for_each_type(kv_types{}, [&]<class Kv>() {
    for (const std::size_t committed : sizes{0, 1, 4, 5, 6, 16, 17, 40}) {
      check_window<B, Kv>(layout::growing, committed + 1, committed, 1, {committed, 4 + 1});
      check_window<B, Kv>(layout::ring, 4 + 1 + 8, committed, 1, {committed, 4 + 1});
    }
  });
}

TEST_CASE_TEMPLATE("attend over no keys gives zeros", B, OUTRIDER_TESTED_BACKENDS) {
  context_of<B> ctx(execution{1});
  for_each_type(kv_types{}, [&]<class Kv>() {
    const kv_memory<Kv> memory(layout::growing, 16, 2, 64);
    const auto q = padded<float>(3, 256, 1).fill([] { return 1.0f; }), zeros = padded<float>(3, 256).fill([] { return 0.0f; });
    for (const key_window window : {key_window{7, 0}, key_window{0, 0}}) {
      padded<float> got(3, 256, 1);
      attention_ops<B, Kv>::attend(ctx, got.view(), q.view(), memory.read(), window);
      check_same(got, zeros);
    }
    padded<float> first(1, 256);
    attention_ops<B, Kv>::attend(ctx, first.view(), q.view().first_rows(1), memory.read(), {0, key_window::unlimited});
    CHECK(same_bits(first.row(0), zeros.row(0), 256));
  });
}

TEST_CASE_TEMPLATE("NaN in the slot of a later row is seen from that row on and not before", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 604;
  CAPTURE(seed);
  random_numbers random(seed);
  context_of<B> ctx(execution{1});
  for_each_type(kv_types{}, [&]<class Kv>() {
    for (std::size_t start = 10; start < 40; ++start) {
      CAPTURE(start);
      constexpr std::size_t d = whole<Kv>(16);
      kv_memory<Kv> memory(layout::growing, start + 5, 1, d);
      memory.fill(0, start + 2, random.grids(), random.grids());  // positions start + 2 … start + 4 hold NaN
      const auto q = padded<float>(5, 2 * d).fill(random.grids());
      padded<float> got(5, 2 * d);
      attention_ops<B, Kv>::attend(ctx, got.view(), q.view(), memory.read(), {start + 1, key_window::unlimited});
      for (std::size_t r = 0; r < 5; ++r) {
        CAPTURE(r);
        const auto is_nan = [](float value) { return std::isnan(value); };
        if (r < 2)
          CHECK(std::none_of(got.row(r), got.row(r) + 2 * d, is_nan));
        else
          CHECK(std::all_of(got.row(r), got.row(r) + 2 * d, is_nan));
      }
    }
  });
}

// ------------------------------------------------------------------------------------------------ attend: row independence

TEST_CASE_TEMPLATE("pitfall 126: an attend row has the bits it has alone, wherever its pass began and with any threads", B,
                   OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 605;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_type(kv_types{}, [&]<class Kv>() {
    for_each_layout([&](layout form) {
      for (const std::size_t d : sizes{whole<Kv>(16), 256})
        for (const std::size_t first : sizes{0, 50, 118})  // blocks of 16; the ring of 52 wraps at 52, 104 and 156
          for (const std::size_t width : sizes{7, 35, key_window::unlimited}) {
            if (form == layout::ring && width == key_window::unlimited) continue;
            INFO("d = ", d, ", first = ", first, ", width = ", width);
            constexpr std::size_t q_heads = 4, kv_heads = 2;
            const std::size_t cols = q_heads * d;
            kv_memory<Kv> memory(form, form == layout::ring ? 52 : first + source_rows, kv_heads, d);
            memory.fill(key_window{first + 1, width}.begin(0), first + source_rows, random.uniforms(), random.uniforms());
            const auto q = padded<float>(source_rows, cols).fill(random.uniforms(0.5f));

            // Row i of the source stands at position first + i; a pass is a run of neighbours.
            const auto pass = [&](unsigned threads, std::size_t begin, const std::vector<std::size_t>& rows) {
              context_of<B> ctx(execution{threads});
              padded<float> out(rows.size(), cols);
              attention_ops<B, Kv>::attend(ctx, out.view(), pick(q, rows).read(), memory.read(), {first + begin + 1, width});
              return out.bits();
            };
            std::vector<row_bits> alone;
            for (std::size_t i = 0; i < source_rows; ++i) alone.push_back(pass(1, i, {i})[0]);

            for (const std::size_t m : sizes{1, 2, 3, 4, 5, 6, 7, 8, 9, 17})
              for (const std::size_t begin : sizes{0, source_rows - m}) {
                if (!takes_case()) continue;
                INFO("m = ", m, ", begin = ", begin);
                std::vector<std::size_t> rows(m);
                std::iota(rows.begin(), rows.end(), begin);
                for (const unsigned threads : {1u, begin == 0 ? 2u : 3u}) {
                  CAPTURE(threads);
                  const auto together = pass(threads, begin, rows);
                  bool same = true;
                  for (std::size_t r = 0; r < m; ++r) same = same && together[r] == alone[begin + r];
                  CHECK_MESSAGE(same, "a row computed in a pass differs from the row alone");
                }
                for (const std::size_t place : sizes{0, m / 2, m - 1}) {
                  CAPTURE(place);
                  std::vector<std::size_t> among_strangers(m, stranger);
                  among_strangers[place] = begin + place;
                  const auto together = pass(1, begin, among_strangers);
                  CHECK_MESSAGE(together[place] == alone[begin + place], "a row takes something from the rows beside it");
                }
              }
          }
    });
  });
}

TEST_CASE_TEMPLATE("an attend row over a long context has the bits it has alone, with any threads", B, OUTRIDER_TESTED_BACKENDS) {
  constexpr std::uint64_t seed = 607;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_type(kv_types{}, [&]<class Kv>() {
    for (const std::size_t first : sizes{250, 1000, 4090, 8190})
      for (const std::size_t width : sizes{600, key_window::unlimited}) {
        INFO("first = ", first, ", width = ", width);
        constexpr std::size_t m = 9, d = whole<Kv>(16), cols = 4 * d;
        kv_memory<Kv> memory(layout::growing, first + m, 2, d);
        memory.fill(0, first + m, random.uniforms(), random.uniforms());
        const auto q = padded<float>(m, cols).fill(random.uniforms(0.5f));
        const auto pass = [&](unsigned threads, std::size_t row, std::size_t rows) {
          context_of<B> ctx(execution{threads});
          padded<float> out(rows, cols);
          attention_ops<B, Kv>::attend(ctx, out.view(), q.view().slice_rows(row, rows), memory.read(), {first + row + 1, width});
          return out.bits();
        };
        for (const unsigned threads : {1u, 2u, 3u}) {
          CAPTURE(threads);
          const auto together = pass(threads, 0, m);
          for (std::size_t r = 0; r < m; ++r) CHECK_MESSAGE(together[r] == pass(1, r, 1)[0], "row ", r, " differs from the row alone");
        }
      }
  });
}

}  // namespace contract
