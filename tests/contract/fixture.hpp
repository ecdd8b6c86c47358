// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What the contract tests share: poisoned matrices, exact random numbers, comparison within a derived bound, and the two properties every
// op has to keep: a row does not depend on its company, nor on the number of threads.
#pragma once
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "outrider/backend/concepts.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/view.hpp"

namespace contract {

using outrider::bf16;
using outrider::context_of;
using outrider::execution;
using outrider::f16;
using outrider::matrix_view;
using outrider::token_id;
using outrider::weight_view;

/// Unit roundoff of float: one correctly rounded operation is off by a factor of at most 1 ± u.
inline constexpr double u = 0x1p-24;

using sizes = std::initializer_list<std::size_t>;

// A test of a backend that is very slow, an emulated device, takes every n-th case of the longest loops alone.
#if !defined(OUTRIDER_CONTRACT_EVERY)
#define OUTRIDER_CONTRACT_EVERY 1
#endif
/// Whether the next case of such a loop is run. n is a prime, so that in the end every value of every loop is met.
inline bool takes_case() {
  static std::size_t count = 0;
  return count++ % OUTRIDER_CONTRACT_EVERY == 0;
}

/// Vector lengths around every register width up to 64 lanes, and some that need several rounds and a tail.
inline constexpr std::size_t lengths[] = {0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 256, 513};

template <class T>
inline constexpr std::string_view name_of = "?";
template <>
inline constexpr std::string_view name_of<float> = "f32";
template <>
inline constexpr std::string_view name_of<bf16> = "bf16";
template <>
inline constexpr std::string_view name_of<f16> = "f16";

/// Calls body.operator()<T>() for every type of the list.
template <class... T, class Body>
void for_each_type(outrider::type_list<T...>, Body body) {
  const auto one = [&]<class Type>() {
    INFO("element type ", name_of<Type>);
    body.template operator()<Type>();
  };
  (one.template operator()<T>(), ...);
}

/// What unused and unwritten places hold: a NaN, or an index that no array has.
template <class T>
T poison() noexcept {
  if constexpr (std::is_same_v<T, float>)
    return std::bit_cast<float>(0x7fd5a5a5u);
  else if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>)
    return std::bit_cast<T>(std::uint16_t{0x7fd5});
  else
    return T{0x6b6b6b6b};
}

template <class T>
bool same_bits(const T* a, const T* b, std::size_t count) noexcept {
  return count == 0 || std::memcmp(a, b, count * sizeof(T)) == 0;
}
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) noexcept {
  return a.size() == b.size() && same_bits(a.data(), b.data(), a.size());
}

using row_bits = std::vector<std::byte>;

/// An owned matrix [rows, cols] whose rows are cols + extra apart, poisoned throughout until written.
template <class T>
class padded {
 public:
  padded(std::size_t rows, std::size_t cols, std::size_t extra = 0)
      : rows_(rows), cols_(cols), stride_(cols + extra), elements_(rows * (cols + extra), poison<T>()) {}

  [[nodiscard]] T& operator()(std::size_t r, std::size_t c) noexcept { return elements_[r * stride_ + c]; }
  [[nodiscard]] const T& operator()(std::size_t r, std::size_t c) const noexcept { return elements_[r * stride_ + c]; }
  [[nodiscard]] std::size_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::size_t cols() const noexcept { return cols_; }
  [[nodiscard]] const T* data() const noexcept { return elements_.data(); }
  [[nodiscard]] const T* row(std::size_t r) const noexcept { return elements_.data() + r * stride_; }
  [[nodiscard]] matrix_view<T> view() noexcept { return {elements_.data(), rows_, cols_, stride_}; }
  [[nodiscard]] matrix_view<const T> view() const noexcept { return {elements_.data(), rows_, cols_, stride_}; }
  [[nodiscard]] matrix_view<const T> read() const noexcept { return view(); }
  [[nodiscard]] weight_view<T> weight() const noexcept { return {elements_.data(), rows_, cols_, stride_}; }

  template <class Next>
  padded& fill(Next next) {
    for (std::size_t r = 0; r < rows_; ++r)
      for (std::size_t c = 0; c < cols_; ++c) (*this)(r, c) = static_cast<T>(next());
    return *this;
  }
  /// Whether an op left everything between cols and stride alone.
  [[nodiscard]] bool padding_untouched() const {
    const T untouched = poison<T>();
    for (std::size_t r = 0; r < rows_; ++r)
      for (std::size_t c = cols_; c < stride_; ++c)
        if (!same_bits(&(*this)(r, c), &untouched, 1)) return false;
    return true;
  }
  /// Same shape and the same bits in every element; padding is not compared.
  [[nodiscard]] bool same_elements(const padded& other) const {
    bool same = rows_ == other.rows_ && cols_ == other.cols_;
    for (std::size_t r = 0; same && r < rows_; ++r) same = same_bits(row(r), other.row(r), cols_);
    return same;
  }
  /// The bits of the elements, row by row; `group` rows count as one.
  [[nodiscard]] std::vector<row_bits> bits(std::size_t group = 1) const {
    std::vector<row_bits> rows(rows_ / group);
    for (std::size_t r = 0; r < rows_; ++r) {
      const auto bytes = std::as_bytes(std::span(row(r), cols_));
      rows[r / group].insert(rows[r / group].end(), bytes.begin(), bytes.end());
    }
    return rows;
  }

 private:
  std::size_t rows_, cols_, stride_;
  std::vector<T> elements_;
};

