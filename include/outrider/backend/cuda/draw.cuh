// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Tokens drawn from logits: argmax of score + Gumbel noise over what the filters leave of a row. Top-k and top-p are one threshold, a key of
// choice.cuh below which no column stays. Four launches:
//   greatest_of_chunks   the greatest key of each of up to 1024 chunks; by these alone most of a row is out of the question later
//   find_limits          the threshold of a row
//   race_columns         the winner among a block's columns, ...
//   race_winners         ... and among a row's blocks
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "outrider/backend/cuda/choice.cuh"
#include "outrider/backend/cuda/columns.cuh"
#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/key_search.cuh"
#include "outrider/backend/cuda/launch.cuh"
#include "outrider/backend/cuda/optional.hpp"
#include "outrider/backend/cuda/warp.cuh"
#include "outrider/core/rng.hpp"

namespace outrider::device {

/// f(value, column) for columns c … c + 3 of a row of n, c < n.
template <class Function>
__device__ void each_of_four(const float* row, std::size_t c, std::size_t n, bool vectors, Function f) {
  const float4 v = load_four(row, c, n, vectors);
  f(v.x, c);
  if (c + 1 < n) f(v.y, c + 1);
  if (c + 2 < n) f(v.z, c + 2);
  if (c + 3 < n) f(v.w, c + 3);
}

// ------------------------------------------------------------------------------------------------ chunks

inline constexpr unsigned most_chunks = search_threads;  // one a thread of find_limits

/// Columns of a chunk: a power of two.
inline unsigned chunk_length(std::size_t n) noexcept {
  unsigned length = 8;
  while (std::size_t{length} * most_chunks < n) length *= 2;
  return length;
}

/// greatest(r, chunk) = the chunk's greatest key; weights(r, chunk), unless null, = Σ exp(score) of its columns, the score against the chunk's
/// own largest: exponentials in double, some ten million operations for a row of 262144, about 1 µs where a multiprocessor has a unit for
/// each lane and 10 to 40 where it has two (a token takes milliseconds there). `lanes` neighbouring lanes, a power of two, share a chunk.
/// Grid: (blocks, rows).
template <int Threads = column_threads>
__global__ void __launch_bounds__(Threads)
    greatest_of_chunks(std::uint64_t* greatest, double* weights, rows<const float> x, unsigned chunks, unsigned length, unsigned lanes,
                       double temperature, bool vectors) {
  const std::size_t r = blockIdx.y, n = x.cols, index = std::size_t{blockIdx.x} * Threads + threadIdx.x, chunk = index / lanes;
  const std::size_t first = chunk * length + 4 * (index % lanes), end = (chunk + 1) * length < n ? (chunk + 1) * length : n;
  const float* const row = x.row(r);

  std::uint64_t best = 0;
#pragma unroll 2
  for (std::size_t c = first; c < end; c += 4 * lanes)
    each_of_four(row, c, n, vectors, [&](float v, std::size_t at) { best = greater(best, key_of(v, static_cast<std::int32_t>(at))); });
  for (unsigned step = lanes / 2; step > 0; step /= 2) best = greater(best, __shfl_xor_sync(all_lanes, best, static_cast<int>(step)));
  if (chunk < chunks && index % lanes == 0) greatest[r * chunks + chunk] = best;
  if (!weights) return;

  const float largest = value_of(best);
  double weight = 0;
  for (std::size_t c = first; c < end; c += 4 * lanes)
    each_of_four(row, c, n, vectors, [&](float v, std::size_t) {
      if (v > -INFINITY) weight += exp(score_of(v, largest, temperature));
    });
  for (unsigned step = lanes / 2; step > 0; step /= 2) weight += __shfl_xor_sync(all_lanes, weight, static_cast<int>(step));
  if (chunk < chunks && index % lanes == 0) weights[r * chunks + chunk] = weight;
}

// ------------------------------------------------------------------------------------------------ limits

/// What decides which columns of a row may win.
struct row_limit {
  std::uint64_t least;     // key of the last column that stays, its index being the id
  std::uint64_t greatest;  // key of the largest column
  double bar;              // a sum that the winner exceeds
};

/// No noise reaches this.
inline constexpr double out_of_reach = 23;

/// Grid: rows. `weights` null: they are counted here, after top-k. lowest_score: that min-p lets pass.
template <int Threads = search_threads>
__global__ void __launch_bounds__(Threads)
    find_limits(row_limit* limits, const std::uint64_t* greatest, const double* weights, rows<const float> x, rows<const token_id> ids,
                unsigned chunks, unsigned length, std::size_t position, draw_rule rule, double lowest_score, bool vectors) {
  __shared__ search_room room;
  __shared__ shared_array<unsigned, Threads> listed;
  const std::size_t r = blockIdx.x, n = x.cols;
  const unsigned thread = threadIdx.x, pieces = length / 4;
  const std::uint64_t own = thread < chunks ? greatest[r * chunks + thread] : 0;
  const std::uint64_t best = over_block(own, greater), high = best | 0xffffffffu;
  const float largest = value_of(best);
  if (!(largest > -INFINITY)) {
    if (thread == 0) limits[r] = {0, best, 0};
    return;
  }

  unsigned count = 0;  // of the chunks listed: those that hold a key as great as `low`, in their order
  const auto list_chunks = [&](std::uint64_t low) {
    const bool holds = thread < chunks && own >= without_index(low);
    const running_sum sum = sums_of_block(holds ? 1 : 0);
    if (holds) listed[static_cast<int>(sum.through) - 1] = thread;
    __syncthreads();
    count = static_cast<unsigned>(sum.total);
  };
  const auto id_of = [&](std::size_t c) { return ids.data ? ids.row(r)[c] : static_cast<token_id>(c); };
  const auto in_listed = [&](auto f) {
    for (unsigned i = thread; i < count * pieces; i += Threads) {
      const std::size_t c = std::size_t{listed[static_cast<int>(i / pieces)]} * length + 4 * (i % pieces);
      if (c < n) each_of_four(x.row(r), c, n, vectors, [&](float v, std::size_t at) { f(key_of(v, id_of(at))); });
    }
  };
  // Below the keys of all logits with this score, roundings included.
  const auto key_below = [&](double score) {
    const double span = rule.temperature * score, value = double{largest} + span - 0x1p-20 * (fabs(double{largest}) + fabs(span));
    return value > -3e38 ? without_index(key_of(static_cast<float>(value), 0)) : least_number;  // not so for a NaN
  };

  std::uint64_t least = least_number;
  if (rule.top_k > 0 && rule.top_k < n) {
    // At least k columns are as great as the k-th greatest chunk.
    const auto of_chunks = [&](auto f) {
      if (own != 0) f(own);
    };
    const std::uint64_t low = greater(least, without_index(find_key(room, of_chunks, least, high, {}, rule.top_k)));
    list_chunks(low);
    least = greater(least, without_index(find_key(room, in_listed, low, high, {}, rule.top_k)));
  }
  if (rule.top_p < 1) {
    double weight = 0;
    if (!weights)
      in_listed([&](std::uint64_t key) {
        if (key >= least) weight += exp(score_of(value_of(key), largest, rule.temperature));
      });
    else if (own >= least)
      weight = weights[r * chunks + thread] * exp(score_of(value_of(own), largest, rule.temperature));
    const double total = over_block(weight, [](double a, double b) { return a + b; });
    std::uint64_t low = least;
    if (weights) {  // columns with less than their share of 1 − P do not make up 1 − P, so the threshold is not among them; halved, to be safe
      low = greater(low, key_below(log((1 - rule.top_p) * total / (2 * static_cast<double>(n)))));
      list_chunks(low);
    }
    // Sums that equal P but for roundings have reached it.
    const double wanted = rule.top_p * 0x1p62 - 0x1p16;
    const std::uint64_t last = find_key(room, in_listed, low, high, {true, largest, rule.temperature, 0x1p62 / total},
                                        wanted > 1 ? static_cast<std::uint64_t>(wanted) : 1);
    least = greater(least, last);
  }
  if (thread != 0) return;
  const token_id id = id_of(static_cast<std::size_t>(index_of(best)));
  const bool stays = key_of(largest, id) >= least;  // of equals, top-p may have kept another
  constexpr double rounding = 0x1p-30;              // far more than two ways to compile a logarithm differ by
  const double bar = stays ? noise(rule.seed, rule.sequence).gumbel(position + r, id) - rounding : -INFINITY;
  limits[r] = {greater(least, key_below(fmax(bar - out_of_reach, lowest_score))), best, bar};
}

// ------------------------------------------------------------------------------------------------ race

struct race_entry {
  double sum;
  token_id id;
};
inline constexpr token_id nobody = 0x7fffffff;

/// The greater sum, of equals the lower id.
__device__ inline race_entry winner_of(race_entry a, race_entry b) { return b.sum > a.sum || (b.sum == a.sum && b.id < a.id) ? b : a; }
__device__ inline race_entry warp_winner(race_entry e) {
#pragma unroll
  for (int step = warp_size / 2; step > 0; step /= 2)
    e = winner_of(e, {__shfl_xor_sync(all_lanes, e.sum, step), __shfl_xor_sync(all_lanes, e.id, step)});
  return e;
}

inline constexpr std::size_t race_length = 4096;  // columns of a block

/// The winner among a block's columns to entries(row, block), or its id to `out` where the row has one block. Grid: (blocks, rows).
template <int Threads = column_threads>
__global__ void __launch_bounds__(Threads)
    race_columns(token_id* out, race_entry* entries, const row_limit* limits, rows<const float> x, rows<const token_id> ids,
                 std::size_t position, draw_rule rule, double lowest_score, bool vectors) {
  __shared__ shared_array<race_entry, Threads / warp_size> of_warp;
  const int thread = static_cast<int>(threadIdx.x);
  const std::size_t r = blockIdx.y, n = x.cols, first = std::size_t{blockIdx.x} * race_length;
  const row_limit limit = limits[r];
  const float largest = value_of(limit.greatest);
  const auto id_of = [&](std::size_t c) { return ids.data ? ids.row(r)[c] : static_cast<token_id>(c); };
  const noise source(rule.seed, rule.sequence);
  philox_words words;
  std::uint32_t block = ~0u;  // the four ids whose noise `words` is

  race_entry best{limit.bar, nobody};
  const auto enter = [&](float value, std::size_t c) {
    if (key_of(value, 0) < limit.least) return;
    const token_id id = id_of(c);
    const double score = score_of(value, largest, rule.temperature);
    if (key_of(value, id) < limit.least || score < lowest_score || !(best.sum - score < out_of_reach)) return;
    const auto index = static_cast<std::uint32_t>(id), place = index % 4;
    if (index / 4 != block) words = source.words(position + r, block = index / 4);
    const std::uint32_t word = place == 0 ? words.word[0] : place == 1 ? words.word[1] : place == 2 ? words.word[2] : words.word[3];
    // From −log u ≥ 1 − u follows  gumbel ≥ d  ⇒  1 − u ≤ exp(−d): most are behind before they need a logarithm.
    if (static_cast<float>(~word) * 0x1p-32f > expf(static_cast<float>(score - best.sum)) * 1.001f) return;
    best = winner_of(best, {score + noise::gumbel_of(word), id});
  };
  if (largest > -INFINITY) {
#pragma unroll 1
    for (std::size_t c = first + 4 * threadIdx.x; c < first + race_length && c < n; c += 4 * Threads)
      each_of_four(x.row(r), c, n, vectors, enter);
  } else {
    best = {0, id_of(static_cast<std::size_t>(index_of(limit.greatest)))};
  }
  best = warp_winner(best);
  if (thread % warp_size == 0) of_warp[thread / warp_size] = best;
  __syncthreads();
  if (thread != 0) return;
  for (int i = 1; i < Threads / warp_size; ++i) best = winner_of(best, of_warp[i]);
  if (gridDim.x == 1)
    out[r] = best.id;
  else
    entries[r * gridDim.x + blockIdx.x] = best;
}

/// out[r] = the winner among entries(r) [count]. A warp a row.
template <int Threads = row_threads>
__global__ void __launch_bounds__(Threads) race_winners(token_id* out, const race_entry* entries, std::size_t m, std::size_t count) {
  const std::size_t r = std::size_t{blockIdx.x} * (Threads / warp_size) + threadIdx.x / warp_size;
  if (r >= m) return;  // a whole warp
  race_entry best{-INFINITY, nobody};
  for (std::size_t i = threadIdx.x % warp_size; i < count; i += warp_size) best = winner_of(best, entries[r * count + i]);
  best = warp_winner(best);
  if (threadIdx.x % warp_size == 0) out[r] = best.id;
}

void draw(queue& q, token_id* out, rows<const float> x, rows<const token_id> ids, std::size_t position, const draw_rule& rule) noexcept {
  const std::size_t n = x.cols;
  if (n == 0) return;
  const unsigned length = chunk_length(n), chunks = blocks_for(n, length), lanes = length / 8 < 32 ? length / 8 : 32;
  const unsigned blocks = blocks_for(n, race_length);
  const bool counts = rule.top_k > 0 && rule.top_k < n, weighs = rule.top_p < 1 && !counts, vectors = holds_fours(x);
  const double lowest_score = rule.min_p > 0 ? std::log(rule.min_p) : -INFINITY;
  constexpr std::size_t limit_words = sizeof(row_limit) / 8, entry_words = sizeof(race_entry) / 8;
  in_ranges(x.rows, 2 * chunks + limit_words + entry_words * blocks, [&](std::size_t from, std::size_t count) {
    const rows<const float> some = x.slice_rows(from, count);
    const rows<const token_id> names = ids.data ? ids.slice_rows(from, count) : ids;
    auto* const greatest = static_cast<std::uint64_t*>(q.scratch());
    auto* const weights = reinterpret_cast<double*>(greatest + count * chunks);
    auto* const limits = reinterpret_cast<row_limit*>(weights + count * chunks);
    auto* const entries = reinterpret_cast<race_entry*>(limits + count);
    double* const weighed = weighs ? weights : nullptr;
    const auto m = static_cast<unsigned>(count);
    launch(q, &greatest_of_chunks<>, dim3(blocks_for(std::size_t{chunks} * lanes, column_threads), m), column_threads, 0, greatest, weighed,
           some, chunks, length, lanes, rule.temperature, vectors);
    launch(q, &find_limits<>, m, search_threads, 0, limits, greatest, weighed, some, names, chunks, length, position + from, rule,
           lowest_score, vectors);
    launch(q, &race_columns<>, dim3(blocks, m), column_threads, 0, out + from, entries, limits, some, names, position + from, rule,
           lowest_score, vectors);
    if (blocks > 1)
      launch(q, &race_winners<>, blocks_for(count, row_threads / warp_size), row_threads, 0, out + from, entries, count, blocks);
  });
}

}  // namespace outrider::device
