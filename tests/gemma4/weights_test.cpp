// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/gemma4/weights.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "../support/elsewhere_backend.hpp"
#include "../support/refusal.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/core/dequantize.hpp"

namespace io = outrider::io;
using outrider::error_code;
using outrider::reference;
using outrider::weight_view;
using outrider::gemma4::load_options;
using outrider::gemma4::weight_form;
using outrider::testing::mentions;
using outrider::testing::refusal;

namespace {

/// The reference's ops, liking int8 products.
struct with_int8 {};

}  // namespace

template <>
struct outrider::backend_traits<with_int8> : outrider::backend_traits<reference> {
  static constexpr bool int8_products = true;
};

namespace {

/// One tensor "w" of that type and shape, its bytes 0, 1, 2, … beginning `shift` bytes behind an aligned address.
template <class B = reference>
struct one_tensor {
  std::vector<std::byte> file;
  outrider::gemma4::weight_store<B> store;

  one_tensor(io::dtype type, const std::vector<std::size_t>& shape, std::size_t shift = 0, weight_form form = weight_form::preferred)
      : file(shift + io::byte_size(type, shape).value()), store(tensors(type, shape, shift), form) {}

  std::shared_ptr<const io::tensor_set> tensors(io::dtype type, const std::vector<std::size_t>& shape, std::size_t shift) {
    for (std::size_t i = shift; i < file.size(); ++i) file[i] = static_cast<std::byte>((i - shift) % 64);  // halves below 2: no NaN
    return std::make_shared<io::tensor_set>("x.gguf", std::vector<io::tensor>{{"w", type, shape, std::span(file).subspan(shift), "x.gguf"}},
                                            nullptr);
  }
};

template <class W>
std::vector<float> weights_of(const weight_view<W>& view) {
  std::vector<float> weights;
  for (std::size_t r = 0; r < view.rows; ++r)
    outrider::for_each_weight(view.row(r), view.cols, [&](std::size_t, float weight) { weights.push_back(weight); });
  return weights;
}

/// The rows of "w" as floats, through the view the store gives.
template <class W>
std::vector<float> weights_at(std::size_t shift) {
  one_tensor<> made(io::dtype_of<W>, {3, 512}, shift);
  const auto loaded = made.store.matrix("w", 3, 512);
  REQUIRE(std::holds_alternative<weight_view<W>>(loaded));
  const auto& view = std::get<weight_view<W>>(loaded);
  CHECK(view.stride == 512 / outrider::elements_of<W>);
  if (shift == 0) CHECK(static_cast<const void*>(view.data) == made.file.data());
  return weights_of(view);
}

}  // namespace

TEST_CASE("a matrix of every weight type is used where it lies in the file, and copied where it lies across") {
  const auto check = [&]<class... W>(outrider::type_list<W...>) {
    const auto one = [&]<class Type>() {
      INFO("type ", io::name_of(io::dtype_of<Type>));
      CHECK(weights_at<Type>(0) == weights_at<Type>(1));
    };
    (one.template operator()<W>(), ...);
  };
  check(outrider::weight_types{});
}

TEST_CASE("pitfall 109: rows of 2112 and 704 load as the types their lengths allow") {
  for (const std::size_t cols : {2112u, 704u})
    for (const io::dtype type : {io::dtype::q5_0, io::dtype::q8_0, io::dtype::iq4_nl}) {
      CAPTURE(cols);
      one_tensor<> made(type, {2, cols});
      const auto loaded = made.store.matrix("w", 2, cols);
      std::visit([&](const auto& view) { CHECK(view.stride == cols / 32); }, loaded);
    }
}

TEST_CASE("experts of a block format are stacked row by row") {
  one_tensor<> made(io::dtype::q8_0, {3, 2, 64});
  const auto view = std::get<weight_view<outrider::q8_0>>(made.store.stacked("w", 3, 2, 64));
  CHECK(view.rows == 6);
  CHECK(view.cols == 64);
  CHECK(view.stride == 2);
}

TEST_CASE("a type without products is refused with its name, the tensor's and those allowed") {
  for (const io::dtype type : {io::dtype::iq2_xs, io::dtype::nvfp4, io::dtype::q8_k, io::dtype::i32}) {
    one_tensor<> made(type, {1, 256});
    const std::string sentence = refusal(error_code::tensor_mismatch, [&] { static_cast<void>(made.store.matrix("w", 1, 256)); });
    CHECK(mentions(sentence, "x.gguf", "'w'", io::name_of(type), "F32, BF16, F16, Q4_0", "IQ4_XS, MXFP4"));
  }
}

TEST_CASE("a vector of blocks is refused with the types a vector may have") {
  one_tensor<> made(io::dtype::q8_0, {32});
  CHECK(mentions(refusal(error_code::tensor_mismatch, [&] { static_cast<void>(made.store.vector("w", 32)); }), "'w'", "Q8_0",
                 "F32, BF16 or F16"));
}

