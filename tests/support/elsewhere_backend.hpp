// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "counting_space.hpp"
#include "outrider/backend/reference.hpp"

namespace outrider::testing {

/// The reference on a device that is none: its tensors lie in counting_space.
struct elsewhere {};

/// Its context; done is done when an op returns.
class elsewhere_context : public reference_context {
 public:
  using reference_context::reference_context;
  void wait() const noexcept {}
  [[nodiscard]] std::span<token_id> exchange() const noexcept { return shared(); }
  /// Where ops find an id: in the device's memory, or in that which both sides reach.
  template <class T>
  [[nodiscard]] static T* reach(T* ids) noexcept {
    const auto begin = reinterpret_cast<std::uintptr_t>(shared().data()), at = reinterpret_cast<std::uintptr_t>(ids);
    return at >= begin && at < begin + shared().size_bytes() ? ids : counting_space::reveal(ids);
  }

 private:
  static std::span<token_id> shared() noexcept {
    static token_id ids[64];
    return ids;
  }
};

// Views as the device sees them.
template <class T>
matrix_view<T> here(matrix_view<T, counting_space> x) noexcept {
  return {counting_space::reveal(x.data), x.rows, x.cols, x.stride};
}
template <class W>
weight_view<W> here(weight_view<W, counting_space> w) noexcept {
  return {counting_space::reveal(w.data), w.rows, w.cols, w.stride};
}
template <class T>
const T* here(const T* p) noexcept {
  return counting_space::reveal(p);
}
/// A cache of `end` positions; the table it points to is `table`.
template <class Kv>
kv_view<Kv> here(kv_view<Kv, counting_space> cache, std::size_t end, std::vector<Kv*>& table) {
  table.resize(cache.ring_rows != 0 ? 1 : divide_up(end, cache.block_rows));
  for (std::size_t b = 0; b < table.size(); ++b) table[b] = counting_space::reveal(counting_space::reveal(cache.blocks)[b]);
  return {table.data(), cache.block_rows, cache.ring_rows, cache.heads, cache.head_dim};
}

}  // namespace outrider::testing

namespace outrider {

template <>
struct backend_traits<testing::elsewhere> {
  using space = testing::counting_space;
  using context = testing::elsewhere_context;
  static constexpr std::string_view name() noexcept { return "elsewhere"; }
  static constexpr std::string_view simd() noexcept { return "scalar"; }
};

template <class W>
  requires listed_weight<W> || listed_group<W>
struct linear_ops<testing::elsewhere, W> {
  using host = linear_ops<reference, W>;
  using context = testing::elsewhere_context;
  template <class T>
  using rows = matrix_view<T, testing::counting_space>;
  using weights = weight_view<W, testing::counting_space>;
  using input = rows<std::conditional_t<listed_group<W>, const int8_block, const float>>;

  static void matmul(context& ctx, rows<float> out, input x, weights w) noexcept { host::matmul(ctx, here(out), here(x), here(w)); }
  static void matmul_prompt(context& ctx, rows<float> out, input x, weights w) noexcept { host::matmul(ctx, here(out), here(x), here(w)); }
  static void expert_matmul(context& ctx, rows<float> out, input x, weights w, const std::int32_t* experts) noexcept {
    host::expert_matmul(ctx, here(out), here(x), here(w), testing::here(experts));
  }
  static void gathered_matmul(context& ctx, rows<float> out, input x, weights w, rows<const token_id> ids) noexcept {
    if constexpr (listed_weight<W>) host::gathered_matmul(ctx, here(out), here(x), here(w), here(ids));
  }
  static void gather_rows(context& ctx, rows<float> out, weights w, const token_id* ids, float factor) noexcept {
    host::gather_rows(ctx, here(out), here(w), context::reach(ids), factor);
  }
};

template <>
struct pointwise_ops<testing::elsewhere> {
  using host = pointwise_ops<reference>;
  using context = testing::elsewhere_context;
  template <class T>
  using rows = matrix_view<T, testing::counting_space>;

