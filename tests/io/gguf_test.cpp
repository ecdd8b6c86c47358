// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/io/gguf.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#if OUTRIDER_HAS_MMAP
#include <sys/resource.h>
#include <sys/stat.h>
#endif

#include "../support/refusal.hpp"
#include "../support/temporary_directory.hpp"
#include "../support/write_gguf.hpp"

namespace io = outrider::io;
using io::dtype;
using outrider::error_code;
using outrider::testing::gguf_builder;
using outrider::testing::gguf_tensor;
using outrider::testing::mentions;
using outrider::testing::refusal;
using outrider::testing::temporary_directory;

namespace {

const std::filesystem::path root = OUTRIDER_SOURCE_DIR;

constexpr std::int64_t most = (std::numeric_limits<std::int64_t>::max)();

std::vector<std::byte> counting_bytes(std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i);
  return bytes;
}
gguf_tensor bytes_tensor(const std::string& name, std::size_t count) { return {name, dtype::i8, {count}, counting_bytes(count)}; }

/// Reads a file from memory of exactly its length, where a sanitizer sees a read behind the end; a mapping ends with its page.
struct in_memory {
  std::vector<char> bytes;
  io::gguf_file file;

  explicit in_memory(std::string_view contents) : bytes(contents.begin(), contents.end()) {
    file = io::detail::gguf_reader(std::as_bytes(std::span(bytes)), "memory.gguf").read();
  }
};

/// The sentence with which a file of these bytes is refused; it names the file.
std::string refused(std::string_view contents) {
  const std::string sentence = refusal(error_code::file_malformed, [&] { in_memory{contents}; });
  CHECK(sentence.starts_with("memory.gguf: "));
  return sentence;
}

/// Something of everything.
gguf_builder sample() {
  gguf_builder b;
  b.pair("general.architecture", "gemma4").pair("count", std::uint32_t{7}).pair("flag", true);
  b.array<std::string>("tokens", {"a", "", "ccc"}).array<float>("scores", {0.5f, -1000.f}).align(16);
  b.tensor({"matrix", dtype::f16, {2, 3}, counting_bytes(12)}).tensor({"empty", dtype::f32, {0, 4}, {}});
  b.tensor({"blocks", dtype::q8_0, {2, 32}, counting_bytes(68)});
  return b;
}
/// The sample without the padding behind its last tensor: every byte of it is needed.
std::string sample_bytes() {
  std::string file = sample().file();
  file.resize(file.size() - 12);  // 68 bytes, padded to 80
  return file;
}

struct malformed {
  const char* what;
  gguf_builder builder;
  std::vector<std::string> said;  // parts of the sentence
};

void check_refused(const std::vector<malformed>& cases) {
  for (const malformed& one : cases) {
    CAPTURE(one.what);
    const std::string sentence = refused(one.builder.file());
    for (const std::string& part : one.said) {
      CAPTURE(part);
      CHECK(mentions(sentence, part));
    }
  }
}
gguf_builder with_version(std::uint32_t version) {
  gguf_builder b;
  b.version = version;
  return b;
}
gguf_builder with_counts(std::optional<std::int64_t> tensors, std::optional<std::int64_t> pairs) {
  gguf_builder b = sample();
  b.tensor_count = tensors;
  b.pair_count = pairs;
  return b;
}
gguf_builder with_pair(std::uint32_t type, std::string_view bytes) {
  gguf_builder b;
  return b.raw_pair("the.key", type, bytes);
}
gguf_builder with_tensor(gguf_tensor tensor) {
  gguf_builder b;
  return b.tensor(std::move(tensor));
}
std::string array_of(std::uint32_t type, std::uint64_t count) { return gguf_builder::raw(type) + gguf_builder::raw(count); }

}  // namespace

// ---------------------------------------------------------------- good files

