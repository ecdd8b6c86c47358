// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/layers/kv_cache.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "outrider/backend/reference.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/scalar.hpp"

namespace {

using namespace outrider;

template <class Kv>
using cache_of = kv_cache<reference, Kv>;

template <class Call>
error_code code_of(Call&& call) {
  try {
    call();
  } catch (const error& e) {
    return e.code();
  }
  FAIL("no outrider::error was thrown");
  return error_code::file_not_found;
}

/// One layer of a cache that simply keeps everything: row p is position p, keys [heads, head_dim], then values. It writes what it keeps to
/// the view under test as well, and counts where the two differ.
template <class Kv>
class full_length {
 public:
  full_length(std::size_t heads, std::size_t head_dim) : heads_(heads), head_dim_(head_dim) {}

  [[nodiscard]] std::size_t size() const { return rows_.size(); }
  void keep(std::size_t count) { rows_.resize(count); }

  void append(const kv_view<Kv>& cache, std::mt19937_64& random) {
    std::uniform_real_distribution<float> uniform(-1, 1);
    auto& row = rows_.emplace_back(2 * heads_ * head_dim_);
    for (Kv& element : row) element = static_cast<Kv>(uniform(random));
    for_each(cache, rows_.size() - 1, [&](std::size_t i, Kv& element) { element = row[i]; });
  }
  void poison(const kv_view<Kv>& cache, std::size_t position) const {
    for_each(cache, position, [](std::size_t, Kv& element) { element = static_cast<Kv>(std::numeric_limits<float>::quiet_NaN()); });
  }
  /// Positions row `row` of a pass sees under `window` whose key or value is not what was appended.
  [[nodiscard]] std::size_t wrong(const kv_view<Kv>& cache, key_window window, std::size_t row = 0) const {
    std::size_t count = 0;
    for (std::size_t p = window.begin(row); p < window.end(row); ++p) {
      bool same = true;
      for_each(cache, p, [&](std::size_t i, Kv& element) { same = same && to_float(element) == to_float(rows_[p][i]); });
      if (!same) ++count;
    }
    return count;
  }

 private:
  template <class Visit>
  void for_each(const kv_view<Kv>& cache, std::size_t position, Visit&& visit) const {
    for (std::size_t h = 0; h < heads_; ++h)
      for (std::size_t c = 0; c < head_dim_; ++c) {
        visit(h * head_dim_ + c, cache.key(position, h)[c]);
        visit((heads_ + h) * head_dim_ + c, cache.value(position, h)[c]);
      }
  }
  std::size_t heads_, head_dim_;
  std::vector<std::vector<Kv>> rows_;
};

std::size_t draw(std::mt19937_64& random, std::size_t low, std::size_t high) {
  return std::uniform_int_distribution<std::size_t>(low, high)(random);
}

/// What a property run met on its way: a run that never leaves the easy paths proves nothing.
struct coverage {
  std::size_t rounds = 0, drafted = 0, rejected = 0, ring_laps = 0, block_borders = 0, rejected_at_slot_0 = 0, rollbacks = 0;
};

/// A conversation with a cache of two rings of different window and two full layers, beside four that keep everything. After every step,
/// all that the target's rows and the drafter may see is compared; rejected and never written slots hold NaN.
template <class Kv>
void converse(std::uint64_t seed, coverage& met) {
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const std::size_t length = draw(random, 0, 9) == 0 ? draw(random, 500, 700) : draw(random, 20, 90);
  const std::size_t max_draft = draw(random, 0, 16), chunk = draw(random, 1, 24), max_rows = (std::max)(chunk, max_draft + 1);
  const std::array<kv_layer_shape, 4> shapes{kv_layer_shape{2, 3, draw(random, 1, 20)}, kv_layer_shape{1, 4, 0}, kv_layer_shape{2, 1, 0},
                                             kv_layer_shape{1, 2, draw(random, 0, 3) == 0 ? length + 5 : draw(random, 1, 20)}};
  cache_of<Kv> cache(shapes, max_rows, length);
  if (draw(random, 0, 1) == 0) cache.reserve(length);
  std::vector<full_length<Kv>> kept;
  for (const auto& shape : shapes) kept.emplace_back(shape.heads, shape.head_dim);

  std::size_t fresh = 0;  // slots from here on were never poisoned nor written
  const auto process = [&](std::size_t rows) {
    const std::size_t first = cache.committed(), parts = draw(random, 0, 1);
    if (parts != 0) cache.extend(rows / 2);
    cache.extend(rows - cache.pending());
    REQUIRE(cache.pending() == rows);
    for (; fresh < first + rows; ++fresh)
      for (std::size_t l = 0; l < shapes.size(); ++l)
        if (cache.layer(l).ring_rows == 0 || fresh < cache.layer(l).ring_rows) kept[l].poison(cache.layer(l), fresh);
    std::size_t wrong = 0;
    for (std::size_t l = 0; l < shapes.size(); ++l) {
      for (std::size_t r = 0; r < rows; ++r) kept[l].append(cache.layer(l), random);
      const key_window causal{first + 1, shapes[l].window == 0 ? key_window::unlimited : shapes[l].window};
      for (std::size_t r = shapes[l].window == 0 ? rows - 1 : 0; r < rows; ++r) wrong += kept[l].wrong(cache.layer(l), causal, r);
    }
    CHECK(wrong == 0);
  };
  bool drafter_whole = true;
  const auto settle = [&](std::size_t accepted) {
    const std::size_t first = cache.committed(), rows = cache.pending(), last = first + rows;
    if (accepted == 0)
      cache.rollback();
    else
      cache.commit(accepted);
    // A pass of max_rows rows that is given up whole took the oldest of the drafter's W + 1 keys; the next commit heals that.
    drafter_whole = accepted != 0 || (drafter_whole && rows < max_rows);
    REQUIRE(cache.committed() == first + accepted);
    REQUIRE(cache.pending() == 0);
    std::size_t wrong = 0;
    for (std::size_t l = 0; l < shapes.size(); ++l) {
      const auto layer = cache.layer(l);
      kept[l].keep(first + accepted);
      for (std::size_t p = first + accepted; p < last; ++p) {
        kept[l].poison(layer, p);
        if (l == 0 && p >= layer.ring_rows && p % layer.ring_rows == 0) ++met.rejected_at_slot_0;
      }
      const std::size_t w = shapes[l].window, n = first + accepted;
      // The next row's own key is not there yet, the W - 1 before it are; the drafter sees the last W + 1 committed ones.
      wrong += kept[l].wrong(layer, {n, w == 0 ? key_window::unlimited : w - 1});
      if (w != 0 && drafter_whole) wrong += kept[l].wrong(layer, {n, w + 1});
    }
    CHECK(wrong == 0);
    const std::size_t ring = cache.layer(0).ring_rows, block = cache_of<Kv>::block_rows;
    if (first / ring != last / ring) ++met.ring_laps;
    if (first / block != last / block) ++met.block_borders;
  };

  for (int conversation = 0; conversation < 2; ++conversation) {
    cache.clear();
    for (auto& layer : kept) layer.keep(0);
    for (std::size_t left = draw(random, 1, length / 2); left != 0;) {
      const std::size_t rows = (std::min)(left, draw(random, 1, chunk));
      process(rows);
      settle(rows);
      left -= rows;
    }
    while (cache.committed() < length) {
      const std::size_t drafts = (std::min)(draw(random, 0, max_draft), length - cache.committed() - 1);
      process(drafts + 1);
      ++met.rounds;
      met.drafted += drafts;
      if (draw(random, 0, 19) == 0) {  // a round given up half way
        ++met.rollbacks;
        settle(0);
        continue;
      }
      const std::size_t style = draw(random, 0, 3), accepted = style == 0 ? 0 : style == 1 ? drafts : draw(random, 0, drafts);
      met.rejected += drafts - accepted;
      settle(accepted + 1);
    }
  }
}

/// Rounds on a ring of `slots` slots that is made by hand, every fourth of them with all drafts rejected. Counts the keys that are gone
/// though a row of the pass (W keys) or the drafter behind it (W + 1 committed keys) sees them.
struct destroyed {
  std::size_t for_target = 0, for_drafter = 0;
};
destroyed play_on_ring(std::size_t slots, std::size_t window, std::size_t max_draft, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> memory(2 * slots);
  const std::array<float*, 1> table{memory.data()};
  const kv_view<float> ring{table.data(), slots, slots, 1, 1};
  full_length<float> kept(1, 1);
  destroyed keys;
  for (std::size_t n = 0, round = 0; n < 200; ++round) {
    const bool worst = round % 4 == 3;
    const std::size_t drafts = worst ? max_draft : draw(random, 0, max_draft), accepted = worst ? 0 : draw(random, 0, drafts);
    for (std::size_t r = 0; r <= drafts; ++r) kept.append(ring, random);
    for (std::size_t r = 0; r <= drafts; ++r) keys.for_target += kept.wrong(ring, {n + 1, window}, r);
    for (std::size_t p = n + accepted + 1; p < kept.size(); ++p) kept.poison(ring, p);
    n += accepted + 1;
    kept.keep(n);
    keys.for_drafter += kept.wrong(ring, {n, window + 1});
  }
  return keys;
}

constexpr auto any = static_cast<std::size_t>(-1);

}  // namespace

