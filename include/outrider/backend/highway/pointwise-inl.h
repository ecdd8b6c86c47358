// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Row-wise arithmetic. An element's place in its row decides which code computes it (a whole vector or the last, partial one), never the
// number of rows: a row's bits are its own.
#if defined(OUTRIDER_BACKEND_HIGHWAY_POINTWISE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUTRIDER_BACKEND_HIGHWAY_POINTWISE_INL_H_
#undef OUTRIDER_BACKEND_HIGHWAY_POINTWISE_INL_H_
#else
#define OUTRIDER_BACKEND_HIGHWAY_POINTWISE_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>

#include <cmath>
#include <limits>

#include "outrider/backend/highway/compat-inl.h"
#include "outrider/core/view.hpp"

HWY_BEFORE_NAMESPACE();
namespace outrider {
namespace HWY_NAMESPACE {

/// out[c] = f(x[c], y[c]) for c < n; vectors of f are independent of each other.
template <class F>
HWY_INLINE void map(F f, float* out, const float* x, const float* y, std::size_t n) noexcept {
  std::size_t c = 0;
  for (; c + lanes <= n; c += lanes) store(f(load(x + c), load(y + c)), out + c);
  if (c < n) store_first(f(load_first(x + c, n - c), load_first(y + c, n - c)), out + c, n - c);
}
template <class F>
HWY_INLINE void map_rows(F f, matrix_view<float> out, matrix_view<const float> x, matrix_view<const float> y) noexcept {
  for (std::size_t r = 0; r < x.rows; ++r) map(f, out.row(r), x.row(r), y.row(r), x.cols);
}

struct add_of {
  HWY_INLINE vec operator()(vec x, vec y) const { return hn::Add(x, y); }
};
struct scaled {
  float factor;
  HWY_INLINE vec operator()(vec x, vec) const { return hn::Mul(x, set(factor)); }
};
struct scaled_product {
  float factor;
  HWY_INLINE vec operator()(vec x, vec y) const { return hn::Mul(hn::Mul(x, set(factor)), y); }
};
/// gelu_tanh(z) · u. With t = √(2/π)·(z + 0.044715·z³), ½·(1 + tanh t) is 1 / (1 + exp(−2t)), which loses no digits where tanh is near −1.
struct gelu_product {
  HWY_INLINE vec operator()(vec z, vec u) const {
    const vec t2 = hn::Mul(z, hn::MulAdd(hn::Mul(z, z), set(-0.0713548162726f), set(-1.5957691216057f)));  // −2t
    // exp is made for arguments up to 104, where it is infinite already; Min with a NaN may drop it, but z keeps it
    return hn::Mul(hn::Div(z, hn::Add(set(1.0f), hn::Exp(floats(), hn::Min(t2, set(104.0f))))), u);
  }
};
struct capped {
  float cap;
  HWY_INLINE vec operator()(vec x, vec) const { return hn::Mul(set(cap), hn::Tanh(floats(), hn::Div(x, set(cap)))); }
};

inline void add(matrix_view<float> out, matrix_view<const float> x, matrix_view<const float> y) noexcept { map_rows(add_of{}, out, x, y); }
inline void scale(matrix_view<float> out, matrix_view<const float> x, float factor) noexcept { map_rows(scaled{factor}, out, x, x); }
inline void gelu_mul(matrix_view<float> out, matrix_view<const float> gate, matrix_view<const float> up) noexcept {
  map_rows(gelu_product{}, out, gate, up);
}
inline void softcap(matrix_view<float> out, matrix_view<const float> x, float cap) noexcept { map_rows(capped{cap}, out, x, x); }

HWY_INLINE float sum_of_squares(const float* x, std::size_t n) noexcept {
  vec sum[4] = {zero(), zero(), zero(), zero()};
  std::size_t c = 0;
  for (; c + 4 * lanes <= n; c += 4 * lanes) {
    OUTRIDER_UNROLL
    for (std::size_t i = 0; i < 4; ++i) {
      const vec v = load(x + c + i * lanes);
      sum[i] = hn::MulAdd(v, v, sum[i]);
    }
  }
  for (; c < n; c += lanes) {
    const vec v = c + lanes <= n ? load(x + c) : load_first(x + c, n - c);
    sum[0] = hn::MulAdd(v, v, sum[0]);
  }
  return sum_of_lanes(hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3])));
}

