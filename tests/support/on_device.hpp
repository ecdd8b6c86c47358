// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A device backend as one on host memory, for tests that are written for those: every op copies what it is given to the device, padding
// included, runs there, and copies back what it may have written. Slow, and exactly what the device computes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <vector>

#include "outrider/backend/concepts.hpp"
#include "outrider/backend/traits.hpp"
#include "outrider/core/extents.hpp"
#include "outrider/core/space_copy.hpp"
#include "outrider/core/storage.hpp"

namespace outrider::testing {

template <class Device>
struct on_device {};

/// `count` elements of host memory, on the device.
template <class T, class Space>
class elements_there {
  using element = std::remove_const_t<T>;

 public:
  elements_there(T* here, std::size_t count) : here_(here), there_(here ? count : 0) {
    space_copy<host_space, Space>::copy(there_.data(), static_cast<const element*>(here), there_.size());
  }
  [[nodiscard]] element* data() noexcept { return there_.data(); }
  /// Brings everything back.
  void back() const { space_copy<Space, host_space>::copy(here_, there_.data(), there_.size()); }

 private:
  T* here_;
  buffer<element, Space> there_;
};

/// The same for a matrix, with what lies between its rows.
template <class T, class Space>
class matrix_there : public elements_there<T, Space> {
 public:
  explicit matrix_there(matrix_view<T> here)
      : elements_there<T, Space>(here.data, here.rows == 0 ? 0 : (here.rows - 1) * here.stride + here.cols), shape_(here) {}
  [[nodiscard]] matrix_view<T, Space> view() noexcept { return {this->data(), shape_.rows, shape_.cols, shape_.stride}; }

 private:
  matrix_view<T> shape_;
};

template <class W, class Space>
class weight_there : public elements_there<const W, Space> {
 public:
  explicit weight_there(weight_view<W> here)
      : elements_there<const W, Space>(here.data, here.rows == 0 ? 0 : (rows_of(here) - 1) * here.stride + here.cols / elements_of<W>),
        shape_(here) {}
  [[nodiscard]] weight_view<W, Space> view() noexcept { return {this->data(), shape_.rows, shape_.cols, shape_.stride}; }

 private:
  static std::size_t rows_of(const weight_view<W>& w) noexcept {
    if constexpr (listed_group<W>)
      return w.groups();
    else
      return w.rows;
  }
  weight_view<W> shape_;
};

/// A cache of `end` positions.
template <class Kv, class Space>
class cache_there {
  using element = std::remove_const_t<Kv>;

 public:
  cache_there(kv_view<Kv> here, std::size_t end) : here_(here), table_(here.ring_rows != 0 ? 1 : divide_up(end, here.block_rows)) {
    std::vector<element*> places;
    for (std::size_t b = 0; b < table_.size(); ++b)
      places.push_back(blocks_.emplace_back(here.blocks[b], 2 * here.heads * here.block_rows * here.stride()).data());
    space_copy<host_space, Space>::copy(table_.data(), places.data(), places.size());
  }
  [[nodiscard]] kv_view<Kv, Space> view() noexcept {
    return kv_view<element, Space>{table_.data(), here_.block_rows, here_.ring_rows, here_.heads, here_.head_dim};
  }
  void back() const {
    for (const auto& block : blocks_) block.back();
  }

 private:
  kv_view<Kv> here_;
  std::vector<elements_there<Kv, Space>> blocks_;
  buffer<element*, Space> table_;
};

}  // namespace outrider::testing

namespace outrider {

template <class Device>
struct backend_traits<testing::on_device<Device>> {
  using space = host_space;
  using context = context_of<Device>;
  static constexpr bool int8_products = prefers_int8_products<Device>;
  static std::string_view name() noexcept { return backend_traits<Device>::name(); }
  static std::string_view simd() noexcept { return backend_traits<Device>::simd(); }
};

template <class Device, class W>
  requires(listed_weight<W> || listed_group<W>)
struct linear_ops<testing::on_device<Device>, W> {
  using ops = linear_ops<Device, W>;
  using context = context_of<Device>;
  using space = space_of<Device>;
  using input = std::conditional_t<listed_group<W>, const int8_block, const float>;
  template <class T>
  using there = testing::matrix_there<T, space>;
  using weight = testing::weight_there<W, space>;

