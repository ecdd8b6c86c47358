// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Attention of a row over a span of its keys. What a row sees is cut into spans, a block of threads each, whose sums are joined afterwards: a
// single row has work for a whole device that way. The cuts follow from the positions the row sees alone, and a block's order of summation
// from its span, so a row's bits depend neither on other rows nor on where its pass began or its keys lie.
#pragma once
#include <type_traits>

#include "outrider/backend/cuda/attention_elements.cuh"
#include "outrider/backend/cuda/launchers.hpp"

namespace outrider::device {

/// The positions row `row` of a pass sees, cut at multiples of `length`: the least multiple of 16 that makes most_spans do for them, one
/// more span where the ends are not such multiples: at most 128, a power of two.
struct key_spans {
  static constexpr std::size_t most_spans = 127, step = 16;
  std::size_t begin, end, length;

  OUTRIDER_HD key_spans(const key_window& window, std::size_t row) noexcept : begin(window.begin(row)), end(window.end(row)) {
    const std::size_t steps = (end - begin + step * most_spans - 1) / (step * most_spans);
    length = steps > 1 ? steps * step : step;
  }
  [[nodiscard]] OUTRIDER_HD std::size_t count() const noexcept { return begin < end ? (end - 1) / length - begin / length + 1 : 0; }
  /// Positions first(i) … first(i + 1) - 1 are span i < count().
  [[nodiscard]] OUTRIDER_HD std::size_t first(std::size_t i) const noexcept {
    const std::size_t cut = (begin / length + i) * length;
    return cut < begin ? begin : cut < end ? cut : end;
  }
};

/// What the spans of some rows come to, in device memory.
struct span_sums {
  float* sums;    // [rows, spans, q_heads, head_dim], of exp(score - peak) · value
  float* peaks;   // [rows, spans, q_heads], the largest score
  float* totals;  // [rows, spans, q_heads], of exp(score - peak)
  int spans, q_heads;

  [[nodiscard]] __device__ std::size_t index(std::size_t row, int span, int head) const noexcept {
    return (row * static_cast<std::size_t>(spans) + static_cast<std::size_t>(span)) * static_cast<std::size_t>(q_heads) +
           static_cast<std::size_t>(head);
  }
};

namespace detail {

/// Query heads first … first + count - 1 read one KV head: a part of those h with h · kv_heads / q_heads = kv_head.
struct query_heads {
  int first, count;
  __device__ query_heads(int kv_head, int part, int parts, int kv_heads, int heads) {
    const auto first_of = [&](int kv) { return static_cast<int>((static_cast<long long>(kv) * heads + kv_heads - 1) / kv_heads); };
    const int most = (heads + kv_heads - 1) / kv_heads, each = (most + parts - 1) / parts, last = first_of(kv_head + 1);
    first = first_of(kv_head) + part * each;
    count = last - first < each ? last - first : each;
  }
};

inline constexpr int tile_keys = 64;                // keys whose weights lie in shared memory at a time
inline constexpr int score_stride = tile_keys + 4;  // of a head's scores, so that those of 4 keys and 8 heads lie in different banks
inline constexpr int any_dim = 0;

/// How threads share heads of Dim elements. Of the keys a warp has a slice of 64 elements, so that the queries of a slice fit into its
/// registers, of the values a thread has `width` neighbouring elements.
template <int Dim>
struct head_shape {
  static constexpr int slices = Dim / 64, threads = 32 * slices, width = 2;
  static constexpr int least_blocks = (slices < 4 ? 384 : 512) / threads;  // on a multiprocessor: at most 168 registers, or 128
};
/// Any other number of elements: a thread has half a key, and of the values every 128th element.
template <>
struct head_shape<any_dim> {
  static constexpr int slices = 2, threads = slices * tile_keys, width = 1, least_blocks = 3;
};

/// Sums each v[i] over eight neighbouring lanes; number l · Count / 8 goes to lane l of the eight. At each step a lane keeps half of its
/// numbers and sends the others away, 7 in all for eight numbers instead of 24.
template <int Count>
__device__ float sum_over_eight_lanes(float (&v)[Count], int lane) {
  static_assert(Count == 1 || Count == 2 || Count == 4 || Count == 8);
  int left = Count;
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    if (left == 1) {
      v[0] = __fadd_rn(v[0], __shfl_xor_sync(all_lanes, v[0], step));
      continue;
    }
    left /= 2;
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      if (i >= left) break;
      const float kept = upper ? v[i + left] : v[i], sent = upper ? v[i] : v[i + left];
      v[i] = __fadd_rn(kept, __shfl_xor_sync(all_lanes, sent, step));
    }
  }
  return v[0];
}

