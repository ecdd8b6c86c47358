// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/io/safetensors.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#if OUTRIDER_HAS_MMAP
#include <sys/resource.h>
#endif

#include "../support/refusal.hpp"
#include "../support/temporary_directory.hpp"
#include "../support/write_safetensors.hpp"

namespace io = outrider::io;
using outrider::error_code;
using outrider::testing::mentions;
using outrider::testing::refusal;
using outrider::testing::safetensors_file;
using outrider::testing::stored_tensor;
using outrider::testing::temporary_directory;
using outrider::testing::write_safetensors;

namespace {

const std::filesystem::path root = OUTRIDER_SOURCE_DIR;

std::vector<std::byte> counting_bytes(std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i);
  return bytes;
}

/// The sentence with which a file of these bytes is refused; it names the file.
std::string refused(std::string_view file) {
  const temporary_directory directory;
  const auto path = directory.write("bad.safetensors", file);
  const std::string sentence = refusal(error_code::file_malformed, [&] { static_cast<void>(io::load_safetensors(path)); });
  CHECK(sentence.starts_with(path.string() + ": "));
  return sentence;
}
std::string refused(std::string_view header, std::size_t data_bytes) {
  return refused(safetensors_file(header, std::string(data_bytes, '\0')));
}

/// A directory with two shards and the index given; `a` is in one.safetensors, `b` and `c` in two.safetensors.
struct sharded_directory {
  temporary_directory directory;

  explicit sharded_directory(std::string_view index) {
    write_safetensors(directory.path() / "one.safetensors", {{"a", "U8", {3}, counting_bytes(3)}});
    write_safetensors(directory.path() / "two.safetensors", {{"c", "U8", {2}, counting_bytes(2)}, {"b", "U8", {1}, counting_bytes(1)}});
    directory.write("model.safetensors.index.json", index);
  }
  [[nodiscard]] io::tensor_set load() const { return io::load_safetensors(directory.path()); }
  [[nodiscard]] std::string refused(error_code code) const {
    return refusal(code, [&] { static_cast<void>(load()); });
  }
};

}  // namespace

// ---------------------------------------------------------------- good files

TEST_CASE("a single file gives its tensors by name, with type, shape and bytes") {
  const auto path = root / "tests/golden/e2b/target/model.safetensors";
  const io::tensor_set tensors = io::load_safetensors(path);
  CHECK(tensors.source() == path.string());
  const io::tensor& norm = tensors.at("model.norm.weight");
  CHECK(norm.type == io::dtype::f32);
  REQUIRE(norm.shape.size() == 1);
  CHECK(norm.bytes.size() == norm.shape[0] * 4);
  CHECK(norm.file == path.string());
}

TEST_CASE("a directory is searched for model.safetensors") {
  const io::tensor_set tensors = io::load_safetensors(root / "examples/data/tiny-kjv/target");
  CHECK(tensors.at("model.embed_tokens.weight").type == io::dtype::bf16);
}

TEST_CASE("a sharded directory gives the tensors of all its shards") {
  const auto directory = root / "tests/golden/multimodal_names/target";
  const io::tensor_set tensors = io::load_safetensors(directory);
  const auto index = io::parse_json(io::read_text_file(directory / "model.safetensors.index.json"), "index").at("weight_map");
  CHECK(tensors.size() == index.size());
  for (const auto& [name, shard] : index.items()) CHECK(tensors.at(name).file == (directory / shard.get<std::string>()).string());
}

TEST_CASE("the model's own file wins over an index beside it") {
  const sharded_directory shards(R"({"weight_map": {"a": "one.safetensors"}})");
  write_safetensors(shards.directory.path() / "model.safetensors", {{"single", "U8", {0}, {}}});
  CHECK(shards.load().find("single"));
}

TEST_CASE("the tensors' bytes are those of the file, in any order of the header, and outlive the loader") {
  const temporary_directory directory;
  const auto path =
      directory.write("f.safetensors", safetensors_file(R"({"second": {"dtype": "F32", "shape": [1, 1], "data_offsets": [2, 6]},
                                                                         "first": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}})",
                                                        "abcdef"));
  std::optional<io::tensor_set> loaded = io::load_safetensors(path);
  const io::tensor_set tensors = std::move(*loaded);
  loaded.reset();
  CHECK(std::memcmp(tensors.at("first").bytes.data(), "ab", 2) == 0);
  CHECK(std::memcmp(tensors.at("second").bytes.data(), "cdef", 4) == 0);
}