TEST_CASE("a file gives its pairs and tensors in order, shapes outermost first") {
  const in_memory read(sample_bytes());
  CHECK(read.file.source == "memory.gguf");
  CHECK(read.file.version == 3);
  CHECK(read.file.alignment == 16);
  REQUIRE(read.file.pairs.size() == 6);
  CHECK(read.file.pairs[1].key == "count");
  CHECK(read.file.find("tokens")->texts() == std::vector<std::string_view>{"a", "", "ccc"});
  CHECK(read.file.find("absent") == nullptr);
  REQUIRE(read.file.tensors.size() == 3);
  const io::tensor& blocks = read.file.tensors[2];
  CHECK(blocks.name == "blocks");
  CHECK(blocks.type == dtype::q8_0);
  CHECK(blocks.shape == std::vector<std::size_t>{2, 32});
  CHECK(blocks.file == "memory.gguf");
  REQUIRE(blocks.bytes.size() == 68);
  CHECK(std::memcmp(blocks.bytes.data(), counting_bytes(68).data(), 68) == 0);
}

TEST_CASE("a tensor's place in the file can be told") {
  const in_memory read(sample_bytes());
  REQUIRE(read.file.parts.size() == 1);
  const io::tensor& blocks = read.file.tensors[2];
  const io::gguf_part& part = read.file.part_of(blocks);
  CHECK(part.data_offset == read.file.data_offset);
  CHECK(blocks.bytes.data() - part.bytes.data() == static_cast<std::ptrdiff_t>(part.data_offset + 16));
}

TEST_CASE("the tensors' bytes outlive the one who opened the file") {
  const temporary_directory directory;
  sample().write(directory.path() / "f.gguf");
  std::optional<io::gguf_file> opened = io::open_gguf(directory.path() / "f.gguf");
  const io::gguf_file copy = *opened;
  opened.reset();
  CHECK(copy.find("count")->integer() == 7);
  CHECK(std::memcmp(copy.tensors[0].bytes.data(), counting_bytes(12).data(), 12) == 0);
}

TEST_CASE("files of llama.cpp are read: keys, names and types") {
  for (const char* name : {"target-bf16", "target-q8_0", "target-q4_0", "target-q4_k_m", "assistant-bf16", "assistant-q8_0"}) {
    CAPTURE(name);
    const io::gguf_file file = io::open_gguf(root / "examples/data/tiny-kjv/gguf" / (std::string(name) + ".gguf"));
    REQUIRE(file.find("general.architecture"));
    CHECK(file.find("general.architecture")->text() == (std::string_view(name).starts_with("target") ? "gemma4" : "gemma4-assistant"));
    CHECK(file.tensors.size() > 10);
  }
}

TEST_CASE("a file without pairs and tensors is valid, with or without padding behind its header") {
  CHECK(in_memory(gguf_builder().file()).file.tensors.empty());
  CHECK(in_memory(gguf_builder().file() + std::string(8, '\0')).file.pairs.empty());
}

TEST_CASE("a file of version 2 is read like one of version 3") {
  gguf_builder b = sample();
  b.version = 2;
  const in_memory read(b.file());
  CHECK(read.file.version == 2);
  CHECK(read.file.tensors.size() == 3);
}

TEST_CASE("extents of zero, no extents, four extents and a name of 63 bytes are valid") {
  gguf_builder b;
  b.tensor({std::string(63, 'n'), dtype::i8, {}, counting_bytes(1)});
  b.tensor({"four", dtype::i8, {2, 1, 3, 1}, counting_bytes(6)});
  b.tensor({"none", dtype::q4_k, {0, 3, 256}, {}});
  const in_memory read(b.file());
  CHECK(read.file.tensors[0].bytes.size() == 1);
  CHECK(read.file.tensors[1].shape == std::vector<std::size_t>{2, 1, 3, 1});
  CHECK(read.file.tensors[2].bytes.empty());
}

TEST_CASE("every alignment up to 1 MiB is kept") {
  for (std::uint32_t alignment = 1; alignment <= 1u << 20; alignment *= 2) {
    CAPTURE(alignment);
    gguf_builder b;
    b.align(alignment).tensor(bytes_tensor("a", 3)).tensor(bytes_tensor("b", 2));
    const in_memory read(b.file());
    CHECK(read.file.alignment == alignment);
    CHECK(read.file.data_offset % alignment == 0);
    CHECK(read.file.tensors[1].bytes[1] == std::byte{1});
  }
}