TEST_CASE_TEMPLATE("pitfalls 43, 45, 50: over random accept patterns all visible keys equal those of a cache that keeps everything", Kv,
                   float, bf16) {
  coverage met;
  for (std::uint64_t seed = 0; seed < 300; ++seed) converse<Kv>(seed, met);
  CHECK(met.rounds >= 10000);
  CHECK(met.drafted > 20000);
  CHECK(met.rejected > 5000);
  CHECK(met.ring_laps > 1000);
  CHECK(met.block_borders > 50);
  CHECK(met.rejected_at_slot_0 > 500);
  CHECK(met.rollbacks > 100);
}

TEST_CASE("pitfall 42: a ring of exactly W slots loses live keys, one of W + 1 + max_draft loses none") {
  for (std::size_t window = 1; window <= 20; ++window)
    for (std::size_t max_draft = 1; max_draft <= 16; ++max_draft) {
      CAPTURE(window);
      CAPTURE(max_draft);
      const std::uint64_t seed = 100 * window + max_draft;
      const destroyed narrow = play_on_ring(window, window, max_draft, seed);
      CHECK(narrow.for_target > 0);
      const destroyed tight = play_on_ring(window + max_draft, window, max_draft, seed);
      CHECK(tight.for_target == 0);
      CHECK(tight.for_drafter > 0);  // its oldest key needs one slot more
      const destroyed right = play_on_ring(window + 1 + max_draft, window, max_draft, seed);
      CHECK(right.for_target == 0);
      CHECK(right.for_drafter == 0);
    }
}

TEST_CASE("a ring has W + max_draft + 1 slots, and no more than the sequence needs") {
  const std::array<kv_layer_shape, 2> shapes{kv_layer_shape{2, 8, 16}, kv_layer_shape{1, 4, any}};
  const std::size_t max_draft = 5;
  cache_of<float> cache(shapes, max_draft + 1, 100);
  CHECK(cache.layer(0).ring_rows == 16 + max_draft + 1);
  CHECK(cache.layer(0).block_rows == cache.layer(0).ring_rows);
  CHECK(cache.layer(1).ring_rows == 100);
  CHECK(cache.bytes() == sizeof(float) * 2 * (22 * 2 * 8 + 100 * 1 * 4));
}

