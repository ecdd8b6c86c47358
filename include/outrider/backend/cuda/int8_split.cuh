// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Products of grouped weights with up to 8 rows of int8 activations, for matrices of so few groups that a warp each would leave a device
// waiting for one long chain of instructions. The warps of a block share a group and split its columns. Most of them, the dot warps, compute
// what has no order, the terms, a unit of 8 parts each and round. What has an order comes one round later: in the chain warps every lane owns
// an output and takes its float steps, part by part, from the terms in shared memory.
#pragma once
#include <cstddef>
#include <cstdint>

#include "outrider/backend/cuda/device.cuh"
#include "outrider/backend/cuda/int8_fragments.cuh"
#include "outrider/backend/cuda/int8_shape.cuh"
#include "outrider/backend/cuda/int8_terms.cuh"
#include "outrider/backend/cuda/launchers.hpp"
#include "outrider/core/extents.hpp"

namespace outrider::device {

/// A lane's share of copying units to shared memory, in chunks of 16 bytes: of the weights, and of the row of x that is lane / 4.
template <class W>
class int8_unit_copies {
 public:
  using format = int8_format<W>;
  using shape = int8_split<W>;

  /// Of the `count` rows of x from `first_row` on, and of a group; of the units first_unit, first_unit + step, ….
  __device__ int8_unit_copies(rows<const int8_block> x, std::size_t first_row, int count, const grouped<W>* group, int first_unit, int step)
      : lane_(static_cast<int>(threadIdx.x) % 32),
        step_(step),
        copies_x_(lane_ / 4 < count),
        aligned_(reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0),
        share_(lane_, 0),
        weights_(reinterpret_cast<const uint4*>(group) + first_unit * weight_chunks + lane_),
        x_(reinterpret_cast<const std::uint32_t*>(x.row(first_row + (copies_x_ ? static_cast<std::size_t>(lane_ / 4) : 0))) +
           first_unit * x_words + chunk_words * (lane_ % 4)),
        weight_parts_(static_cast<int>(x.cols) - first_unit * shape::unit_parts),
        x_parts_(weight_parts_) {}

  // The next unit. One that ends beyond the row is filled with the last chunks, again and again, so that all of a stage can be read. Nothing
  // is copied of one that begins there.

  template <class Words>
  __device__ void copy_weights(const Words& words, int to) {
    const auto copy = [&](auto from) {
#pragma unroll
      for (int i = 0; i < share_.count; ++i)
        if (i < share_.count - 1 || share_.last) copy_async(words, to + chunk_words * share_.to[i], weights_ + from(share_.from[i]));
    };
    const int last = weight_parts_ * format::part_words / chunk_words - 1 - lane_;
    if (weight_parts_ >= shape::unit_parts)
      copy([](int chunk) { return chunk; });
    else if (format::parts == 1 && weight_parts_ > 0)
      copy([&](int chunk) { return chunk < last ? chunk : last; });
    weights_ += step_ * weight_chunks, weight_parts_ -= step_ * shape::unit_parts;
  }

  template <class Words>
  __device__ void copy_x(const Words& words, int to) {
    const auto copy = [&](auto copy_chunk) {
#pragma unroll
      for (int chunk = 0; chunk < x_words / chunk_words; chunk += 4)
        copy_chunk(to + lane_ / 4 * shape::row_words + chunk_words * (lane_ % 4 + chunk), chunk);
    };
    if (copies_x_ && aligned_ && x_parts_ >= shape::unit_parts) {
      copy([&](int at, int chunk) { copy_async(words, at, reinterpret_cast<const uint4*>(x_ + chunk_words * chunk)); });
    } else if (copies_x_ && x_parts_ > 0) {
      const int existing = x_parts_ < shape::unit_parts ? x_parts_ : shape::unit_parts;
      const int last = existing * shape::block_words / chunk_words - 1 - lane_ % 4;
      copy([&](int at, int chunk) {
        for (int word = 0; word < chunk_words; ++word)
          copy_async(words, at + word, x_ + chunk_words * (chunk < last ? chunk : last) + word);
      });
    }
    x_ += step_ * x_words, x_parts_ -= step_ * shape::unit_parts;
  }

 private:
  static constexpr int chunk_words = 4, weight_chunks = shape::stage_words / chunk_words, x_words = shape::unit_parts * shape::block_words;

