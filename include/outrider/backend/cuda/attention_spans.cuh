// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Attention of some rows over a span of their keys. What a row sees is cut into spans, a block of threads each, whose sums are joined
// afterwards: a single row has work for a whole device that way. A block reads a key once for the query heads that share it and for
// neighbouring rows. What it does for a row follows from the row's own span, by absolute positions: keys that others see beside it weigh
// nothing and are not even added, so a row's bits depend neither on other rows nor on where its pass began or its keys lie.
#pragma once
#include <type_traits>

#include "outrider/backend/cuda/attention_elements.cuh"
#include "outrider/backend/cuda/attention_shape.cuh"
#include "outrider/backend/cuda/launchers.hpp"

namespace outrider::device {

namespace detail {

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

/// Which keys of a span the queries of a block see: from … to - 1 of query g are in lane g of every warp, and bit g of `present` is set where
/// there are any.
struct seen_keys {
  unsigned from, to, present;
  unsigned first, last;  // what some query sees: first … last - 1

  __device__ seen_keys(unsigned own_from, unsigned own_to) : from(own_from), to(own_to), present(__ballot_sync(all_lanes, from < to)) {
    first = __reduce_min_sync(all_lanes, from < to ? from : ~0u);
    last = __reduce_max_sync(all_lanes, from < to ? to : 0u);
  }
  [[nodiscard]] __device__ bool has(int g) const { return (present >> g & 1) != 0; }
  /// Whether all queries see all keys a … b - 1.
  [[nodiscard]] __device__ bool alike(unsigned a, unsigned b) const {
    return __any_sync(all_lanes, from < to && (from > a || to < b)) == 0;
  }
};

/// score(g, key) = the sum over this warp's slice of 64 elements, for keys from … to - 1 of a tile and the queries that are present, at
/// q + offset_of(g). Four keys at a time: eight lanes share a key, each has eight elements of it and of every query.
template <class Kv, int Dim, int Group, class Keys, class Scores, class Offset>
__device__ void multiply_slices(Scores& scores, Keys& keys, const float* q, Offset offset_of, unsigned present, int from, int to,
                                int thread) {
  // What the registers allow.
  constexpr int unrolled = Group == 8 ? 2 : Group == 4 ? (sizeof(Kv) == 4 ? 2 : 4) : (sizeof(Kv) == 2 ? 8 : 4);
  const int lane = thread % warp_size, slice = thread / warp_size, first_dim = 64 * slice + lane % 8 * 8;
  float query[Group][8] = {};
#pragma unroll
  for (int g = 0; g < Group; ++g) {
    const float* const own = q + offset_of(g);
    if ((present >> g & 1) == 0) continue;
    if (reinterpret_cast<std::uintptr_t>(own) % 16 == 0) {
      stored_elements<float, 8> stored;
      stored.read(own, first_dim);
      stored.widen(query[g]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) query[g][i] = own[first_dim + i];
    }
  }
  for (int first = from; first < to; first += 4 * unrolled) {
    stored_elements<Kv, 8> stored[unrolled];
#pragma unroll
    for (int j = 0; j < unrolled; ++j) {
      const int key = first + 4 * j + lane / 8;
      if (first + 4 * j < to) stored[j].read(keys[key < to ? key : to - 1], first_dim);
    }
#pragma unroll
    for (int j = 0; j < unrolled; ++j) {
      if (first + 4 * j >= to) break;
      const int key = first + 4 * j + lane / 8;
      float element[8], dot[Group];
      stored[j].widen(element);
#pragma unroll
      for (int g = 0; g < Group; ++g) {
        dot[g] = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) dot[g] = fmaf(query[g][i], element[i], dot[g]);
      }
      warp_sums_from<Group, 4>(dot);  // over eight lanes: query l · Group / 8 is in lane l of them
      if (key < to && lane % (8 / Group) == 0) scores[(slice * Group + lane % 8 * Group / 8) * score_stride + key] = dot[0];
    }
  }
}

/// The same for any number of elements: a thread takes its half of one key.
template <class Kv, int Group, class Keys, class Scores, class Offset>
__device__ void multiply_halves(Scores& scores, Keys& keys, const float* q, Offset offset_of, unsigned present, int head_dim, int from,
                                int to, int thread) {
  const int key = thread % tile_keys, slice = thread / tile_keys, half = (head_dim + 1) / 2;
  const float* query[Group];
#pragma unroll
  for (int g = 0; g < Group; ++g) query[g] = q + offset_of(g);
  if (key < from || key >= to) return;
  const Kv* const row = keys[key];
  float dot[Group] = {};
  for (int i = slice * half, last = slice == 0 ? half : head_dim; i < last; ++i) {
    stored_elements<Kv, 1> stored;
    float element[1];
    stored.read(row, i);
    stored.widen(element);
#pragma unroll
    for (int g = 0; g < Group; ++g) dot[g] = fmaf((present >> g & 1) != 0 ? query[g][i] : 0.0f, element[0], dot[g]);
  }
#pragma unroll
  for (int g = 0; g < Group; ++g) scores[(slice * Group + g) * score_stride + key] = dot[g];
}

/// The weight of a key that its query does not see, and that no other has. x + (-0 · 0) is x, whatever that is.
inline constexpr float unseen = -0.0f;
__device__ inline bool is_unseen(float weight) { return __float_as_uint(weight) == 0x80000000u; }

/// The softmax of one query so far, the same in every lane of the warp that keeps it.
struct running_softmax {
  float peak = -INFINITY, total = 0;  // the largest score; Σ exp(score - peak)