TEST_CASE("every element type has the format's number and size") {
  struct element_type {
    std::uint32_t number;
    dtype type;
    std::size_t elements, bytes;
  };
  const std::vector<element_type> types = {
      {0, dtype::f32, 1, 4},         {1, dtype::f16, 1, 2},         {2, dtype::q4_0, 32, 18},      {3, dtype::q4_1, 32, 20},
      {6, dtype::q5_0, 32, 22},      {7, dtype::q5_1, 32, 24},      {8, dtype::q8_0, 32, 34},      {9, dtype::q8_1, 32, 36},
      {10, dtype::q2_k, 256, 84},    {11, dtype::q3_k, 256, 110},   {12, dtype::q4_k, 256, 144},   {13, dtype::q5_k, 256, 176},
      {14, dtype::q6_k, 256, 210},   {15, dtype::q8_k, 256, 292},   {16, dtype::iq2_xxs, 256, 66}, {17, dtype::iq2_xs, 256, 74},
      {18, dtype::iq3_xxs, 256, 98}, {19, dtype::iq1_s, 256, 50},   {20, dtype::iq4_nl, 32, 18},   {21, dtype::iq3_s, 256, 110},
      {22, dtype::iq2_s, 256, 82},   {23, dtype::iq4_xs, 256, 136}, {24, dtype::i8, 1, 1},         {25, dtype::i16, 1, 2},
      {26, dtype::i32, 1, 4},        {27, dtype::i64, 1, 8},        {28, dtype::f64, 1, 8},        {29, dtype::iq1_m, 256, 56},
      {30, dtype::bf16, 1, 2},       {34, dtype::tq1_0, 256, 54},   {35, dtype::tq2_0, 256, 66},   {39, dtype::mxfp4, 32, 17},
      {40, dtype::nvfp4, 64, 36},    {41, dtype::q1_0, 128, 18},    {42, dtype::q2_0, 64, 18},
  };
  for (const element_type& one : types) {
    CAPTURE(one.number);
    gguf_tensor t{"t", dtype::i8, {3, 2 * one.elements}, counting_bytes(6 * one.bytes)};
    t.type_id = one.number;
    const in_memory read(with_tensor(t).file());
    CHECK(read.file.tensors[0].type == one.type);
    CHECK(read.file.tensors[0].bytes.size() == 6 * one.bytes);
  }
}

// ---------------------------------------------------------------- pitfall 1: malformed files

TEST_CASE("pitfall 1: what is no GGUF file, or one of another version or byte order, is refused") {
  CHECK(mentions(refused(""), "does not begin with \"GGUF\""));
  CHECK(mentions(refused("GGU"), "does not begin with \"GGUF\""));
  CHECK(mentions(refused("FUGG" + sample_bytes().substr(4)), "does not begin with \"GGUF\""));
  check_refused({{"version 0", with_version(0), {"version 0", "supported are 2 and 3"}},
                 {"version 1", with_version(1), {"version 1"}},
                 {"version 4", with_version(4), {"version 4"}},
                 {"byte-swapped version", with_version(0x03000000), {"big-endian", "only little-endian"}}});
}

TEST_CASE("pitfall 1: counts that the rest of the file has no room for are refused") {
  check_refused({{"absurd tensor count", with_counts(most, {}), {"9223372036854775807 tensors", "allowed are 0 to"}},
                 {"absurd pair count", with_counts({}, most), {"9223372036854775807 key-value pairs", "allowed are 0 to"}},
                 {"negative tensor count", with_counts(-1, {}), {"-1 tensors"}},
                 {"negative pair count", with_counts({}, -1), {"-1 key-value pairs"}}});
  gguf_builder b;  // 24 bytes of header and 24 more: room for one tensor, but for one pair of the two
  b.tensor_count = 2;
  CHECK(mentions(refused(b.file() + std::string(24, '\0')), "2 tensors", "allowed are 0 to 1,"));
  b.tensor_count = 1;
  b.pair_count = 2;
  CHECK(mentions(refused(b.file() + std::string(24, '\0')), "2 key-value pairs", "allowed are 0 to 1,"));
}