  int lane_, step_;
  bool copies_x_, aligned_;
  int8_copies<W, 1, 2> share_;
  const uint4* weights_;  // the lane's first chunk of the next unit
  const std::uint32_t* x_;
  int weight_parts_, x_parts_;  // from the next unit on
};

/// out [m, n] = x · wᵀ for m <= 8, a block a group; the dot warps come first. With experts a block is for one row of out, whose weights begin
/// at row experts[row] · n, and block b has row b % m.
template <class W>
__global__ void __launch_bounds__(32 * int8_split<W>::most_warps(), 2)
    int8_split_product(rows<float> out, rows<const int8_block> x, weights<grouped<W>> w, const std::int32_t* experts) {
  using shape = int8_split<W>;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const unsigned tiles = experts ? static_cast<unsigned>(out.rows) : 1, tile = blockIdx.x % tiles, group = blockIdx.x / tiles;
  const std::size_t first_x = experts ? tile / (tiles / static_cast<unsigned>(x.rows)) : 0;
  const std::size_t first_group = group + (experts ? static_cast<std::size_t>(experts[tile]) * (out.cols / group_rows) : 0);
  const int count = experts ? 1 : static_cast<int>(out.rows), parts = static_cast<int>(x.cols);
  const int dot_warps = static_cast<int>(blockDim.x) / 32 - shape::pairs(count);
  const int units = static_cast<int>(divide_up(x.cols, shape::unit_parts));

  const int warp_words = shape::warp_words(count), terms_words = shape::terms_words(count);
  const auto shared = dynamic_shared<std::uint32_t>(0, dot_warps * warp_words);
  int written = shape::terms_at(count), read = written + terms_words;  // this round and the next one exchange them

  // A dot warp has the units `warp`, warp + dot_warps, …. It copies weights two rounds ahead, and the rows of x, which are in the second-level
  // cache, one round.
  const int weights_at = warp * warp_words, rows_at = weights_at + shape::stages * shape::stage_words;
  int8_unit_copies<W> copies(x, first_x, count, w.group(first_group), warp, dot_warps);
  const auto copy_weights = [&](int slot) {
    copies.copy_weights(shared, weights_at + slot * shape::stage_words);
    copy_async_commit();
  };
  const auto copy_x = [&](int slot) {
    copies.copy_x(shared, rows_at + slot * count * shape::row_words);
    copy_async_commit();
  };
  static_assert(shape::stages == 3 && shape::x_stages == 2);
  if (warp < dot_warps) copy_weights(0), copy_x(0), copy_weights(1);

  const int pair = warp - dot_warps, column = 2 * pair + lane % 2;  // of a lane of a chain warp
  float acc = 0.0f;
  const auto number = [&](int word) { return __uint_as_float(shared[word]); };
  // The chain over a round, whose units begin with `first` and whose terms lie at words[at], and in the other dot warps behind.
  const auto add_round = [&](int at, int first) {
    int sums_at = at + shape::sums_at(pair, 0, 0) + shape::within_sums(pair, lane);
    int scales_at = at + shape::scale_at(0, 0, lane / 2), x_at = at + shape::x_at(count, column, 0, 0);
    const int whole = parts / shape::unit_parts - first, last = whole < dot_warps ? whole : dot_warps;
    int8_terms<W> now, next;
    now.load(shared, sums_at, scales_at, x_at);
#pragma unroll 2
    for (int i = 0; i < last; ++i) {
      if (i + 1 < dot_warps && first + i + 1 < units) sums_at += warp_words, scales_at += warp_words, x_at += warp_words;
      next.load(shared, sums_at, scales_at, x_at);  // at the end one more time, for nothing
      acc = now.added_to(acc);
      now = next;
    }
    const int rest = int8_format<W>::parts == 1 && last < dot_warps ? parts % shape::unit_parts : 0;
    for (int i = 0; i < rest; ++i)
      acc = product_step<W>(static_cast<int>(shared[sums_at + 32 * i]), number(scales_at + shape::scale_at(i / 4, 0, 0) + i % 4),
                            number(x_at + i), acc);
  };

  // Round by round: the terms of the units from `first` on, and the chains over those of the round before.
  for (int first = 0, slot = 0, x_slot = 0; first < units + dot_warps; first += dot_warps) {
    const int before = first - dot_warps;
    if (warp >= dot_warps) {
      if (before >= 0 && column < count) add_round(read, before);
    } else if (first + warp < units) {
      copy_async_wait<1>();  // all but the weights of the next round have arrived
      __syncwarp();          // for all lanes, and nobody reads the unit before any more: the next copies may take its place
      copy_x(1 - x_slot);
      copy_weights(slot == 0 ? 2 : slot - 1);
      compute_terms<W>(shared, weights_at + slot * shape::stage_words, rows_at + x_slot * count * shape::row_words, weights_at + written,
                       count);
    }
    __syncthreads();  // the chains read what was written, and the next round writes where they have read
    const int swapped = written;
    written = read, read = swapped, slot = slot == 2 ? 0 : slot + 1, x_slot = 1 - x_slot;
  }
  copy_async_wait<0>();

  const std::size_t output = std::size_t{group} * group_rows + static_cast<std::size_t>(lane / 2);
  if (warp >= dot_warps && column < count && output < out.cols) out.row(tile + static_cast<std::size_t>(column))[output] = acc;
}

}  // namespace outrider::device