/// score(head, key) = the sum over this warp's slice of 64 elements, for keys 0 … count - 1 of a tile and the `heads` heads from q on (zero
/// for the rest of a Group). Four keys at a time: eight lanes share a key, each has eight elements of it and of every query.
template <class Kv, int Dim, int Group, class Keys, class Scores>
__device__ void multiply_slices(Scores& scores, Keys& keys, const float* q, int heads, int count, int thread) {
  constexpr int unrolled = Group == 8 ? 2 : 4;  // what the registers allow
  const int lane = thread % warp_size, slice = thread / warp_size, first_dim = 64 * slice + lane % 8 * 8;
  float query[Group][8] = {};
  const bool aligned = reinterpret_cast<std::uintptr_t>(q) % 16 == 0;
#pragma unroll
  for (int g = 0; g < Group; ++g) {
    if (g >= heads) continue;
    if (aligned) {
      stored_elements<float, 8> stored;
      stored.read(q, g * Dim + first_dim);
      stored.widen(query[g]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) query[g][i] = q[g * Dim + first_dim + i];
    }
  }
  for (int first = lane / 8; first - lane / 8 < count; first += 4 * unrolled) {
    stored_elements<Kv, 8> stored[unrolled];
#pragma unroll
    for (int j = 0; j < unrolled; ++j) {
      const int key = first + 4 * j;
      stored[j].read(keys[key < count ? key : count - 1], first_dim);
    }
#pragma unroll
    for (int j = 0; j < unrolled; ++j) {
      const int key = first + 4 * j;
      float element[8], dot[Group];
      stored[j].widen(element);
#pragma unroll
      for (int g = 0; g < Group; ++g) {
        dot[g] = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) dot[g] = fmaf(query[g][i], element[i], dot[g]);
      }
      const float sum = sum_over_eight_lanes(dot, lane);
      if (key < count && lane % (8 / Group) == 0) scores[(slice * Group + lane % 8 * Group / 8) * score_stride + key] = sum;
    }
  }
}

/// The same for any number of elements: a thread takes its half of one key.
template <class Kv, int Group, class Keys, class Scores>
__device__ void multiply_halves(Scores& scores, Keys& keys, const float* q, int heads, int head_dim, int count, int thread) {
  const int key = thread % tile_keys, slice = thread / tile_keys, half = (head_dim + 1) / 2;
  if (key >= count) return;
  const Kv* const row = keys[key];
  float dot[Group] = {};
  for (int i = slice * half, last = slice == 0 ? half : head_dim; i < last; ++i) {
    stored_elements<Kv, 1> stored;
    float element[1];
    stored.read(row, i);
    stored.widen(element);
#pragma unroll
    for (int g = 0; g < Group; ++g) dot[g] = fmaf(g < heads ? q[static_cast<std::ptrdiff_t>(g) * head_dim + i] : 0.0f, element[0], dot[g]);
  }
#pragma unroll
  for (int g = 0; g < Group; ++g) scores[(slice * Group + g) * score_stride + key] = dot[g];
}

/// The softmax of one head so far, the same in every lane of the warp that keeps it.
struct running_softmax {
  float peak = -INFINITY, total = 0;  // the largest score; Σ exp(score - peak)

  /// weight(key) = exp(score(key) - peak) for the next `count` keys. score_of(key) gives a score, put(key, weight) takes a weight. Returns by
  /// what factor earlier weights shrink.
  template <class Score, class Put>
  __device__ float add(int count, int lane, Score score_of, Put put) {
    constexpr int each = tile_keys / warp_size;
    float score[each], new_peak = peak, sum = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int key = lane + i * warp_size;
      score[i] = key < count ? score_of(key) : -INFINITY;
      new_peak = fmaxf(new_peak, score[i]);
    }
    new_peak = warp_max(new_peak);
    const float origin = new_peak == -INFINITY ? 0.0f : new_peak;  // scores of -∞ weigh nothing, also where there are no others
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int key = lane + i * warp_size;
      const float weight = expf(score[i] - origin);
      if (key < count) put(key, weight);
      sum = __fadd_rn(sum, weight);
    }
    const float factor = expf(peak - origin);
    total = fmaf(total, factor, warp_sum(sum));
    peak = new_peak;
    return factor;
  }
};

/// sums[g] += Σ weight(key, g) · value(key) over keys 0 … count - 1 in order, for Width elements from `dim` on.
template <class Kv, int Group, int Width, class Keys, class Weights>
__device__ void add_values(float (&sums)[Group][Width], Keys& keys, Weights& weights, std::ptrdiff_t to_value, int count, int dim) {
  using vector = std::conditional_t<Group == 2, float2, float4>;
  constexpr int lanes = sizeof(vector) / sizeof(float);
#pragma unroll 8
  for (int key = 0; key < count; ++key) {
    stored_elements<Kv, Width> stored;
    float value[Width], weight[Group];
    stored.read(keys[key] + to_value, dim);
    stored.widen(value);
#pragma unroll
    for (int g = 0; g < Group; g += lanes) {
      const auto w = weights.template load<vector>(key * Group + g);
      weight[g] = w.x, weight[g + 1] = w.y;
      if constexpr (lanes == 4) weight[g + 2] = w.z, weight[g + 3] = w.w;
    }
#pragma unroll
    for (int g = 0; g < Group; ++g)
#pragma unroll
      for (int i = 0; i < Width; ++i) sums[g][i] = fmaf(weight[g], value[i], sums[g][i]);
  }
}

}  // namespace detail