TEST_CASE("every element type of the table is read") {
  using io::dtype;
  for (const dtype type : {dtype::f64, dtype::f32, dtype::f16, dtype::bf16, dtype::i64, dtype::i32, dtype::i16, dtype::i8, dtype::u64,
                           dtype::u32, dtype::u16, dtype::u8, dtype::boolean}) {
    const std::string name(io::name_of(type));
    CAPTURE(name);
    const temporary_directory directory;
    const auto path = directory.path() / "f.safetensors";
    write_safetensors(path, {{"t", name, {3, 2}, counting_bytes(6 * io::describe(type).bytes)}});
    const io::tensor_set tensors = io::load_safetensors(path);
    CHECK(tensors.at("t").type == type);
    CHECK(tensors.at("t").shape == std::vector<std::size_t>{3, 2});
  }
}

TEST_CASE("scalars, tensors without elements, metadata, unknown fields and a padded header are legal") {
  const temporary_directory directory;
  const auto path = directory.write("f.safetensors", safetensors_file(R"({"__metadata__": {"format": "pt"},
      "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4], "comment": 1},
      "none": {"dtype": "F32", "shape": [7, 0], "data_offsets": [4, 4]},
      "none too": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}     )",
                                                                      "1234"));
  const io::tensor_set tensors = io::load_safetensors(path);
  CHECK(tensors.size() == 3);
  CHECK(tensors.at("scalar").bytes.size() == 4);
  CHECK(tensors.at("none").bytes.empty());
}

TEST_CASE("a file without tensors is legal") {
  const temporary_directory directory;
  CHECK(io::load_safetensors(directory.write("f.safetensors", safetensors_file("{}"))).size() == 0);
}

#if OUTRIDER_HAS_MMAP
TEST_CASE("pitfall 4: loading reads the header only, however large the data") {
  const temporary_directory directory;
  const std::string header = R"({"t": {"dtype": "U8", "shape": [17179869184], "data_offsets": [0, 17179869184]}})";
  const auto path = directory.write("f.safetensors", safetensors_file(header));
  std::filesystem::resize_file(path, 8 + header.size() + (std::uintmax_t{1} << 34));  // 16 GiB, sparse: four million pages
  const auto page_faults = [] {
    ::rusage usage = {};
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt + usage.ru_majflt;
  };
  const long before = page_faults();
  CHECK(io::load_safetensors(path).at("t").bytes.size() == std::size_t{1} << 34);
  CHECK(page_faults() - before < 1000);  // what the program itself needs meanwhile
}
#endif

// ---------------------------------------------------------------- what is not there

TEST_CASE("a missing path is refused with the system's reason") {
  const auto path = root / "tests/golden/absent";
  CHECK(mentions(refusal(error_code::file_not_found, [&] { static_cast<void>(io::load_safetensors(path)); }), path.string()));
}

TEST_CASE("a directory without weights is refused, naming what was looked for") {
  const temporary_directory directory;
  CHECK(mentions(refusal(error_code::file_not_found, [&] { static_cast<void>(io::load_safetensors(directory.path())); }),
                 directory.path().string(), "model.safetensors", "model.safetensors.index.json"));
}

// ---------------------------------------------------------------- pitfall 15: malformed files

TEST_CASE("pitfall 15: a file too short for the header length is refused") {
  CHECK(mentions(refused(""), "8 bytes", "only 0"));
  CHECK(mentions(refused("1234567"), "8 bytes", "only 7"));
}

TEST_CASE("pitfall 15: a header longer than the file is refused") {
  std::string file = safetensors_file("{}");
  file[0] = 3;
  CHECK(mentions(refused(file), "header of 3 bytes", "file of 10 bytes"));
}

TEST_CASE("pitfall 15: a header above the format's limit is refused before it is read") {
  CHECK(mentions(refused(std::string(8, '\xff')), "18446744073709551615", "allowed are 100000000"));
  const temporary_directory directory;
  const auto path = directory.write("f", std::string_view("\x01\xe1\xf5\x05\0\0\0\0", 8));  // 100,000,001
  std::filesystem::resize_file(path, 200'000'000);
  CHECK(mentions(refusal(error_code::file_malformed, [&] { static_cast<void>(io::load_safetensors(path)); }), "100000001"));
}

