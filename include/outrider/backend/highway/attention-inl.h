// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Attention with an online softmax over tiles of keys. Tiles are cut at multiples of key_tile in absolute positions and a score sits in the
// lane its position gives it, so a part's bits depend on its own keys alone: not on the other parts that are read with it, not on ring or
// growing storage.
#if defined(OUTRIDER_BACKEND_HIGHWAY_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUTRIDER_BACKEND_HIGHWAY_ATTENTION_INL_H_
#undef OUTRIDER_BACKEND_HIGHWAY_ATTENTION_INL_H_
#else
#define OUTRIDER_BACKEND_HIGHWAY_ATTENTION_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>

#include <limits>

#include "outrider/backend/highway/compat-inl.h"
#include "outrider/backend/highway/kernel_table.hpp"
#include "outrider/backend/highway/linear-inl.h"
#include "outrider/core/blocks.hpp"
#include "outrider/core/kv_view.hpp"
#include "outrider/core/view.hpp"

HWY_BEFORE_NAMESPACE();
namespace outrider {
namespace HWY_NAMESPACE {

constexpr std::size_t key_tile = 64;
static_assert(key_tile % lanes == 0);

/// Turns scores into weights exp(score − largest), those outside begin … end - 1 into zeros, and updates the largest score and the sum. Returns
/// the factor that what was summed before must be scaled with.
HWY_NOINLINE inline float weigh(float* score, std::size_t begin, std::size_t end, detail::attention_part& part) noexcept {
  constexpr float lowest = -std::numeric_limits<float>::infinity();
  for (std::size_t j = 0; j < begin; ++j) score[j] = lowest;
  for (std::size_t j = end; j < key_tile; ++j) score[j] = lowest;

  vec most = set(part.largest);
  for (std::size_t j = 0; j < key_tile; j += lanes) most = hn::Max(most, load(score + j));
  const float largest = max_of_lanes(most);
  if (largest == lowest) {  // nothing but −∞, which weighs nothing, and NaN
    for (std::size_t j = 0; j < key_tile; ++j) score[j] = score[j] == lowest ? 0 : score[j];
    for (std::size_t j = begin; j < end; ++j) part.total += score[j];
    return 1;
  }

  vec sum = zero();
  for (std::size_t j = 0; j < key_tile; j += lanes) {
    const vec below = hn::Sub(load(score + j), set(largest));
    const vec weight = hn::IfThenElse(hn::IsNaN(below), below, hn::Exp(floats(), below));  // Exp would hide a NaN
    store(weight, score + j);
    sum = hn::Add(sum, weight);
  }
  const float fade = hn::GetLane(hn::Exp(floats(), hn::Sub(set(part.largest), set(largest))));
  part.total = hn::GetLane(hn::MulAdd(set(part.total), set(fade), set(sum_of_lanes(sum))));
  part.largest = largest;
  return fade;
}

/// Vectors of a value added at a time by MR queries. Of blocks whole ones or such parts as fill one, so that a scale is read once.
template <std::size_t MR, class Kv>
constexpr std::size_t width_of = !HWY_CAP_GE512     ? 2
                                 : block_format<Kv> ? (MR > few_rows ? 2 : 4)
                                                    : (MR > few_rows ? many_streams : 6);

/// A half in every lane, exactly: where Highway has no instruction for it, its own conversion takes NaN for a number.
HWY_INLINE vec broadcast(f16 value) {
#if HWY_ARCH_ARM_A64 || (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2)
  const hn::Rebind<std::uint16_t, floats> narrow;
  const hn::Rebind<hwy::float16_t, floats> half;
  return hn::PromoteTo(floats(), hn::BitCast(half, hn::Set(narrow, value.bits)));
#else
  return set(to_float(value));
#endif
}

/// v = the columns column … column + width·lanes - 1 of a value. Asks for what lies `ahead` bytes from them.
template <std::size_t width, class Kv>
HWY_INLINE void load_strip(vec (&v)[width], const Kv* value, std::size_t column, std::ptrdiff_t ahead) noexcept {
  OUTRIDER_UNROLL
  for (std::size_t s = 0; s < width; ++s) {
    const Kv* const at = value + column + s * lanes;
    v[s] = load(at);
    prefetch_second_level(reinterpret_cast<const std::byte*>(at) + ahead);
  }
}
/// The same of blocks; column is a multiple of lanes, and of width·lanes for width > 1.
template <std::size_t width>
HWY_INLINE void load_strip(vec (&v)[width], const q8_0* value, std::size_t column, std::ptrdiff_t ahead) noexcept {
  static_assert(q8_0::elements % (width * lanes) == 0 || width * lanes % q8_0::elements == 0);
  constexpr std::size_t of_block = HWY_MIN(width, q8_0::elements / lanes);
  const q8_0* const block = value + column / q8_0::elements;
  const std::size_t first = column % q8_0::elements;
  vec scale = zero();
  OUTRIDER_UNROLL
  for (std::size_t s = 0; s < width; ++s) {
    const q8_0* const at = block + s / of_block;
    if (s % of_block == 0) {
      scale = broadcast(at->d);
      prefetch_second_level(reinterpret_cast<const std::byte*>(at) + ahead);
    }
    v[s] = hn::Mul(scale, load(at->qs + first + s % of_block * lanes));
  }
}

/// out[i][0 … width·lanes - 1] += Σ_j weight[i][j] · values[j·stride + …], j ascending. Asks for what lies `ahead` bytes from the values.
template <std::size_t MR, std::size_t width, class Kv>
HWY_INLINE void add_strip(float* const* out, std::size_t column, const float* const* weight, const Kv* values, std::size_t count,
                          std::size_t stride, std::ptrdiff_t ahead) noexcept {
  vec sum[MR][width];
  OUTRIDER_UNROLL
  for (std::size_t i = 0; i < MR; ++i) {
    OUTRIDER_UNROLL
    for (std::size_t s = 0; s < width; ++s) sum[i][s] = load(out[i] + column + s * lanes);
  }
  for (std::size_t j = 0; j < count; ++j) {
    vec v[width];
    load_strip(v, values + j * stride, column, ahead);
    OUTRIDER_UNROLL
    for (std::size_t i = 0; i < MR; ++i) {
      vec p = set(weight[i][j]);
      hold(p);
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

/// out[i] [d] += Σ_j weight[i][j] · value(j) over `count` consecutive values, j ascending.
template <std::size_t MR, std::size_t width, class Kv>
HWY_NOINLINE void add_values(float* const* out, const float* const* weight, const Kv* values, std::size_t count, std::size_t d,
                             std::ptrdiff_t ahead) noexcept {
  const std::size_t stride = d / elements_of<Kv>;
  std::size_t c = 0;
  for (; c + width * lanes <= d; c += width * lanes) add_strip<MR, width>(out, c, weight, values, count, stride, ahead);
  for (; c + lanes <= d; c += lanes) add_strip<MR, 1>(out, c, weight, values, count, stride, ahead);
  if constexpr (!block_format<Kv>) {  // blocks have whole vectors
    if (c == d) return;
    for (std::size_t i = 0; i < MR; ++i) {
      vec sum = load_first(out[i] + c, d - c);
      for (std::size_t j = 0; j < count; ++j) sum = hn::MulAdd(set(weight[i][j]), load_first(values + j * d + c, d - c), sum);
      store_first(sum, out[i] + c, d - c);
    }
  }
}

/// The same for 1 <= queries <= MR.
template <std::size_t MR, class Kv>
HWY_INLINE void add_values_of(std::size_t queries, float* const* out, const float* const* weight, const Kv* values, std::size_t count,
                              std::size_t d, std::ptrdiff_t ahead) noexcept {
  if constexpr (MR > 1) {
    if (queries < MR) return add_values_of<MR - 1>(queries, out, weight, values, count, d, ahead);
  }
  add_values<MR, width_of<MR, Kv>>(out, weight, values, count, d, ahead);
}

/// Parts that go through the same keys, and the scores of one tile.
struct part_set {
  std::size_t count = 0;
  const float* q[detail::attention_group];
  float* sum[detail::attention_group];
  std::size_t begin[detail::attention_group], end[detail::attention_group];  // what each sees of the tile, from the tile's first position
  HWY_ALIGN float score[detail::attention_group][key_tile];
};

/// The dots of linear-inl.h over keys in blocks: the same products in the same order as of the floats they stand for.
template <std::size_t MR, std::size_t streams>
HWY_NOINLINE void dots(const float* const* x, const q8_0* const* w, std::size_t k, std::ptrdiff_t ahead, float* result) noexcept {
  vec sum[MR][streams];
  OUTRIDER_UNROLL
  for (std::size_t i = 0; i < MR; ++i) {
    OUTRIDER_UNROLL
    for (std::size_t j = 0; j < streams; ++j) sum[i][j] = zero();
  }
  for (std::size_t block = 0; block < k / q8_0::elements; ++block) {
    vec scale[streams];
    OUTRIDER_UNROLL
    for (std::size_t j = 0; j < streams; ++j) {
      scale[j] = broadcast(w[j][block].d);
      prefetch_second_level(reinterpret_cast<const std::byte*>(w[j] + block) + ahead);
    }
    for (std::size_t c = 0; c < q8_0::elements; c += lanes) {
      vec b[streams];
      OUTRIDER_UNROLL
      for (std::size_t j = 0; j < streams; ++j) b[j] = hn::Mul(scale[j], load(w[j][block].qs + c));
      OUTRIDER_UNROLL
      for (std::size_t i = 0; i < MR; ++i) {
        vec a = load(x[i] + block * q8_0::elements + c);
        hold(a);
        OUTRIDER_UNROLL
        for (std::size_t j = 0; j < streams; ++j) sum[i][j] = hn::MulAdd(a, b[j], sum[i][j]);
      }
    }
  }
  store_sums(sum, result);
}
template <std::size_t MR, std::size_t streams>
HWY_INLINE void dots_of(std::size_t rows, const float* const* x, const q8_0* const* w, std::size_t k, std::ptrdiff_t ahead,
                        float* result) noexcept {
  if constexpr (MR > 1) {
    if (rows < MR) return dots_of<MR - 1, streams>(rows, x, w, k, ahead, result);
  }
  dots<MR, streams>(x, w, k, ahead, result);
}

/// Scores of `count` consecutive keys for up to MR queries; score[i] belongs to q[i] and the first key.
template <std::size_t MR, std::size_t streams, class Kv>
HWY_INLINE void score_keys(std::size_t rows, const float* const* q, float* const* score, const Kv* keys, std::size_t count, std::size_t d,
                           std::ptrdiff_t ahead) noexcept {
  for (std::size_t g = 0; g < count; g += streams) {
    const Kv* key[streams];
    for (std::size_t s = 0; s < streams; ++s) key[s] = keys + HWY_MIN(g + s, count - 1) * (d / elements_of<Kv>);
    HWY_ALIGN float result[result_room<MR, streams>];
    dots_of<MR, streams>(rows, q, key, d, ahead, result);
    const std::size_t fresh = HWY_MIN(streams, count - g);
    for (std::size_t i = 0; i < rows; ++i)
      for (std::size_t s = 0; s < fresh; ++s) score[i][g + s] = result[i * streams + s];
  }
}

/// Scores of the positions from … to - 1, which lie in the tile that starts at `tile`, for all parts. Asks for the values of the same
/// positions meanwhile.
template <class Kv>
void score_tile(part_set& set, kv_view<const Kv> cache, std::size_t head, std::size_t tile, std::size_t from, std::size_t to) noexcept {
  const std::size_t d = cache.head_dim;
  for (std::size_t p = from; p < to;) {
    const std::size_t run = cache.run(p, to);
    const Kv* const keys = cache.key(p, head);
    const std::ptrdiff_t ahead = distance(keys, cache.value(p, head));
    for (std::size_t r = 0; r < set.count; r += many_rows) {
      const std::size_t rows = HWY_MIN(many_rows, set.count - r);
      float* score[many_rows];
      for (std::size_t i = 0; i < rows; ++i) score[i] = set.score[r + i] + (p - tile);
      if (rows <= few_rows)
        score_keys<few_rows, few_streams>(rows, set.q + r, score, keys, run, d, ahead);
      else
        score_keys<many_rows, many_streams>(rows, set.q + r, score, keys, run, d, ahead);
    }
    p += run;
  }
}

/// Adds the weighted values of the same positions to the sums and asks for the keys of the next tile, up to last - 1. Neighbouring parts
/// that see the same part of the tile, as they do everywhere but at the ends of their windows, go together.
template <class Kv>
void add_tile(part_set& set, kv_view<const Kv> cache, std::size_t head, std::size_t tile, std::size_t from, std::size_t to,
              std::size_t last) noexcept {
  const std::size_t d = cache.head_dim;
  for (std::size_t p = from; p < to;) {
    const std::size_t run = cache.run(p, to), at = p - tile;
    const Kv* values = cache.value(p, head);
    const std::ptrdiff_t ahead = p + key_tile < last ? distance(values, cache.key(p + key_tile, head)) : 0;
    for (std::size_t r = 0; r < set.count;) {
      std::size_t rows = 1;
      while (rows < many_rows && r + rows < set.count && set.begin[r + rows] == set.begin[r] && set.end[r + rows] == set.end[r]) ++rows;
      const std::size_t begin = HWY_MAX(at, set.begin[r]), end = HWY_MIN(at + run, set.end[r]);
      if (begin < end) {
        const float* weight[many_rows];
        for (std::size_t i = 0; i < rows; ++i) weight[i] = set.score[r + i] + begin;
        add_values_of<many_rows>(rows, set.sum + r, weight, values + (begin - at) * cache.stride(), end - begin, d, ahead);
      }
      r += rows;
    }
    p += run;
  }
}

/// See detail::attention_kernels.
template <class Kv>
void add_keys(detail::attention_part* parts, std::size_t count, kv_view<const Kv> cache, std::size_t head) noexcept {
  const std::size_t d = cache.head_dim;
  part_set all;
  all.count = count;
  std::size_t first = key_window::unlimited, last = 0;
  for (std::size_t i = 0; i < count; ++i) {
    all.q[i] = parts[i].q;
    all.sum[i] = parts[i].sum;
    parts[i].largest = -std::numeric_limits<float>::infinity();
    parts[i].total = 0;
    for (std::size_t c = 0; c < d; ++c) all.sum[i][c] = 0;
    if (parts[i].begin >= parts[i].end) continue;
    first = HWY_MIN(first, parts[i].begin);
    last = HWY_MAX(last, parts[i].end);
  }

  for (std::size_t from = first; from < last;) {
    const std::size_t tile = from / key_tile * key_tile, to = HWY_MIN(tile + key_tile, last);
    score_tile(all, cache, head, tile, from, to);
    for (std::size_t i = 0; i < count; ++i) {
      all.begin[i] = HWY_MAX(from, parts[i].begin) - tile;
      all.end[i] = HWY_MAX(HWY_MIN(to, parts[i].end), tile) - tile;
      if (all.begin[i] >= all.end[i]) continue;
      const float fade = weigh(all.score[i], all.begin[i], all.end[i], parts[i]);
      if (fade != 1)
        for (std::size_t c = 0; c < d; ++c) all.sum[i][c] *= fade;
    }
    add_tile(all, cache, head, tile, from, to, last);
    from = to;
  }
}

/// See detail::attention_kernels.
inline void join_parts(float* out, const detail::attention_part* parts, std::size_t count, std::size_t d) noexcept {
  std::size_t seen = 0;
  const float* sums[detail::most_spans + 2];
  const auto weighs = [](const detail::attention_part& part) HWY_ATTR { return part.begin < part.end && part.total != 0; };
  float largest = -std::numeric_limits<float>::infinity(), factor[detail::most_spans + 2];
  for (std::size_t i = 0; i < count; ++i)
    if (weighs(parts[i])) largest = HWY_MAX(largest, parts[i].largest);
  vec total = zero();
  for (std::size_t i = 0; i < count; ++i) {
    if (!weighs(parts[i])) continue;
    const vec below = hn::Sub(set(parts[i].largest), set(largest));
    const vec weight = hn::IfThenElse(hn::IsNaN(below), below, hn::Exp(floats(), below));
    total = hn::MulAdd(set(parts[i].total), weight, total);
    factor[seen] = hn::GetLane(weight);
    sums[seen++] = parts[i].sum;
  }
  if (seen == 0) total = set(1);
  const auto joined = [&](std::size_t c, auto read) HWY_ATTR {
    vec sum = zero();
    for (std::size_t i = 0; i < seen; ++i) sum = hn::MulAdd(set(factor[i]), read(sums[i] + c), sum);
    return hn::Div(sum, total);
  };
  std::size_t c = 0;
  for (; c + lanes <= d; c += lanes) store(joined(c, [](const float* at) HWY_ATTR { return load(at); }), out + c);
  if (c < d) store_first(joined(c, [&](const float* at) HWY_ATTR { return load_first(at, d - c); }), out + c, d - c);
}

}  // namespace HWY_NAMESPACE
}  // namespace outrider
HWY_AFTER_NAMESPACE();

#endif