  static void matmul(context& ctx, matrix_view<float> out, matrix_view<input> x, weight_view<W> w) noexcept {
    there<float> o(out);
    ops::matmul(ctx, o.view(), there<input>(x).view(), weight(w).view());
    o.back();
  }
  static void matmul_prompt(context& ctx, matrix_view<float> out, matrix_view<input> x, weight_view<W> w) noexcept {
    if constexpr (listed_weight<W>) {
      there<float> o(out);
      ops::matmul_prompt(ctx, o.view(), there<input>(x).view(), weight(w).view());
      o.back();
    }
  }
  static void expert_matmul(context& ctx, matrix_view<float> out, matrix_view<input> x, weight_view<W> w,
                            const std::int32_t* experts) noexcept {
    there<float> o(out);
    testing::elements_there<const std::int32_t, space> e(experts, out.rows);
    ops::expert_matmul(ctx, o.view(), there<input>(x).view(), weight(w).view(), e.data());
    o.back();
  }
  static void gathered_matmul(context& ctx, matrix_view<float> out, matrix_view<input> x, weight_view<W> w,
                              matrix_view<const token_id> ids) noexcept {
    if constexpr (listed_weight<W>) {
      there<float> o(out);
      ops::gathered_matmul(ctx, o.view(), there<input>(x).view(), weight(w).view(), there<const token_id>(ids).view());
      o.back();
    }
  }
  static void gather_rows(context& ctx, matrix_view<float> out, weight_view<W> w, const token_id* ids, float factor) noexcept {
    there<float> o(out);
    testing::elements_there<const token_id, space> i(ids, out.rows);
    ops::gather_rows(ctx, o.view(), weight(w).view(), i.data(), factor);
    o.back();
  }
};

template <class Device>
struct pointwise_ops<testing::on_device<Device>> {
  using ops = pointwise_ops<Device>;
  using context = context_of<Device>;
  using space = space_of<Device>;
  template <class T>
  using there = testing::matrix_there<T, space>;
  template <class T>
  using list = testing::elements_there<const T, space>;