  static void rms_norm(context& ctx, rows<float> out, rows<const float> x, const float* weight, float eps) noexcept {
    host::rms_norm(ctx, here(out), here(x), testing::here(weight), eps);
  }
  static void rope_table(context& ctx, rows<float> cos, rows<float> sin, const std::int32_t* positions, const float* frequencies) noexcept {
    host::rope_table(ctx, here(cos), here(sin), positions, testing::here(frequencies));
  }
  static void rope(context& ctx, rows<float> x, rows<const float> cos, rows<const float> sin) noexcept {
    host::rope(ctx, here(x), here(cos), here(sin));
  }
  static void gelu_mul(context& ctx, rows<float> out, rows<const float> gate, rows<const float> up) noexcept {
    host::gelu_mul(ctx, here(out), here(gate), here(up));
  }
  static void add(context& ctx, rows<float> out, rows<const float> x, rows<const float> y) noexcept {
    host::add(ctx, here(out), here(x), here(y));
  }
  static void scale(context& ctx, rows<float> out, rows<const float> x, float factor) noexcept {
    host::scale(ctx, here(out), here(x), factor);
  }
  static void copy(context& ctx, rows<float> out, rows<const float> x) noexcept { host::copy(ctx, here(out), here(x)); }
  static void softcap(context& ctx, rows<float> out, rows<const float> x, float cap) noexcept {
    host::softcap(ctx, here(out), here(x), cap);
  }
  static void quantize(context& ctx, rows<int8_block> out, rows<const float> x) noexcept { host::quantize(ctx, here(out), here(x)); }
  static void top_k(context& ctx, rows<std::int32_t> ids, rows<const float> x) noexcept { host::top_k(ctx, here(ids), here(x)); }
  static void argmax(context& ctx, token_id* out, rows<const float> x, rows<const token_id> ids) noexcept {
    host::argmax(ctx, context::reach(out), here(x), here(ids));
  }
  static void mask(context& ctx, rows<float> x, rows<const token_id> ids, const token_id* banned, std::size_t count) noexcept {
    host::mask(ctx, here(x), here(ids), banned, count);
  }
  static void gather_ids(context& ctx, rows<token_id> out, rows<const token_id> table, rows<const std::int32_t> from) noexcept {
    host::gather_ids(ctx, here(out), here(table), here(from));
  }
  static void scatter_logits(context& ctx, rows<float> out, rows<const float> x, rows<const token_id> ids) noexcept {
    host::scatter_logits(ctx, here(out), here(x), here(ids));
  }
  static void route_experts(context& ctx, rows<std::int32_t> experts, rows<float> weights, rows<float> logits,
                            const float* scales) noexcept {
    host::route_experts(ctx, here(experts), here(weights), here(logits), testing::here(scales));
  }
  static void weighted_sum(context& ctx, rows<float> out, rows<const float> x, rows<const float> weights) noexcept {
    host::weighted_sum(ctx, here(out), here(x), here(weights));
  }
};

template <listed_kv Kv>
struct attention_ops<testing::elsewhere, Kv> {
  using host = attention_ops<reference, Kv>;
  using context = testing::elsewhere_context;
  template <class T>
  using rows = matrix_view<T, testing::counting_space>;

  static void append(context& ctx, kv_view<Kv, testing::counting_space> cache, rows<const float> k, rows<const float> v,
                     std::size_t first) noexcept {
    std::vector<Kv*> table;
    host::append(ctx, here(cache, first + k.rows, table), here(k), here(v), first);
  }
  static void attend(context& ctx, rows<float> out, rows<const float> q, kv_view<const Kv, testing::counting_space> cache,
                     key_window window) noexcept {
    std::vector<const Kv*> table;
    host::attend(ctx, here(out), here(q), here(cache, window.first_end + q.rows - 1, table), window);
  }
};

static_assert(check_backend<testing::elsewhere>());

}  // namespace outrider
