// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/io/mapped_file.hpp"

#include <doctest/doctest.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>

#if OUTRIDER_HAS_MMAP
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#include "../support/refusal.hpp"
#include "../support/temporary_directory.hpp"

using outrider::error_code;
using outrider::io::mapped_file;
using outrider::io::read_text_file;
using outrider::testing::mentions;
using outrider::testing::refusal;
using outrider::testing::temporary_directory;

static_assert(std::is_nothrow_move_constructible_v<mapped_file> && std::is_nothrow_move_assignable_v<mapped_file>);
static_assert(!std::is_copy_constructible_v<mapped_file> && !std::is_copy_assignable_v<mapped_file>);

namespace {

std::string_view text_of(const mapped_file& file) { return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()}; }

}  // namespace

TEST_CASE("a mapped file has the bytes and the path of the file") {
  const temporary_directory directory;
  const auto path = directory.write("f", std::string_view("one\0two\n", 8));
  const mapped_file file(path);
  CHECK(text_of(file) == std::string_view("one\0two\n", 8));
  CHECK(file.path() == path);
}

TEST_CASE("an empty file maps to no bytes") {
  const temporary_directory directory;
  CHECK(mapped_file(directory.write("f", "")).bytes().empty());
}

TEST_CASE("the bytes stay where they are when a mapped file moves") {
  const temporary_directory directory;
  mapped_file first(directory.write("first", "first")), second(directory.write("second", "second"));
  const std::byte* const where = first.bytes().data();

  mapped_file moved(std::move(first));
  CHECK(moved.bytes().data() == where);
  CHECK(first.bytes().empty());
  second = std::move(moved);
  CHECK(second.bytes().data() == where);
  CHECK(text_of(second) == "first");
  CHECK(moved.bytes().empty());
}

TEST_CASE("a mapping survives the removal of the file") {
  const temporary_directory directory;
  const auto path = directory.write("f", "kept");
  const mapped_file file(path);
  std::filesystem::remove(path);
  CHECK(text_of(file) == "kept");
}

TEST_CASE("a missing file is refused with its path and the system's reason") {
  const temporary_directory directory;
  const auto path = directory.path() / "absent";
  const std::string reason = std::generic_category().message(ENOENT);
  CHECK(mentions(refusal(error_code::file_not_found, [&] { mapped_file{path}; }), path.string(), reason));
  CHECK(mentions(refusal(error_code::file_not_found, [&] { static_cast<void>(read_text_file(path)); }), path.string(), reason));
}

TEST_CASE("a directory is refused as a file") {
  const temporary_directory directory;
  const std::string path = directory.path().string(), reason = std::generic_category().message(EISDIR);
  CHECK(mentions(refusal(error_code::file_not_found, [&] { mapped_file{path}; }), path, reason));
  CHECK(mentions(refusal(error_code::file_not_found, [&] { static_cast<void>(read_text_file(path)); }), path, reason));
}

TEST_CASE("a text file is read as it is") {
  const temporary_directory directory;
  CHECK(read_text_file(directory.write("empty", "")).empty());
  CHECK(read_text_file(directory.write("f", std::string_view("a\r\n\0b", 5))) == std::string_view("a\r\n\0b", 5));
  for (const std::size_t size : {65535u, 65536u, 65537u, 1000000u}) {  // around the piece it is read in
    CAPTURE(size);
    std::string text(size, 'x');
    text.back() = 'y';
    CHECK(read_text_file(directory.write("long", text)) == text);
  }
}

#if OUTRIDER_HAS_MMAP

TEST_CASE("an unreadable file is refused with its path and the system's reason") {
  if (::geteuid() == 0) return;  // root reads everything
  const temporary_directory directory;
  const auto path = directory.write("f", "secret");
  std::filesystem::permissions(path, std::filesystem::perms::none);
  const std::string reason = std::generic_category().message(EACCES);
  CHECK(mentions(refusal(error_code::file_not_found, [&] { mapped_file{path}; }), path.string(), reason));
  CHECK(mentions(refusal(error_code::file_not_found, [&] { static_cast<void>(read_text_file(path)); }), path.string(), reason));
}

TEST_CASE("a pipe is refused at once instead of waiting for its writer") {
  const temporary_directory directory;
  const auto path = directory.path() / "pipe";
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
  CHECK(mentions(refusal(error_code::file_not_found, [&] { mapped_file{path}; }), path.string(), "not a regular file"));
}

TEST_CASE("a text file above 1 GiB is refused without being read") {
  const temporary_directory directory;
  const auto path = directory.write("f", "");
  std::filesystem::resize_file(path, (std::uintmax_t{1} << 30) + 1);  // sparse: takes no room
  CHECK(mentions(refusal(error_code::file_malformed, [&] { static_cast<void>(read_text_file(path)); }), path.string(), "1073741824"));
}

TEST_CASE("a stream that never ends is given up at the limit") {
  if (!std::filesystem::exists("/dev/zero")) return;
  const auto read = [] { static_cast<void>(outrider::io::detail::read_file("/dev/zero", 100'000)); };
  CHECK(mentions(refusal(error_code::file_malformed, read), "/dev/zero", "100000"));
}

TEST_CASE("pitfall 4: mapping a file touches none of its pages") {
  const temporary_directory directory;
  const auto path = directory.write("f", "");
  std::filesystem::resize_file(path, std::uintmax_t{1} << 34);  // 16 GiB, sparse: four million pages
  const auto page_faults = [] {
    ::rusage usage = {};
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt + usage.ru_majflt;
  };
  const long before = page_faults();
  const mapped_file file(path);
  CHECK(file.bytes().size() == std::size_t{1} << 34);
  CHECK(page_faults() - before < 1000);  // what the program itself needs meanwhile
}

#endif
