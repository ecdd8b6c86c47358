// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Attention over a kernel table: how the work is cut. See ops.hpp of this folder.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <tuple>

#include "outrider/backend/highway/kernel_table.hpp"
#include "outrider/backend/highway/ops.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/core/extents.hpp"
#include "outrider/core/kv_view.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/storage.hpp"
#include "outrider/core/view.hpp"

namespace outrider::detail {

/// Room for the parts of queries whose keys are cut into spans. A context of a backend owns one; its memory is not touched before there are some.
class attention_parts {
 public:
  attention_parts() : parts_(most_parts), sums_(floats) {}

  [[nodiscard]] attention_part* parts() noexcept { return parts_.data(); }
  [[nodiscard]] float* sums() noexcept { return sums_.data(); }
  /// How many parts of heads of size d there is room for.
  [[nodiscard]] static constexpr std::size_t room(std::size_t d) noexcept { return (std::min)(most_parts, floats / d); }

 private:
  static constexpr std::size_t most_parts = 4096, floats = std::size_t{1} << 19;  // of heads of 512, a group and all its spans
  buffer<attention_part, host_space> parts_;
  buffer<float, host_space> sums_;
};

/// attention_ops over attention_kernels<Kv>. The queries that read one KV head go through its keys in groups. Their keys are cut into spans at
/// multiples of a length that follows from how many a query sees, and the spans' results are joined in order: so threads share long contexts,
/// each reading its own keys, and how many threads there are changes no bit.
template <class Context, class Kv>
struct simd_attention {
  using context = Context;

  static void append(context&, kv_view<Kv> cache, matrix_view<const float> k, matrix_view<const float> v, std::size_t first) noexcept {
    reference_context scalar;
    attention_ops<reference, Kv>::append(scalar, cache, k, v, first);
  }

  static void attend(context& ctx, matrix_view<float> out, matrix_view<const float> q, kv_view<const Kv> cache,
                     key_window window) noexcept {
    const std::size_t ratio = q.cols / cache.head_dim / cache.heads, per_head = q.rows * ratio;
    pass all{ctx, out, q, cache, window, ratio};
    const std::size_t most = all.most_queries();
    for (std::size_t head = 0; head < cache.heads; ++head)
      for (std::size_t first = 0; first < per_head;) {
        const group next = all.group_from(head, first, (std::min)(first + most, per_head));
        all.add(next);
        first += next.queries;
      }
    all.run();
  }

 private:
  /// The length of the spans of a query that sees n keys: as short as they can be, with few of them.
  static constexpr std::size_t span_length(std::size_t n, std::size_t d) noexcept {
    constexpr std::size_t shortest = 256;
    if (attention_parts::room(d) < attention_group * (most_spans + 2)) return key_window::unlimited;  // huge heads
    std::size_t length = shortest;
    while (n > most_spans * length) length *= 2;
    return length;
  }

  /// Queries of one KV head with spans of the same length. Query i of a head is head i mod ratio of the heads that share it, in row i / ratio.
  struct group {
    std::size_t head = 0, first = 0, queries = 0;
    std::size_t length = 0, first_span = 0, spans = 0;
    std::size_t first_item = 0, first_part = 0, first_join = 0;

    /// A single span is summed in the output itself; more are joined, and take room for their parts.
    [[nodiscard]] std::size_t joins() const noexcept { return spans == 1 ? 0 : queries; }
    [[nodiscard]] std::size_t parts() const noexcept { return joins() * spans; }
  };

  /// A call of attend: collects groups, and runs them where there are many enough or no room for more. An item is a span of a group.
  struct pass {
    context& ctx;
    matrix_view<float> out;
    matrix_view<const float> q;
    kv_view<const Kv> cache;
    key_window window;
    std::size_t ratio;
    std::array<group, 64> groups = {};
    std::size_t count = 0, items = 0, parts = 0, joins = 0;