inline void rms_norm(matrix_view<float> out, matrix_view<const float> x, const float* weight, float eps) noexcept {
  for (std::size_t r = 0; r < x.rows; ++r) {
    const double mean = double{sum_of_squares(x.row(r), x.cols)} / static_cast<double>(x.cols);
    const float factor = static_cast<float>(1 / std::sqrt(mean + double{eps}));
    if (weight) {
      map(scaled_product{factor}, out.row(r), x.row(r), weight, x.cols);
    } else {
      map(scaled{factor}, out.row(r), x.row(r), x.row(r), x.cols);
    }
  }
}

inline void rope(matrix_view<float> x, matrix_view<const float> cos, matrix_view<const float> sin, std::size_t first,
                 std::size_t heads) noexcept {
  const std::size_t h = cos.cols;
  for (std::size_t r = 0; r < x.rows; ++r) {
    float *low = x.row(r), *high = low + h;
    const float *c = cos.row((first + r) / heads), *s = sin.row((first + r) / heads);
    std::size_t i = 0;
    for (; i + lanes <= h; i += lanes) {
      const vec a = load(low + i), b = load(high + i), co = load(c + i), si = load(s + i);
      store(hn::NegMulAdd(b, si, hn::Mul(a, co)), low + i);
      store(hn::MulAdd(a, si, hn::Mul(b, co)), high + i);
    }
    if (i < h) {
      const std::size_t n = h - i;
      const vec a = load_first(low + i, n), b = load_first(high + i, n), co = load_first(c + i, n), si = load_first(s + i, n);
      store_first(hn::NegMulAdd(b, si, hn::Mul(a, co)), low + i, n);
      store_first(hn::MulAdd(a, si, hn::Mul(b, co)), high + i, n);
    }
  }
}

/// The largest number in x; −∞ if there is none.
HWY_INLINE float largest_of(const float* x, std::size_t n) noexcept {
  const vec lowest = set(-std::numeric_limits<float>::infinity());
  vec best = lowest;
  std::size_t c = 0;
  for (; c + lanes <= n; c += lanes) {
    const vec v = load(x + c);
    best = hn::Max(best, hn::IfThenElse(hn::IsNaN(v), lowest, v));
  }
  float largest = max_of_lanes(best);
  for (; c < n; ++c)
    if (x[c] > largest) largest = x[c];
  return largest;
}

inline void argmax(token_id* out, matrix_view<const float> x, matrix_view<const token_id> ids) noexcept {
  for (std::size_t r = 0; r < x.rows; ++r) {
    if (x.cols == 0) continue;
    const float* row = x.row(r);
    const float largest = largest_of(row, x.cols);
    bool found = false;
    token_id best = ids.data ? ids.row(r)[0] : 0;
    for (std::size_t c = 0; c < x.cols;) {
      if (c + lanes <= x.cols && hn::AllFalse(floats(), hn::Eq(load(row + c), set(largest)))) {
        c += lanes;
        continue;
      }
      for (const std::size_t end = HWY_MIN(c + lanes, x.cols); c < end; ++c) {
        const token_id id = ids.data ? ids.row(r)[c] : static_cast<token_id>(c);
        if (row[c] == largest && (!found || id < best)) {
          best = id;
          found = true;
        }
      }
      if (found && !ids.data) break;
    }
    out[r] = best;
  }
}

inline void weighted_sum(matrix_view<float> out, matrix_view<const float> x, matrix_view<const float> weights) noexcept {
  for (std::size_t r = 0; r < out.rows; ++r) {
    const float* w = weights.row(r);
    const float* terms = x.row(r * weights.cols);
    std::size_t c = 0;
    for (; c + lanes <= out.cols; c += lanes) {
      vec sum = zero();
      for (std::size_t j = 0; j < weights.cols; ++j) sum = hn::MulAdd(set(w[j]), load(terms + j * x.stride + c), sum);
      store(sum, out.row(r) + c);
    }
    if (c < out.cols) {
      vec sum = zero();
      for (std::size_t j = 0; j < weights.cols; ++j) sum = hn::MulAdd(set(w[j]), load_first(terms + j * x.stride + c, out.cols - c), sum);
      store_first(sum, out.row(r) + c, out.cols - c);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace outrider
HWY_AFTER_NAMESPACE();

#endif