TEST_CASE("sliding layers keep their size, full layers grow by whole blocks, clearing keeps the memory") {
  const std::array<kv_layer_shape, 3> shapes{kv_layer_shape{2, 8, 16}, kv_layer_shape{1, 32, 0}, kv_layer_shape{3, 16, 0}};
  cache_of<bf16> cache(shapes, 4, 2000);
  const std::size_t rings = sizeof(bf16) * 2 * 20 * 2 * 8, block = sizeof(bf16) * 2 * 256 * (1 * 32 + 3 * 16);
  CHECK(cache.bytes() == rings);
  using step = std::array<std::size_t, 2>;
  for (const auto& [positions, blocks] : {step{1, 1}, step{256, 1}, step{257, 2}, step{100, 2}, step{1025, 5}, step{2000, 8}}) {
    cache.reserve(positions);
    CHECK(cache.bytes() == rings + blocks * block);
  }
  const std::array<kv_layer_shape, 1> sliding{shapes[0]};
  cache_of<bf16> ring_only(sliding, 4, 2000);
  while (ring_only.committed() < 2000) ring_only.extend(4), ring_only.commit(4);
  CHECK(ring_only.bytes() == rings);

  cache.extend(3);
  cache.commit(3);
  cache.clear();
  CHECK(cache.committed() == 0);
  CHECK(cache.bytes() == rings + 8 * block);
}

TEST_CASE("blocks and rings begin at a cache line") {
  const std::array<kv_layer_shape, 3> shapes{kv_layer_shape{1, 1, 3}, kv_layer_shape{1, 1, 0}, kv_layer_shape{3, 5, 0}};
  cache_of<bf16> cache(shapes, 2, 1000);
  cache.reserve(1000);
  for (std::size_t l = 0; l < cache.layer_count(); ++l)
    for (std::size_t p = 0; p < (l == 0 ? 1u : 1000u); p += 256)
      CHECK(reinterpret_cast<std::uintptr_t>(cache.layer(l).key(p, 0)) % buffer<bf16, host_space>::alignment == 0);
}

TEST_CASE("pitfall 49: no position of a long sequence lies outside its ring") {
  const std::array<kv_layer_shape, 1> shapes{kv_layer_shape{2, 3, 16}};
  cache_of<float> cache(shapes, 5, 100000);
  const auto ring = cache.layer(0);
  const float *begin = ring.blocks[0], *end = begin + cache.bytes() / sizeof(float);
  bool inside = true;
  for (std::size_t p = 0; p < 100000; ++p)
    for (std::size_t h = 0; h < 2; ++h) inside = inside && ring.key(p, h) >= begin && ring.value(p, h) + 3 <= end && ring.run(p, any) <= 21;
  CHECK(inside);
}

TEST_CASE_TEMPLATE("pitfall 52: views taken before growth and before a move stay valid", Kv, float, bf16) {
  const std::array<kv_layer_shape, 2> shapes{kv_layer_shape{1, 2, 8}, kv_layer_shape{2, 2, 0}};
  cache_of<Kv> cache(shapes, 64, 1500);
  const std::array<kv_view<Kv>, 2> early{cache.layer(0), cache.layer(1)};
  std::array<full_length<Kv>, 2> kept{full_length<Kv>(1, 2), full_length<Kv>(2, 2)};
  std::mt19937_64 random(52);
  const auto fill = [&](cache_of<Kv>& into, std::size_t count) {
    while (into.committed() < count) {
      into.extend(50);
      for (std::size_t l = 0; l < 2; ++l)
        for (int r = 0; r < 50; ++r) kept[l].append(into.layer(l), random);
      into.commit(50);
    }
  };
  fill(cache, 500);
  cache_of<Kv> moved = std::move(cache);
  fill(moved, 1500);
  const cache_of<Kv>& constant = moved;
  CHECK(constant.layer(1).key(1499, 1) == early[1].key(1499, 1));
  CHECK(kept[0].wrong(early[0], {1500, 9}) == 0);
  CHECK(kept[1].wrong(early[1], {1500}) == 0);
  static_assert(!std::is_copy_constructible_v<cache_of<Kv>> && std::is_nothrow_move_constructible_v<cache_of<Kv>> &&
                std::is_nothrow_move_assignable_v<cache_of<Kv>>);
}

TEST_CASE("more rows than a pass may have are refused and change nothing") {
  const std::array<kv_layer_shape, 2> shapes{kv_layer_shape{1, 2, 8}, kv_layer_shape{1, 2, 0}};
  cache_of<float> cache(shapes, 4, 100);
  CHECK(code_of([&] { cache.extend(5); }) == error_code::argument_invalid);
  cache.extend(3);
  CHECK(code_of([&] { cache.extend(2); }) == error_code::argument_invalid);
  CHECK(code_of([&] { cache.extend(any); }) == error_code::argument_invalid);
  CHECK(cache.pending() == 3);
  cache.extend(1);
  CHECK(cache.pending() == 4);
  CHECK(cache.committed() == 0);
}

TEST_CASE("committing more rows than are pending is refused and changes nothing") {
  const std::array<kv_layer_shape, 1> shapes{kv_layer_shape{1, 2, 8}};
  cache_of<float> cache(shapes, 4, 100);
  CHECK(code_of([&] { cache.commit(1); }) == error_code::argument_invalid);
  cache.commit(0);
  cache.extend(3);
  CHECK(code_of([&] { cache.commit(4); }) == error_code::argument_invalid);
  CHECK(cache.pending() == 3);
  cache.commit(2);
  CHECK(cache.committed() == 2);
  CHECK(cache.pending() == 0);
  CHECK(code_of([&] { cache.commit(1); }) == error_code::argument_invalid);  // the third was forgotten
  cache.extend(4);
  cache.rollback();
  CHECK(cache.committed() == 2);
  CHECK(cache.pending() == 0);
}

