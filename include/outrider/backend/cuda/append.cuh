// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// From projections to stored keys and values in one kernel.
#pragma once
#include <cstddef>

#include "outrider/backend/cuda/attention_elements.cuh"
#include "outrider/backend/cuda/columns.cuh"
#include "outrider/backend/cuda/launch.cuh"
#include "outrider/backend/cuda/norm.cuh"
#include "outrider/backend/cuda/optional.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/kv_view.hpp"

namespace outrider::device {

/// A team takes a key or a value: of each row the keys of all heads, then the values. The sum of squares has the order of norm_rows; what
/// follows goes by single columns, so that a warp has a block of 32. Values take the way of keys and are not turned in the end: without
/// branches between them the loads of a batch are all under way at once, most of them while the squares are summed.
template <class Kv, class Team>
__global__ void __launch_bounds__(Team::threads)
    norm_append_rows(kv_view<Kv, device_space> cache, rows<const float> k, rows<const float> v, const float* weight, float eps,
                     rows<const float> cos, rows<const float> sin, std::size_t first, std::size_t skipped, bool vectors) {
  const auto index = static_cast<unsigned>(Team::row()), heads = static_cast<unsigned>(cache.heads), place = index % (2 * heads);
  const auto dim = static_cast<unsigned>(cache.head_dim), half = dim / 2, thread = Team::thread();
  const std::size_t row = skipped + index / (2 * heads);
  const bool is_key = place < heads;
  const unsigned head = is_key ? place : place - heads;
  if (row >= k.rows) return;  // a whole team
  const float *const x = (is_key ? k : v).row(row) + head * dim, *const head_weight = is_key ? weight : nullptr;
  const float *const cosines = cos.row(row), *const sines = sin.row(row);

  struct column {
    float x, other, weight, other_weight, cosine, sine;  // other: of the other half
  };
  constexpr unsigned size = Team::size, batch = size == warp_size ? 8 : 1;
  column columns[batch];
  const auto load = [&](unsigned begin) {
#pragma unroll
    for (unsigned i = 0; i < batch; ++i) {
      const unsigned c = begin + i * size < dim ? begin + i * size : 0, pair = c < half ? c : c - half;
      const unsigned other = c < half ? c + half : pair;
      columns[i] = {x[c], x[other], 1.0f, 1.0f, cosines[pair], sines[pair]};
      if (head_weight) columns[i].weight = head_weight[c], columns[i].other_weight = head_weight[other];
    }
  };
  load(thread);
  Kv* const to = is_key ? local(cache).key(first + row, head) : local(cache).value(first + row, head);
  const float inverse = inverse_root<Team>(x, dim, eps, vectors);

  for (unsigned begin = thread; begin < dim; begin += batch * size) {
    if (begin >= batch * size) load(begin);
#pragma unroll
    for (unsigned i = 0; i < batch; ++i) {
      const unsigned c = begin + i * size;
      if (c >= dim) break;
      const column& own = columns[i];
      const float value = __fmul_rn(__fmul_rn(own.x, inverse), own.weight);
      const float other = __fmul_rn(__fmul_rn(own.other, inverse), own.other_weight);
      const float from_other = __fmul_rn(other, own.sine);
      const float turned = fmaf(value, own.cosine, c < half ? -from_other : from_other);  // as rotate_row has it
      if constexpr (block_format<Kv>)
        store_block(to[c / elements_of<Kv>], is_key ? turned : value, static_cast<int>(c % elements_of<Kv>));  // whole warps
      else
        to[c] = static_cast<Kv>(is_key ? turned : value);
    }
  }
}

template <class Kv>
void norm_append(queue& q, kv_view<Kv, device_space> cache, rows<const float> k, rows<const float> v, const float* weight, float eps,
                 rows<const float> cos, rows<const float> sin, std::size_t first) noexcept {
  // Of two rows that share a ring's slot the later one stays.
  const std::size_t skipped = cache.ring_rows != 0 && k.rows > cache.ring_rows ? k.rows - cache.ring_rows : 0;
  const bool vectors = holds_fours(k) && holds_fours(v) && cache.head_dim % 4 == 0;
  with_team_for(cache.head_dim, [&]<class Team>(Team) {
    launch(q, &norm_append_rows<Kv, Team>, blocks_for(2 * cache.heads * (k.rows - skipped), Team::rows_per_block), Team::threads, 0, cache,
           k, v, weight, eps, cos, sin, first, skipped, vectors);
  });
}

}  // namespace outrider::device