TEST_CASE("a header that is not a JSON object is refused") {
  for (const char* header : {"", "[]", " {}", "null", "\xef\xbb\xbf{}", "PK"})
    CHECK(mentions(refused(header, 0), "does not begin with '{'"));
  CHECK(mentions(refused("{", 0), "JSON"));
  CHECK(mentions(refused("{}x", 0), "JSON", "byte 3"));
  CHECK(mentions(refused(std::string_view("{}\0", 3), 0), "zero byte"));
}

TEST_CASE("a deeply nested header cannot exhaust the stack") {
  CHECK(mentions(refused("{\"a\":" + std::string(1'000'000, '['), 0), "nested deeper"));
}

TEST_CASE("pitfall 15: a tensor that is there twice is refused") {
  CHECK(mentions(refused(R"({"t": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
                            "t": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}})",
                         2),
                 "'t'", "twice"));
}

TEST_CASE("metadata other than an object of strings is refused") {
  CHECK(mentions(refused(R"({"__metadata__": [1]})", 0), "'__metadata__'", "array", "object of strings"));
  CHECK(mentions(refused(R"({"__metadata__": {"layers": 1}})", 0), "'layers'", "number", "string"));
}

TEST_CASE("a tensor that is not an object is refused") { CHECK(mentions(refused(R"({"t": [0, 1]})", 0), "'t'", "array", "an object")); }

TEST_CASE("a tensor with a field missing is refused") {
  CHECK(mentions(refused(R"({"t": {"shape": [], "data_offsets": [0, 1]}})", 1), "'t'", "no dtype"));
  CHECK(mentions(refused(R"({"t": {"dtype": "U8", "data_offsets": [0, 1]}})", 1), "'t'", "no shape"));
  CHECK(mentions(refused(R"({"t": {"dtype": "U8", "shape": []}})", 1), "'t'", "no data_offsets"));
}

TEST_CASE("a field of the wrong type is refused") {
  CHECK(mentions(refused(R"({"t": {"dtype": 5, "shape": [], "data_offsets": [0, 1]}})", 1), "'t'", "dtype", "number"));
  CHECK(mentions(refused(R"({"t": {"dtype": "U8", "shape": "1", "data_offsets": [0, 1]}})", 1), "'t'", "shape", "string"));
  CHECK(mentions(refused(R"({"t": {"dtype": "U8", "shape": [], "data_offsets": {"0": 1}}})", 1), "'t'", "data_offsets", "object"));
}

TEST_CASE("an unknown dtype is refused with the tensor's name and what is allowed") {
  CHECK(mentions(refused(R"({"t": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}})", 1), "'t'", "\"F8_E4M3\"", "F64, F32",
                 "BOOL"));
  CHECK(mentions(refused(R"({"t": {"dtype": "f32", "shape": [1], "data_offsets": [0, 4]}})", 4), "'t'", "\"f32\""));
}

TEST_CASE("sizes that are not integers from 0 to 2^64 - 1 are refused") {
  for (const std::string number : {"-1", "-0", "1.0", "1.5", "1e3", "18446744073709551616", "\"1\"", "null", "[1]", "true"}) {
    CAPTURE(number);
    CHECK(mentions(refused(R"({"t": {"dtype": "U8", "shape": [)" + number + R"(], "data_offsets": [0, 1]}})", 1), "'t'", "shape contains"));
    CHECK(mentions(refused(R"({"t": {"dtype": "U8", "shape": [1], "data_offsets": [0, )" + number + "]}}", 1), "'t'",
                   "data_offsets contains"));
  }
}

TEST_CASE("data_offsets other than a pair are refused") {
  for (const std::string offsets : {"[]", "[0]", "[0, 1, 1]"}) {
    CAPTURE(offsets);
    CHECK(mentions(refused(R"({"t": {"dtype": "U8", "shape": [1], "data_offsets": )" + offsets + "}}", 1), "'t'", "begin and end"));
  }
}

TEST_CASE("pitfall 15: a byte range that ends before it begins is refused") {
  CHECK(mentions(refused(R"({"t": {"dtype": "U8", "shape": [1], "data_offsets": [2, 1]}})", 2), "'t'", "begin at 2", "end at 1"));
}

