// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/io/json.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <string_view>

#include "../support/refusal.hpp"

using outrider::error_code;
using outrider::io::parse_json;
using outrider::testing::mentions;
using outrider::testing::refusal;

namespace {

std::string refused(std::string_view text) {
  return refusal(error_code::file_malformed, [&] { static_cast<void>(parse_json(text, "some/config.json")); });
}

std::string nested(std::size_t levels) { return std::string(levels, '[') + std::string(levels, ']'); }

}  // namespace

TEST_CASE("a JSON text is the document nlohmann's own parser makes of it") {
  for (const std::string text : {R"({"a": [1, -2, 3.5e2, {"b": null}], "": "ü \u00e9 \n", "c": {"d": {}, "e": []}, "f": [true, false]})",
                                 "42", "\"text\"", "null", " [ [ ] , [ 1 , [ 2 ] ] ] ", "18446744073709551615", "-9223372036854775808"})
    CHECK(parse_json(text, "f") == nlohmann::json::parse(text));
}

TEST_CASE("integers keep their sign and width, anything else numeric is a float") {
  CHECK(parse_json("18446744073709551615", "f").is_number_unsigned());
  CHECK(parse_json("18446744073709551616", "f").is_number_float());
  CHECK(parse_json("-1", "f").is_number_integer());
  CHECK_FALSE(parse_json("-1", "f").is_number_unsigned());
  CHECK(parse_json("1.0", "f").is_number_float());
  CHECK(parse_json("1e2", "f").is_number_float());
}

TEST_CASE("what is not JSON is refused with the file and the byte") {
  CHECK(mentions(refused(""), "some/config.json", "byte 0", "unexpected end"));
  CHECK(mentions(refused("[1, 2"), "byte 5", "expected ']'"));
  CHECK(mentions(refused("[1, 2] x"), "byte 8"));
  CHECK(mentions(refused("[1,]"), "byte 4", "unexpected ']'"));
  CHECK(mentions(refused("{\"a\" 1}"), "expected ':'"));
  CHECK(mentions(refused("[NaN]"), "invalid literal"));
  CHECK(mentions(refused("\"\n\""), "control character"));
  CHECK(mentions(refused("1e999"), "number overflow"));
}

TEST_CASE("a text that is not UTF-8 is refused, and its bytes stay out of the message") {
  const std::string sentence = refused("\"\xff\"");
  CHECK(mentions(sentence, "UTF-8"));
  CHECK(sentence.find('\xff') == sentence.npos);
}

TEST_CASE("a zero byte does not end the text early") {
  CHECK(mentions(refused(std::string_view("{}\0[", 4)), "byte 2", "zero byte"));
  CHECK(mentions(refused(std::string_view("{}\0", 3)), "byte 2", "zero byte"));
}

TEST_CASE("pitfall 15: a key that is there twice in one object is refused") {
  CHECK(mentions(refused(R"({"x": {"name": 1, "other": 2, "name": 1}})"), "some/config.json", "byte 36", "'name'", "twice"));
  CHECK(mentions(refused(R"({"a": 1, "\u0061": 2})"), "'a'", "twice"));  // one name, spelt differently
}

TEST_CASE("the same key in different objects is fine") {
  CHECK(parse_json(R"({"a": {"a": {"a": 1}}, "b": [{"a": 2}, {"a": 3}]})", "f").at("b").at(1).at("a") == 3);
}

TEST_CASE("64 levels of nesting are read, 65 are refused") {
  CHECK_NOTHROW(static_cast<void>(parse_json(nested(64), "f")));
  CHECK(mentions(refused(nested(65)), "byte 65", "deeper than 64"));
}

TEST_CASE("a million open brackets cannot exhaust the stack") {
  CHECK(mentions(refused(std::string(1'000'000, '[')), "deeper than 64"));
  std::string objects;
  for (int i = 0; i < 1'000'000; ++i) objects += "{\"\":";
  CHECK(mentions(refused(objects), "deeper than 64"));
}

TEST_CASE("a small file cannot become a huge document") {
  std::string values = "[0";
  for (int i = 0; i < 2'000'000; ++i) values += ",0";
  CHECK(mentions(refused(values + "]"), "more than 2000000 values"));
}