TEST_CASE("pitfall 1: keys that are empty, twice there or longer than the file are refused") {
  gguf_builder empty, twice, longer;
  empty.pair("", true);
  twice.pair("k", true).pair("other", true).pair("k", false);
  longer.pair_count = 1;
  check_refused({{"empty key", empty, {"key 0 is empty"}}, {"duplicate key", twice, {"key 'k' is there twice"}}});
  for (const std::uint64_t length : {std::uint64_t{6}, std::uint64_t{1} << 31, ~std::uint64_t{0}, ~std::uint64_t{7}})
    CHECK(mentions(refused(longer.file() + gguf_builder::raw(length) + "12345"), "a key at byte 32", std::to_string(length),
                   "allowed are 5"));
}

TEST_CASE("pitfall 1: values of unknown type, of the wrong length, and arrays of arrays are refused") {
  using b = gguf_builder;
  check_refused(
      {{"value type 13", with_pair(13, ""), {"'the.key'", "type 13", "known are 0 to 12"}},
       {"value type 2^32 - 1", with_pair(~0u, ""), {"'the.key'", "type 4294967295"}},
       {"number cut short", with_pair(4, "abc"), {"ends too early", "takes 4 bytes", "only 3 are left"}},
       {"string cut short", with_pair(8, b::raw(std::uint64_t{4}) + "abc"), {"a string", "length of 4", "allowed are 3"}},
       {"element type 13", with_pair(9, array_of(13, 0)), {"'the.key'", "type 13"}},
       {"nested array", with_pair(9, array_of(9, 1)), {"'the.key'", "array of arrays"}},
       {"array of 2^63", with_pair(9, array_of(4, std::uint64_t{1} << 63)), {"'the.key'", "9223372036854775808 elements", "allowed are 0"}},
       {"array whose bytes wrap to 4", with_pair(9, array_of(4, (std::uint64_t{1} << 62) + 1) + "abcd"), {"'the.key'", "allowed are 1"}},
       {"array one too long", with_pair(9, array_of(2, 3) + "abcde"), {"'the.key'", "array of 3 elements", "allowed are 2"}},
       {"strings one too many",
        with_pair(9, array_of(8, 2) + b::raw_string("1234567")),
        {"'the.key'", "array of 2 elements", "allowed are 1"}},
       {"bad length inside", with_pair(9, array_of(8, 2) + b::raw_string("a") + b::raw(~std::uint64_t{0})), {"a string of an array"}}});
}

TEST_CASE("pitfall 1: an array of more than 2^30 elements or a string beyond 1 GiB is refused even where the file has the bytes") {
  const temporary_directory directory;
  const auto sparse = [&](const std::string& bytes) {
    const auto path = directory.write("sparse.gguf", bytes);
    std::filesystem::resize_file(path, std::uintmax_t{1} << 31);
    return refusal(error_code::file_malformed, [&] { static_cast<void>(io::open_gguf(path)); });
  };
  constexpr std::uint64_t limit = std::uint64_t{1} << 30;
  CHECK(mentions(sparse(with_pair(9, array_of(0, limit + 1)).file()), "array of 1073741825", "allowed are 1073741824"));
  CHECK(mentions(sparse(with_pair(8, gguf_builder::raw(limit + 1)).file()), "1073741825", "allowed are 1073741824"));
}

TEST_CASE("pitfall 1: alignments that are no UINT32 power of two up to 1 MiB are refused") {
  gguf_builder wrong_type, many;
  wrong_type.pair("general.alignment", std::int32_t{32});
  many.array<std::uint32_t>("general.alignment", {32});
  check_refused({{"INT32", wrong_type, {"general.alignment", "INT32", "allowed is UINT32"}},
                 {"array", many, {"general.alignment", "ARRAY", "allowed is UINT32"}}});
  for (const std::uint32_t alignment : {0u, 13u, 1u << 21, 1u << 31}) {
    CAPTURE(alignment);
    gguf_builder b;
    b.pair("general.alignment", alignment);
    CHECK(mentions(refused(b.file()), "general.alignment is " + std::to_string(alignment), "powers of two up to 1048576"));
  }
}