/// Grid: rows, spans, kv_heads · parts; a part is at most Group of the query heads of a KV head. Keys go through shared memory's tiles of 64;
/// when a tile has a larger score, what was summed so far, which waits in `out`, is made smaller. Blocks of `cache` lie on 16 bytes, as
/// allocations do.
template <class Kv, int Dim, int Group>
__global__ void __launch_bounds__(detail::head_shape<Dim>::threads, detail::head_shape<Dim>::least_blocks)
    attend_spans(span_sums out, rows<const float> q, kv_view<const Kv, device_space> cache, key_window window, int parts) {
  using namespace detail;
  using shape = head_shape<Dim>;
  constexpr int threads = shape::threads, width = shape::width, warps = threads / warp_size, heads_of_warp = (Group + warps - 1) / warps;
  __shared__ shared_array<const Kv*, tile_keys> keys;
  __shared__ shared_array<float, shape::slices * Group * score_stride> scores;  // [slice, head, key], of a slice's elements
  __shared__ shared_array<float, tile_keys * Group> weights;                    // [key, head]
  __shared__ shared_array<float, Group> factors;                                // of what was summed before the tile

  const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_size, warp = thread / warp_size;
  const int span = static_cast<int>(blockIdx.y), kv_head = static_cast<int>(blockIdx.z) / parts;
  const std::size_t row = blockIdx.x;
  const key_spans seen(window, row);
  const query_heads heads(kv_head, static_cast<int>(blockIdx.z) % parts, parts, static_cast<int>(cache.heads), out.q_heads);
  if (blockIdx.y >= seen.count() || heads.count <= 0) return;

  const int head_dim = Dim == any_dim ? static_cast<int>(cache.head_dim) : Dim;
  const float* const queries = q.row(row) + static_cast<std::ptrdiff_t>(heads.first) * head_dim;
  const auto to_value = static_cast<std::ptrdiff_t>(cache.heads * cache.block_rows * cache.stride());
  const std::size_t index = out.index(row, span, heads.first), begin = seen.first(blockIdx.y);
  const int keys_of_span = static_cast<int>(seen.first(blockIdx.y + 1) - begin);
  float* const stored_sums = out.sums + index * static_cast<std::size_t>(head_dim);
  running_softmax softmax[heads_of_warp];  // of heads warp, warp + warps, …

  for (int first = 0; first < keys_of_span; first += tile_keys) {
    const int count = keys_of_span - first < tile_keys ? keys_of_span - first : tile_keys;
    if (first != 0) __syncthreads();  // the tile before is read until here
    for (int i = thread; i < count; i += threads)
      keys[i] = cache.key(begin + static_cast<std::size_t>(first + i), static_cast<std::size_t>(kv_head));
    __syncthreads();
    if constexpr (Dim == any_dim)
      multiply_halves<Kv, Group>(scores, keys, queries, heads.count, head_dim, count, thread);
    else
      multiply_slices<Kv, Dim, Group>(scores, keys, queries, heads.count, count, thread);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < heads_of_warp; ++i) {
      const int g = warp + i * warps;
      if (g >= Group) break;
      const auto score_of = [&](int key) {
        float score = scores[g * score_stride + key];
#pragma unroll
        for (int slice = 1; slice < shape::slices; ++slice) score = __fadd_rn(score, scores[(slice * Group + g) * score_stride + key]);
        return score;
      };
      const float factor = softmax[i].add(count, lane, score_of, [&](int key, float weight) { weights[key * Group + g] = weight; });
      if (lane == 0) factors[g] = factor;
    }
    __syncthreads();
    for (int dim = width * thread; dim < head_dim; dim += width * threads) {
      float sums[Group][width] = {};
#pragma unroll
      for (int g = 0; g < Group; ++g) {
        if (first == 0 || g >= heads.count) continue;
        read_floats(sums[g], stored_sums + g * head_dim + dim);
#pragma unroll
        for (int i = 0; i < width; ++i) sums[g][i] = __fmul_rn(sums[g][i], factors[g]);
      }
      add_values<Kv>(sums, keys, weights, to_value, count, dim);
#pragma unroll
      for (int g = 0; g < Group; ++g)
        if (g < heads.count) write_floats(stored_sums + g * head_dim + dim, sums[g]);
    }
  }
#pragma unroll
  for (int i = 0; i < heads_of_warp; ++i) {
    const int g = warp + i * warps;
    if (lane != 0 || g >= heads.count) break;
    out.peaks[index + static_cast<std::size_t>(g)] = softmax[i].peak;
    out.totals[index + static_cast<std::size_t>(g)] = softmax[i].total;
  }
}

}  // namespace outrider::device
