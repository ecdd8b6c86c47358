// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/io/gguf_value.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../support/write_gguf.hpp"

using outrider::io::gguf_file;
using outrider::io::gguf_type;
using outrider::io::gguf_value;
using outrider::testing::gguf_builder;

namespace {

/// The value of one pair, read from a file of it.
struct stored_value {
  std::string bytes;
  gguf_file file;

  explicit stored_value(const gguf_builder& builder) : bytes(builder.file()) {
    file = outrider::io::detail::gguf_reader(std::as_bytes(std::span(bytes)), "memory").read();
  }
  const gguf_value* operator->() const { return &file.pairs.at(0).value; }
};
template <class T>
stored_value one(const T& value) {
  return stored_value(gguf_builder().pair("k", value));
}
template <class T>
stored_value many(const std::vector<T>& values) {
  return stored_value(gguf_builder().array("k", values));
}

}  // namespace

TEST_CASE("whole numbers of every integer type are read, up to their limits") {
  CHECK(one(std::uint8_t{255})->integer() == 255);
  CHECK(one(std::int8_t{-128})->integer() == -128);
  CHECK(one(std::uint16_t{65535})->integer() == 65535);
  CHECK(one(std::int16_t{-32768})->integer() == -32768);
  CHECK(one(std::uint32_t{4294967295u})->integer() == 4294967295);
  CHECK(one((std::numeric_limits<std::int32_t>::min)())->integer() == -2147483648);
  CHECK(one(std::uint64_t{1} << 62)->integer() == std::int64_t{1} << 62);
  CHECK(one((std::numeric_limits<std::int64_t>::min)())->integer() == (std::numeric_limits<std::int64_t>::min)());
}

TEST_CASE("an unsigned number above 2^63 - 1 is no integer") {
  CHECK(one(std::uint64_t{1} << 63)->integer() == std::nullopt);
  CHECK(one(std::uint64_t{1} << 63)->number() == std::nullopt);
  CHECK(many<std::uint64_t>({1, std::uint64_t{1} << 63})->integers() == std::nullopt);
}

TEST_CASE("numbers are floats, doubles or integers") {
  CHECK(one(0.1f)->number() == double{0.1f});
  CHECK(one(0.1)->number() == 0.1);
  CHECK(one(std::int16_t{-3})->number() == -3.0);
}

TEST_CASE("a boolean is true if its byte is not zero") {
  CHECK(one(true)->boolean() == true);
  CHECK(one(false)->boolean() == false);
  CHECK(stored_value(gguf_builder().raw_pair("k", 7, "\x02"))->boolean() == true);
}

TEST_CASE("texts may be empty and hold any byte") {
  CHECK(one("")->text() == "");
  CHECK(one(std::string("a\0\xff", 3))->text() == std::string_view("a\0\xff", 3));
  CHECK(many<std::string>({"", "b", ""})->texts() == std::vector<std::string_view>{"", "b", ""});
}

TEST_CASE("arrays are read as what their elements are") {
  CHECK(many<std::int32_t>({1, -2})->integers() == std::vector<std::int64_t>{1, -2});
  CHECK(many<std::uint8_t>({1, 2})->numbers() == std::vector<double>{1, 2});
  CHECK(many<float>({0.5f})->numbers() == std::vector<double>{0.5});
  CHECK(many<bool>({true, false})->booleans() == std::vector<bool>{true, false});
}

TEST_CASE("pitfall 2: a value of another type than asked for gives nothing, even an array without elements") {
  const stored_value text = one("5"), flag = one(true), number = one(5.0f);
  CHECK(text->integer() == std::nullopt);
  CHECK(text->number() == std::nullopt);
  CHECK(text->boolean() == std::nullopt);
  CHECK(flag->integer() == std::nullopt);
  CHECK(flag->number() == std::nullopt);
  CHECK(number->integer() == std::nullopt);
  CHECK(number->text() == std::nullopt);
  CHECK(many<float>({1})->integers() == std::nullopt);
  CHECK(many<std::string>({})->integers() == std::nullopt);
  CHECK(many<std::string>({})->numbers() == std::nullopt);
  CHECK(many<bool>({})->numbers() == std::nullopt);
  CHECK(many<std::int32_t>({})->booleans() == std::nullopt);
  CHECK(many<std::int32_t>({})->texts() == std::nullopt);
  CHECK(many<std::int32_t>({})->integers() == std::vector<std::int64_t>{});
}

TEST_CASE("pitfall 2: an array is no single value, and a single value no array") {
  CHECK(many<std::int32_t>({5})->integer() == std::nullopt);
  CHECK(many<float>({5})->number() == std::nullopt);
  CHECK(many<bool>({true})->boolean() == std::nullopt);
  CHECK(many<std::string>({"5"})->text() == std::nullopt);
  CHECK(one(std::int32_t{5})->integers() == std::nullopt);
  CHECK(one("5")->texts() == std::nullopt);
}

TEST_CASE("values are equal if type and bytes are") {
  const auto equal = [](const stored_value& a, const stored_value& b) { return a.file.pairs[0].value == b.file.pairs[0].value; };
  CHECK(equal(one(5), one(5)));
  CHECK_FALSE(equal(one(5), one(6)));
  CHECK_FALSE(equal(one(5), one(5u)));
  CHECK_FALSE(equal(one(5), many<std::int32_t>({5})));
  CHECK(equal(many<std::string>({"a", "b"}), many<std::string>({"a", "b"})));
}

TEST_CASE("types have the names of the format") {
  CHECK(outrider::io::name_of(gguf_type::u8) == "UINT8");
  CHECK(outrider::io::name_of(gguf_type::boolean) == "BOOL");
  CHECK(outrider::io::name_of(gguf_type::f64) == "FLOAT64");
}