TEST_CASE("a sequence ends at max_positions with context_full and stays usable") {
  const std::array<kv_layer_shape, 2> shapes{kv_layer_shape{1, 2, 8}, kv_layer_shape{1, 2, 0}};
  cache_of<float> cache(shapes, 4, 6);
  const std::size_t bytes = cache.bytes();
  CHECK(code_of([&] { cache.reserve(7); }) == error_code::context_full);
  CHECK(code_of([&] { cache.reserve(any); }) == error_code::context_full);
  CHECK(cache.bytes() == bytes);
  cache.extend(4);
  cache.commit(4);
  cache.extend(1);
  CHECK(code_of([&] { cache.extend(2); }) == error_code::context_full);
  CHECK(cache.pending() == 1);
  cache.extend(1);
  cache.commit(2);
  CHECK(cache.committed() == cache.max_positions());
  CHECK(code_of([&] { cache.extend(1); }) == error_code::context_full);
  cache.extend(0);
}

TEST_CASE("memory that cannot be had is out_of_memory and leaves the cache as it was") {
  // One block has 2 · 256 · 2^53 elements, whose bytes do not fit into 64 bits: no allocator is asked.
  const std::array<kv_layer_shape, 2> shapes{kv_layer_shape{1, 2, 8}, kv_layer_shape{1, std::size_t{1} << 53, 0}};
  cache_of<float> cache(shapes, 4, 1000);
  const std::size_t bytes = cache.bytes();
  CHECK(code_of([&] { cache.reserve(1); }) == error_code::out_of_memory);
  CHECK(code_of([&] { cache.extend(2); }) == error_code::out_of_memory);
  CHECK(cache.bytes() == bytes);
  CHECK(cache.pending() == 0);
  for (const kv_layer_shape& shape : {kv_layer_shape{any, 2, 0}, kv_layer_shape{any / 2, 1, 0}, kv_layer_shape{any / 8, 1, 9}})
    CHECK(code_of([&] { cache_of<float>(std::span(&shape, 1), 4, 1000); }) == error_code::out_of_memory);
}

TEST_CASE("a cache of nothing is refused") {
  const kv_layer_shape good{1, 2, 8}, headless{0, 2, 8}, flat{1, 0, 0};
  CHECK(code_of([&] { cache_of<float>(std::span(&good, 1), 0, 10); }) == error_code::argument_invalid);
  CHECK(code_of([&] { cache_of<float>(std::span(&good, 1), 4, 0); }) == error_code::argument_invalid);
  CHECK(code_of([&] { cache_of<float>(std::span(&headless, 1), 4, 10); }) == error_code::argument_invalid);
  CHECK(code_of([&] { cache_of<float>(std::span(&flat, 1), 4, 10); }) == error_code::argument_invalid);
  CHECK(cache_of<float>({}, 4, 10).layer_count() == 0);
}

TEST_CASE("keys and values in blocks take the bytes of their blocks, and a key is a whole number of them") {
  const std::array<kv_layer_shape, 2> shapes{kv_layer_shape{2, 64, 8}, kv_layer_shape{1, 96, 0}};
  cache_of<q8_0> cache(shapes, 4, 1000);
  cache.reserve(300);
  CHECK(cache.bytes() == 2 * (2 * 12 * 64 + 2 * cache.block_rows * 96) / 32 * 34);
  CHECK(cache.layer(0).key(1, 0) - cache.layer(0).key(0, 0) == 2);
  CHECK(cache.layer(1).key(299, 0) - cache.layer(1).key(298, 0) == 3);
  CHECK(cache.layer(1).value(0, 0) - cache.layer(1).key(0, 0) == 3 * static_cast<std::ptrdiff_t>(cache.block_rows));
}

TEST_CASE("heads that have no whole blocks are refused in one sentence, and scalar types take any") {
  for (const std::size_t head_dim : {1u, 8u, 31u, 33u, 80u})
    for (const std::size_t window : {0u, 8u}) {
      const std::array<kv_layer_shape, 2> shapes{kv_layer_shape{1, 32, 0}, kv_layer_shape{1, head_dim, window}};
      CHECK(code_of([&] { cache_of<q8_0>(shapes, 4, 10); }) == error_code::argument_invalid);
      CHECK(cache_of<bf16>(shapes, 4, 10).layer_count() == 2);
    }
  const kv_layer_shape odd{1, 80, 0};
  try {
    const cache_of<q8_0> cache(std::span(&odd, 1), 4, 10);
    FAIL("a cache of heads of size 80 in blocks of 32");
  } catch (const error& e) {
    CHECK(std::string_view(e.what()) ==
          "outrider: cache layer 0 has heads of size 80, keys and values stored in blocks need a multiple of 32");
  }
}

namespace {

struct rewinds {
  std::size_t done = 0, refused = 0, guaranteed = 0;
};

/// Passes with accepted and rejected rows, and attempts to go back to any earlier length, beside layers that keep everything.
template <class Kv>
void go_back_and_forth(std::uint64_t seed, rewinds& met) {
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const std::size_t length = 400, max_rows = draw(random, 1, 9), max_rewind = draw(random, 0, 1) * draw(random, 0, 20);
  const std::array<kv_layer_shape, 3> shapes{kv_layer_shape{1, 2, draw(random, 1, 20)}, kv_layer_shape{2, 1, 0},
                                             kv_layer_shape{1, 1, draw(random, 1, 20)}};
  cache_of<Kv> cache(shapes, max_rows, length, max_rewind);
  std::vector<full_length<Kv>> kept;
  for (const auto& shape : shapes) kept.emplace_back(shape.heads, shape.head_dim);
  // Keys that are gone, of those that the rows and the drafter behind `positions` see.
  const auto gone = [&](std::size_t positions) {
    std::size_t count = 0;
    for (std::size_t l = 0; l < shapes.size(); ++l)
      count += kept[l].wrong(cache.layer(l), {positions, shapes[l].window == 0 ? key_window::unlimited : shapes[l].window + 1});
    return count;
  };

  std::size_t longest = 0;
  while (cache.committed() + max_rows < length) {
    const std::size_t first = cache.committed(), rows = draw(random, 1, max_rows), accepted = draw(random, 1, rows);
    cache.extend(rows);
    for (std::size_t l = 0; l < shapes.size(); ++l)
      for (std::size_t r = 0; r < rows; ++r) kept[l].append(cache.layer(l), random);
    cache.commit(accepted);
    longest = (std::max)(longest, first + accepted);
    for (std::size_t l = 0; l < shapes.size(); ++l) {
      kept[l].keep(first + accepted);
      for (std::size_t p = first + accepted; p < first + rows; ++p) kept[l].poison(cache.layer(l), p);
    }
    CHECK(gone(cache.committed()) == 0);

    if (draw(random, 0, 3) != 0) continue;
    const std::size_t committed = cache.committed(), near = (std::min)(committed, draw(random, 0, 40));
    const std::size_t positions = draw(random, 0, 4) == 0 ? draw(random, 0, committed) : committed - near;
    CAPTURE(committed);
    CAPTURE(positions);
    const bool held = gone(positions) == 0;
    const bool went = cache.truncate(positions);
    CHECK(went == held);
    if (longest - positions <= max_rewind) CHECK(went);
    CHECK(cache.committed() == (went ? positions : committed));
    if (positions == 0) longest = 0;
    if (went)
      for (auto& layer : kept) layer.keep(positions);
    met.done += went && positions != committed ? 1 : 0;
    met.guaranteed += went && positions < longest && longest - positions <= max_rewind ? 1 : 0;
    met.refused += went ? 0 : 1;
  }
}

}  // namespace

