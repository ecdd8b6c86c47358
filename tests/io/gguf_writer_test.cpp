// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "outrider/io/gguf.hpp"
#include "outrider/io/gguf_writer.hpp"
#include "support/refusal.hpp"
#include "support/temporary_directory.hpp"

namespace {

using namespace outrider;
using outrider::testing::mentions;
using outrider::testing::refusal;
using outrider::testing::temporary_directory;

/// Tensor i is filled with the byte i + 1, in pieces of seven bytes.
io::tensor_source numbered(const io::gguf_header& header) {
  return [&header](std::size_t i, const io::byte_sink& sink) {
    const std::vector<std::byte> piece(7, static_cast<std::byte>(i + 1));
    for (std::size_t left = *header.tensors()[i].bytes(); left > 0;) {
      const std::size_t n = left < piece.size() ? left : piece.size();
      sink(std::span(piece).first(n));
      left -= n;
    }
  };
}

}  // namespace

TEST_CASE("every type of value comes back from the file as it was added, in order") {
  const temporary_directory directory;
  const auto path = directory.path() / "x.gguf";
  io::gguf_header header;
  header.add("u8", std::uint8_t{200});
  header.add("u16", std::uint16_t{60000});
  header.add("u32", std::uint32_t{4000000000u});
  header.add("u64", std::uint64_t{1} << 40);
  header.add("i32", std::int32_t{-5});
  header.add("f32", 1.5f);
  header.add("bool", true);
  header.add("text", "with\0zero");
  header.add("string", std::string("a\0b", 3));
  header.add("texts", std::vector<std::string>{"", "▁a", "b"});
  header.add("numbers", std::vector<std::int32_t>{1, -2});
  header.add("floats", std::vector<float>{-1000.0f});
  header.add("flags", std::vector<bool>{true, false, true});
  header.add("nothing", std::vector<float>{});
  const std::uint64_t size = io::write_gguf(path, header, {});
  CHECK(size == std::filesystem::file_size(path));

  const io::gguf_file file = io::open_gguf(path);
  CHECK(file.version == 3);
  REQUIRE(file.pairs.size() == 14);
  CHECK(file.pairs.front().key == "u8");
  CHECK(file.pairs.back().key == "nothing");
  CHECK(file.find("u8")->integer() == 200);
  CHECK(file.find("u16")->integer() == 60000);
  CHECK(file.find("u32")->integer() == 4000000000);
  CHECK(file.find("u64")->integer() == std::int64_t{1} << 40);
  CHECK(file.find("i32")->integer() == -5);
  CHECK(file.find("f32")->number() == 1.5);
  CHECK(file.find("bool")->boolean() == true);
  CHECK(file.find("text")->text() == "with");
  CHECK(file.find("string")->text() == std::string_view("a\0b", 3));
  CHECK(file.find("texts")->texts() == std::vector<std::string_view>{"", "▁a", "b"});
  CHECK(file.find("numbers")->integers() == std::vector<std::int64_t>{1, -2});
  CHECK(file.find("floats")->numbers() == std::vector<double>{-1000});
  CHECK(file.find("flags")->booleans() == std::vector<bool>{true, false, true});
  CHECK(file.find("nothing")->count == 0);
}

TEST_CASE("a value of one file can be added to another") {
  const temporary_directory directory;
  io::gguf_header first, second;
  first.add("texts", std::vector<std::string>{"a", "bc"});
  first.add("n", std::uint16_t{7});
  static_cast<void>(io::write_gguf(directory.path() / "1.gguf", first, {}));
  const io::gguf_file file = io::open_gguf(directory.path() / "1.gguf");
  for (const io::gguf_pair& pair : file.pairs) second.add(std::string(pair.key), pair.value);
  CHECK(first.bytes() == second.bytes());
}

TEST_CASE("tensors of any type lie where the reader expects them, padded") {
  const temporary_directory directory;
  io::gguf_header header;
  header.add({"scalar", io::dtype::f32, {}});
  header.add({"odd", io::dtype::f16, {3}});
  header.add({"empty", io::dtype::bf16, {0, 4}});
  header.add({"blocks", io::dtype::q4_0, {3, 64}});
  header.add({"cube", io::dtype::i32, {2, 3, 5}});
  header.add({std::string(63, 'n'), io::dtype::q6_k, {1, 256}});
  static_cast<void>(io::write_gguf(directory.path() / "x.gguf", header, numbered(header)));
  const io::gguf_file file = io::open_gguf(directory.path() / "x.gguf");
  REQUIRE(file.tensors.size() == header.tensors().size());
  for (std::size_t i = 0; i < file.tensors.size(); ++i) {
    const io::tensor& t = file.tensors[i];
    CAPTURE(t.name);
    CHECK(t.name == header.tensors()[i].name);
    CHECK(t.type == header.tensors()[i].type);
    CHECK(t.shape == header.tensors()[i].shape);
    bool all = true;
    for (const std::byte b : t.bytes) all = all && b == static_cast<std::byte>(i + 1);
    CHECK(all);
  }
}

TEST_CASE("what a GGUF file cannot hold is refused with a sentence") {
  io::gguf_header header;
  const auto refused = [&](io::tensor_plan plan) { return refusal(error_code::argument_invalid, [&] { header.add(std::move(plan)); }); };
  CHECK(mentions(refused({std::string(64, 'n'), io::dtype::f32, {1}}), "64 bytes", "allowed are 63"));
  CHECK(mentions(refused({"t", io::dtype::f32, {1, 1, 1, 1, 1}}), "'t'", "5 extents", "allowed are 4"));
  CHECK(mentions(refused({"t", io::dtype::boolean, {1}}), "'t'", "BOOL"));
  CHECK(mentions(refused({"t", io::dtype::q8_0, {2, 33}}), "'t'", "Q8_0"));
  header.add({"t", io::dtype::f32, {1}});
  CHECK(mentions(refused({"t", io::dtype::f32, {1}}), "'t'", "twice"));
  header.add("key", 1.0f);
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { header.add("key", 1.0f); }), "'key'", "twice"));
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { header.add("", 1.0f); }), "empty"));
}

TEST_CASE("a tensor that is given too few or too many bytes is refused, and no file appears") {
  const temporary_directory directory;
  io::gguf_header header;
  header.add({"t", io::dtype::f32, {2}});
  for (const std::size_t given : {std::size_t{7}, std::size_t{9}}) {
    const std::vector<std::byte> bytes(given);
    const auto path = directory.path() / "x.gguf";
    const std::string sentence = refusal(error_code::argument_invalid, [&] {
      static_cast<void>(io::write_gguf(path, header, [&](std::size_t, const io::byte_sink& sink) { sink(bytes); }));
    });
    CHECK(mentions(sentence, "'t'", "8 bytes", std::to_string(given)));
    CHECK(std::filesystem::is_empty(directory.path()));
  }
}