TEST_CASE("pitfall 1: offsets that do not follow from the file's alignment are refused") {
  gguf_builder b;
  b.pair("general.alignment", std::uint32_t{64});  // while the builder pads to 32
  b.tensor(bytes_tensor("a", 8)).tensor(bytes_tensor("b", 8));
  CHECK(mentions(refused(b.file()), "'b'", "offset 32", "allowed is 64"));
}

TEST_CASE("pitfall 1: names that are too long or twice there are refused") {
  gguf_builder twice;
  twice.tensor(bytes_tensor("t", 1)).tensor(bytes_tensor("t", 1));
  check_refused({{"64 bytes", with_tensor(bytes_tensor(std::string(64, 'n'), 1)), {"tensor 0", "64 bytes", "at most 63"}},
                 {"duplicate", twice, {"tensor 't' is there twice"}}});
}

TEST_CASE("pitfall 1: shapes with too many, negative or overflowing extents are refused") {
  const auto shaped = [](std::vector<std::int64_t> extents, dtype type = dtype::i8) {
    gguf_tensor t{"t", type, {}, counting_bytes(64)};
    t.extents = std::move(extents);
    return with_tensor(t);
  };
  constexpr std::int64_t two_32 = std::int64_t{1} << 32;
  check_refused({{"5 dimensions", shaped({1, 1, 1, 1, 1}), {"'t'", "5 dimensions", "at most 4"}},
                 {"negative extent", shaped({4, -1}), {"'t'", "extent -1"}},
                 {"smallest extent", shaped({(std::numeric_limits<std::int64_t>::min)()}), {"'t'", "extent -9223372036854775808"}},
                 {"{INT64_MAX, 2}", shaped({most, 2}), {"'t'", "product exceeds 2^63 - 1"}},
                 {"product wraps to 0", shaped({two_32, two_32}), {"'t'", "product exceeds"}},
                 {"product wraps to 1", shaped({two_32 + 1, two_32 - 1, 1}), {"'t'", "product exceeds"}},
                 {"overflow before a zero", shaped({most, 2, 0}), {"'t'", "product exceeds"}},
                 {"overflow behind a zero", shaped({0, most, 2}), {"'t'", "product exceeds"}},
                 {"more elements than bytes", shaped({most / 32 * 32, 1, 8}, dtype::q4_0), {"'t'", "product exceeds"}},
                 {"element size wraps", shaped({std::int64_t{1} << 62}, dtype::f32), {"'t'", "more elements than fit"}},
                 {"block size wraps", shaped({most / 256 * 256, 1}, dtype::f64), {"'t'", "more elements than fit"}}});
}

TEST_CASE("pitfall 1: sizes whose padding or sum wraps are refused") {
  gguf_tensor huge{"huge", dtype::i16, {}, {}}, more{"more", dtype::i16, {}, {}};
  huge.extents = {most};  // 2^64 - 2 bytes, which padding would wrap to 0
  check_refused({{"padding wraps", with_tensor(huge), {"'huge'", "ends behind 2^64"}}});
  huge.extents = {std::int64_t{1} << 62};  // two of them are 2^64 bytes
  more.extents = huge.extents;
  more.offset = std::uint64_t{1} << 63;
  gguf_builder sum;
  sum.tensor(huge).tensor(more);
  check_refused({{"sum wraps", sum, {"'more'", "ends behind 2^64"}}});
  more.extents = {(std::int64_t{1} << 62) - 32};  // their sum fits, but not behind the header
  gguf_builder beyond;
  beyond.tensor(huge).tensor(more);
  check_refused({{"data beyond the address space", beyond, {"'huge'", "reaches beyond the end"}}});
}

