// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Norms and rotations: what sees a whole row, alone and together.
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/backend/cuda/columns.cuh"
#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/launch.cuh"
#include "outrider/backend/cuda/launchers.hpp"
#include "outrider/backend/cuda/optional.hpp"
#include "outrider/backend/cuda/warp.cuh"

namespace outrider::device {

// ------------------------------------------------------------------------------------------------ rms_norm

/// The threads that share a row: a warp, with several rows a block, or a block.
template <int Size>
struct team {
  static constexpr int size = Size, threads = Size < 128 ? 128 : Size, rows_per_block = threads / Size;

  /// Enough threads of a block for rows of n. Those beyond the end of a row may be missing: zeros are all they would add.
  static unsigned threads_for(std::size_t n) noexcept {
    const std::size_t busy = (n + 4 * warp_size - 1) / (4 * warp_size) * warp_size;
    return static_cast<unsigned>(rows_per_block == 1 && busy < threads ? busy : threads);
  }

  static __device__ std::size_t row() { return std::size_t{blockIdx.x} * rows_per_block + threadIdx.x / Size; }
  static __device__ unsigned thread() { return threadIdx.x % Size; }
  static __device__ unsigned first_column() { return 4 * thread(); }

  /// then(sum of v), in every thread, for numbers that are not negative: those of a warp are added as a butterfly, then warp by warp. One warp
  /// does what all would have to do alike.
  template <class Then>
  static __device__ float sum(float v, Then then) {
    const float of_warp = warp_sum(v);
    if constexpr (Size == warp_size) {
      __syncwarp();  // no lane writes what another one still reads
      return then(of_warp);
    } else {
      constexpr int warps = Size / warp_size;
      static_assert(warps <= warp_size);
      __shared__ shared_array<float, warps> sums;
      __shared__ shared_array<float, 1> result;
      const int warp = static_cast<int>(threadIdx.x) / warp_size, lane = static_cast<int>(threadIdx.x) % warp_size;
      if (lane == 0) sums[warp] = of_warp;
      if (warp == 0 && lane >= static_cast<int>(blockDim.x) / warp_size) sums[lane] = 0.0f;
      __syncthreads();
      if (warp == 0) {
        float sum = sums[0];
#pragma unroll
        for (int w = 1; w < warps; ++w) sum = __fadd_rn(sum, sums[w]);
        const float told = then(sum);
        if (lane == 0) result[0] = told;
      }
      __syncthreads();
      return result[0];
    }
  }
};

/// body(team), chosen by the length of the rows alone: it decides the order of the sum. Heads are short and many.
template <class Body>
void with_team_for(std::size_t n, Body body) noexcept {
  if (n <= 512)
    body(team<32>{});
  else
    body(team<1024>{});
}

__device__ inline float add_squares(float sum, float4 v) { return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, sum)))); }

/// 1 / √(mean + eps), from what each thread of a team has of the sum of n squares.
template <class Team>
__device__ float inverse_root_of(float squares, std::size_t n, float eps) {
  return Team::sum(squares, [&](float sum) { return __fdiv_rn(1.0f, sqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(n)), eps))); });
}

/// 1 / √(mean(x²) + eps)
template <class Team>
__device__ float inverse_root(const float* x, std::size_t n, float eps, bool vectors) {
  constexpr std::size_t step = 4 * Team::size;
  constexpr int batch = 4;  // loads under way at once
  float squares = 0.0f;
  for (std::size_t first = Team::first_column(); first < n; first += batch * step) {
    float4 v[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const std::size_t c = first + static_cast<std::size_t>(i) * step;
      v[i] = c < n ? load_four(x, c, n, vectors) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) squares = add_squares(squares, v[i]);
  }
  return inverse_root_of<Team>(squares, n, eps);
}

/// v · inverse · weight
__device__ inline float4 norm_four(float4 v, float inverse, float4 weight) {
  return make_float4(__fmul_rn(__fmul_rn(v.x, inverse), weight.x), __fmul_rn(__fmul_rn(v.y, inverse), weight.y),
                     __fmul_rn(__fmul_rn(v.z, inverse), weight.z), __fmul_rn(__fmul_rn(v.w, inverse), weight.w));
}
/// (h + v) · factor
__device__ inline float4 add_four(float4 h, float4 v, float factor) {
  return make_float4(__fmul_rn(__fadd_rn(h.x, v.x), factor), __fmul_rn(__fadd_rn(h.y, v.y), factor), __fmul_rn(__fadd_rn(h.z, v.z), factor),
                     __fmul_rn(__fadd_rn(h.w, v.w), factor));
}

/// What becomes of every row of x, in this order. Steps whose matrix is null are left out, and of the two norms the second one unless both h and
/// out are there.
struct norm_steps {
  rows<const float> x;
  const float* weight = nullptr;
  float eps = 0;
  rows<float> h = {};  // h = (h + rms_norm(x) · weight) · factor
  float factor = 1;
  const float* next_weight = nullptr;
  float next_eps = 0;
  rows<float> out = {};          // out = rms_norm(h) · next_weight, without h: rms_norm(x) · weight
  rows<int8_block> blocks = {};  // quantize(out), without out: of h
};