  /// weight(key) = exp(score(key) - peak) for keys from … to - 1 of a tile. score_of(key) gives a score, put(key, weight) takes the weight of
  /// any key of the tile. Returns by what factor earlier weights shrink.
  template <class Score, class Put>
  __device__ float add(int from, int to, int lane, Score score_of, Put put) {
    constexpr int each = tile_keys / warp_size;
    float score[each], new_peak = peak, sum = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int key = lane + i * warp_size;
      score[i] = key >= from && key < to ? score_of(key) : -INFINITY;
      new_peak = fmaxf(new_peak, score[i]);
    }
    new_peak = warp_max(new_peak);
    const float origin = new_peak == -INFINITY ? 0.0f : new_peak;  // scores of -∞ weigh nothing, also where there are no others
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int key = lane + i * warp_size;
      const float weight = expf(score[i] - origin);
      put(key, key >= from && key < to ? weight : unseen);
      sum = __fadd_rn(sum, weight);
    }
    const float factor = expf(peak - origin);
    total = fmaf(total, factor, warp_sum(sum));
    peak = new_peak;
    return factor;
  }
};

/// Keys whose values are on their way at a time, where every query sees them all (Whole) or else: what the registers allow.
template <class Kv, int Group, bool Whole>
inline constexpr int keys_ahead = Whole                            ? (block_format<Kv> ? 8 : 16)
                                  : Group == 2                     ? 8
                                  : Group == 8 && block_format<Kv> ? 2
                                                                   : 4;

/// sums[g] += Σ weight(key, g) · value(key) over keys first … first + keys_ahead - 1 in order, for Width elements from `dim` on. Unless Whole,
/// there are only those below `to`, and not every query sees them all.
template <class Kv, bool Whole, int Group, int Width, class Keys, class Weights>
__device__ void add_values(float (&sums)[Group][Width], Keys& keys, Weights& weights, std::ptrdiff_t to_value, int first, int to, int dim) {
  using vector = std::conditional_t<Group == 2, float2, float4>;
  constexpr int lanes = sizeof(vector) / sizeof(float), ahead = keys_ahead<Kv, Group, Whole>;
  stored_elements<Kv, Width> stored[ahead];
  const auto key_at = [&](int j) { return Whole || first + j < to ? first + j : to - 1; };
#pragma unroll
  for (int j = 0; j < ahead; ++j) stored[j].read(keys[key_at(j)] + to_value, dim);
#pragma unroll
  for (int j = 0; j < ahead; ++j) {
    float value[Width], weight[Group];
    stored[j].widen(value);
#pragma unroll
    for (int g = 0; g < Group; g += lanes) {
      const auto w = weights.template load<vector>(key_at(j) * Group + g);
      weight[g] = w.x, weight[g + 1] = w.y;
      if constexpr (lanes == 4) weight[g + 2] = w.z, weight[g + 3] = w.w;
    }
    if (!Whole && first + j >= to)
#pragma unroll
      for (int g = 0; g < Group; ++g) weight[g] = unseen;
#pragma unroll
    for (int g = 0; g < Group; ++g)
#pragma unroll
      for (int i = 0; i < Width; ++i) sums[g][i] = fmaf(weight[g], Whole || !is_unseen(weight[g]) ? value[i] : 0.0f, sums[g][i]);
  }
}

}  // namespace detail