TEST_CASE("pitfall 113: rows that are no multiple of the block are refused") {
  check_refused(
      {{"31 of 32", with_tensor({"t", dtype::q8_0, {32, 31}, counting_bytes(34 * 31)}), {"'t'", "rows of 31", "Q8_0", "multiples of 32"}},
       {"scalar block", with_tensor({"t", dtype::q6_k, {}, counting_bytes(210)}), {"'t'", "rows of 1", "multiples of 256"}}});
}

TEST_CASE("pitfall 13: an unknown element type is refused with tensor and number") {
  for (const std::uint32_t id : {4u, 5u, 31u, 32u, 33u, 36u, 37u, 38u, 43u, 0xffffffffu}) {
    CAPTURE(id);
    gguf_tensor t{"blk.0.attn_q.weight", dtype::i8, {1}, counting_bytes(1)};
    t.type_id = id;
    CHECK(mentions(refused(with_tensor(t).file()), "'blk.0.attn_q.weight'", "element type " + std::to_string(id)));
  }
}

TEST_CASE("pitfall 1: tensors that leave a gap or overlap are refused") {
  const auto placed = [](std::uint64_t offset) {
    gguf_tensor second = bytes_tensor("b", 8);
    second.offset = offset;
    gguf_builder b;
    return b.tensor(bytes_tensor("a", 40)).tensor(second);
  };
  check_refused({{"off by one", placed(65), {"'b'", "offset 65", "allowed is 64"}},
                 {"gap", placed(96), {"'b'", "offset 96", "allowed is 64"}},
                 {"overlap", placed(32), {"'b'", "offset 32", "allowed is 64"}},
                 {"the same place", placed(0), {"'b'", "offset 0", "allowed is 64"}},
                 {"2^64 - 1", placed(~std::uint64_t{0}), {"'b'", "offset 18446744073709551615"}}});
}

TEST_CASE("pitfall 1: a file cut anywhere is refused") {
  const std::string whole = sample_bytes();
  CHECK_NOTHROW(in_memory{whole});
  for (std::size_t length = 0; length < whole.size(); ++length) {
    CAPTURE(length);
    static_cast<void>(refused(std::string_view(whole).substr(0, length)));
  }
}

TEST_CASE("a data section that is cut is refused with what is there") {
  const std::string whole = sample_bytes();
  CHECK(mentions(refused(whole.substr(0, whole.size() - 1)), "'blocks' of 68 bytes at offset 16", "beyond the end",
                 std::to_string(whole.size() - 1) + " bytes"));
}

TEST_CASE("control characters of a file do not reach the sentence") {
  gguf_builder b;
  b.pair("a\n\x1b[31m", true).pair("a\n\x1b[31m", true);
  CHECK(mentions(refused(b.file()), "'a??[31m' is there twice"));
}

// ---------------------------------------------------------------- property

