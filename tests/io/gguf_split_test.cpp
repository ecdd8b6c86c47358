// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "../support/refusal.hpp"
#include "../support/temporary_directory.hpp"
#include "../support/write_gguf.hpp"
#include "outrider/io/gguf.hpp"

namespace io = outrider::io;
using outrider::error_code;
using outrider::testing::gguf_builder;
using outrider::testing::gguf_tensor;
using outrider::testing::mentions;
using outrider::testing::refusal;
using outrider::testing::temporary_directory;

namespace {

gguf_tensor one_byte(const std::string& name, int value) { return {name, io::dtype::i8, {1}, {static_cast<std::byte>(value)}}; }

gguf_builder part(std::uint16_t number, std::uint16_t count, std::int32_t tensors) {
  gguf_builder b;
  b.pair("split.no", number).pair("split.count", count).pair("split.tensors.count", tensors);
  return b;
}

/// A set of three parts: pairs only, then one tensor, then two.
struct split_set {
  temporary_directory directory;
  gguf_builder first = part(0, 3, 3).pair("general.architecture", "gemma4"), second = part(1, 3, 3).tensor(one_byte("a", 10)),
               third = part(2, 3, 3).tensor(one_byte("b", 20)).tensor(one_byte("c", 30));

  [[nodiscard]] std::filesystem::path path(int number) const {
    return directory.path() / ("model-0000" + std::to_string(number) + "-of-00003.gguf");
  }
  void write() const {
    first.write(path(1));
    second.write(path(2));
    third.write(path(3));
  }
  /// The sentence with which the set is refused.
  [[nodiscard]] std::string refused(error_code code) const {
    write();
    return refusal(code, [&] { static_cast<void>(io::open_gguf(path(1))); });
  }
};

}  // namespace

TEST_CASE("pitfall 12: any part of a split set opens all of it") {
  const split_set set;
  set.write();
  for (int opened = 1; opened <= 3; ++opened) {
    CAPTURE(opened);
    const io::gguf_file file = io::open_gguf(set.path(opened));
    CHECK(file.source == set.path(opened).string());
    CHECK(file.find("general.architecture")->text() == "gemma4");
    CHECK(file.find("split.no")->integer() == 0);
    REQUIRE(file.tensors.size() == 3);
    CHECK(file.tensors[0].name == "a");
    CHECK(file.tensors[2].bytes[0] == std::byte{30});
  }
}

TEST_CASE("pitfall 12: each tensor of a split set knows its part and its place there") {
  const split_set set;
  set.write();
  const io::gguf_file file = io::open_gguf(set.path(1));
  REQUIRE(file.parts.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) CHECK(file.parts[i].file == set.path(static_cast<int>(i) + 1).string());
  const io::tensor& last = file.tensors[2];
  const io::gguf_part& part = file.part_of(last);
  CHECK(part.file == set.path(3).string());
  CHECK(last.bytes.data() - part.bytes.data() == static_cast<std::ptrdiff_t>(part.data_offset + 32));
}

TEST_CASE("a file that says it is a set of one, or of none, stands alone under any name") {
  const temporary_directory directory;
  const auto path = directory.path() / "model.gguf";
  for (const std::uint16_t count : {std::uint16_t{0}, std::uint16_t{1}}) {
    part(0, count, 1).tensor(one_byte("a", 1)).write(path);
    CHECK(io::open_gguf(path).tensors.size() == 1);
  }
}

TEST_CASE("pitfall 12: a missing part is named") {
  const split_set set;
  set.write();
  std::filesystem::remove(set.path(2));
  for (const int opened : {1, 3})
    CHECK(mentions(refusal(error_code::file_not_found, [&] { static_cast<void>(io::open_gguf(set.path(opened))); }), set.path(2).string(),
                   "part 2 of 3", "is missing"));
}

TEST_CASE("pitfall 12: a part under a name that does not lead to the others is refused with the ending it should have") {
  const split_set set;
  set.write();
  for (const char* name : {"model.gguf", "model-00001-of-00004.gguf", "model-00002-of-00003.gguf", "model-1-of-3.gguf"}) {
    CAPTURE(name);
    const temporary_directory directory;
    const auto path = directory.path() / name;
    set.first.write(path);
    CHECK(mentions(refusal(error_code::file_malformed, [&] { static_cast<void>(io::open_gguf(path)); }), path.string(), "part 1 of 3",
                   "-00001-of-00003.gguf"));
  }
}

TEST_CASE("pitfall 12: parts that say they are another part, of another set or of none are refused") {
  split_set set;
  set.second = part(2, 3, 3);
  CHECK(mentions(set.refused(error_code::file_malformed), set.path(2).string(), "part 2 of 3", "says it is part 3 of 3"));
  set.second = part(1, 4, 3);
  CHECK(mentions(set.refused(error_code::file_malformed), set.path(2).string(), "says it is part 2 of 4"));
  set.second = gguf_builder();
  CHECK(mentions(set.refused(error_code::file_malformed), set.path(2).string(), "says it is part 1 of 1"));
}

TEST_CASE("pitfall 12: parts that disagree with the first are refused with the key") {
  split_set set;
  set.second = part(1, 3, 4);
  CHECK(mentions(set.refused(error_code::file_malformed), set.path(2).string(), "'split.tensors.count'"));
  set.second = part(1, 3, 3).pair("general.architecture", "llama");
  CHECK(mentions(set.refused(error_code::file_malformed), set.path(2).string(), "'general.architecture'"));
}

TEST_CASE("pitfall 12: a tensor in two parts is refused with both") {
  split_set set;
  set.third.tensor(one_byte("a", 1));
  CHECK(mentions(set.refused(error_code::file_malformed), set.path(3).string(), "'a'", set.path(2).string()));
}

TEST_CASE("pitfall 12: a set that has not as many tensors as it says is refused with both numbers") {
  split_set set;
  set.third = part(2, 3, 3);
  CHECK(mentions(set.refused(error_code::file_malformed), "split.tensors.count is 3", "1 tensors"));
}

TEST_CASE("pitfall 12: numbers of a set that are missing or of the wrong type are refused with the key") {
  const temporary_directory directory;
  const auto refused = [&](const gguf_builder& b) {
    const auto path = directory.path() / "model-00001-of-00001.gguf";
    b.write(path);
    return refusal(error_code::file_malformed, [&] { static_cast<void>(io::open_gguf(path)); });
  };
  CHECK(mentions(refused(gguf_builder().pair("split.count", "3")), "split.count", "integer from 0 to 65535"));
  CHECK(mentions(refused(gguf_builder().pair("split.count", std::int32_t{-1})), "split.count"));
  CHECK(mentions(refused(gguf_builder().pair("split.count", std::uint32_t{65536})), "split.count"));
  CHECK(mentions(refused(gguf_builder().pair("split.count", std::uint16_t{2})), "split.no is missing"));
  CHECK(mentions(refused(gguf_builder().pair("split.count", std::uint16_t{2}).pair("split.no", std::uint16_t{2})), "part 3 of 2"));
}

TEST_CASE("a malformed part is refused under its own name") {
  const split_set set;
  set.write();
  set.directory.write(set.path(3).filename().string(), "GGUF");
  CHECK(mentions(refusal(error_code::file_malformed, [&] { static_cast<void>(io::open_gguf(set.path(1))); }), set.path(3).string(),
                 "the version"));
}