/// Seeded numbers that are the same with every standard library.
class random_numbers {
 public:
  explicit random_numbers(std::uint64_t seed) : engine_(seed) {}
  /// Uniform in [-1, 1), all 24 bits of the significand in use.
  float uniform() { return static_cast<float>(static_cast<double>(engine_() >> 40) * 0x1p-23 - 1.0); }
  /// A multiple of 1/16 in [-limit/16, limit/16]: exact in every storage type, and sums of many products of two are exact in float.
  float grid(int limit = 16) { return static_cast<float>(static_cast<int>(below(static_cast<std::size_t>(2 * limit + 1))) - limit) / 16; }
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(engine_() % bound); }
  std::int32_t index(std::size_t bound) { return static_cast<std::int32_t>(below(bound)); }
  auto uniforms(float factor = 1) {
    return [this, factor] { return factor * uniform(); };
  }
  auto grids(int limit = 16) {
    return [this, limit] { return grid(limit); };
  }
  auto indexes(std::size_t bound) {
    return [this, bound] { return index(bound); };
  }

 private:
  std::mt19937_64 engine_;
};

/// |got − want| <= bound(r, c) for every element, and the padding of `got` is untouched.
template <class Bound>
void check_within(const padded<float>& got, const padded<float>& want, Bound bound) {
  for (std::size_t r = 0; r < got.rows(); ++r)
    for (std::size_t c = 0; c < got.cols(); ++c) {
      const double error = std::abs(double{got(r, c)} - double{want(r, c)}), allowed = bound(r, c);
      if (got(r, c) == want(r, c) || error <= allowed) continue;
      INFO("r = ", r, ", c = ", c, ", got(r, c) = ", got(r, c), ", want(r, c) = ", want(r, c), ", allowed = ", allowed);
      FAIL_CHECK("an element is further from its reference than rounding explains");
      return;
    }
  CHECK(got.padding_untouched());
}

template <class T>
void check_same(const padded<T>& got, const padded<T>& want) {
  CHECK(got.same_elements(want));
  CHECK(got.padding_untouched());
}

/// Stands for "any other row" in a list of source rows: its floats are NaN.
inline constexpr std::size_t stranger = static_cast<std::size_t>(-1);
inline constexpr std::size_t source_rows = 17;

/// The rows of `source` named by `rows`, strangers poisoned (indexes of a stranger are those of row 0: they have to be valid).
template <class T>
padded<T> pick(const padded<T>& source, std::span<const std::size_t> rows, std::size_t extra = 0) {
  padded<T> picked(rows.size(), source.cols(), extra);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (rows[r] == stranger && std::is_same_v<T, float>) continue;
    for (std::size_t c = 0; c < source.cols(); ++c) picked(r, c) = source(rows[r] == stranger ? 0 : rows[r], c);
  }
  return picked;
}

/// Runs an op on the source rows named and returns the bits of each row's result.
template <class B>
using row_op = std::function<std::vector<row_bits>(context_of<B>& ctx, std::span<const std::size_t> rows)>;

/// Pitfall 126: every row, in every place of batches of 1 … 9, 17 and 65 rows, beside its neighbours or beside NaN, has the bits it has alone.
template <class B>
void check_rows_are_independent(const row_op<B>& op) {
  context_of<B> ctx(execution{1});
  std::vector<row_bits> alone;
  for (std::size_t r = 0; r < source_rows; ++r) alone.push_back(op(ctx, std::vector{r})[0]);

  const auto agree = [&](const std::vector<std::size_t>& rows) {
    const std::vector<row_bits> together = op(ctx, rows);
    bool same = together.size() == rows.size();
    for (std::size_t r = 0; same && r < rows.size(); ++r) same = rows[r] == stranger || together[r] == alone[rows[r]];
    return same;
  };
  for (const std::size_t m : sizes{1, 2, 3, 4, 5, 6, 7, 8, 9, 17}) {
    CAPTURE(m);
    std::vector<std::size_t> rows(m);
    std::iota(rows.begin(), rows.end(), std::size_t{0});
    CHECK_MESSAGE(agree(rows), "a row computed among others differs from the row alone");
    std::iota(rows.rbegin(), rows.rend(), source_rows - m);
    CHECK_MESSAGE(agree(rows), "a row computed in another place differs from the row alone");
    for (std::size_t place = 0; place < m; ++place) {
      if (!takes_case()) continue;
      std::vector<std::size_t> among_strangers(m, stranger);
      among_strangers[place] = place;
      CAPTURE(place);
      CHECK_MESSAGE(agree(among_strangers), "a row takes something from the rows beside it");
    }
  }
  std::vector<std::size_t> many(65);  // more than a kernel holds at once
  for (std::size_t i = 0; i < many.size(); ++i) many[i] = i % source_rows;
  CHECK_MESSAGE(agree(many), "a row of a large batch differs from the row alone");
}

/// The same bits with 1, 2 and 3 threads, for small and larger batches.
template <class B>
void check_threads_do_not_matter(const row_op<B>& op) {
  for (const std::size_t m : sizes{1, 2, 5, 17}) {
    std::vector<std::size_t> rows(m);
    std::iota(rows.begin(), rows.end(), std::size_t{0});
    context_of<B> one(execution{1});
    const std::vector<row_bits> expected = op(one, rows);
    for (const unsigned threads : {2u, 3u}) {
      if (!takes_case()) continue;
      INFO("m = ", m, ", threads = ", threads);
      context_of<B> several(execution{threads});
      CHECK_MESSAGE(op(several, rows) == expected, "the number of threads changed a bit");
    }
  }
}

}  // namespace contract
