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

/// A query on its way through its keys. out [head_dim] holds Σ exp(score − largest) · value so far.
struct query_state {
  const float* q;
  float* out;
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

/// out[i] += Σ_j weight[i][j] · value(j) over `count` consecutive values, j ascending.
template <std::size_t MR, class Kv>
HWY_NOINLINE void add_values(float* const* out, const float* const* weight, const Kv* values, std::size_t count, std::size_t d) noexcept {
  constexpr std::size_t width = HWY_CAP_GE512 ? 4 : 2;  // vectors of a strip; MR × width accumulators stay in registers
  std::size_t c = 0;
  for (; c + width * lanes <= d; c += width * lanes) {
    vec sum[MR][width];
    OUTRIDER_UNROLL
    for (std::size_t i = 0; i < MR; ++i) {
      OUTRIDER_UNROLL
      for (std::size_t s = 0; s < width; ++s) sum[i][s] = load(out[i] + c + s * lanes);
    }
    for (std::size_t j = 0; j < count; ++j) {
      vec v[width];
      OUTRIDER_UNROLL
      for (std::size_t s = 0; s < width; ++s) v[s] = load(values + j * d + c + s * lanes);
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
      for (std::size_t s = 0; s < width; ++s) store(sum[i][s], out[i] + c + s * lanes);
    }
  }
  for (; c < d; c += lanes) {
    const std::size_t n = HWY_MIN(lanes, d - c);
    for (std::size_t i = 0; i < MR; ++i) {
      vec sum = load_first(out[i] + c, n);
      for (std::size_t j = 0; j < count; ++j) sum = hn::MulAdd(set(weight[i][j]), load_first(values + j * d + c, n), sum);
      store_first(sum, out[i] + c, n);
    }
  }
}

/// Up to dot_rows queries of one KV head, each over its own positions; the keys and values they share are read once.
template <class Kv>
void attend_group(query_state* query, std::size_t count, kv_view<const Kv> cache, std::size_t head) noexcept {
  const std::size_t d = cache.head_dim;
  const float* q[dot_rows];
  std::size_t first = key_window::unlimited, last = 0;
  for (std::size_t i = 0; i < count; ++i) {
    q[i] = query[i].q;
    for (std::size_t c = 0; c < d; ++c) query[i].out[c] = 0;
    if (query[i].begin >= query[i].end) continue;
    first = HWY_MIN(first, query[i].begin);
    last = HWY_MAX(last, query[i].end);
  }

  HWY_ALIGN float score[dot_rows][key_tile];
  for (std::size_t from = first; from < last;) {
    const std::size_t tile = from / key_tile * key_tile, to = HWY_MIN(tile + key_tile, last);
    for (std::size_t p = from; p < to;) {
      const std::size_t run = cache.run(p, to);
      const Kv* keys = cache.key(p, head);
      for (std::size_t j = 0; j < run; j += dot_streams) {
        const Kv* key[dot_streams];
        for (std::size_t s = 0; s < dot_streams; ++s) key[s] = keys + HWY_MIN(j + s, run - 1) * d;
        float result[dot_rows][dot_streams];
        dots_of(count, q, key, d, result);
        for (std::size_t i = 0; i < count; ++i)
          for (std::size_t s = 0; s < dot_streams && j + s < run; ++s) score[i][p - tile + j + s] = result[i][s];
      }
      p += run;
    }

    bool together = true;  // all queries see the same part of the tile, as they do everywhere but at the ends of their windows
    std::size_t begin[dot_rows], end[dot_rows];
    for (std::size_t i = 0; i < count; ++i) {
      begin[i] = HWY_MAX(from, query[i].begin) - tile;
      end[i] = HWY_MAX(HWY_MIN(to, query[i].end), tile + begin[i]) - tile;
      together = together && begin[i] == begin[0] && end[i] == end[0];
      if (begin[i] == end[i]) continue;
      const float fade = weigh(score[i], begin[i], end[i], query[i]);
      if (fade != 1) {
        const vec f = set(fade);
        std::size_t c = 0;
        for (; c + lanes <= d; c += lanes) store(hn::Mul(load(query[i].out + c), f), query[i].out + c);
        for (; c < d; ++c) query[i].out[c] *= fade;
      }
    }

    for (std::size_t p = from; p < to;) {
      const std::size_t run = cache.run(p, to);
      const Kv* values = cache.value(p, head);
      const std::size_t at = p - tile;
      if (together && count == dot_rows) {
        float* out[dot_rows];
        const float* weight[dot_rows];
        for (std::size_t i = 0; i < dot_rows; ++i) {
          out[i] = query[i].out;
          weight[i] = score[i] + at;
        }
        add_values<dot_rows>(out, weight, values, run, d);
      } else {
        for (std::size_t i = 0; i < count; ++i) {
          const std::size_t b = HWY_MAX(at, begin[i]), e = HWY_MIN(at + run, end[i]);
          const float* weight = score[i] + b;
          if (b < e) add_values<1>(&query[i].out, &weight, values + (b - at) * d, e - b, d);
        }
      }
      p += run;
    }
    from = to;
  }

  for (std::size_t i = 0; i < count; ++i) {
    if (query[i].begin >= query[i].end) continue;
    for (std::size_t c = 0; c < d; ++c) query[i].out[c] /= query[i].sum;
  }
}

template <class Kv>
void attend(matrix_view<float> out, matrix_view<const float> q, kv_view<const Kv> cache, key_window window, std::size_t begin,
            std::size_t end) noexcept {
  const std::size_t d = cache.head_dim, group = q.cols / d / cache.heads, per_head = q.rows * group;
  for (std::size_t item = begin; item < end;) {
    const std::size_t head = item / per_head, count = HWY_MIN(dot_rows, HWY_MIN(end, (head + 1) * per_head) - item);
    query_state query[dot_rows];
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t row = (item + i) % per_head / group, column = (head * group + (item + i) % group) * d;
      query[i] = {q.row(row) + column, out.row(row) + column, window.begin(row), window.end(row), -std::numeric_limits<float>::infinity(), 0};
    }
    attend_group(query, count, cache, head);
    item += count;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace outrider
HWY_AFTER_NAMESPACE();

#endif