TEST_CASE("pitfall 1: whatever happens to a header, every byte range lies inside the file or the file is refused") {
  const std::string whole = sample_bytes();
  const std::uint32_t seed = 20250117;
  CAPTURE(seed);
  std::mt19937 random(seed);
  const auto below = [&](std::size_t bound) { return static_cast<std::size_t>(random()) % bound; };
  const std::vector<std::uint64_t> numbers = {
      0, 1, 2, 9, 13, 31, 32, 33, 255, 1u << 30, 1u << 31, ~0u, std::uint64_t{1} << 62, ~std::uint64_t{0}};
  const auto mutate = [&](std::string& file) {
    const std::size_t at = below(file.size());
    switch (below(5)) {
      case 0:
        file[at] = static_cast<char>(file[at] ^ (1 << below(8)));
        break;
      case 1:
        file[at] = static_cast<char>(below(256));
        break;
      case 2:
        file.erase(at, 1 + below(8));
        break;
      case 3:
        file.insert(at, 1, static_cast<char>(below(16)));
        break;
      case 4:  // a number that means something
        file.replace(at, 1 + below(8), gguf_builder::raw(numbers[below(numbers.size())]).substr(0, 1 + below(8)));
        break;
    }
  };

  std::size_t opened = 0, refusals = 0;
  for (int iteration = 0; iteration < 20'000; ++iteration) {
    CAPTURE(iteration);
    std::string file = whole;
    for (std::size_t changes = 1 + below(3); changes-- > 0;) mutate(file);
    try {
      const in_memory read(file);
      ++opened;
      const auto* const begin = reinterpret_cast<const std::byte*>(read.bytes.data());
      const auto is_inside = [&](std::span<const std::byte> bytes) {
        return bytes.data() >= begin && bytes.data() + bytes.size() <= begin + read.bytes.size();
      };
      for (const io::tensor& t : read.file.tensors) CHECK((is_inside(t.bytes) && t.bytes.size() == io::byte_size(t.type, t.shape)));
      for (const io::gguf_pair& pair : read.file.pairs) {
        CHECK(is_inside(pair.value.bytes));
        if (const auto texts = pair.value.texts())
          for (const std::string_view text : *texts) CHECK(is_inside(std::as_bytes(std::span(text))));
      }
    } catch (const outrider::error& refused) {
      ++refusals;
      if (refused.code() != error_code::file_malformed) FAIL(refused.what());
    }
  }
  CHECK(opened > 100);  // other names, other values: the test must not stop at the first byte each time
  CHECK(refusals > 100);
}

// ---------------------------------------------------------------- files

TEST_CASE("a file that is missing, a directory or empty is refused under its name") {
  const temporary_directory directory;
  const auto refused_file = [](error_code code, const std::filesystem::path& path) {
    const std::string sentence = refusal(code, [&] { static_cast<void>(io::open_gguf(path)); });
    CHECK(sentence.starts_with(path.string() + ": "));
  };
  refused_file(error_code::file_not_found, directory.path() / "absent.gguf");
  refused_file(error_code::file_not_found, directory.path());
  refused_file(error_code::file_malformed, directory.write("empty.gguf", ""));
}

#if OUTRIDER_HAS_MMAP

TEST_CASE("a pipe is refused at once instead of waiting for its writer") {
  const temporary_directory directory;
  const auto path = directory.path() / "pipe";
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
  CHECK(
      mentions(refusal(error_code::file_not_found, [&] { static_cast<void>(io::open_gguf(path)); }), path.string(), "not a regular file"));
}

TEST_CASE("a file is opened through a symbolic link") {
  const temporary_directory directory;
  sample().write(directory.path() / "f.gguf");
  std::filesystem::create_symlink("f.gguf", directory.path() / "link");
  CHECK(io::open_gguf(directory.path() / "link").tensors.size() == 3);
}

TEST_CASE("pitfall 4: opening reads the header only, however large the data") {
  const temporary_directory directory;
  gguf_tensor t{"t", dtype::i8, {}, {}};
  constexpr std::size_t size = std::size_t{1} << 34;  // 16 GiB, sparse: four million pages
  t.extents = {std::int64_t{size}};
  const auto path = directory.write("f.gguf", with_tensor(t).file());
  std::filesystem::resize_file(path, std::filesystem::file_size(path) + size);
  const auto page_faults = [] {
    ::rusage usage = {};
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt + usage.ru_majflt;
  };
  const long before = page_faults();
  CHECK(io::open_gguf(path).tensors[0].bytes.size() == size);
  CHECK(page_faults() - before < 1000);  // what the program itself needs meanwhile
}

TEST_CASE("pitfall 1: a count is no reason to allocate, even where the file is as large as it says") {
  const temporary_directory directory;
  gguf_builder b;
  b.pair_count = (std::int64_t{1} << 34) / 13 - 2;  // 16 GiB of pairs, so to speak
  b.pair("k", true);
  const auto path = directory.write("f.gguf", b.file());
  std::filesystem::resize_file(path, std::uintmax_t{1} << 34);
  CHECK(mentions(refusal(error_code::file_malformed, [&] { static_cast<void>(io::open_gguf(path)); }), "key 1 is empty"));
}

#endif