TEST_CASE("pitfall 15: a byte range that ends behind the data is refused") {
  CHECK(mentions(refused(R"({"t": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}})", 1), "'t'", "end at 2", "only 1 bytes"));
  CHECK(mentions(refused(R"({"t": {"dtype": "U8", "shape": [1], "data_offsets": [18446744073709551614, 18446744073709551615]}})", 1), "'t'",
                 "end at 18446744073709551615"));
}

TEST_CASE("pitfall 15: a byte range of another length than type and shape ask for is refused") {
  CHECK(mentions(refused(R"({"t": {"dtype": "BF16", "shape": [3, 2], "data_offsets": [0, 24]}})", 24), "'t'", "24 bytes", "BF16", "[3,2]",
                 "takes 12"));
  CHECK(mentions(refused(R"({"t": {"dtype": "F32", "shape": [], "data_offsets": [0, 0]}})", 0), "'t'", "takes 4"));
}

TEST_CASE("pitfall 15: a shape whose size overflows is refused, not wrapped around to the length of the range") {
  // 2^32 · 2^32 = 2^64 wraps to 0; 2^62 elements of 4 bytes do as well.
  CHECK(
      mentions(refused(R"({"t": {"dtype": "U8", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}})", 0), "'t'", "more elements"));
  CHECK(mentions(refused(R"({"t": {"dtype": "F32", "shape": [4611686018427387904], "data_offsets": [0, 0]}})", 0), "'t'", "more elements"));
  // An extent of zero does not hide the others, wherever it stands.
  for (const std::string extents : {"0, 4294967296, 4294967296", "4294967296, 4294967296, 0"})
    CHECK(mentions(refused(R"({"t": {"dtype": "U8", "shape": [)" + extents + R"(], "data_offsets": [0, 0]}})", 0), "'t'", "more elements"));
}

TEST_CASE("pitfall 15: overlapping byte ranges are refused") {
  CHECK(mentions(refused(R"({"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
                            "b": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}})",
                         4),
                 "'b' overlaps tensor 'a'"));
  CHECK(mentions(refused(R"({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                            "b": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}})",
                         4),
                 "overlaps"));
}

TEST_CASE("data that belongs to no tensor is refused") {
  CHECK(mentions(refused(R"({"t": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}})", 2), "byte 0 to 1"));
  CHECK(mentions(refused(R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
                            "b": {"dtype": "U8", "shape": [1], "data_offsets": [3, 4]}})",
                         4),
                 "byte 1 to 3"));
  CHECK(mentions(refused(R"({"t": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})", 3), "byte 1 to 3"));
  CHECK(mentions(refused("{}", 5), "byte 0 to 5"));
}

TEST_CASE("a file cut anywhere is refused") {
  const std::string whole = safetensors_file(R"({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})", "12345678");
  for (std::size_t length = 0; length < whole.size(); ++length) {
    CAPTURE(length);
    refused(std::string_view(whole).substr(0, length));
  }
}

// ---------------------------------------------------------------- shards

TEST_CASE("an index chooses the tensors of its shards") {
  const sharded_directory shards(R"({"metadata": {"total_size": 5}, "weight_map": {"a": "one.safetensors", "c": "two.safetensors"}})");
  const io::tensor_set tensors = shards.load();
  CHECK(tensors.size() == 2);
  CHECK(tensors.at("c").bytes.size() == 2);
  CHECK(tensors.source() == shards.directory.path().string());
}

TEST_CASE("pitfall 12: a missing shard is named") {
  const sharded_directory shards(R"({"weight_map": {"a": "one.safetensors", "b": "three.safetensors"}})");
  CHECK(mentions(shards.refused(error_code::file_not_found), (shards.directory.path() / "three.safetensors").string()));
}

TEST_CASE("a tensor that its shard does not hold is refused") {
  const sharded_directory shards(R"({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}})");
  CHECK(mentions(shards.refused(error_code::file_malformed), "index.json", "'b'", "not in one.safetensors"));
}

