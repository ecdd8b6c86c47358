// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>

#include "outrider/io/output_file.hpp"
#include "support/refusal.hpp"
#include "support/temporary_directory.hpp"

namespace {

using outrider::error_code;
using outrider::io::output_file;
using outrider::testing::mentions;
using outrider::testing::refusal;
using outrider::testing::temporary_directory;

std::string contents_of(const std::filesystem::path& file) {
  std::ostringstream text;
  text << std::ifstream(file, std::ios::binary).rdbuf();
  return text.str();
}
/// Entries of a directory, hidden ones included.
std::ptrdiff_t entries_of(const std::filesystem::path& directory) {
  return std::distance(std::filesystem::directory_iterator(directory), std::filesystem::directory_iterator());
}

/// Files of this process cannot grow beyond a limit while this lives: what a full disk looks like to a program.
class file_size_limit {
 public:
  explicit file_size_limit(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &before_);
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  file_size_limit(const file_size_limit&) = delete;
  file_size_limit& operator=(const file_size_limit&) = delete;
  ~file_size_limit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int) = nullptr;
};

}  // namespace

TEST_CASE("a file appears when it is committed, with all that was written") {
  const temporary_directory directory;
  const auto path = directory.path() / "model.gguf";
  output_file file(path);
  file.write("one ");
  file.write(std::string(3'000'000, 'x'));
  CHECK(file.size() == 3'000'004);
  CHECK_FALSE(std::filesystem::exists(path));
  file.commit();
  CHECK(contents_of(path) == "one " + std::string(3'000'000, 'x'));
  CHECK(entries_of(directory.path()) == 1);
}

TEST_CASE("without commit nothing stays behind") {
  const temporary_directory directory;
  {
    output_file file(directory.path() / "model.gguf");
    file.write(std::string(1'000'000, 'x'));
  }
  CHECK(entries_of(directory.path()) == 0);
}

TEST_CASE("an existing file stays until the new one is committed") {
  const temporary_directory directory;
  const auto path = directory.write("model.gguf", "old");
  {
    output_file file(path);
    file.write("new");
    CHECK(contents_of(path) == "old");
  }
  CHECK(contents_of(path) == "old");
  output_file file(path);
  file.write("new");
  file.commit();
  CHECK(contents_of(path) == "new");
  CHECK(entries_of(directory.path()) == 1);
}

TEST_CASE("two files of one name do not get into each other's way") {
  const temporary_directory directory;
  const auto path = directory.path() / "model.gguf";
  output_file first(path), second(path);
  first.write("first");
  second.write("second");
  second.commit();
  CHECK(contents_of(path) == "second");
  first.commit();
  CHECK(contents_of(path) == "first");
  CHECK(entries_of(directory.path()) == 1);
}

TEST_CASE("a moved file is committed once, by its new owner") {
  const temporary_directory directory;
  const auto path = directory.path() / "model.gguf";
  output_file second = [&] {
    output_file first(path);
    first.write("moved");
    return output_file(std::move(first));
  }();
  second.commit();
  CHECK(contents_of(path) == "moved");
}

TEST_CASE("a link is followed: its target is replaced, the link stays") {
  const temporary_directory directory;
  const auto path = directory.write("model.gguf", "old"), link = directory.path() / "link.gguf";
  std::filesystem::create_symlink("model.gguf", link);
  output_file file(link);
  file.write("new");
  file.commit();
  CHECK(std::filesystem::is_symlink(link));
  CHECK(contents_of(path) == "new");
}

TEST_CASE("a full disk is an error with the file's name and the system's reason, and nothing stays behind") {
  const temporary_directory directory;
  const auto path = directory.path() / "model.gguf";
  const file_size_limit limit(64 * 1024);
  const std::string sentence = refusal(error_code::file_not_written, [&] {
    output_file file(path);
    for (int i = 0; i < 100; ++i) file.write(std::string(10'000, 'x'));
    file.commit();
  });
  CHECK(mentions(sentence, "model.gguf: cannot be written: File too large"));
  CHECK(entries_of(directory.path()) == 0);
}

TEST_CASE("a disk that is full at the very end is an error too") {
  const temporary_directory directory;
  const file_size_limit limit(1000);
  output_file file(directory.path() / "model.gguf");
  file.write(std::string(1500, 'x'));  // stays in the buffer
  CHECK(mentions(refusal(error_code::file_not_written, [&] { file.commit(); }), "File too large"));
  CHECK_FALSE(std::filesystem::exists(directory.path() / "model.gguf"));
}

TEST_CASE("of several files none has its name while one may still find the disk full") {
  const temporary_directory directory;
  output_file first(directory.path() / "first"), second(directory.path() / "second");
  const file_size_limit limit(1000);
  first.write("one");
  second.write(std::string(1500, 'x'));  // stays in the buffer
  first.sync();
  CHECK(mentions(refusal(error_code::file_not_written, [&] { second.sync(); }), "second: cannot be written: File too large"));
  CHECK_FALSE(std::filesystem::exists(directory.path() / "first"));
}

TEST_CASE("temporary names that a killed program left behind are passed over") {
  const temporary_directory directory;
  const auto path = directory.path() / "model.gguf";
  // Names have a number that rises with every one given: these are the next ones of this process, whichever of them comes first.
  for (int i = 1; i <= 200; ++i) directory.write(".model.gguf." + std::to_string(getpid()) + "-" + std::to_string(i) + ".part", "left");
  output_file file(path);
  file.write("new");
  file.commit();
  CHECK(contents_of(path) == "new");
  CHECK(entries_of(directory.path()) == 201);
}

TEST_CASE("where there is no directory, or something else than a file, nothing is begun") {
  const temporary_directory directory;
  CHECK(mentions(refusal(error_code::file_not_written, [&] { output_file(directory.path() / "missing" / "model.gguf"); }),
                 "model.gguf: cannot be written: No such file or directory"));
  CHECK(mentions(refusal(error_code::file_not_written, [&] { output_file(directory.path()); }), "something else than a regular file"));
  CHECK(mentions(refusal(error_code::file_not_written, [&] { output_file("/dev/full"); }), "something else than a regular file"));
}

#ifdef O_TMPFILE
TEST_CASE("a program that is killed leaves nothing behind, where the file system knows files without names") {
  const temporary_directory directory;
  const int probe = ::open(directory.path().c_str(), O_TMPFILE | O_WRONLY, 0600);
  if (probe < 0) {
    MESSAGE("this file system does not: not tested");
    return;
  }
  ::close(probe);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    output_file file(directory.path() / "model.gguf");
    file.write(std::string(1'000'000, 'x'));
    std::raise(SIGKILL);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(entries_of(directory.path()) == 0);
}
#endif