TEST_CASE("a store says which tensors it has") {
  one_tensor<> made(io::dtype::f32, {1});
  CHECK(made.store.has("w"));
  CHECK(!made.store.has("v"));
}

namespace {

template <class W, class Weight>
bool in_groups(const Weight& weight) {
  return std::holds_alternative<weight_view<outrider::grouped<W>>>(weight);
}

/// The 17 rows of "w" as floats, through the groups the store makes of them.
template <class W>
std::vector<float> weights_in_groups(std::size_t shift) {
  one_tensor<> made(io::dtype_of<W>, {17, 256}, shift, weight_form::grouped);
  const auto loaded = made.store.matrix("w", 17, 256);
  made.store.rearrange({});
  REQUIRE(in_groups<W>(loaded));
  std::vector<outrider::token_id> ids(17);
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<float> weights(17 * 256);
  outrider::context_of<reference> ctx;
  outrider::linear_ops<reference, outrider::grouped<W>>::gather_rows(ctx, {weights.data(), 17, 256, 256},
                                                                     std::get<weight_view<outrider::grouped<W>>>(loaded), ids.data(), 1);
  return weights;
}

constexpr auto for_each_grouped = []<class Body, class... W>(Body&& body, outrider::type_list<outrider::grouped<W>...>) {
  (body.template operator()<W>(), ...);
};

}  // namespace

TEST_CASE("a matrix in groups has the weights of the file, wherever it lies there") {
  for_each_grouped(
      []<class W>() {
        INFO("type ", io::name_of(io::dtype_of<W>));
        one_tensor<> made(io::dtype_of<W>, {17, 256});
        const std::vector<float> want = weights_of(std::get<weight_view<W>>(made.store.matrix("w", 17, 256)));
        CHECK(weights_in_groups<W>(0) == want);
        CHECK(weights_in_groups<W>(1) == want);
      },
      outrider::grouped_types{});
}

TEST_CASE("types that have no form in groups stay in the file's memory when others are rearranged") {
  for (const io::dtype type : {io::dtype::f32, io::dtype::bf16, io::dtype::f16, io::dtype::q4_1, io::dtype::q5_0, io::dtype::q2_k}) {
    INFO("type ", io::name_of(type));
    one_tensor<> made(type, {16, 256}, 0, weight_form::grouped);
    const auto loaded = made.store.matrix("w", 16, 256);
    std::visit([&](const auto& view) { CHECK(static_cast<const void*>(view.data) == made.file.data()); }, loaded);
  }
}

TEST_CASE("stacked experts are kept in groups only if no group holds rows of two of them") {
  one_tensor<> whole(io::dtype::q8_0, {3, 32, 32}, 0, weight_form::grouped), odd(io::dtype::q8_0, {3, 24, 32}, 0, weight_form::grouped);
  CHECK(in_groups<outrider::q8_0>(whole.store.stacked("w", 3, 32, 32)));
  CHECK(std::holds_alternative<weight_view<outrider::q8_0>>(odd.store.stacked("w", 3, 24, 32)));
}

namespace {

/// Tensors "w0", "w1", … of these types, [rows, 64], each with bytes of its own.
template <class B>
struct several_tensors {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<outrider::gemma4::named_rows> parts;
  outrider::gemma4::weight_store<B> store;

  several_tensors(const std::vector<std::pair<io::dtype, std::size_t>>& made) : store(tensors(made), weight_form::preferred) {}

  std::shared_ptr<const io::tensor_set> tensors(const std::vector<std::pair<io::dtype, std::size_t>>& made) {
    std::vector<io::tensor> all;
    for (const auto& [type, rows] : made) {
      const std::vector<std::size_t> shape{rows, 64};
      std::vector<std::byte>& own = bytes.emplace_back(io::byte_size(type, shape).value());
      for (std::size_t i = 0; i < own.size(); ++i) own[i] = static_cast<std::byte>((7 * i + all.size()) % 64);
      parts.push_back({"w" + std::to_string(all.size()), rows});
      all.push_back({parts.back().name, type, shape, own, "x.gguf"});
    }
    return std::make_shared<io::tensor_set>("x.gguf", std::move(all), nullptr);
  }
};

}  // namespace

TEST_CASE("matrices of one type that are copied anyway can be joined, and have the weights of all of them") {
  several_tensors<with_int8> made({{io::dtype::q4_0, 32}, {io::dtype::q4_0, 16}, {io::dtype::q4_0, 48}});
  const auto joined = made.store.joined(made.parts, 64);
  REQUIRE(joined);
  std::vector<outrider::weight<with_int8>> alone;
  for (const auto& part : made.parts) alone.push_back(made.store.matrix(part.name, part.rows, 64));
  made.store.rearrange({});
  using grouped = outrider::grouped<outrider::q4_0>;
  const auto all = std::get<weight_view<grouped>>(*joined);
  CHECK(all.rows == 96);
  const grouped* next = all.data;
  for (const auto& weight : alone) {
    const auto view = std::get<weight_view<grouped>>(weight);
    CHECK(std::memcmp(next, view.data, view.groups() * view.stride * sizeof(grouped)) == 0);
    next += view.groups() * view.stride;
  }
}