/// A row stays with its team from the first load to the last store, and all that can be is asked for before the first sum is waited for: a
/// single row takes hardly longer than its way from memory and back. Vectors: whether the views allow them.
template <class Team, bool Vectors>
__global__ void __launch_bounds__(Team::threads) norm_rows(__grid_constant__ const norm_steps a) {
  struct four_columns {
    float4 v, h, weight, next_weight;
  };
  constexpr unsigned step = 4 * Team::size;
  constexpr int held = 2;  // fours of a thread: the rest of longer rows is read again in every pass
  const std::size_t r = Team::row();
  const auto n = static_cast<unsigned>(a.x.cols);
  const unsigned own = Team::first_column(), of_warp = own - 4 * (threadIdx.x % warp_size);
  if (r >= a.x.rows) return;  // a whole team
  const float* const x = a.x.row(r);
  float* const h = a.h.data ? a.h.row(r) : nullptr;

  const auto load = [&](unsigned c, const float* v) {
    const auto four = [&](const float* row, float missing) {
      return row && c < n ? load_four(row, c, n, Vectors) : make_float4(missing, missing, missing, missing);
    };
    return four_columns{four(v, 0.0f), four(h, 0.0f), four(a.weight, 1.0f), four(a.next_weight, 1.0f)};
  };
  four_columns first[held];
#pragma unroll
  for (unsigned i = 0; i < held; ++i)
    if (i * step + of_warp < n) first[i] = load(i * step + own, x);
  /// body(c, columns c … c + 3), c ascending, in whole warps: what lies beyond the row's end is zero. v: where the values lie by now.
  const auto each = [&](const float* v, auto body) {
#pragma unroll
    for (unsigned i = 0; i < held; ++i)
      if (i * step + of_warp < n) body(i * step + own, first[i]);
    for (unsigned c = held * step; c + of_warp < n; c += step) {
      four_columns four = load(c + own, v);
      body(c + own, four);
    }
  };

  float squares = 0.0f;
  each(x, [&](unsigned, const four_columns& f) { squares = add_squares(squares, f.v); });
  float inverse = inverse_root_of<Team>(squares, n, a.eps);
  if (h) {
    squares = 0.0f;
    each(x, [&](unsigned c, four_columns& f) {
      f.v = add_four(f.h, norm_four(f.v, inverse, f.weight), a.factor);
      if (c < n) store_four(h, c, n, Vectors, f.v);
      squares = add_squares(squares, f.v);
    });
    if (a.out.data) inverse = inverse_root_of<Team>(squares, n, a.next_eps);
  }
  if (!a.out.data && !a.blocks.data) return;
  each(h ? h : x, [&](unsigned c, const four_columns& f) {
    float4 v = f.v;
    if (a.out.data) {
      v = norm_four(v, inverse, h ? f.next_weight : f.weight);
      if (c < n) store_four(a.out.row(r), c, n, Vectors, v);
    }
    if (a.blocks.data) store_as_blocks(a.blocks.row(r), c, v, c < n);
  });
}

void launch_norm(queue& q, const norm_steps& steps) noexcept {
  const bool vectors =
      holds_fours(steps.x) && holds_fours(steps.h) && holds_fours(steps.out) && holds_fours(steps.weight) && holds_fours(steps.next_weight);
  const std::size_t n = steps.x.cols;
  with_team_for(n, [&]<class Team>(Team) {
    const auto kernel = vectors ? &norm_rows<Team, true> : &norm_rows<Team, false>;
    launch(q, kernel, blocks_for(steps.x.rows, Team::rows_per_block), Team::threads_for(n), 0, steps);
  });
}

void rms_norm(queue& q, rows<float> out, rows<const float> x, const float* weight, float eps) noexcept {
  launch_norm(q, {.x = x, .weight = weight, .eps = eps, .out = out});
}
void norm_quantize(queue& q, rows<float> out, rows<int8_block> blocks, rows<const float> x, const float* weight, float eps) noexcept {
  launch_norm(q, {.x = x, .weight = weight, .eps = eps, .out = out, .blocks = blocks});
}
void norm_add(queue& q, rows<float> h, rows<int8_block> blocks, rows<const float> x, const float* weight, float eps,
              float factor) noexcept {
  launch_norm(q, {.x = x, .weight = weight, .eps = eps, .h = h, .factor = factor, .blocks = blocks});
}
void norm_add_norm(queue& q, rows<float> h, rows<float> out, rows<int8_block> blocks, rows<const float> x, const float* weight, float eps,
                   const float* next_weight, float next_eps) noexcept {
  launch_norm(
      q, {.x = x, .weight = weight, .eps = eps, .h = h, .next_weight = next_weight, .next_eps = next_eps, .out = out, .blocks = blocks});
}

// ------------------------------------------------------------------------------------------------ rope

