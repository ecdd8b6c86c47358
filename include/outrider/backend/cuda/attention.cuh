// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Keys and values of a layer: writing them, and attention over them.
#pragma once
#include "outrider/backend/cuda/attention_shape.cuh"
#include "outrider/backend/cuda/attention_spans.cuh"
#include "outrider/backend/cuda/columns.cuh"
#include "outrider/backend/cuda/launch.cuh"

namespace outrider::device {

// ------------------------------------------------------------------------------------------------ append

inline constexpr int append_threads = 256;

/// Rows from `skipped` on to positions from first + skipped on. Grid: ⌈heads · head_dim / Threads⌉, rows - skipped as far as a grid goes; a
/// thread stores one element of a key and of a value.
template <class Kv, int Threads = append_threads>
__global__ void __launch_bounds__(Threads)
    append_scalars(kv_view<Kv, device_space> cache, rows<const float> k, rows<const float> v, std::size_t first, std::size_t skipped) {
  const std::size_t element = std::size_t{blockIdx.x} * Threads + threadIdx.x;
  if (element >= cache.heads * cache.head_dim) return;
  const std::size_t head = element / cache.head_dim, within = element % cache.head_dim;
  for (std::size_t row = skipped + blockIdx.y; row < k.rows; row += gridDim.y) {
    local(cache).key(first + row, head)[within] = static_cast<Kv>(k.row(row)[element]);
    local(cache).value(first + row, head)[within] = static_cast<Kv>(v.row(row)[element]);
  }
}

/// The same in blocks of 32, a warp each.
template <class Kv, int Threads = append_threads>
__global__ void __launch_bounds__(Threads)
    append_blocks(kv_view<Kv, device_space> cache, rows<const float> k, rows<const float> v, std::size_t first, std::size_t skipped) {
  const std::size_t element = std::size_t{blockIdx.x} * Threads + threadIdx.x;
  if (element >= cache.heads * cache.head_dim) return;  // whole warps
  const std::size_t head = element / cache.head_dim, block = element % cache.head_dim / elements_of<Kv>;
  const int lane = static_cast<int>(threadIdx.x) % warp_size;
  for (std::size_t row = skipped + blockIdx.y; row < k.rows; row += gridDim.y) {
    store_block(local(cache).key(first + row, head)[block], k.row(row)[element], lane);
    store_block(local(cache).value(first + row, head)[block], v.row(row)[element], lane);
  }
}

template <class Kv>
void append(queue& q, kv_view<Kv, device_space> cache, rows<const float> k, rows<const float> v, std::size_t first) noexcept {
  // Of two rows that share a ring's slot the later one stays.
  const std::size_t skipped = cache.ring_rows != 0 && k.rows > cache.ring_rows ? k.rows - cache.ring_rows : 0;
  const dim3 grid = grid_over(k.rows - skipped, cache.heads * cache.head_dim, append_threads);
  if constexpr (block_format<Kv>)
    launch(q, &append_blocks<Kv>, grid, append_threads, 0, cache, k, v, first, skipped);
  else
    launch(q, &append_scalars<Kv>, grid, append_threads, 0, cache, k, v, first, skipped);
}

// ------------------------------------------------------------------------------------------------ attend

inline constexpr int join_threads = 256;

/// out = Σ exp(peak of a span - peak) · its sum / the same of the totals. Grid: rows, query heads of the parts, ⌈head_dim / 32⌉; a lane has one
/// element, and a warp every eighth span: eight sums in ascending order, added in the order of the warps.
template <int Threads = join_threads>
__global__ void __launch_bounds__(Threads) join_spans(rows<float> out, span_sums in, attention_piece piece, int head_dim) {
  constexpr int warps = Threads / warp_size;
  __shared__ shared_array<float, Threads> sums, totals;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_size, warp = thread / warp_size;
  const int dim = static_cast<int>(blockIdx.z) * warp_size + lane;
  const unsigned row = blockIdx.x, group = row / piece.group, part = blockIdx.y / piece.heads.each, head = blockIdx.y % piece.heads.each;
  const head_parts::range heads = piece.heads[piece.first_part + part];
  if (head >= heads.count) return;
  const unsigned first = piece.first_span(row) - piece.first_span(group * piece.group);
  const int count = static_cast<int>(piece.span_count(row, row));
  const std::size_t index = span_sums::index(piece, group, first, part) + row % piece.group * piece.heads.each + head;
  const auto index_of = [&, stride = span_sums::stride(piece)](int span) {
    return index + std::size_t{stride} * static_cast<unsigned>(span);
  };

  float peak = -INFINITY, sum = 0, total = 0;
  for (int span = lane; span < count; span += warp_size) peak = fmaxf(peak, in.peaks[index_of(span)]);
  peak = warp_max(peak);
#pragma unroll 4
  for (int span = warp; span < count; span += warps) {
    const std::size_t i = index_of(span);
    const float factor = expf(in.peaks[i] - peak);
    if (dim < head_dim) sum = fmaf(factor, in.sums[i * static_cast<std::size_t>(head_dim) + static_cast<std::size_t>(dim)], sum);
    total = fmaf(factor, in.totals[i], total);
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
  out.row(row)[static_cast<std::ptrdiff_t>(heads.first + head) * head_dim + dim] = count == 0 ? 0.0f : __fdiv_rn(sum, total);
}

/// attend, the sums of the spans lying in the first `bytes` of the queue's memory. They hold those of a block at least.
template <class Kv>
void attend_within(std::size_t bytes, queue& q, rows<float> out, rows<const float> queries, kv_view<const Kv, device_space> cache,
                   key_window window) noexcept {
  if (queries.rows == 0 || queries.cols == 0 || cache.heads == 0) return;
  const head_parts heads(queries.cols / cache.head_dim, cache.heads);
  for_each_piece(bytes, queries.rows, window, heads, cache.head_dim, [&](std::size_t first, const attention_piece& piece) {
    const span_sums sums(q.scratch(), piece, cache.head_dim);
    const auto attend_with = [&]<int Dim, int Group>() {
      launch(q, &attend_spans<Kv, Dim, Group>, dim3(piece.groups(), piece.spans, piece.part_count), detail::head_shape<Dim>::threads, 0,
             sums, queries.slice_rows(first, piece.rows), cache, piece);
    };
    const auto attend_dim = [&]<int Dim>() {
      if (piece.queries() <= 2)
        attend_with.template operator()<Dim, 2>();
      else if (piece.queries() <= 4)
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
    const dim3 grid(piece.rows, piece.part_count * heads.each, blocks_for(cache.head_dim, warp_size));
    launch(q, &join_spans<>, grid, join_threads, 0, out.slice_rows(first, piece.rows), sums, piece, cache.head_dim);
  });
}

template <class Kv>
void attend(queue& q, rows<float> out, rows<const float> queries, kv_view<const Kv, device_space> cache, key_window window) noexcept {
  attend_within<Kv>(queue::scratch_bytes, q, out, queries, cache, window);
}

}  // namespace outrider::device