TEST_CASE_TEMPLATE("pitfall 51: a cache goes back exactly where all that will be seen is still held", Kv, float, bf16) {
  rewinds met;
  for (std::uint64_t seed = 0; seed < 300; ++seed) go_back_and_forth<Kv>(seed, met);
  CHECK(met.done > 1000);
  CHECK(met.refused > 1000);
  CHECK(met.guaranteed > 200);
}

TEST_CASE("going back to nothing is an empty sequence, going forward is refused") {
  const std::array<kv_layer_shape, 2> shapes{kv_layer_shape{1, 2, 8}, kv_layer_shape{1, 2, 0}};
  cache_of<float> cache(shapes, 4, 100);
  while (cache.committed() < 80) cache.extend(4), cache.commit(4);
  CHECK_FALSE(cache.truncate(81));
  CHECK_FALSE(cache.truncate(20));
  CHECK(cache.committed() == 80);
  cache.extend(2);
  CHECK(cache.truncate(80));
  CHECK(cache.pending() == 0);
  CHECK(cache.truncate(0));
  CHECK(cache.committed() == 0);
  cache.extend(4);
  cache.commit(4);
  CHECK(cache.truncate(1));  // the rings are not full yet
}

TEST_CASE("without sliding layers a cache goes back any distance") {
  const std::array<kv_layer_shape, 1> shapes{kv_layer_shape{1, 2, 0}};
  cache_of<float> cache(shapes, 4, 1000);
  while (cache.committed() < 1000) cache.extend(4), cache.commit(4);
  CHECK(cache.truncate(999));
  CHECK(cache.truncate(1));
}

TEST_CASE("slots for going back are added to every ring, and no more than the sequence needs") {
  const std::array<kv_layer_shape, 2> shapes{kv_layer_shape{2, 8, 16}, kv_layer_shape{1, 4, any}};
  cache_of<float> cache(shapes, 4, 100, 30);
  CHECK(cache.layer(0).ring_rows == 50);
  CHECK(cache.layer(1).ring_rows == 100);
  CHECK(cache_of<float>(shapes, 4, 100, any).layer(0).ring_rows == 100);
}

// ---------------------------------------------------------------- forks

namespace {

/// A cache and, layer by layer, what it must hold.
template <class Kv>
struct sequence_kept {
  cache_of<Kv> cache;
  std::vector<full_length<Kv>> kept;

  sequence_kept(std::span<const kv_layer_shape> shapes, std::size_t max_rows, std::size_t length, std::size_t max_rewind = 0)
      : cache(shapes, max_rows, length, max_rewind) {
    for (const auto& shape : shapes) kept.emplace_back(shape.heads, shape.head_dim);
  }
  explicit sequence_kept(const sequence_kept& other) : cache(other.cache.fork()), kept(other.kept) {
    for (auto& layer : kept) layer.keep(cache.committed());
  }
  sequence_kept(sequence_kept&&) = default;

