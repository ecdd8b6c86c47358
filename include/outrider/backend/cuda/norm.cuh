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

  static __device__ std::size_t row() { return std::size_t{blockIdx.x} * rows_per_block + threadIdx.x / Size; }
  static __device__ std::size_t first_column() { return 4 * (threadIdx.x % Size); }

  /// The same bits in every thread. No thread goes on while another still reads.
  static __device__ float sum(float v) {
    if constexpr (Size > warp_size) return block_sum<Size>(v);
    const float sum = warp_sum(v);
    __syncwarp();
    return sum;
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
    for (int i = 0; i < batch; ++i)
      squares = fmaf(v[i].w, v[i].w, fmaf(v[i].z, v[i].z, fmaf(v[i].y, v[i].y, fmaf(v[i].x, v[i].x, squares))));
  }
  const float mean = __fdiv_rn(Team::sum(squares), static_cast<float>(n));
  return __fdiv_rn(1.0f, sqrtf(__fadd_rn(mean, eps)));
}

/// x · inverse · weight for four columns.
__device__ inline float4 norm_four(const float* x, const float* weight, float inverse, std::size_t c, std::size_t n, bool vectors) {
  const float4 v = load_four(x, c, n, vectors), w = weight ? load_four(weight, c, n, vectors) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
  return make_float4(__fmul_rn(__fmul_rn(v.x, inverse), w.x), __fmul_rn(__fmul_rn(v.y, inverse), w.y),
                     __fmul_rn(__fmul_rn(v.z, inverse), w.z), __fmul_rn(__fmul_rn(v.w, inverse), w.w));
}

/// out = norm, or out + norm.
template <class Team, bool Add>
__global__ void __launch_bounds__(Team::threads)
    norm_rows(rows<float> out, rows<const float> x, const float* weight, float eps, bool vectors) {
  const std::size_t r = Team::row(), n = x.cols;
  if (r >= x.rows) return;  // a whole team
  const float inverse = inverse_root<Team>(x.row(r), n, eps, vectors);
  for (std::size_t c = Team::first_column(); c < n; c += 4 * Team::size) {
    float4 v = norm_four(x.row(r), weight, inverse, c, n, vectors);
    if constexpr (Add) {
      const float4 h = load_four(out.row(r), c, n, vectors);
      v = make_float4(__fadd_rn(h.x, v.x), __fadd_rn(h.y, v.y), __fadd_rn(h.z, v.z), __fadd_rn(h.w, v.w));
    }
    store_four(out.row(r), c, n, vectors, v);
  }
}

template <bool Add>
void launch_norm(queue& q, rows<float> out, rows<const float> x, const float* weight, float eps) noexcept {
  const bool vectors = holds_fours(out) && holds_fours(x) && holds_fours(weight);
  with_team_for(x.cols, [&]<class Team>(Team) {
    launch(q, &norm_rows<Team, Add>, blocks_for(x.rows, Team::rows_per_block), Team::threads, 0, out, x, weight, eps, vectors);
  });
}

void rms_norm(queue& q, rows<float> out, rows<const float> x, const float* weight, float eps) noexcept {
  launch_norm<false>(q, out, x, weight, eps);
}
void norm_add(queue& q, rows<float> h, rows<const float> x, const float* weight, float eps) noexcept {
  launch_norm<true>(q, h, x, weight, eps);
}

// ------------------------------------------------------------------------------------------------ rope

struct position_list {
  static constexpr std::size_t capacity = 128;
  std::int32_t positions[capacity];
};

/// Grid: (columns, rows). In double, as the reference: the functions of float lose accuracy at the angles of long contexts, and the table is
/// small.
template <int Threads = 128>
__global__ void __launch_bounds__(Threads)
    rope_table_rows(rows<float> cos_out, rows<float> sin_out, __grid_constant__ const position_list list, const float* frequencies) {
  const std::size_t i = std::size_t{blockIdx.x} * Threads + threadIdx.x, r = blockIdx.y;
  if (i >= cos_out.cols) return;
  const float angle = static_cast<float>(static_cast<double>(frequencies[i]) * list.positions[r]);
  cos_out.row(r)[i] = static_cast<float>(cos(static_cast<double>(angle)));
  sin_out.row(r)[i] = static_cast<float>(sin(static_cast<double>(angle)));
}

void rope_table(queue& q, rows<float> cos, rows<float> sin, const std::int32_t* host_positions, const float* frequencies) noexcept {
  for (std::size_t first = 0; first < cos.rows; first += position_list::capacity) {
    position_list list{};
    const std::size_t left = cos.rows - first, count = left < position_list::capacity ? left : position_list::capacity;
    for (std::size_t i = 0; i < count; ++i) list.positions[i] = host_positions[first + i];
    launch(q, &rope_table_rows<>, grid_over(count, cos.cols, 128), 128, 0, cos.slice_rows(first, count), sin.slice_rows(first, count), list,
           frequencies);
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
      return norm_four(row + half, weight ? weight + half : nullptr, inverse, i, h, vectors);
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
