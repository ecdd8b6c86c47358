// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "cuda_emulation/immediate_queue.hpp"

#include "outrider/backend/cuda/attention_shape.cuh"

#include <initializer_list>
#include <span>
#include <vector>

#include <doctest/doctest.h>

namespace {

using outrider::key_window;
using outrider::device::attention_piece;
using outrider::device::head_parts;
using outrider::device::span_lengths;
using sizes = std::initializer_list<std::size_t>;
using numbers = std::vector<std::size_t>;

struct model_shape {
  std::size_t q_heads, kv_heads, head_dim;
};
constexpr model_shape shapes[] = {{8, 1, 256},  {8, 1, 512}, {16, 8, 256}, {16, 1, 512}, {32, 16, 256},
                                  {32, 4, 512}, {3, 2, 96},  {1, 1, 1},    {2, 3, 2}};
/// As far as a configuration may go.
constexpr model_shape extremes[] = {{256, 1, 1024},  {256, 256, 1024}, {65536, 1, 2},     {65536, 65536, 2},    {1, 65536, 2},
                                    {65536, 3, 512}, {8, 1, 65536},    {65536, 1, 65536}, {65535, 65536, 65536}};

template <class Body>
void each_piece(const model_shape& shape, std::size_t rows, const key_window& window, Body body) {
  outrider::device::for_each_piece(outrider::device::queue::scratch_bytes, rows, window, head_parts(shape.q_heads, shape.kv_heads),
                                   shape.head_dim, body);
}

TEST_CASE("query heads read the KV head that the contract says, up to eight of them a block") {
  for (const auto& shapes_of : {std::span<const model_shape>(shapes), std::span<const model_shape>(extremes)})
    for (const model_shape& shape : shapes_of) {
      CAPTURE(shape.q_heads);
      CAPTURE(shape.kv_heads);
      const head_parts heads(shape.q_heads, shape.kv_heads);
      std::size_t next = 0, wrong = 0;
      for (unsigned part = 0; part < heads.count(); ++part) {
        const auto [kv_head, first, count] = heads[part];
        wrong += count > heads.each || (count != 0 && first != next) ? 1 : 0;
        for (unsigned i = 0; i < count; ++i, ++next) wrong += next * shape.kv_heads / shape.q_heads != kv_head ? 1 : 0;
      }
      CHECK(wrong == 0);
      CHECK(next == shape.q_heads);
      CHECK(heads.each <= 8);
    }
}

TEST_CASE("spans hold every position a row sees, once, and are cut by these positions and the model's shape alone") {
  for (const model_shape& shape : shapes)
    for (const std::size_t begin : sizes{0, 1, 15, 16, 17, 1000, 70000})
      for (const std::size_t n : sizes{0, 1, 15, 16, 17, 512, 513, 2016, 2017, 8064, 8192, 100000, 1 << 20}) {
        INFO("q_heads = ", shape.q_heads, ", head_dim = ", shape.head_dim, ", begin = ", begin, ", n = ", n);
        std::size_t length = 0;
        each_piece(shape, 1, {begin + n, n}, [&](std::size_t, const attention_piece& alone) {
          const unsigned first = alone.first_span(0), count = alone.span_count(0, 0);
          length = alone.length;
          CHECK(length % 16 == 0);
          CHECK(count <= 127);
          CHECK(count <= alone.spans);
          CHECK((count == 0) == (n == 0));
          if (n == 0) return;
          CHECK(first * length <= begin);
          CHECK(begin < (first + 1) * length);
          CHECK((first + count - 1) * length < begin + n);
          CHECK(begin + n <= (first + count) * length);
        });
        each_piece(shape, 300, {begin + n, n}, [&](std::size_t, const attention_piece& many) { CHECK(many.length == length); });
      }
}

TEST_CASE("spans are short while they are few, and longer where many heads make blocks enough") {
  const auto lengths_of = [](const model_shape& shape) {
    const span_lengths length(head_parts(shape.q_heads, shape.kv_heads), shape.head_dim);
    return numbers{length(100), length(512), length(1024), length(2048), length(8192), length(131072)};
  };
  CHECK(lengths_of({8, 1, 256}) == numbers{16, 16, 16, 32, 80, 1056});      // E2B, sliding layers see 512 keys
  CHECK(lengths_of({16, 8, 256}) == numbers{16, 16, 32, 64, 80, 1056});     // 12B, 1024 keys
  CHECK(lengths_of({16, 1, 512}) == numbers{16, 16, 16, 32, 80, 1056});     // and its full layers
  CHECK(lengths_of({32, 16, 256}) == numbers{16, 32, 64, 64, 80, 1056});    // 31B, 1024 keys
  CHECK(lengths_of({32, 4, 512}) == numbers{16, 16, 32, 64, 80, 1056});     // and its full layers
  CHECK(lengths_of({8, 1, 65536}) == numbers{64, 64, 80, 160, 592, 9376});  // 14 spans, that they fit into memory
}

TEST_CASE("a pass of any shape goes through the queue's memory in pieces that fit, all rows and heads once") {
  for (const auto& shapes_of : {std::span<const model_shape>(shapes), std::span<const model_shape>(extremes)})
    for (const model_shape& shape : shapes_of)
      for (const std::size_t keys : sizes{0, 1, 1000, 2010, 131072})
        for (const std::size_t width : sizes{1, 512, key_window::unlimited})
          for (const std::size_t m : sizes{0, 1, 2, 5, 8, 9, 70}) {
            INFO("q_heads = ", shape.q_heads, ", kv_heads = ", shape.kv_heads, ", head_dim = ", shape.head_dim, ", keys = ", keys,
                 ", width = ", width, ", m = ", m);
            const key_window window{keys, width};
            const std::size_t parts = head_parts(shape.q_heads, shape.kv_heads).count();
            std::size_t row = 0, part = 0, wrong = 0;
            each_piece(shape, m, window, [&](std::size_t first, const attention_piece& piece) {
              wrong += first != row || piece.first_part != part || piece.rows == 0 || piece.part_count == 0 ? 1 : 0;
              wrong += piece.sums() * (shape.head_dim + 2) * sizeof(float) > outrider::device::queue::scratch_bytes ? 1 : 0;
              wrong += piece.spans > 128 || piece.queries() > 8 || std::size_t{piece.part_count} * piece.heads.each > 65535 ? 1 : 0;
              for (std::size_t r = 0; r < piece.rows; ++r) {
                const std::size_t group = r / piece.group * piece.group;
                wrong += piece.window.end(r) != window.end(first + r) || piece.window.begin(r) != window.begin(first + r) ? 1 : 0;
                wrong += piece.first_span(r) - piece.first_span(group) + piece.span_count(r, r) > piece.spans ? 1 : 0;
              }
              part += piece.part_count;
              if (part != parts) return;
              part = 0;
              row += piece.rows;
            });
            CHECK(wrong == 0);
            CHECK(row == m);
            CHECK(part == 0);
          }
}

TEST_CASE("neighbouring rows share blocks as far as eight queries go, evenly") {
  const auto group_of = [](const model_shape& shape, std::size_t rows) {
    std::size_t group = 0;
    each_piece(shape, rows, {512, 512}, [&](std::size_t, const attention_piece& piece) { group = piece.group; });
    return group;
  };
  const auto groups_of = [&](const model_shape& shape) {
    return numbers{group_of(shape, 1), group_of(shape, 2), group_of(shape, 4), group_of(shape, 5), group_of(shape, 8), group_of(shape, 9)};
  };
  CHECK(groups_of({16, 8, 256}) == numbers{1, 2, 4, 3, 4, 3});
  CHECK(groups_of({8, 1, 256}) == numbers{1, 1, 1, 1, 1, 1});
  CHECK(groups_of({3, 3, 256}) == numbers{1, 2, 4, 5, 8, 5});
}

}  // namespace