  static void rms_norm(context& ctx, matrix_view<float> out, matrix_view<const float> x, const float* weight, float eps) noexcept {
    binary(out, x, x, [&](auto o, auto a, auto) { ops::rms_norm(ctx, o, a, list<float>(weight, x.cols).data(), eps); });
  }
  static void rope_table(context& ctx, matrix_view<float> cos, matrix_view<float> sin, const std::int32_t* positions,
                         const float* frequencies) noexcept {
    there<float> c(cos), s(sin);
    list<float> f(frequencies, cos.cols);
    ops::rope_table(ctx, c.view(), s.view(), positions, f.data());
    c.back();
    s.back();
  }
  static void rope(context& ctx, matrix_view<float> x, matrix_view<const float> cos, matrix_view<const float> sin) noexcept {
    there<float> there_x(x);
    ops::rope(ctx, there_x.view(), there<const float>(cos).view(), there<const float>(sin).view());
    there_x.back();
  }
  static void gelu_mul(context& ctx, matrix_view<float> out, matrix_view<const float> gate, matrix_view<const float> up) noexcept {
    binary(out, gate, up, [&](auto o, auto a, auto b) { ops::gelu_mul(ctx, o, a, b); });
  }
  static void add(context& ctx, matrix_view<float> out, matrix_view<const float> x, matrix_view<const float> y) noexcept {
    binary(out, x, y, [&](auto o, auto a, auto b) { ops::add(ctx, o, a, b); });
  }
  static void scale(context& ctx, matrix_view<float> out, matrix_view<const float> x, float factor) noexcept {
    binary(out, x, x, [&](auto o, auto a, auto) { ops::scale(ctx, o, a, factor); });
  }
  static void copy(context& ctx, matrix_view<float> out, matrix_view<const float> x) noexcept {
    binary(out, x, x, [&](auto o, auto a, auto) { ops::copy(ctx, o, a); });
  }
  static void softcap(context& ctx, matrix_view<float> out, matrix_view<const float> x, float cap) noexcept {
    binary(out, x, x, [&](auto o, auto a, auto) { ops::softcap(ctx, o, a, cap); });
  }
  static void quantize(context& ctx, matrix_view<int8_block> out, matrix_view<const float> x) noexcept {
    there<int8_block> o(out);
    ops::quantize(ctx, o.view(), there<const float>(x).view());
    o.back();
  }
  static void top_k(context& ctx, matrix_view<std::int32_t> ids, matrix_view<const float> x) noexcept {
    there<std::int32_t> o(ids);
    ops::top_k(ctx, o.view(), there<const float>(x).view());
    o.back();
  }
  static void argmax(context& ctx, token_id* out, matrix_view<const float> x, matrix_view<const token_id> ids) noexcept {
    testing::elements_there<token_id, space> o(out, x.rows);
    there<const token_id> names(ids.data ? ids : matrix_view<const token_id>{});
    auto view = names.view();
    if (!ids.data) view = {};
    ops::argmax(ctx, o.data(), there<const float>(x).view(), view);
    o.back();
  }
  static void mask(context& ctx, matrix_view<float> x, matrix_view<const token_id> ids, const token_id* banned,
                   std::size_t count) noexcept {
    there<float> there_x(x);
    there<const token_id> names(ids.data ? ids : matrix_view<const token_id>{});
    auto view = names.view();
    if (!ids.data) view = {};
    ops::mask(ctx, there_x.view(), view, banned, count);
    there_x.back();
  }
  static void gather_ids(context& ctx, matrix_view<token_id> out, matrix_view<const token_id> table,
                         matrix_view<const std::int32_t> rows) noexcept {
    there<token_id> o(out);
    ops::gather_ids(ctx, o.view(), there<const token_id>(table).view(), there<const std::int32_t>(rows).view());
    o.back();
  }
  static void scatter_logits(context& ctx, matrix_view<float> out, matrix_view<const float> x, matrix_view<const token_id> ids) noexcept {
    there<float> o(out);
    ops::scatter_logits(ctx, o.view(), there<const float>(x).view(), there<const token_id>(ids).view());
    o.back();
  }
  static void route_experts(context& ctx, matrix_view<std::int32_t> experts, matrix_view<float> weights, matrix_view<float> logits,
                            const float* scales) noexcept {
    there<std::int32_t> e(experts);
    there<float> w(weights), l(logits);
    ops::route_experts(ctx, e.view(), w.view(), l.view(), list<float>(scales, logits.cols).data());
    e.back();
    w.back();
    l.back();
  }
  static void weighted_sum(context& ctx, matrix_view<float> out, matrix_view<const float> x, matrix_view<const float> weights) noexcept {
    binary(out, x, weights, [&](auto o, auto a, auto b) { ops::weighted_sum(ctx, o, a, b); });
  }

 private:
  /// Runs op(out, a, b); what is the same matrix here is the same one there, so that "in place" stays what it is.
  template <class Op>
  static void binary(matrix_view<float> out, matrix_view<const float> a, matrix_view<const float> b, Op op) noexcept {
    there<float> o(out);
    there<const float> other_a(a.data == out.data ? matrix_view<const float>{} : a);
    there<const float> other_b(b.data == out.data ? matrix_view<const float>{} : b);
    op(o.view(), a.data == out.data ? matrix_view<const float, space>(o.view()) : other_a.view(),
       b.data == out.data ? matrix_view<const float, space>(o.view()) : other_b.view());
    o.back();
  }
};

template <class Device, listed_kv Kv>
struct attention_ops<testing::on_device<Device>, Kv> {
  using ops = attention_ops<Device, Kv>;
  using context = context_of<Device>;
  using space = space_of<Device>;
  template <class T>
  using there = testing::matrix_there<T, space>;

  static void append(context& ctx, kv_view<Kv> cache, matrix_view<const float> k, matrix_view<const float> v, std::size_t first) noexcept {
    testing::cache_there<Kv, space> c(cache, first + k.rows);
    ops::append(ctx, c.view(), there<const float>(k).view(), there<const float>(v).view(), first);
    c.back();
  }
  static void attend(context& ctx, matrix_view<float> out, matrix_view<const float> q, kv_view<const Kv> cache,
                     key_window window) noexcept {
    there<float> o(out);
    testing::cache_there<const Kv, space> c(cache, q.rows == 0 ? 0 : window.end(q.rows - 1));
    ops::attend(ctx, o.view(), there<const float>(q).view(), c.view(), window);
    o.back();
  }
};

}  // namespace outrider