TEST_CASE("an index without a weight_map of strings is refused") {
  CHECK(mentions(sharded_directory("[]").refused(error_code::file_malformed), "index.json", "weight_map"));
  CHECK(mentions(sharded_directory("{}").refused(error_code::file_malformed), "index.json", "weight_map"));
  CHECK(mentions(sharded_directory(R"({"weight_map": ["a"]})").refused(error_code::file_malformed), "weight_map"));
  CHECK(mentions(sharded_directory(R"({"weight_map": {"a": 1}})").refused(error_code::file_malformed), "'a'", "number", "string"));
  CHECK(mentions(sharded_directory("{").refused(error_code::file_malformed), "index.json", "JSON"));
}

TEST_CASE("a tensor listed twice in an index is refused") {
  const sharded_directory shards(R"({"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}})");
  CHECK(mentions(shards.refused(error_code::file_malformed), "'a'", "twice"));
}

TEST_CASE("an index cannot name files outside its directory") {
  for (const std::string shard :
       {"../one.safetensors", "sub/one.safetensors", "/one.safetensors", "..", ".", "", "..\\\\one", "C:one", "one\\u0000"}) {
    CAPTURE(shard);
    const sharded_directory shards(R"({"weight_map": {"a": ")" + shard + "\"}}");
    CHECK(mentions(shards.refused(error_code::file_malformed), "'a'", "beside the index"));
  }
}

TEST_CASE("a malformed shard is refused under its own name") {
  const sharded_directory shards(R"({"weight_map": {"a": "one.safetensors"}})");
  const auto path = shards.directory.write("one.safetensors", "short");
  CHECK(shards.refused(error_code::file_malformed).starts_with(path.string()));
}

// ---------------------------------------------------------------- property

TEST_CASE("pitfall 15: whatever happens to a header, every tensor lies inside the file or the file is refused") {
  using namespace std::string_view_literals;
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("b":{"dtype":"BF16","shape":[5],"data_offsets":[24,34]},"c":{"dtype":"U8","shape":[0],"data_offsets":[34,34]}})";
  const std::string whole = safetensors_file(header, std::string(34, 'x'));
  const std::string_view alphabet = "{}[]:,\"0123456789-.e \\u\0\xff"sv;  // bytes that mean something to the parser

  const std::uint32_t seed = 20240607;
  CAPTURE(seed);
  std::mt19937 random(seed);
  const auto below = [&](std::size_t bound) { return static_cast<std::size_t>(random()) % bound; };
  const auto mutate = [&](std::string& file) {
    const std::size_t at = below((std::min)(8 + header.size(), file.size()));
    switch (below(6)) {
      case 0:
        file[at] = static_cast<char>(file[at] ^ (1 << below(8)));
        break;
      case 1:
        file[at] = alphabet[below(alphabet.size())];
        break;
      case 2:
        file.erase(at, 1 + below(4));
        break;
      case 3:
        file.insert(at, 1, alphabet[below(alphabet.size())]);
        break;
      case 4:
        file.resize(file.size() - below(file.size() / 2));
        break;
      case 5:  // another number, so that what is refused is the range and not the JSON
        if (const std::size_t digit = file.find_first_of("0123456789", at); digit != file.npos)
          file[digit] = static_cast<char>('0' + below(10));
        break;
    }
  };

  std::size_t loaded = 0, refused = 0;
  for (int iteration = 0; iteration < 20'000; ++iteration) {
    CAPTURE(iteration);
    std::string file = whole;
    for (std::size_t changes = 1 + below(3); changes-- > 0;) mutate(file);
    // On the heap and exactly as long as the file, where a sanitizer sees a read behind the end; a mapping ends with its page.
    const std::vector<char> bytes(file.begin(), file.end());
    try {
      const auto tensors = io::detail::safetensors_reader(std::as_bytes(std::span(bytes)), "mutant").read();
      ++loaded;
      const auto* const begin = reinterpret_cast<const std::byte*>(bytes.data());
      for (const io::tensor& t : tensors) {
        CHECK(t.bytes.data() >= begin + 8);
        CHECK(t.bytes.data() + t.bytes.size() <= begin + bytes.size());
      }
    } catch (const outrider::error& refusal) {
      ++refused;
      if (refusal.code() != error_code::file_malformed) FAIL(refusal.what());
    }
  }
  CHECK(loaded > 100);  // renamed tensors, changed metadata: the test must not stop at the first byte each time
  CHECK(refused > 100);
}