struct position_list {
  static constexpr std::size_t capacity = 128;
  std::int32_t positions[capacity];
};

/// Grid: (columns, rows). In double, as the reference: the functions of float lose accuracy at the angles of long contexts, and the table is
/// small.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    rope_table_rows(rows<float> cos_out, rows<float> sin_out, __grid_constant__ const position_list list, const float* frequencies) {
  const std::size_t i = std::size_t{blockIdx.x} * Threads + threadIdx.x, r = blockIdx.y;
  if (i >= cos_out.cols) return;
  const float angle = static_cast<float>(static_cast<double>(frequencies[i]) * list.positions[r]);
  cos_out.row(r)[i] = static_cast<float>(cos(static_cast<double>(angle)));
  sin_out.row(r)[i] = static_cast<float>(sin(static_cast<double>(angle)));
}

void rope_table(queue& q, rows<float> cos, rows<float> sin, const std::int32_t* host_positions, const float* frequencies) noexcept {
  constexpr int threads = 128;
  for (std::size_t first = 0; first < cos.rows; first += position_list::capacity) {
    position_list list{};
    const std::size_t left = cos.rows - first, count = left < position_list::capacity ? left : position_list::capacity;
    for (std::size_t i = 0; i < count; ++i) list.positions[i] = host_positions[first + i];
    launch(q, &rope_table_rows<threads>, grid_over(count, cos.cols, threads), threads, 0, cos.slice_rows(first, count),
           sin.slice_rows(first, count), list, frequencies);
  }
}

/// x(i), x(i + h) = a·c − b·s, b·c + a·s with the values a, b that four(0, i) and four(h, i) give for four columns each.
template <class Team, class Four>
__device__ void rotate_row(float* x, const float* cos, const float* sin, std::size_t h, bool vectors, Four four) {
  const auto low = [](float a, float b, float c, float s) { return fmaf(a, c, -__fmul_rn(b, s)); };
  const auto high = [](float a, float b, float c, float s) { return fmaf(b, c, __fmul_rn(a, s)); };
  for (std::size_t i = Team::first_column(); i < h; i += 4 * Team::size) {
    const float4 a = four(std::size_t{0}, i), b = four(h, i), c = load_four(cos, i, h, vectors), s = load_four(sin, i, h, vectors);
    store_four(x, i, h, vectors,
               make_float4(low(a.x, b.x, c.x, s.x), low(a.y, b.y, c.y, s.y), low(a.z, b.z, c.z, s.z), low(a.w, b.w, c.w, s.w)));
    store_four(x + h, i, h, vectors,
               make_float4(high(a.x, b.x, c.x, s.x), high(a.y, b.y, c.y, s.y), high(a.z, b.z, c.z, s.z), high(a.w, b.w, c.w, s.w)));
  }
}

/// `heads` rows of x share a row of the tables. Norm: of rms_norm(x) instead of x.
template <class Team, bool Norm>
__global__ void __launch_bounds__(Team::threads)
    rope_rows(rows<float> x, const float* weight, float eps, rows<const float> cos, rows<const float> sin, unsigned heads, bool vectors) {
  const std::size_t r = Team::row(), h = cos.cols, t = static_cast<unsigned>(r) / heads;
  if (r >= x.rows) return;  // a whole team
  float* const row = x.row(r);
  if constexpr (Norm) {
    const float inverse = inverse_root<Team>(row, 2 * h, eps, vectors);
    rotate_row<Team>(row, cos.row(t), sin.row(t), h, vectors, [&](std::size_t half, std::size_t i) {
      const float4 ones = make_float4(1.0f, 1.0f, 1.0f, 1.0f), w = weight ? load_four(weight + half, i, h, vectors) : ones;
      return norm_four(load_four(row + half, i, h, vectors), inverse, w);
    });
  } else {
    rotate_row<Team>(row, cos.row(t), sin.row(t), h, vectors,
                     [&](std::size_t half, std::size_t i) { return load_four(row + half, i, h, vectors); });
  }
}

template <bool Norm>
void launch_rope(queue& q, rows<float> x, const float* weight, float eps, rows<const float> cos, rows<const float> sin) noexcept {
  if (x.rows == 0) return;
  const bool vectors = holds_fours(x) && holds_fours(weight) && holds_fours(cos) && holds_fours(sin);
  with_team_for(x.cols, [&]<class Team>(Team) {
    launch(q, &rope_rows<Team, Norm>, blocks_for(x.rows, Team::rows_per_block), Team::threads, 0, x, weight, eps, cos, sin,
           x.rows / cos.rows, vectors);
  });
}

void rope(queue& q, rows<float> x, rows<const float> cos, rows<const float> sin) noexcept {
  launch_rope<false>(q, x, nullptr, 0, cos, sin);
}
void norm_rope(queue& q, rows<float> x, const float* weight, float eps, rows<const float> cos, rows<const float> sin) noexcept {
  launch_rope<true>(q, x, weight, eps, cos, sin);
}

}  // namespace outrider::device