  void process(std::size_t rows, std::mt19937_64& random) {
    cache.extend(rows);
    for (std::size_t l = 0; l < kept.size(); ++l)
      for (std::size_t r = 0; r < rows; ++r) kept[l].append(cache.layer(l), random);
  }
  void commit(std::size_t rows) {
    const std::size_t first = cache.committed(), last = first + cache.pending();
    cache.commit(rows);
    for (std::size_t l = 0; l < kept.size(); ++l) {
      kept[l].keep(first + rows);
      for (std::size_t p = first + rows; p < last; ++p) kept[l].poison(cache.layer(l), p);
    }
  }
  void write(std::size_t rows, std::mt19937_64& random) {
    for (; rows != 0; rows -= (std::min)(rows, cache.max_rows())) {
      process((std::min)(rows, cache.max_rows()), random);
      commit(cache.pending());
    }
  }
  [[nodiscard]] bool truncate(std::size_t positions) {
    if (!cache.truncate(positions)) return false;
    for (auto& layer : kept) layer.keep(positions);
    return true;
  }
  /// Keys that are gone, of those that the rows and the drafter behind the committed positions see.
  [[nodiscard]] std::size_t gone(std::span<const kv_layer_shape> shapes) {
    std::size_t count = 0;
    for (std::size_t l = 0; l < shapes.size(); ++l)
      count += kept[l].wrong(cache.layer(l), {cache.committed(), shapes[l].window == 0 ? key_window::unlimited : shapes[l].window + 1});
    return count;
  }
};

struct family_met {
  std::size_t forks = 0, of_forks = 0, half_way = 0, copied = 0, parents_gone = 0, went_back = 0, refused = 0;
};

/// Random histories of a cache and its forks. After every step all of them hold what sequences of their own would.
template <class Kv>
void grow_family(std::uint64_t seed, family_met& met) {
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const std::size_t length = 1100, max_rows = draw(random, 2, 150);
  const std::array<kv_layer_shape, 3> shapes{kv_layer_shape{2, 1, 0}, kv_layer_shape{1, 2, draw(random, 1, 20)}, kv_layer_shape{1, 1, 0}};
  struct member {
    sequence_kept<Kv> sequence;
    std::size_t generation, children;
  };
  std::vector<member> family;
  family.push_back({sequence_kept<Kv>(shapes, max_rows, length, 400 * draw(random, 0, 1)), 0, 0});
  family.front().sequence.write(draw(random, 1, 700), random);
  for (int step = 0; step < 60; ++step) {
    const std::size_t chosen = draw(random, 0, family.size() - 1);
    auto& [sequence, generation, children] = family[chosen];
    const std::size_t committed = sequence.cache.committed(), room = (std::min)(max_rows, length - committed);
    switch (draw(random, 0, 6)) {
      case 0:
      case 1:
      case 2:
        if (room != 0) {
          const std::size_t shared = sequence.cache.shared_bytes(), rows = draw(random, 1, room);
          sequence.process(rows, random);
          if (sequence.cache.shared_bytes() < shared) ++met.copied;
          sequence.commit(draw(random, 1, rows));
        }
        break;
      case 3:
        if (sequence.truncate(committed - draw(random, 0, (std::min)(committed, std::size_t{600}))))
          ++met.went_back;
        else
          ++met.refused;
        break;
      case 4:
        if (family.size() < 5) {
          const bool half_way = room != 0 && draw(random, 0, 1) == 0;
          if (half_way) sequence.process((std::min)(room, max_rows - 1), random);
          member child{sequence_kept<Kv>(sequence), generation + 1, 0};
          CHECK(child.sequence.cache.committed() == committed);
          CHECK(child.sequence.cache.pending() == 0);
          if (half_way) sequence.commit(sequence.cache.pending());
          ++met.forks;
          met.of_forks += generation != 0 ? 1u : 0u;
          met.half_way += half_way ? 1u : 0u;
          ++children;
          family.push_back(std::move(child));
        }
        break;
      case 5:
        if (family.size() > 1) {
          met.parents_gone += children != 0 ? 1u : 0u;
          std::vector<member> others;
          for (std::size_t i = 0; i < family.size(); ++i)
            if (i != chosen) others.push_back(std::move(family[i]));
          family = std::move(others);
        }
        break;
      default:
        if (draw(random, 0, 7) == 0) {
          CHECK(sequence.truncate(0));
        } else {
          sequence.cache.reserve(draw(random, 0, length));
        }
    }
    std::size_t gone = 0;
    for (auto& one : family) gone += one.sequence.gone(shapes);
    CHECK(gone == 0);
  }
}

}  // namespace

TEST_CASE_TEMPLATE("forks go on like sequences of their own, whatever the others of the family do", Kv, float, bf16) {
  family_met met;
  for (std::uint64_t seed = 0; seed < 200; ++seed) grow_family<Kv>(seed, met);
  CHECK(met.forks > 600);
  CHECK(met.of_forks > 50);
  CHECK(met.half_way > 50);
  CHECK(met.copied > 20);
  CHECK(met.parents_gone > 20);
  CHECK(met.went_back > 100);
  CHECK(met.refused > 10);
}

TEST_CASE("a fork costs its rings and a partly filled block, however long the sequence is") {
  const std::array<kv_layer_shape, 3> shapes{kv_layer_shape{2, 8, 16}, kv_layer_shape{1, 32, 0}, kv_layer_shape{3, 16, 0}};
  const std::size_t rings = sizeof(bf16) * 2 * 24 * 2 * 8, block = sizeof(bf16) * 2 * 256 * (1 * 32 + 3 * 16);
  std::mt19937_64 random(1);
  sequence_kept<bf16> parent(shapes, 8, 4000);
  parent.cache.reserve(4000);
  parent.write(1300, random);
  CHECK(parent.cache.shared_bytes() == 0);
  std::vector<cache_of<bf16>> forks;
  for (int k = 0; k < 10; ++k) forks.push_back(parent.cache.fork());
  CHECK(parent.cache.bytes() == rings + 16 * block);  // its room is its own
  CHECK(parent.cache.shared_bytes() == 5 * block);
  for (const auto& fork : forks) {
    CHECK(fork.bytes() == rings + 6 * block);
    CHECK(fork.bytes() - fork.shared_bytes() == rings + block);
  }

  parent.write(24, random);  // 1304 … 1323 lie in blocks of its own
  CHECK(parent.cache.shared_bytes() == 5 * block);
  forks.clear();
  CHECK(parent.cache.shared_bytes() == 0);
  parent.write(212, random);  // to the border of a block
  CHECK(parent.cache.committed() == 6 * 256);
  CHECK(parent.cache.fork().bytes() == rings + 6 * block);
}

TEST_CASE("a block that forks share is copied when one of them goes back and writes, views taken before see the copy") {
  const std::array<kv_layer_shape, 2> shapes{kv_layer_shape{2, 2, 0}, kv_layer_shape{1, 1, 0}};
  const std::size_t block = sizeof(float) * 2 * 256 * (2 * 2 + 1);
  std::mt19937_64 random(2);
  sequence_kept<float> parent(shapes, 64, 2000);
  parent.write(600, random);
  sequence_kept<float> child(parent);
  const kv_view<float> early = child.cache.layer(0);
  CHECK(early.key(511, 1) == parent.cache.layer(0).key(511, 1));
  CHECK(early.key(512, 1) != parent.cache.layer(0).key(512, 1));

  CHECK(child.truncate(300));
  CHECK(child.cache.shared_bytes() == 2 * block);  // nothing is written yet
  child.write(10, random);
  CHECK(child.cache.shared_bytes() == block);
  CHECK(early.key(255, 1) == parent.cache.layer(0).key(255, 1));
  CHECK(early.key(299, 1) != parent.cache.layer(0).key(299, 1));
  CHECK(child.kept[0].wrong(early, {310}) == 0);
  CHECK(child.gone(shapes) == 0);
  CHECK(parent.gone(shapes) == 0);

  // The parent is now the only one with its second block, so it writes there without a copy.
  const float* const before = parent.cache.layer(0).key(256, 0);
  CHECK(parent.truncate(256));
  parent.write(30, random);
  CHECK(parent.cache.layer(0).key(256, 0) == before);
  CHECK(child.gone(shapes) == 0);
}

