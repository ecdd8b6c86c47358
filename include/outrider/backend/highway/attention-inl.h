// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Attention with an online softmax over tiles of keys. Tiles are cut at multiples of key_tile in absolute positions and a score sits in the
// lane its position gives it, so a query's bits depend on its own keys alone: not on the other queries of its group, not on ring or growing
// storage.
#if defined(OUTRIDER_BACKEND_HIGHWAY_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUTRIDER_BACKEND_HIGHWAY_ATTENTION_INL_H_
#undef OUTRIDER_BACKEND_HIGHWAY_ATTENTION_INL_H_
#else
#define OUTRIDER_BACKEND_HIGHWAY_ATTENTION_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>

#include <limits>

#include "outrider/backend/highway/compat-inl.h"
#include "outrider/backend/highway/linear-inl.h"
#include "outrider/core/kv_view.hpp"
#include "outrider/core/view.hpp"

HWY_BEFORE_NAMESPACE();
namespace outrider {
namespace HWY_NAMESPACE {

constexpr std::size_t key_tile = 64;
static_assert(key_tile % lanes == 0);

/// How far a query has come through its keys; its output holds Σ exp(score − largest) · value so far.
struct query_state {
  std::size_t begin, end;  // the positions it sees
  float largest, sum;
};

/// Turns scores into weights exp(score − largest), those outside begin … end - 1 into zeros, and updates the largest score and the sum. Returns
/// the factor that what was summed before must be scaled with.
HWY_NOINLINE inline float weigh(float* score, std::size_t begin, std::size_t end, query_state& state) noexcept {
  constexpr float lowest = -std::numeric_limits<float>::infinity();
  for (std::size_t j = 0; j < begin; ++j) score[j] = lowest;
  for (std::size_t j = end; j < key_tile; ++j) score[j] = lowest;

  vec most = set(state.largest);
  for (std::size_t j = 0; j < key_tile; j += lanes) most = hn::Max(most, load(score + j));
  const float largest = max_of_lanes(most);

  vec sum = zero();
  for (std::size_t j = 0; j < key_tile; j += lanes) {
    const vec below = hn::Sub(load(score + j), set(largest));
    const vec weight = hn::IfThenElse(hn::IsNaN(below), below, hn::Exp(floats(), below));  // Exp would hide a NaN
    store(weight, score + j);
    sum = hn::Add(sum, weight);
  }
  const float fade = hn::GetLane(hn::Exp(floats(), hn::Sub(set(state.largest), set(largest))));
  state.sum = hn::GetLane(hn::MulAdd(set(state.sum), set(fade), set(sum_of_lanes(sum))));
  state.largest = largest;
  return fade;
}

/// out[i][0 … width·lanes - 1] += Σ_j weight[i][j] · values[j·d + …], j ascending.
template <std::size_t MR, std::size_t width, class Kv>
HWY_INLINE void add_strip(float* const* out, std::size_t column, const float* const* weight, const Kv* values, std::size_t count,
                          std::size_t d) noexcept {
  vec sum[MR][width];
  OUTRIDER_UNROLL
  for (std::size_t i = 0; i < MR; ++i) {
    OUTRIDER_UNROLL
    for (std::size_t s = 0; s < width; ++s) sum[i][s] = load(out[i] + column + s * lanes);
  }
  for (std::size_t j = 0; j < count; ++j) {
    vec v[width];
    OUTRIDER_UNROLL
    for (std::size_t s = 0; s < width; ++s) v[s] = load(values + j * d + column + s * lanes);
    OUTRIDER_UNROLL
    for (std::size_t i = 0; i < MR; ++i) {
      const vec p = set(weight[i][j]);
      OUTRIDER_UNROLL
      for (std::size_t s = 0; s < width; ++s) sum[i][s] = hn::MulAdd(p, v[s], sum[i][s]);
    }
  }
  OUTRIDER_UNROLL
  for (std::size_t i = 0; i < MR; ++i) {
    OUTRIDER_UNROLL
    for (std::size_t s = 0; s < width; ++s) store(sum[i][s], out[i] + column + s * lanes);
  }
}

/// out[i] [d] += Σ_j weight[i][j] · value(j) over `count` consecutive values, j ascending, for MR <= dot_rows queries.
template <std::size_t MR, class Kv>
HWY_NOINLINE void add_values(float* const* out, const float* const* weight, const Kv* values, std::size_t count, std::size_t d) noexcept {
  constexpr std::size_t width = HWY_CAP_GE512 ? 4 : 2;  // dot_rows × width accumulators and a row of values fit into the registers
  std::size_t c = 0;
  for (; c + width * lanes <= d; c += width * lanes) add_strip<MR, width>(out, c, weight, values, count, d);
  for (; c + lanes <= d; c += lanes) add_strip<MR, 1>(out, c, weight, values, count, d);
  if (c == d) return;
  for (std::size_t i = 0; i < MR; ++i) {
    vec sum = load_first(out[i] + c, d - c);
    for (std::size_t j = 0; j < count; ++j) sum = hn::MulAdd(set(weight[i][j]), load_first(values + j * d + c, d - c), sum);
    store_first(sum, out[i] + c, d - c);
  }
}

/// The same for 1 <= queries <= dot_rows.
template <class Kv>
HWY_INLINE void add_values_of(std::size_t queries, float* const* out, const float* const* weight, const Kv* values, std::size_t count,
                              std::size_t d) noexcept {
  switch (queries) {
    case 1:
      return add_values<1>(out, weight, values, count, d);
    case 2:
      return add_values<2>(out, weight, values, count, d);
    case 3:
      return add_values<3>(out, weight, values, count, d);
    default:
      return add_values<4>(out, weight, values, count, d);
  }
}

/// How many queries of a KV head go through its keys together: a tile of keys and values is read once and stays in the second-level cache.
constexpr std::size_t query_group = 32;

/// The queries of a group and the scores of one tile.
struct query_set {
  std::size_t count = 0;
  query_state state[query_group];
  const float* q[query_group];
  float* out[query_group];
  std::size_t begin[query_group], end[query_group];  // what each sees of the tile, counted from the tile's first position
  HWY_ALIGN float score[query_group][key_tile];
};

/// Scores of the positions from … to - 1, which lie in the tile that starts at `tile`, for all queries.
template <class Kv>
void score_tile(query_set& set, kv_view<const Kv> cache, std::size_t head, std::size_t tile, std::size_t from, std::size_t to) noexcept {
  const std::size_t d = cache.head_dim, line = 64 / sizeof(Kv);
  for (std::size_t p = from; p < to;) {
    const std::size_t run = cache.run(p, to), groups = (run + dot_streams - 1) / dot_streams;
    const Kv *keys = cache.key(p, head), *values = cache.value(p, head);
    for (std::size_t g = 0; g < groups; ++g) {
      const Kv* key[dot_streams];
      std::size_t at[dot_streams];
      for (std::size_t s = 0; s < dot_streams; ++s) {
        at[s] = HWY_MIN(s * groups + g, run - 1);
        key[s] = keys + at[s] * d;
        for (std::size_t c = 0; c < d; c += line) prefetch(values + at[s] * d + c);  // wanted as soon as the scores are known
      }
      for (std::size_t r = 0; r < set.count; r += dot_rows) {
        const std::size_t rows = HWY_MIN(dot_rows, set.count - r);
        float result[dot_rows][dot_streams];
        dots_of(rows, set.q + r, key, d, result);
        for (std::size_t i = 0; i < rows; ++i)
          for (std::size_t s = 0; s < dot_streams; ++s) set.score[r + i][p - tile + at[s]] = result[i][s];
      }
    }
    p += run;
  }
}

/// Adds the weighted values of the same positions to the outputs. Neighbouring queries that see the same part of the tile, as they do
/// everywhere but at the ends of their windows, go together.
template <class Kv>
void add_tile(query_set& set, kv_view<const Kv> cache, std::size_t head, std::size_t tile, std::size_t from, std::size_t to) noexcept {
  const std::size_t d = cache.head_dim;
  for (std::size_t p = from; p < to;) {
    const std::size_t run = cache.run(p, to), at = p - tile;
    const Kv* values = cache.value(p, head);
    for (std::size_t r = 0; r < set.count;) {
      std::size_t rows = 1;
      while (rows < dot_rows && r + rows < set.count && set.begin[r + rows] == set.begin[r] && set.end[r + rows] == set.end[r]) ++rows;
      const std::size_t begin = HWY_MAX(at, set.begin[r]), end = HWY_MIN(at + run, set.end[r]);
      if (begin < end) {
        const float* weight[dot_rows];
        for (std::size_t i = 0; i < rows; ++i) weight[i] = set.score[r + i] + begin;
        add_values_of(rows, set.out + r, weight, values + (begin - at) * d, end - begin, d);
      }
      r += rows;
    }
    p += run;
  }
}

/// The queries of a set, each over its own positions; the keys and values they share are read once.
template <class Kv>
void attend_set(query_set& set, kv_view<const Kv> cache, std::size_t head) noexcept {
  const std::size_t d = cache.head_dim;
  std::size_t first = key_window::unlimited, last = 0;
  for (std::size_t i = 0; i < set.count; ++i) {
    for (std::size_t c = 0; c < d; ++c) set.out[i][c] = 0;
    if (set.state[i].begin >= set.state[i].end) continue;
    first = HWY_MIN(first, set.state[i].begin);
    last = HWY_MAX(last, set.state[i].end);
  }

  for (std::size_t from = first; from < last;) {
    const std::size_t tile = from / key_tile * key_tile, to = HWY_MIN(tile + key_tile, last);
    score_tile(set, cache, head, tile, from, to);
    for (std::size_t i = 0; i < set.count; ++i) {
      set.begin[i] = HWY_MAX(from, set.state[i].begin) - tile;
      set.end[i] = HWY_MAX(HWY_MIN(to, set.state[i].end), tile) - tile;
      if (set.begin[i] >= set.end[i]) continue;
      const float fade = weigh(set.score[i], set.begin[i], set.end[i], set.state[i]);
      if (fade != 1)
        for (std::size_t c = 0; c < d; ++c) set.out[i][c] *= fade;
    }
    add_tile(set, cache, head, tile, from, to);
    from = to;
  }

  for (std::size_t i = 0; i < set.count; ++i) {
    if (set.state[i].begin >= set.state[i].end) continue;
    for (std::size_t c = 0; c < d; ++c) set.out[i][c] /= set.state[i].sum;
  }
}

template <class Kv>
void attend(matrix_view<float> out, matrix_view<const float> q, kv_view<const Kv> cache, key_window window, std::size_t begin,
            std::size_t end) noexcept {
  const std::size_t d = cache.head_dim, group = q.cols / d / cache.heads, per_head = q.rows * group;
  for (std::size_t item = begin; item < end;) {
    const std::size_t head = item / per_head, stop = HWY_MIN(end, (head + 1) * per_head);
    query_set set;
    for (; item < stop && set.count < query_group; ++item, ++set.count) {
      const std::size_t row = item % per_head / group, column = (head * group + item % group) * d;
      set.q[set.count] = q.row(row) + column;
      set.out[set.count] = out.row(row) + column;
      set.state[set.count] = {window.begin(row), window.end(row), -std::numeric_limits<float>::infinity(), 0};
    }
    attend_set(set, cache, head);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace outrider
HWY_AFTER_NAMESPACE();

#endif
