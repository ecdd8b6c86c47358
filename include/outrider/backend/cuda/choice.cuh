// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What chooses among the columns of a row. Candidates are keys of 64 bits whose order is the order of the choice, ties included, so no result
// depends on which thread meets which column when.
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/backend/cuda/columns.cuh"
#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/launch.cuh"
#include "outrider/backend/cuda/launchers.hpp"
#include "outrider/backend/cuda/warp.cuh"

namespace outrider::device {

inline constexpr int column_threads = 256, row_threads = 128;  // of blocks whose threads have columns, whose warps have rows

// ------------------------------------------------------------------------------------------------ keys

/// The value above, the complement of the index below: the greatest key has the greatest value and among equals the lowest index. A NaN is
/// below every number, both zeros are one value. 0 is no key's: it stands for nothing.
__device__ inline std::uint64_t key_of(float value, std::int32_t index) {
  const unsigned bits = value == 0.0f ? 0u : __float_as_uint(value);
  const unsigned order = value != value ? 0u : (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return std::uint64_t{order} << 32 | ~static_cast<unsigned>(index);
}
__device__ inline std::int32_t index_of(std::uint64_t key) { return static_cast<std::int32_t>(~static_cast<unsigned>(key)); }
__device__ inline std::uint64_t greater(std::uint64_t a, std::uint64_t b) { return a > b ? a : b; }

/// The greatest key of the warp, in every lane.
__device__ inline std::uint64_t warp_greatest(std::uint64_t key) {
  const auto upper = static_cast<unsigned>(key >> 32), lower = static_cast<unsigned>(key);
  const unsigned greatest_upper = __reduce_max_sync(all_lanes, upper);
  const unsigned greatest_lower = __reduce_max_sync(all_lanes, upper == greatest_upper ? lower : 0u);
  return std::uint64_t{greatest_upper} << 32 | greatest_lower;
}

// ------------------------------------------------------------------------------------------------ argmax

inline constexpr std::size_t argmax_columns = 2048;  // of a block

/// The greatest key of a block's columns goes to keys(row, block), or its id to out where the row has one block. Grid: (blocks, rows).
template <int Threads = column_threads>
__global__ void __launch_bounds__(Threads)
    argmax_blocks(token_id* out, std::uint64_t* keys, rows<const float> x, rows<const token_id> ids, bool vectors) {
  __shared__ shared_array<std::uint64_t, Threads / warp_size> of_warp;
  const int thread = static_cast<int>(threadIdx.x);
  const std::size_t r = blockIdx.y, n = x.cols, first = std::size_t{blockIdx.x} * argmax_columns;
  std::uint64_t best = 0;
  const auto consider = [&](float value, std::size_t c) {
    // Where all are NaN the id of column 0 is wanted, not the lowest: no other NaN takes part.
    if (c < n && (value == value || c == 0)) best = greater(best, key_of(value, ids.data ? ids.row(r)[c] : static_cast<token_id>(c)));
  };
#pragma unroll
  for (std::size_t step = 0; step < argmax_columns; step += 4 * Threads) {
    const std::size_t c = first + step + 4 * threadIdx.x;
    if (c >= n) break;
    const float4 v = load_four(x.row(r), c, n, vectors);
    consider(v.x, c);
    consider(v.y, c + 1);
    consider(v.z, c + 2);
    consider(v.w, c + 3);
  }
  best = warp_greatest(best);
  if (thread % warp_size == 0) of_warp[thread / warp_size] = best;
  __syncthreads();
  if (thread != 0) return;
  for (int i = 1; i < Threads / warp_size; ++i) best = greater(best, of_warp[i]);
  if (gridDim.x == 1)
    out[r] = index_of(best);
  else
    keys[r * gridDim.x + blockIdx.x] = best;
}

/// out[r] = the id of the greatest of keys(r) [count]. A warp a row.
template <int Threads = row_threads>
__global__ void __launch_bounds__(Threads) argmax_of_keys(token_id* out, const std::uint64_t* keys, std::size_t m, std::size_t count) {
  const std::size_t r = std::size_t{blockIdx.x} * (Threads / warp_size) + threadIdx.x / warp_size;
  if (r >= m) return;  // a whole warp
  std::uint64_t best = 0;
  for (std::size_t i = threadIdx.x % warp_size; i < count; i += warp_size) best = greater(best, keys[r * count + i]);
  best = warp_greatest(best);
  if (threadIdx.x % warp_size == 0) out[r] = index_of(best);
}

/// body(first, count) for ranges of m rows that a grid may have and whose keys, `keys` a row, fit into the scratch memory.
template <class Body>
void in_ranges(std::size_t m, std::size_t keys, Body body) noexcept {
  const std::size_t fit = queue::scratch_bytes / sizeof(std::uint64_t) / keys, most = fit < 65535 ? fit : 65535;
  for (std::size_t first = 0; first < m; first += most) body(first, m - first < most ? m - first : most);
}

void argmax(queue& q, token_id* out, rows<const float> x, rows<const token_id> ids) noexcept {
  if (x.cols == 0) return;
  auto* const keys = static_cast<std::uint64_t*>(q.scratch());
  const unsigned blocks = blocks_for(x.cols, argmax_columns);
  in_ranges(x.rows, blocks, [&](std::size_t first, std::size_t count) {
    const rows<const token_id> of_range = ids.data ? ids.slice_rows(first, count) : ids;
    launch(q, &argmax_blocks<>, dim3(blocks, static_cast<unsigned>(count)), column_threads, 0, out + first, keys,
           x.slice_rows(first, count), of_range, holds_fours(x));
    if (blocks > 1)
      launch(q, &argmax_of_keys<>, blocks_for(count, row_threads / warp_size), row_threads, 0, out + first, keys, count, blocks);
  });
}

// ------------------------------------------------------------------------------------------------ top_k

// A block sorts as many keys as it has threads, keeps the first k, and goes on with as many new ones as it has room for. Long rows are cut
// into parts, a block each, and a second launch chooses among what the parts kept. A sort of 2^s keys takes s (s + 1) / 2 steps, those of 64
// keys and more with barriers: of a drafter's 2048 centroids, k = 32, eight parts of 256 take 36 steps and what they keep as many, where two
// of 1024 would take 55 and 21, of four times as many warps.

inline constexpr std::size_t sorted_keys = 1024, most_parts = 64, most_kept = sorted_keys / 2;

/// The keys of columns.
struct column_keys {
  rows<const float> x;
  __device__ std::uint64_t operator()(std::size_t r, std::size_t c) const { return key_of(x.row(r)[c], static_cast<std::int32_t>(c)); }
};
/// Keys that parts kept.
struct kept_keys {
  const std::uint64_t* keys;
  std::size_t count;  // of a row
  __device__ std::uint64_t operator()(std::size_t r, std::size_t i) const { return keys[r * count + i]; }
};

/// Puts the keys of a block, one a thread and a power of two together, into falling order: bitonic sort, by shuffles within a warp and through
/// `exchange` beyond.
template <class Exchange>
__device__ std::uint64_t sort_falling(std::uint64_t key, Exchange& exchange) {
  const int thread = static_cast<int>(threadIdx.x), count = static_cast<int>(blockDim.x);
  for (int size = 2; size <= count; size *= 2)
    for (int stride = size / 2; stride > 0; stride /= 2) {
      std::uint64_t other;
      if (stride < warp_size) {
        other = __shfl_xor_sync(all_lanes, key, stride);
      } else {
        __syncthreads();  // the exchange before is over
        exchange[thread] = key;
        __syncthreads();
        other = exchange[thread ^ stride];
      }
      const bool first = (thread & stride) == 0, falling = (thread & size) == 0;
      key = (first == falling) == (key > other) ? key : other;
    }
  return key;
}

/// The k greatest of `count` keys a row, `length` of them a block: to ids(row) where the row has one block, else to kept(row, block).
/// Grid: (blocks, rows); a power of two of threads, 32 … 1024. More keys than threads: k below the number of threads.
template <class Source>
__global__ void __launch_bounds__(sorted_keys)
    keep_greatest(rows<std::int32_t> ids, std::uint64_t* kept, Source source, std::size_t count, std::size_t length) {
  __shared__ shared_array<std::uint64_t, static_cast<int>(sorted_keys)> exchange;
  const std::size_t r = blockIdx.y, thread = threadIdx.x, k = ids.cols, first = blockIdx.x * length;
  const std::size_t end = first + length < count ? first + length : count;
  std::uint64_t key = 0;
  for (std::size_t next = first, held = 0; next < end; next += blockDim.x - held, held = k) {
    if (thread >= held) {
      const std::size_t i = next + thread - held;
      key = i < end ? source(r, i) : 0;
    }
    key = sort_falling(key, exchange);
  }
  if (thread >= k) return;
  if (gridDim.x == 1)
    ids.row(r)[thread] = index_of(key);
  else
    kept[(r * gridDim.x + blockIdx.x) * k + thread] = key;
}

/// The same for any k: a column with fewer than k greater keys has the place that is their number. Grid: (columns, rows).
template <int Threads = column_threads>
__global__ void __launch_bounds__(Threads) rank_columns(rows<std::int32_t> ids, column_keys source, std::size_t n) {
  const std::size_t c = std::size_t{blockIdx.x} * Threads + threadIdx.x;
  if (c >= n) return;
  for (std::size_t r = blockIdx.y; r < ids.rows; r += gridDim.y) {
    const std::uint64_t own = source(r, c);
    std::size_t before = 0;
    for (std::size_t other = 0; other < n; ++other) before += source(r, other) > own ? 1 : 0;
    if (before < ids.cols) ids.row(r)[before] = static_cast<std::int32_t>(c);
  }
}

/// A power of two of threads, enough for `keys` if there are as many.
inline unsigned threads_to_sort(std::size_t keys) noexcept {
  unsigned threads = 32;
  while (threads < keys && threads < sorted_keys) threads *= 2;
  return threads;
}

void top_k(queue& q, rows<std::int32_t> ids, rows<const float> x) noexcept {
  const std::size_t n = x.cols, k = ids.cols;
  if (k == 0) return;
  if (k > most_kept && n > sorted_keys) {
    launch(q, &rank_columns<>, grid_over(x.rows, n, column_threads), column_threads, 0, ids, column_keys{x}, n);
    return;
  }
  // The shortest parts that leave no more keys for the second launch than they have.
  std::size_t sorted = 32;
  while (sorted < sorted_keys && sorted < blocks_for(n, sorted) * k) sorted *= 2;
  const std::size_t wanted = blocks_for(n, sorted), most = wanted < most_parts ? wanted : most_parts;
  const std::size_t length = (n + most - 1) / most;
  const unsigned parts = blocks_for(n, length);
  auto* const kept = static_cast<std::uint64_t*>(q.scratch());
  in_ranges(x.rows, parts * k, [&](std::size_t first, std::size_t count) {
    const rows<std::int32_t> to = ids.slice_rows(first, count);
    const auto m = static_cast<unsigned>(count);
    launch(q, &keep_greatest<column_keys>, dim3(parts, m), threads_to_sort(length), 0, to, kept, column_keys{x.slice_rows(first, count)}, n,
           length);
    if (parts > 1)
      launch(q, &keep_greatest<kept_keys>, dim3(1, m), threads_to_sort(parts * k), 0, to, kept, kept_keys{kept, parts * k}, parts * k,
             parts * k);
  });
}

// ------------------------------------------------------------------------------------------------ mask

struct ban_list {
  static constexpr int capacity = 128;
  token_id ids[capacity];
};

/// Columns are ids: a thread per ban.
template <int Threads = ban_list::capacity>
__global__ void __launch_bounds__(Threads) ban_columns(rows<float> x, __grid_constant__ const ban_list banned, std::size_t count) {
  const auto id = static_cast<std::size_t>(threadIdx.x < count ? banned.ids[threadIdx.x] : -1);
  if (id >= x.cols) return;
  for (std::size_t r = blockIdx.y; r < x.rows; r += gridDim.y) x.row(r)[id] = -INFINITY;
}

/// Columns have ids: a thread per column.
template <int Threads = column_threads>
__global__ void __launch_bounds__(Threads)
    ban_ids(rows<float> x, rows<const token_id> ids, __grid_constant__ const ban_list banned, std::size_t count) {
  const std::size_t c = std::size_t{blockIdx.x} * Threads + threadIdx.x;
  if (c >= x.cols) return;
  for (std::size_t r = blockIdx.y; r < x.rows; r += gridDim.y) {
    const token_id id = ids.row(r)[c];
    bool found = false;
    for (std::size_t i = 0; i < count; ++i) found = found || banned.ids[i] == id;
    if (found) x.row(r)[c] = -INFINITY;
  }
}

void mask(queue& q, rows<float> x, rows<const token_id> ids, const token_id* host_banned, std::size_t count) noexcept {
  for (std::size_t first = 0; first < count; first += ban_list::capacity) {
    ban_list banned{};
    const std::size_t left = count - first, here = left < ban_list::capacity ? left : std::size_t{ban_list::capacity};
    for (std::size_t i = 0; i < here; ++i) banned.ids[i] = host_banned[first + i];
    if (ids.data)
      launch(q, &ban_ids<>, grid_over(x.rows, x.cols, column_threads), column_threads, 0, x, ids, banned, here);
    else
      launch(q, &ban_columns<>, grid_over(x.rows, 1, 1), ban_list::capacity, 0, x, banned, here);
  }
}

// ------------------------------------------------------------------------------------------------ route_experts

/// A warp a row. The next chosen is the greatest key below the last; softmax keeps the order, and its denominator cancels.
template <int Threads = row_threads>
__global__ void __launch_bounds__(Threads)
    route_rows(rows<std::int32_t> experts, rows<float> weights, rows<const float> logits, const float* scales) {
  const std::size_t r = std::size_t{blockIdx.x} * (Threads / warp_size) + threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  if (r >= logits.rows) return;  // a whole warp
  const float* const logit = logits.row(r);
  std::int32_t* const chosen = experts.row(r);

  std::uint64_t last = ~std::uint64_t{0};
  for (std::size_t j = 0; j < experts.cols; ++j) {
    std::uint64_t best = 0;
    for (std::size_t e = lane; e < logits.cols; e += warp_size) {
      const std::uint64_t key = key_of(logit[e], static_cast<std::int32_t>(e));
      if (key < last) best = greater(best, key);
    }
    last = warp_greatest(best);
    if (lane == 0) chosen[j] = index_of(last);
  }
  __syncwarp();  // all lanes see what lane 0 wrote

  const auto p = [&](std::size_t j) { return expf(__fadd_rn(logit[chosen[j]], -logit[chosen[0]])); };
  float sum = 0.0f;
  for (std::size_t j = 0; j < experts.cols; ++j) sum = __fadd_rn(sum, p(j));
  for (std::size_t j = lane; j < experts.cols; j += warp_size) weights.row(r)[j] = __fmul_rn(__fdiv_rn(p(j), sum), scales[chosen[j]]);
}

void route_experts(queue& q, rows<std::int32_t> experts, rows<float> weights, rows<float> logits, const float* scales) noexcept {
  launch(q, &route_rows<>, blocks_for(logits.rows, row_threads / warp_size), row_threads, 0, experts, weights, logits, scales);
}

}  // namespace outrider::device