TEST_CASE("reserving takes the copies of shared blocks that will be written, so that passes need no memory") {
  const std::array<kv_layer_shape, 1> shapes{kv_layer_shape{1, 1, 0}};
  std::mt19937_64 random(3);
  sequence_kept<float> parent(shapes, 64, 2000);
  parent.write(1024, random);
  sequence_kept<float> child(parent);
  CHECK(child.truncate(700));
  child.cache.reserve(700);
  const std::size_t one_block = child.cache.bytes() / 4;
  CHECK(child.cache.shared_bytes() == 3 * one_block);  // 512 … 699 stay, and are copied with the rest of their block
  child.cache.reserve(1024);
  CHECK(child.cache.shared_bytes() == 2 * one_block);
  const float* const block = child.cache.layer(0).key(768, 0);
  child.write(300, random);
  CHECK(child.cache.layer(0).key(768, 0) == block);
  CHECK(child.gone(shapes) == 0);
  CHECK(parent.gone(shapes) == 0);
}

TEST_CASE("an emptied cache keeps its own blocks and lets go of shared ones") {
  const std::array<kv_layer_shape, 1> shapes{kv_layer_shape{1, 1, 0}};
  std::mt19937_64 random(4);
  sequence_kept<float> parent(shapes, 64, 2000);
  parent.write(800, random);
  const std::size_t bytes = parent.cache.bytes();
  sequence_kept<float> child(parent);
  CHECK(parent.truncate(0));
  CHECK(parent.cache.bytes() == bytes / 4);
  CHECK(child.cache.shared_bytes() == 0);
  parent.write(900, random);
  CHECK(parent.gone(shapes) == 0);
  CHECK(child.gone(shapes) == 0);
}

TEST_CASE("a fork has the limits of its parent and goes back as far") {
  const std::array<kv_layer_shape, 2> shapes{kv_layer_shape{1, 2, 8}, kv_layer_shape{1, 2, 0}};
  std::mt19937_64 random(5);
  for (std::size_t positions = 1; positions < 60; ++positions) {
    CAPTURE(positions);
    sequence_kept<float> parent(shapes, 4, 60, 5);
    parent.write(57, random);
    parent.process(3, random);
    parent.commit(1);
    sequence_kept<float> child(parent);
    CHECK(child.cache.max_rows() == 4);
    CHECK(child.cache.max_positions() == 60);
    CHECK(code_of([&] { child.cache.extend(3); }) == error_code::context_full);
    CHECK(code_of([&] { child.cache.extend(5); }) == error_code::argument_invalid);
    CHECK(child.truncate(positions) == parent.truncate(positions));
    CHECK(child.gone(shapes) == 0);
  }
  cache_of<float> nothing(shapes, 4, 60);
  CHECK(nothing.fork().committed() == 0);
  CHECK(nothing.fork().bytes() == nothing.bytes());
}

TEST_CASE("what is prepared can be extended, what is refused has opened nothing") {
  const std::array<kv_layer_shape, 2> shapes{kv_layer_shape{1, 2, 8}, kv_layer_shape{1, 2, 0}};
  cache_of<float> cache(shapes, 4, 6);
  CHECK(code_of([&] { cache.prepare(5); }) == error_code::argument_invalid);
  cache.prepare(4);
  CHECK(cache.pending() == 0);
  const std::size_t bytes = cache.bytes();
  cache.extend(4);
  CHECK(cache.bytes() == bytes);
  cache.commit(4);
  CHECK(code_of([&] { cache.prepare(3); }) == error_code::context_full);
  CHECK(cache.pending() == 0);
}

// ---------------------------------------------------------------- through the ops of a backend

namespace {

/// A ring layer and a full layer that are given the same keys and values, attended with the same windows.
template <class Kv>
class twin_layers {
 public:
  static constexpr std::size_t heads = 2, head_dim = 4 * elements_of<Kv>, q_heads = 4;

  twin_layers(std::size_t window, std::size_t max_rows, std::size_t length, std::uint64_t seed)
      : window_(window),
        cache_(std::array{kv_layer_shape{heads, head_dim, window}, kv_layer_shape{heads, head_dim, 0}}, max_rows, length),
        random_(seed) {}

  [[nodiscard]] const cache_of<Kv>& cache() const { return cache_; }
  void commit(std::size_t rows) { cache_.commit(rows); }

  /// A pass of `rows` rows: append, attend, and compare the outputs bit by bit.
  [[nodiscard]] bool pass_is_equal(std::size_t rows) {
    const std::size_t first = cache_.committed();
    cache_.extend(rows);
    const auto k = random_rows(rows, heads), v = random_rows(rows, heads);
    for (std::size_t l = 0; l < 2; ++l) ops::append(context_, cache_.layer(l), k.view(), v.view(), first);
    return attended_is_equal(rows, {first + 1, window_});
  }
  /// The drafter's row at position committed().
  [[nodiscard]] bool drafter_is_equal() { return attended_is_equal(1, {cache_.committed(), window_ + 1}); }

 private:
  using ops = attention_ops<reference, Kv>;