/// The sums of a span, for the queries of a block: those of some rows (lane l of a warp: row l / each) and of a part of the heads. Grid: groups
/// of rows, spans from the first of the group's first row on, parts.
template <class Kv, int Dim, int Group>
__global__ void __launch_bounds__(detail::head_shape<Dim>::threads, detail::head_shape<Dim>::least_blocks)
    attend_spans(span_sums out, rows<const float> q, kv_view<const Kv, device_space> cache, attention_piece piece) {
  using namespace detail;
  using shape = head_shape<Dim>;
  constexpr int threads = shape::threads, width = shape::width, warps = threads / warp_size, queries_of_warp = (Group + warps - 1) / warps;
  constexpr int whole = keys_ahead<Kv, Group, true>, some = keys_ahead<Kv, Group, false>;
  __shared__ shared_array<const Kv*, tile_keys> keys;
  __shared__ shared_array<float, shape::slices * Group * score_stride> scores;  // [slice, query, key], of a slice's elements
  __shared__ shared_array<float, tile_keys * Group> weights;                    // [key, query]
  __shared__ shared_array<float, Group> factors;                                // of what was summed before the tile

  const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_size, warp = thread / warp_size;
  const int head_dim = Dim == any_dim ? static_cast<int>(cache.head_dim) : Dim;
  const head_parts::range heads = piece.heads[piece.first_part + blockIdx.z];
  const std::size_t first_row = std::size_t{blockIdx.x} * piece.group;
  const unsigned start = (piece.first_span(first_row) + blockIdx.y) * piece.length;  // the span begins here, whoever sees that

  const unsigned row_of_lane = threadIdx.x % warp_size / piece.heads.each, head_of_lane = threadIdx.x % warp_size % piece.heads.each;
  const std::size_t own_row = first_row + row_of_lane;
  unsigned from = 0, to = 0;
  if (row_of_lane < piece.group && own_row < piece.rows && head_of_lane < heads.count) {
    const unsigned begin = piece.begin(own_row), end = piece.end(own_row);
    from = begin > start ? begin - start : 0;
    to = end > start ? (end - start < piece.length ? end - start : piece.length) : 0;
  }
  const seen_keys seen(from, to);
  if (seen.present == 0) return;
  const std::ptrdiff_t own_offset =
      static_cast<std::ptrdiff_t>(own_row * q.stride) + static_cast<std::ptrdiff_t>(heads.first + head_of_lane) * head_dim;
  const auto offset_of = [&](int g) { return __shfl_sync(all_lanes, own_offset, g); };

  const auto to_value = static_cast<std::ptrdiff_t>(cache.heads * cache.block_rows * cache.stride());
  const std::size_t index = span_sums::index(piece, blockIdx.x, blockIdx.y, blockIdx.z);
  float* const stored_sums = out.sums + index * static_cast<std::size_t>(head_dim);
  running_softmax softmax[queries_of_warp];  // of queries warp, warp + warps, …

  const unsigned first_tile = seen.first / tile_keys * tile_keys;
  for (unsigned tile = first_tile; tile < seen.last; tile += tile_keys) {
    // Of the tile's keys those from … to - 1 are seen by some query.
    const auto within = [&](unsigned key) { return key < tile ? 0 : key - tile < tile_keys ? static_cast<int>(key - tile) : tile_keys; };
    const int tile_from = within(seen.first), tile_to = within(seen.last);
    if (tile != first_tile) __syncthreads();  // the tile before is read until here
#pragma unroll 1
    for (int i = tile_from + thread; i < tile_to; i += threads)
      keys[i] = local(cache).key(std::size_t{start} + tile + static_cast<unsigned>(i), heads.kv_head);
    __syncthreads();
    if constexpr (Dim == any_dim)
      multiply_halves<Kv, Group>(scores, keys, q.data, offset_of, seen.present, head_dim, tile_from, tile_to, thread);
    else
      multiply_slices<Kv, Dim, Group>(scores, keys, q.data, offset_of, seen.present, tile_from, tile_to, thread);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < queries_of_warp; ++i) {
      const int g = warp + i * warps;
      if (g >= Group) break;
      const auto score_of = [&](int key) {
        float score = scores[g * score_stride + key];
#pragma unroll
        for (int slice = 1; slice < shape::slices; ++slice) score = __fadd_rn(score, scores[(slice * Group + g) * score_stride + key]);
        return score;
      };
      const int own_from = within(__shfl_sync(all_lanes, seen.from, g)), own_to = within(__shfl_sync(all_lanes, seen.to, g));
      const float factor =
          softmax[i].add(own_from, own_to, lane, score_of, [&](int key, float weight) { weights[key * Group + g] = weight; });
      if (lane == 0) factors[g] = factor;
    }
    const bool alike = seen.alike(tile + static_cast<unsigned>(tile_from), tile + static_cast<unsigned>(tile_to));
    __syncthreads();
    for (int dim = width * thread; dim < head_dim; dim += width * threads) {
      float sums[Group][width] = {};
#pragma unroll
      for (int g = 0; g < Group; ++g) {
        if (tile == first_tile || !seen.has(g)) continue;
        read_floats(sums[g], stored_sums + g * head_dim + dim);
#pragma unroll
        for (int i = 0; i < width; ++i) sums[g][i] = __fmul_rn(sums[g][i], factors[g]);
      }
      int key = tile_from;
      for (; alike && key + whole <= tile_to; key += whole) add_values<Kv, true>(sums, keys, weights, to_value, key, tile_to, dim);
      for (; key < tile_to; key += some) add_values<Kv, false>(sums, keys, weights, to_value, key, tile_to, dim);
#pragma unroll
      for (int g = 0; g < Group; ++g)
        if (seen.has(g)) write_floats(stored_sums + g * head_dim + dim, sums[g]);
    }
  }
#pragma unroll
  for (int i = 0; i < queries_of_warp; ++i) {
    const int g = warp + i * warps;
    if (lane != 0 || g >= Group || !seen.has(g)) continue;
    out.peaks[index + static_cast<std::size_t>(g)] = softmax[i].peak;
    out.totals[index + static_cast<std::size_t>(g)] = softmax[i].total;
  }
}

}  // namespace outrider::device
