// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/decode/padding.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/io/safetensors.hpp"
#include "support/refusal.hpp"

namespace {

using namespace outrider;
using testing::mentions;
using testing::refusal;
using ids = std::vector<token_id>;
using mask = std::vector<std::int64_t>;

bool same(std::span<const token_id> a, const ids& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

std::string refused(const ids& tokens, const mask& places) {
  return refusal(error_code::argument_invalid, [&] { static_cast<void>(strip_left_padding(tokens, places)); });
}
std::string refused(const ids& tokens, const mask& places, std::size_t rows) {
  return refusal(error_code::argument_invalid, [&] { static_cast<void>(strip_left_padding_rows(tokens, places, rows)); });
}

}  // namespace

TEST_CASE("padding on the left is left out, whatever its id") {
  const ids tokens{0, 7, 0, 2, 0};
  CHECK(same(strip_left_padding(tokens, mask{0, 0, 1, 1, 1}), {0, 2, 0}));
  CHECK(same(strip_left_padding(tokens, mask{1, 1, 1, 1, 1}), tokens));
  CHECK(same(strip_left_padding(tokens, mask{0, 0, 0, 0, 1}), {0}));
  CHECK(strip_left_padding(tokens, mask{0, 1, 1, 1, 1}).data() == tokens.data() + 1);  // a view, no copy
}

TEST_CASE("a mask may be of any integers") {
  const ids tokens{0, 5, 6};
  CHECK(same(strip_left_padding(tokens, std::vector<std::uint8_t>{0, 1, 1}), {5, 6}));
  CHECK(same(strip_left_padding(tokens, std::vector<std::int32_t>{0, 1, 1}), {5, 6}));
  CHECK(same(strip_left_padding(tokens, std::array<bool, 3>{false, true, true}), {5, 6}));
  std::vector<std::uint8_t> bytes{0, 0, 1};
  CHECK(same(strip_left_padding(tokens, std::span(bytes)), {6}));
  CHECK(same(strip_left_padding(tokens, std::span<const std::uint8_t>(bytes)), {6}));
  static_assert(!attention_mask<std::vector<bool>> && !attention_mask<std::vector<float>>);
}

TEST_CASE("a mask of another size, or with other elements, is refused") {
  CHECK(mentions(refused({1, 2, 3}, {1, 1}), "3 token ids", "mask of 2"));
  CHECK(mentions(refused({1, 2}, {0, 2}), "mask is 2 at place 1", "0 and 1"));
  CHECK(mentions(refused({1, 2}, {-1, 1}), "mask is -1 at place 0"));
}

TEST_CASE("padding in the middle and on the right is refused") {
  CHECK(mentions(refused({1, 2, 3, 4}, {0, 1, 0, 1}), "padding at place 2", "token at place 1", "left only"));
  CHECK(mentions(refused({1, 2, 3}, {1, 1, 0}), "padding at place 2"));
}

TEST_CASE("a text of padding alone is refused") {
  CHECK(mentions(refused({0, 0}, {0, 0}), "2 places has no token", "at least one"));
  CHECK(mentions(refused({}, {}), "0 places has no token"));
}

TEST_CASE("every row of a batch loses its own padding") {
  const ids tokens{0, 0, 1, 0, 2, 3, 4, 5, 6};
  const auto texts = strip_left_padding_rows(tokens, mask{0, 0, 1, 0, 1, 1, 1, 1, 1}, 3);
  REQUIRE(texts.size() == 3);
  CHECK(same(texts[0], {1}));
  CHECK(same(texts[1], {2, 3}));
  CHECK(same(texts[2], {4, 5, 6}));
}

TEST_CASE("a batch that is none is refused, and a bad row named") {
  CHECK(mentions(refused({1, 2, 3}, {1, 1, 1}, 2), "3 token ids do not make 2 rows"));
  CHECK(mentions(refused({1, 2, 3}, {1, 1, 1}, 0), "do not make 0 rows", "at least one row"));
  CHECK(mentions(refused({}, {}, 2), "no token", "(row 0)"));
  CHECK(mentions(refused({1, 2, 3, 4}, {1, 1, 1}, 2), "4 token ids", "mask of 3"));
  CHECK(mentions(refused({1, 2, 3, 4}, {1, 1, 0, 0}, 2), "only padding", "(row 1)"));
  CHECK(mentions(refused({1, 2, 3, 4}, {0, 1, 1, 0}, 2), "padding at place 1", "(row 1)"));
  CHECK(mentions(refused({1, 2, 3, 4}, {0, 1, 3, 1}, 2), "mask is 3 at place 0", "(row 1)"));
}

TEST_CASE("the recorded batch has the lengths of its prompts") {
  const std::filesystem::path directory = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "tests/golden/left_padding_batch";
  const nlohmann::json expected = nlohmann::json::parse(std::ifstream(directory / "expected.json"));
  const io::tensor_set file = io::load_safetensors(directory / "expected.safetensors");
  const auto read = [&](const char* name) {
    const io::tensor& tensor = file.at(name);
    REQUIRE(tensor.type == io::dtype::i64);
    std::vector<std::int64_t> values(tensor.bytes.size() / sizeof(std::int64_t));
    std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    return values;
  };
  const std::vector<std::int64_t> wide = read("ids"), places = read("mask");
  const ids tokens(wide.begin(), wide.end());
  const auto lengths = expected.at("lengths").get<std::vector<std::size_t>>();
  const auto texts = strip_left_padding_rows(tokens, places, lengths.size());
  for (std::size_t r = 0; r < lengths.size(); ++r) {
    CAPTURE(r);
    CHECK(texts[r].size() == lengths[r]);
    CHECK(texts[r].data() + texts[r].size() == tokens.data() + (r + 1) * (tokens.size() / lengths.size()));
  }
}
