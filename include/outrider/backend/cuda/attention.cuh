// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Keys and values of a layer: writing them, and attention over them.
#pragma once
#include "outrider/backend/cuda/attention_spans.cuh"
#include "outrider/backend/cuda/launch.cuh"
#include "outrider/core/extents.hpp"

namespace outrider::device {

// ------------------------------------------------------------------------------------------------ append

/// Rows from `skipped` on to positions from first + skipped on. Grid: rows - skipped, ⌈heads · head_dim / Threads⌉; a thread stores one
/// element of a key and of a value.
template <class Kv, int Threads = 256>
__global__ void __launch_bounds__(Threads)
    append_scalars(kv_view<Kv, device_space> cache, rows<const float> k, rows<const float> v, std::size_t first, std::size_t skipped) {
  const std::size_t row = skipped + blockIdx.x, element = std::size_t{blockIdx.y} * Threads + threadIdx.x;
  if (element >= cache.heads * cache.head_dim) return;
  const std::size_t head = element / cache.head_dim, within = element % cache.head_dim;
  cache.key(first + row, head)[within] = static_cast<Kv>(k.row(row)[element]);
  cache.value(first + row, head)[within] = static_cast<Kv>(v.row(row)[element]);
}

/// The same in blocks of 32, a warp each. Grid: rows - skipped, ⌈heads · head_dim / Threads⌉.
template <class Kv, int Threads = 256>
__global__ void __launch_bounds__(Threads)
    append_blocks(kv_view<Kv, device_space> cache, rows<const float> k, rows<const float> v, std::size_t first, std::size_t skipped) {
  const std::size_t row = skipped + blockIdx.x, element = std::size_t{blockIdx.y} * Threads + threadIdx.x;
  if (element >= cache.heads * cache.head_dim) return;  // whole warps
  const std::size_t head = element / cache.head_dim, block = element % cache.head_dim / elements_of<Kv>;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  store_block(cache.key(first + row, head)[block], k.row(row)[element], lane);
  store_block(cache.value(first + row, head)[block], v.row(row)[element], lane);
}

template <class Kv>
void append(queue& q, kv_view<Kv, device_space> cache, rows<const float> k, rows<const float> v, std::size_t first) noexcept {
  constexpr std::size_t threads = 256;
  // Of two rows that share a ring's slot the later one stays.
  const std::size_t skipped = cache.ring_rows != 0 && k.rows > cache.ring_rows ? k.rows - cache.ring_rows : 0;
  const dim3 grid(static_cast<unsigned>(k.rows - skipped), static_cast<unsigned>(divide_up(cache.heads * cache.head_dim, threads)));
  if constexpr (block_format<Kv>)
    launch(q, &append_blocks<Kv, threads>, grid, threads, 0, cache, k, v, first, skipped);
  else
    launch(q, &append_scalars<Kv, threads>, grid, threads, 0, cache, k, v, first, skipped);
}

// ------------------------------------------------------------------------------------------------ attend

/// out = Σ exp(peak of a span - peak) · its sum / the same of the totals. Grid: rows, q_heads, ⌈head_dim / 32⌉; a lane has one element, and
/// a warp every eighth span: eight sums in ascending order, added in the order of the warps.
template <int Threads = 256>
__global__ void __launch_bounds__(Threads) join_spans(rows<float> out, span_sums in, key_window window, int head_dim) {
  constexpr int warps = Threads / warp_size;
  __shared__ shared_array<float, Threads> sums, totals;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_size, warp = thread / warp_size;
  const int head = static_cast<int>(blockIdx.y), dim = static_cast<int>(blockIdx.z) * warp_size + lane;
  const std::size_t row = blockIdx.x;
  const int count = static_cast<int>(key_spans(window, row).count());

  float peak = -INFINITY, sum = 0, total = 0;
  for (int span = lane; span < count; span += warp_size) peak = fmaxf(peak, in.peaks[in.index(row, span, head)]);
  peak = warp_max(peak);
#pragma unroll 4
  for (int span = warp; span < count; span += warps) {
    const std::size_t index = in.index(row, span, head);
    const float factor = expf(in.peaks[index] - peak);
    if (dim < head_dim) sum = fmaf(factor, in.sums[index * static_cast<std::size_t>(head_dim) + static_cast<std::size_t>(dim)], sum);
    total = fmaf(factor, in.totals[index], total);
  }
  sums[thread] = sum;
  totals[thread] = total;
  __syncthreads();
  if (warp != 0 || dim >= head_dim) return;
#pragma unroll
  for (int w = 1; w < warps; ++w) {
    sum = __fadd_rn(sum, sums[w * warp_size + lane]);
    total = __fadd_rn(total, totals[w * warp_size + lane]);
  }
  out.row(row)[static_cast<std::ptrdiff_t>(head) * head_dim + dim] = count == 0 ? 0.0f : __fdiv_rn(sum, total);
}

/// The sums of the spans lie in the queue's memory, `bytes` of it; passes of more rows go through it in pieces. A row has to fit: with all of
/// the memory q_heads · (head_dim + 2) <= 2^16, four times what the largest model has.
template <class Kv>
void attend_within(std::size_t bytes, queue& q, rows<float> out, rows<const float> queries, kv_view<const Kv, device_space> cache,
                   key_window window) noexcept {
  const std::size_t q_heads = cache.head_dim == 0 ? 0 : queries.cols / cache.head_dim;
  if (queries.rows == 0 || q_heads == 0) return;
  std::size_t spans = 1;
  for (std::size_t r = 0; r < queries.rows; ++r) {
    const std::size_t of_row = key_spans(window, r).count();
    spans = of_row > spans ? of_row : spans;
  }
  // A power of two, so that the grid stays the same while a context grows; spans that no row has cost next to nothing.
  std::size_t grid_spans = 1;
  while (grid_spans < spans) grid_spans *= 2;
  spans = grid_spans;
  const std::size_t row_spans = q_heads * spans, most_rows = bytes / sizeof(float) / (row_spans * (cache.head_dim + 2));
  OUTRIDER_ASSERT(most_rows != 0);
  const std::size_t group = divide_up(q_heads, cache.heads), parts = divide_up(group, std::size_t{8}), heads = divide_up(group, parts);

  for (std::size_t first = 0; first < queries.rows; first += most_rows) {
    const std::size_t count = queries.rows - first < most_rows ? queries.rows - first : most_rows;
    const key_window seen{window.first_end + first, window.width};
    auto* const memory = static_cast<float*>(q.scratch());
    float* const peaks = memory + count * row_spans * cache.head_dim;
    const span_sums sums{memory, peaks, peaks + count * row_spans, static_cast<int>(spans), static_cast<int>(q_heads)};
    const dim3 grid(static_cast<unsigned>(count), static_cast<unsigned>(spans), static_cast<unsigned>(cache.heads * parts));

    const auto attend_with = [&]<int Dim, int Group>() {
      launch(q, &attend_spans<Kv, Dim, Group>, grid, detail::head_shape<Dim>::threads, 0, sums, queries.slice_rows(first, count), cache,
             seen, parts);
    };
    const auto attend_dim = [&]<int Dim>() {
      if (heads <= 2)
        attend_with.template operator()<Dim, 2>();
      else if (heads <= 4)
        attend_with.template operator()<Dim, 4>();
      else
        attend_with.template operator()<Dim, 8>();
    };
    switch (cache.head_dim) {
      case 64:
        attend_dim.template operator()<64>();
        break;
      case 128:
        attend_dim.template operator()<128>();
        break;
      case 256:
        attend_dim.template operator()<256>();
        break;
      case 512:
        attend_dim.template operator()<512>();
        break;
      default:
        attend_dim.template operator()<detail::any_dim>();
    }
    launch(q, &join_spans<>,
           dim3(grid.x, static_cast<unsigned>(q_heads), static_cast<unsigned>(divide_up(cache.head_dim, std::size_t{32}))), 256, 0,
           out.slice_rows(first, count), sums, seen, cache.head_dim);
  }
}

template <class Kv>
void attend(queue& q, rows<float> out, rows<const float> queries, kv_view<const Kv, device_space> cache, key_window window) noexcept {
  attend_within<Kv>(queue::scratch_bytes, q, out, queries, cache, window);
}

}  // namespace outrider::device