  [[nodiscard]] matrix<float, host_space> random_rows(std::size_t rows, std::size_t count) {
    std::normal_distribution<float> normal;
    matrix<float, host_space> m(rows, count * head_dim);
    for (std::size_t i = 0; i < rows * count * head_dim; ++i) m.view().data[i] = normal(random_);
    return m;
  }
  [[nodiscard]] bool attended_is_equal(std::size_t rows, key_window window) {
    const auto q = random_rows(rows, q_heads);
    std::array<matrix<float, host_space>, 2> out{random_rows(rows, q_heads), random_rows(rows, q_heads)};
    for (std::size_t l = 0; l < 2; ++l) ops::attend(context_, out[l].view(), q.view(), cache_.layer(l), window);
    return std::memcmp(out[0].view().data, out[1].view().data, rows * q_heads * head_dim * sizeof(float)) == 0;
  }

  std::size_t window_;
  cache_of<Kv> cache_;
  std::mt19937_64 random_;
  context_of<reference> context_{execution{}};
};

}  // namespace

TEST_CASE_TEMPLATE("pitfalls 43, 47: attention over a ring has the bits of attention over the full sequence, through drafts and rejections",
                   Kv, float, bf16, q8_0) {
  for (std::uint64_t seed = 0; seed < (block_format<Kv> ? 10 : 60); ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const std::size_t length = seed % 10 == 0 ? 600 : 120, max_rows = draw(random, 1, 17);
    twin_layers<Kv> layers(draw(random, 1, 20), max_rows, length, seed);
    while (layers.cache().committed() < length) {
      const std::size_t first = layers.cache().committed(), rows = (std::min)(draw(random, 1, max_rows), length - first);
      CAPTURE(first);
      CHECK(layers.pass_is_equal(rows));
      layers.commit(draw(random, 1, rows));
      CHECK(layers.drafter_is_equal());
    }
  }
}

TEST_CASE("pitfall 44: prompts around the window's length and drafting behind them") {
  struct sizes {
    std::size_t window, prompt;
  };
  for (const sizes& size : {sizes{16, 15}, sizes{16, 16}, sizes{16, 17}, sizes{16, 32}, sizes{512, 511}, sizes{512, 512}, sizes{512, 513},
                            sizes{512, 515}, sizes{512, 1024}, sizes{512, 1025}}) {
    CAPTURE(size.window);
    CAPTURE(size.prompt);
    twin_layers<float> layers(size.window, 64, size.prompt + 40, size.prompt);
    while (layers.cache().committed() < size.prompt) {
      const std::size_t rows = (std::min)(size.prompt - layers.cache().committed(), std::size_t{64});
      CHECK(layers.pass_is_equal(rows));
      layers.commit(rows);
    }
    for (std::size_t accepted = 0; accepted < 5; ++accepted) {
      CHECK(layers.drafter_is_equal());
      CHECK(layers.pass_is_equal(5));
      layers.commit(accepted + 1);
    }
  }
}

TEST_CASE_TEMPLATE("pitfalls 46, 60: a row sees the last W positions with itself, the drafter the last W + 1 committed ones", Kv, float,
                   bf16) {
  // With a zero query all visible keys weigh the same; with value = position, the output is the mean of the positions seen. A window that
  // is off by one moves it by 1/2. The mean of up to W + 1 integers below 256 is exact in the sum and rounded in weights and division: far
  // less than W · 2^-24 · 256 < 2^-12 in total.
  constexpr std::size_t window = 6, length = 100;
  const std::array<kv_layer_shape, 1> shapes{kv_layer_shape{1, 1, window}};
  cache_of<Kv> cache(shapes, 4, length);
  context_of<reference> context{execution{}};
  const auto mean_seen = [&](key_window seen) {
    float zero = 0, out = -1;
    attention_ops<reference, Kv>::attend(context, {&out, 1, 1, 1}, {&zero, 1, 1, 1}, cache.layer(0), seen);
    return out;
  };
  const auto mean_of = [](std::size_t first, std::size_t last) { return static_cast<float>(first + last) / 2; };
  for (std::size_t p = 0; p < length; ++p) {
    CAPTURE(p);
    cache.extend(1);
    float key = 1, value = static_cast<float>(p);
    attention_ops<reference, Kv>::append(context, cache.layer(0), {&key, 1, 1, 1}, {&value, 1, 1, 1}, p);
    CHECK(std::abs(mean_seen({p + 1, window}) - mean_of(p < window ? 0 : p - window + 1, p)) < 0x1p-12f);
    cache.commit(1);
    // The drafter now stands at position p + 1 and sees p - W … p.
    CHECK(std::abs(mean_seen({p + 1, window + 1}) - mean_of(p < window ? 0 : p - window, p)) < 0x1p-12f);
  }
}

TEST_CASE("positions up to 131,072 and beyond have their slots, in full layers and in rings") {
  constexpr std::size_t window = 512, rows = 128, length = 140'000;
  const std::array<kv_layer_shape, 2> shapes{kv_layer_shape{1, 1, 0}, kv_layer_shape{1, 1, window}};
  cache_of<float> cache(shapes, rows, length);
  context_of<reference> context{execution{}};
  std::vector<float> numbers(rows);
  for (std::size_t first = 0; first < length; first += rows) {
    const std::size_t count = (std::min)(rows, length - first);
    cache.extend(count);
    for (std::size_t r = 0; r < count; ++r) numbers[r] = static_cast<float>(first + r);  // exact below 2^24
    const matrix_view<const float> view{numbers.data(), count, 1, 1};
    for (std::size_t layer = 0; layer < 2; ++layer) attention_ops<reference, float>::append(context, cache.layer(layer), view, view, first);
    cache.commit(count);
  }
  for (const std::size_t p :
       {std::size_t{0}, std::size_t{65'535}, std::size_t{65'536}, std::size_t{131'071}, std::size_t{131'072}, length - 1})
    CHECK(*cache.layer(0).key(p, 0) == static_cast<float>(p));
  for (std::size_t p = length - window - 1; p < length; ++p) CHECK(*cache.layer(1).value(p, 0) == static_cast<float>(p));
  CHECK_THROWS_AS(cache.extend(1), error);
}