    /// How many queries a group may have: fewer where their spans alone are not enough for all threads.
    [[nodiscard]] std::size_t most_queries() const noexcept {
      if (q.rows == 0) return 1;
      const std::size_t keys = window.end(q.rows - 1) - window.begin(q.rows - 1), queries = q.rows * ratio;
      if (keys * bytes_of_key() < bytes_per_range) return attention_group;
      const std::size_t enough = divide_up(ctx.threads(), divide_up(keys, span_length(keys, cache.head_dim)) * cache.heads);
      return (std::min)(attention_group, divide_up(queries, enough));
    }

    [[nodiscard]] group group_from(std::size_t head, std::size_t first, std::size_t end) const noexcept {
      const auto length = [&](std::size_t query) {
        return span_length(window.end(query / ratio) - window.begin(query / ratio), cache.head_dim);
      };
      group g{head, first, 1, length(first)};
      while (first + g.queries < end && length(first + g.queries) == g.length) ++g.queries;
      const std::size_t begin = window.begin(first / ratio), stop = window.end((first + g.queries - 1) / ratio);
      g.first_span = begin / g.length;
      g.spans = begin < stop ? (stop - 1) / g.length - g.first_span + 1 : 1;
      return g;
    }

    void add(group g) noexcept {
      if (count == groups.size() || parts + g.parts() > attention_parts::room(cache.head_dim)) run();
      g.first_item = items;
      g.first_part = parts;
      g.first_join = joins;
      groups[count++] = g;
      items += g.spans;
      parts += g.parts();
      joins += g.joins();
    }

    void run() noexcept {
      if (count == 0) return;
      const std::size_t keys = (std::min)(window.end(q.rows - 1) - window.begin(q.rows - 1), groups[0].length);
      ctx.team().for_ranges(items, grain_of(keys * bytes_of_key()), [&](std::size_t begin, std::size_t end) {
        const group* g = groups.data();
        for (std::size_t item = begin; item < end; ++item) {
          while (item >= g->first_item + g->spans) ++g;
          add_span(*g, item - g->first_item);
        }
      });
      ctx.team().for_ranges(joins, grain_of(most_spans * cache.head_dim * sizeof(float)), [&](std::size_t begin, std::size_t end) {
        const group* g = groups.data();
        for (std::size_t i = begin; i < end; ++i) {
          while (i >= g->first_join + g->joins()) ++g;
          const std::size_t query = i - g->first_join;
          kernels().join(out_of(*g, query), ctx.attention().parts() + g->first_part + query * g->spans, g->spans, cache.head_dim);
        }
      });
      count = items = parts = joins = 0;
    }

    void add_span(const group& g, std::size_t span) const noexcept {
      const std::size_t begin = (g.first_span + span) * g.length, end = g.length == key_window::unlimited ? g.length : begin + g.length;
      std::array<attention_part, attention_group> queries;
      for (std::size_t i = 0; i < g.queries; ++i) {
        const std::size_t row = (g.first + i) / ratio, part = g.first_part + i * g.spans + span;
        float* const sum = g.spans == 1 ? out_of(g, i) : ctx.attention().sums() + part * cache.head_dim;
        queries[i] = {q.row(row) + column_of(g, i), sum, (std::max)(begin, window.begin(row)), (std::min)(end, window.end(row)), 0, 0};
      }
      kernels().add_keys(queries.data(), g.queries, cache, g.head);
      for (std::size_t i = 0; i < g.queries; ++i) {
        if (g.spans == 1)
          kernels().join(queries[i].sum, &queries[i], 1, cache.head_dim);
        else
          ctx.attention().parts()[g.first_part + i * g.spans + span] = queries[i];
      }
    }

    [[nodiscard]] const attention_kernels<Kv>& kernels() const noexcept { return std::get<attention_kernels<Kv>>(ctx.kernels().attention); }
    [[nodiscard]] std::size_t bytes_of_key() const noexcept { return 2 * cache.stride() * sizeof(Kv); }
    [[nodiscard]] std::size_t column_of(const group& g, std::size_t i) const noexcept {
      return (g.head * ratio + (g.first + i) % ratio) * cache.head_dim;
    }
    [[nodiscard]] float* out_of(const group& g, std::size_t i) const noexcept { return out.row((g.first + i) / ratio) + column_of(g, i); }
  };
};

}  // namespace outrider::detail
