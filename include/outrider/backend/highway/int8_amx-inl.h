// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Products of grouped weights by the tile registers of AMX, for more rows than a verification of a few drafts has. A line of codes is a row of
// the second operand as it lies: register 2 holds the lines of a part, register 1 up to 16 rows of x, register 0 their sums of products, row r
// of the group in column r. The sums are those of every other way, and the float steps behind them too.
#if defined(OUTRIDER_BACKEND_HIGHWAY_INT8_AMX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUTRIDER_BACKEND_HIGHWAY_INT8_AMX_INL_H_
#undef OUTRIDER_BACKEND_HIGHWAY_INT8_AMX_INL_H_
#else
#define OUTRIDER_BACKEND_HIGHWAY_INT8_AMX_INL_H_
#endif

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>

#include "outrider/backend/highway/compat-inl.h"
#include "outrider/backend/highway/int8-inl.h"
#include "outrider/backend/highway/kernel_table.hpp"
#include "outrider/core/extents.hpp"
#include "outrider/core/grouped.hpp"
#include "outrider/core/int8.hpp"
#include "outrider/core/view.hpp"

#if defined(OUTRIDER_EMULATED_AMX)
HWY_BEFORE_NAMESPACE();
#else
#include <immintrin.h>
HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512vnni,amx-tile,amx-int8")
#endif
namespace outrider {
namespace HWY_NAMESPACE {
namespace amx {

// Rows of x from which the tiles are used; below, the dot products of vectors.
constexpr std::size_t least_rows = 8, tile_height = 16;

/// What `ldtilecfg` reads: palette 1 has eight registers of up to 16 rows of up to 64 bytes.
struct alignas(64) tile_shapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(tile_shapes) == 64);

/// The three registers, shaped for `height` rows of x and `columns` columns of a part, 16 or 32. Not reentrant within a thread.
class tile_registers {
 public:
  tile_registers(std::size_t height, std::size_t columns) noexcept {
    tile_shapes shapes;
    shape(shapes, 0, height, 4 * group_rows);
    shape(shapes, 1, height, columns);
    shape(shapes, 2, columns / 4, 4 * group_rows);
    configure(shapes);
  }
  tile_registers(const tile_registers&) = delete;
  tile_registers& operator=(const tile_registers&) = delete;

  /// sums[m][r] = Σ over the columns of x[m][k] · (code of row r, column k).
  void multiply(std::int32_t (*sums)[group_rows], const std::int8_t* x, std::size_t x_stride, const detail::code_line* codes) noexcept;
  ~tile_registers();

