// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/gemma4/weights.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "../support/refusal.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/core/dequantize.hpp"

namespace io = outrider::io;
using outrider::error_code;
using outrider::reference;
using outrider::weight_view;
using outrider::testing::mentions;
using outrider::testing::refusal;
using weight_store = outrider::gemma4::weight_store<reference>;

namespace {

/// One tensor "w" of that type and shape, its bytes 0, 1, 2, … beginning `shift` bytes behind an aligned address.
struct one_tensor {
  std::vector<std::byte> file;
  weight_store store;

  one_tensor(io::dtype type, const std::vector<std::size_t>& shape, std::size_t shift = 0)
      : file(shift + io::byte_size(type, shape).value()), store(tensors(type, shape, shift)) {}

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
  one_tensor made(io::dtype_of<W>, {3, 512}, shift);
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
      one_tensor made(type, {2, cols});
      const auto loaded = made.store.matrix("w", 2, cols);
      std::visit([&](const auto& view) { CHECK(view.stride == cols / 32); }, loaded);
    }
}

TEST_CASE("experts of a block format are stacked row by row") {
  one_tensor made(io::dtype::q8_0, {3, 2, 64});
  const auto view = std::get<weight_view<outrider::q8_0>>(made.store.stacked("w", 3, 2, 64));
  CHECK(view.rows == 6);
  CHECK(view.cols == 64);
  CHECK(view.stride == 2);
}

TEST_CASE("a type without products is refused with its name, the tensor's and those allowed") {
  for (const io::dtype type : {io::dtype::iq2_xs, io::dtype::nvfp4, io::dtype::q8_k, io::dtype::i32}) {
    one_tensor made(type, {1, 256});
    const std::string sentence = refusal(error_code::tensor_mismatch, [&] { static_cast<void>(made.store.matrix("w", 1, 256)); });
    CHECK(mentions(sentence, "x.gguf", "'w'", io::name_of(type), "F32, BF16, F16, Q4_0", "IQ4_XS, MXFP4"));
  }
}

TEST_CASE("a vector of blocks is refused with the types a vector may have") {
  one_tensor made(io::dtype::q8_0, {32});
  CHECK(mentions(refusal(error_code::tensor_mismatch, [&] { static_cast<void>(made.store.vector("w", 32)); }), "'w'", "Q8_0",
                 "F32, BF16 or F16"));
}

TEST_CASE("a store says which tensors it has") {
  one_tensor made(io::dtype::f32, {1});
  CHECK(made.store.has("w"));
  CHECK(!made.store.has("v"));
}