TEST_CASE("on a device matrices as the file has them are joined, too") {
  several_tensors<outrider::testing::elsewhere> made({{io::dtype::bf16, 16}, {io::dtype::bf16, 32}});
  const auto joined = made.store.joined(made.parts, 64);
  REQUIRE(joined);
  made.store.rearrange({});
  const auto all = std::get<weight_view<outrider::bf16, outrider::testing::counting_space>>(*joined);
  CHECK(all.rows == 48);
  std::vector<outrider::bf16> here(48 * 64);
  outrider::space_copy<outrider::testing::counting_space, outrider::host_space>::copy(here.data(), all.data, here.size());
  CHECK(std::memcmp(here.data(), made.bytes[0].data(), made.bytes[0].size()) == 0);
  CHECK(std::memcmp(here.data() + 16 * 64, made.bytes[1].data(), made.bytes[1].size()) == 0);
}

TEST_CASE("matrices are not joined where they stay in the file, differ in type or would share a group") {
  const std::size_t columns = 64;
  several_tensors<reference> in_file({{io::dtype::bf16, 16}, {io::dtype::bf16, 16}});
  CHECK(!in_file.store.joined(in_file.parts, columns));
  several_tensors<with_int8> mixed({{io::dtype::q4_0, 16}, {io::dtype::q8_0, 16}}), odd({{io::dtype::q4_0, 16}, {io::dtype::q4_0, 24}});
  CHECK(!mixed.store.joined(mixed.parts, columns));
  CHECK(!odd.store.joined(odd.parts, columns));
  mixed.parts[1].rows = 17;
  CHECK(mentions(refusal(error_code::tensor_mismatch, [&] { static_cast<void>(mixed.store.joined(mixed.parts, columns)); }), "'w1'",
                 "[16, 64]", "[17, 64]"));
}

TEST_CASE("tables whose rows are looked up, and matrices whose single rows are multiplied, are never rearranged") {
  one_tensor<> made(io::dtype::q8_0, {32, 64}, 0, weight_form::grouped);
  const auto table = made.store.table("w", 32, 64);
  const auto matrix = made.store.stored_matrix("w", 32, 64);
  CHECK(static_cast<const void*>(std::get<weight_view<outrider::q8_0>>(table).data) == made.file.data());
  CHECK(static_cast<const void*>(std::get<weight_view<outrider::q8_0>>(matrix).data) == made.file.data());
}

TEST_CASE("matrices are kept as the backend likes it, unless the program says how") {
  const auto grouped = []<class B>(B, weight_form form) {
    one_tensor<B> made(io::dtype::q4_0, {16, 32}, 0, form);
    return in_groups<outrider::q4_0>(made.store.matrix("w", 16, 32));
  };
  CHECK(grouped(with_int8{}, weight_form::preferred));
  CHECK_FALSE(grouped(with_int8{}, weight_form::stored));
  CHECK_FALSE(grouped(reference{}, weight_form::preferred));
  CHECK(grouped(reference{}, weight_form::grouped));
}

TEST_CASE("memory for matrices in groups begins at lines of 64 bytes") {
  one_tensor<> made(io::dtype::q4_0, {16, 32}, 0, weight_form::grouped);  // a record of 288 bytes
  for (int i = 0; i < 3; ++i) {
    const auto loaded = std::get<weight_view<outrider::grouped<outrider::q4_0>>>(made.store.matrix("w", 16, 32));
    CHECK(reinterpret_cast<std::uintptr_t>(loaded.data) % 64 == 0);
  }
}

TEST_CASE("rearranging tells how far it is, up to the last byte, and has nothing to tell without matrices in groups") {
  std::vector<std::size_t> told;
  load_options options;
  options.progress = [&](std::size_t done, std::size_t all) {
    CHECK(all == 2 * 16 * 18);
    told.push_back(done);
  };
  one_tensor<> made(io::dtype::q4_0, {16, 32}, 0, weight_form::grouped);
  made.store.rearrange(options);
  CHECK(told.empty());
  static_cast<void>(made.store.matrix("w", 16, 32));
  static_cast<void>(made.store.matrix("w", 16, 32));
  made.store.rearrange(options);
  CHECK(told == std::vector<std::size_t>{16 * 18, 2 * 16 * 18});
}

TEST_CASE("what the progress callback throws ends the loading") {
  one_tensor<> made(io::dtype::q4_0, {16, 32}, 0, weight_form::grouped);
  static_cast<void>(made.store.matrix("w", 16, 32));
  load_options options;
  options.progress = [](std::size_t, std::size_t) { throw std::runtime_error("enough"); };
  CHECK_THROWS_WITH_AS(made.store.rearrange(options), "enough", std::runtime_error);
}