 private:
  static void shape(tile_shapes& shapes, std::size_t index, std::size_t rows, std::size_t bytes) noexcept {
    shapes.rows[index] = static_cast<std::uint8_t>(rows);
    shapes.row_bytes[index] = static_cast<std::uint16_t>(bytes);
  }
  void configure(const tile_shapes& shapes) noexcept;

#if defined(OUTRIDER_EMULATED_AMX)  // for tests on machines without the instructions
  struct tile {
    std::int8_t byte[16][64];
  };
  template <std::size_t I>
  void load(const void* from, std::size_t stride) noexcept {
    for (std::size_t r = 0; r < shapes_.rows[I]; ++r)
      std::memcpy(tile_[I].byte[r], static_cast<const std::int8_t*>(from) + r * stride, shapes_.row_bytes[I]);
  }
  template <std::size_t I>
  void store(void* to, std::size_t stride) const noexcept {
    for (std::size_t r = 0; r < shapes_.rows[I]; ++r)
      std::memcpy(static_cast<std::int8_t*>(to) + r * stride, tile_[I].byte[r], shapes_.row_bytes[I]);
  }
  template <std::size_t I>
  void zero() noexcept {
    tile_[I] = {};
  }
  /// tdpbssd: 32-bit word n of row m of C += Σ over i < 4 and k of byte 4k + i of row m of A · byte 4n + i of row k of B.
  template <std::size_t C, std::size_t A, std::size_t B>
  void add_products() noexcept {
    for (std::size_t m = 0; m < shapes_.rows[C]; ++m)
      for (std::size_t n = 0; n < shapes_.row_bytes[C] / 4u; ++n) {
        std::int32_t sum;
        std::memcpy(&sum, tile_[C].byte[m] + 4 * n, 4);
        for (std::size_t k = 0; k < shapes_.row_bytes[A]; ++k) sum += tile_[A].byte[m][k] * tile_[B].byte[k / 4][4 * n + k % 4];
        std::memcpy(tile_[C].byte[m] + 4 * n, &sum, 4);
      }
  }
  tile_shapes shapes_;
  tile tile_[3];
#endif
};

#if defined(OUTRIDER_EMULATED_AMX)
inline void tile_registers::configure(const tile_shapes& shapes) noexcept {
  shapes_ = shapes;
  std::memset(tile_, 0, sizeof(tile_));
}
inline tile_registers::~tile_registers() = default;
inline void tile_registers::multiply(std::int32_t (*sums)[group_rows], const std::int8_t* x, std::size_t x_stride,
                                     const detail::code_line* codes) noexcept {
  zero<0>();
  load<1>(x, x_stride);
  load<2>(codes, sizeof(*codes));
  add_products<0, 1, 2>();
  store<0>(sums, sizeof(*sums));
}
#else
inline void tile_registers::configure(const tile_shapes& shapes) noexcept { _tile_loadconfig(&shapes); }
inline tile_registers::~tile_registers() { _tile_release(); }
inline void tile_registers::multiply(std::int32_t (*sums)[group_rows], const std::int8_t* x, std::size_t x_stride,
                                     const detail::code_line* codes) noexcept {
  asm volatile("" ::: "memory");  // GCC's _tile_loadd does not say that it reads memory
  _tile_zero(0);
  _tile_loadd(1, x, x_stride);
  _tile_loadd(2, codes, sizeof(*codes));
  _tile_dpbssd(0, 1, 2);
  _tile_stored(0, sums, sizeof(*sums));
}
#endif

/// The weights of quad F as signed bytes.
template <class W, std::size_t F, class Part>
HWY_INLINE void unpack_quad(detail::code_line& out, const Part& part) {
  OUTRIDER_UNROLL
  for (std::size_t v = 0; v < line_vectors; ++v) {
    code_vec codes = quad_of<W, F>(part, v);
    if constexpr (std::same_as<W, q4_0>) codes = hn::Sub(codes, hn::Set(code_bytes(), 8));
    if constexpr (std::same_as<W, q6_k>) codes = hn::Sub(codes, hn::Set(code_bytes(), 32));
    hn::StoreU(hn::BitCast(hn::Repartition<std::uint32_t, words>(), codes), hn::Repartition<std::uint32_t, words>(), out + v * lanes);
  }
}

/// The lines of a part: those of the record itself, or unpacked into `space`.
template <class W, class Part>
HWY_INLINE const detail::code_line* lines_of(detail::code_line (&space)[8], const Part& part) {
  if constexpr (std::same_as<W, q8_0>) {
    return part.codes;
  } else {
    unpack_quad<W, 0>(space[0], part);
    unpack_quad<W, 1>(space[1], part);
    unpack_quad<W, 2>(space[2], part);
    unpack_quad<W, 3>(space[3], part);
    unpack_quad<W, 4>(space[4], part);
    unpack_quad<W, 5>(space[5], part);
    unpack_quad<W, 6>(space[6], part);
    unpack_quad<W, 7>(space[7], part);
    return space;
  }
}

/// out[m][c] = x[m] · w(c) for m < height <= 16 and the `width` columns c of one group, whose records begin at w.
template <class W>
HWY_NOINLINE void multiply_group(tile_registers& tiles, float* const* out, const int8_block* const* x, std::size_t height,
                                 const grouped<W>* w, std::size_t records, std::size_t column, std::size_t width) noexcept {
  HWY_ALIGN float result[tile_height][group_rows] = {};
  HWY_ALIGN std::int32_t sums[tile_height][group_rows];
  HWY_ALIGN std::int8_t rows[tile_height][32];
  HWY_ALIGN detail::code_line space[8];
  constexpr std::size_t parts = grouped<W>::parts, columns = scale_columns<W>;
  for (std::size_t b = 0; b < records; ++b) {
    for (std::size_t i = 0; i < sizeof(*w); i += 64) prefetch_ahead(reinterpret_cast<const std::byte*>(w + b) + prefetch_distance + i);
    for (std::size_t p = 0; p < parts; ++p) {
      const auto& part = part_at(w[b], p);
      const detail::code_line* lines = lines_of<W>(space, part);
      const std::size_t block = b * parts + p;
      for (std::size_t m = 0; m < height; ++m) std::memcpy(rows[m], x[m][block].q, 32);
      for (std::size_t half = 0; half < 32 / columns; ++half) {
        tiles.multiply(sums, rows[0] + half * columns, 32, lines + half * columns / 4);
        for (std::size_t v = 0; v < line_vectors; ++v) {
          const vec scale = scales_of(w[b], part, half, v);
          for (std::size_t m = 0; m < height; ++m) {
            float* to = result[m] + v * lanes;
            const vec sum = hn::ConvertTo(floats(), hn::Load(words(), sums[m] + v * lanes));
            store(hn::MulAdd(sum, hn::Mul(scale, set(x[m][block].d)), load(to)), to);
          }
        }
      }
      if constexpr (has_minimum<W>)
        for (std::size_t v = 0; v < line_vectors; ++v) {
          const vec minimum = hn::Neg(hn::Mul(load(w[b].dmin + v * lanes), load(part.minimum + v * lanes)));
          for (std::size_t m = 0; m < height; ++m) {
            float* to = result[m] + v * lanes;
            store(hn::MulAdd(minimum, set(x[m][block].sum), load(to)), to);
          }
        }
    }
  }
  for (std::size_t m = 0; m < height; ++m) std::memcpy(out[m] + column, result[m], width * sizeof(float));
}

/// out[m][c] = x[m] · w(c) for m < rows and the columns c of the groups begin … end - 1.
template <class W>
void int8_matmul(float* const* out, const int8_block* const* x, std::size_t rows, weight_view<grouped<W>> w, std::size_t begin,
                 std::size_t end) noexcept {
  if (rows < least_rows) return vnni::int8_matmul<W>(out, x, rows, w, begin, end);
  const std::size_t height = divide_up(rows, divide_up(rows, tile_height));
  tile_registers tiles(height, scale_columns<W>);
  for (std::size_t g = begin; g < end; ++g)
    for (std::size_t first = 0; first < rows; first += height) {
      const std::size_t begin_row = (std::min)(first, rows - height);  // the last tile repeats rows of the one before
      multiply_group<W>(tiles, out + begin_row, x + begin_row, height, w.group(g), w.cols / grouped<W>::elements, g * group_rows,
                        (std::min)(group_rows, w.rows - g * group_rows));
    }
}

/// This way's entry of the kernel table.
template <class... G>
constexpr auto int8_table(type_list<G...>) {
  return std::tuple{detail::int8_kernels<G>{int8_matmul, widen_row}...};
}

}  // namespace amx
}  // namespace HWY_NAMESPACE
}  // namespace outrider
HWY_AFTER_NAMESPACE();

#endif
