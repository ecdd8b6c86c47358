// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#if __has_include(<unistd.h>)
#define OUTRIDER_HAS_FSYNC 1
#include <fcntl.h>
#include <unistd.h>
#else
#define OUTRIDER_HAS_FSYNC 0
#endif

#include "outrider/error.hpp"

namespace outrider::io {

/// A file that appears under its name when it is complete, or not at all: what is written goes to a file beside it, and commit() puts that in
/// the name's place. An existing file of that name stays as it was until then. Without commit(), be it for an exception or a signal that ends
/// the program, nothing stays behind: on Linux the unfinished file has no name; elsewhere, and on file systems that cannot do that, it has a
/// temporary name, which the destructor removes.
/// Errors: file_not_written, with the system's reason. Move-only; one thread.
class output_file {
 public:
  /// `path` is where the file will appear; its directory must exist. What is there already must be a regular file, or a link to one, whose
  /// target is then replaced.
  explicit output_file(std::filesystem::path path) : path_(std::move(path)) {
    std::error_code ignored;
    if (std::filesystem::is_symlink(path_, ignored))
      if (auto target = std::filesystem::weakly_canonical(path_, ignored); !ignored) path_ = std::move(target);
    if (std::filesystem::exists(path_, ignored) && !std::filesystem::is_regular_file(path_, ignored))
      refuse("there is something else than a regular file");
    open();
  }
  output_file(output_file&& other) noexcept
      : path_(std::move(other.path_)), temporary_(std::exchange(other.temporary_, {})), file_(std::move(other.file_)), size_(other.size_) {}
  output_file& operator=(output_file&&) = delete;
  ~output_file() {
    file_.reset();
    std::error_code ignored;
    if (!temporary_.empty()) std::filesystem::remove(temporary_, ignored);
  }

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  /// Bytes written so far.
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }

  void write(std::span<const std::byte> bytes) {
    if (bytes.empty()) return;  // its data may be null, which fwrite must not get
    if (std::fwrite(bytes.data(), 1, bytes.size(), file_.get()) != bytes.size()) refuse(errno);
    size_ += bytes.size();
  }
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }

  /// Makes sure that the bytes written so far are on the disk. commit() does so too: this is for several files of which none shall appear
  /// while there may be no room for another.
  void sync() {
    if (std::fflush(file_.get()) != 0) refuse(errno);
#if OUTRIDER_HAS_FSYNC
    if (::fsync(::fileno(file_.get())) != 0) refuse(errno);
#endif
  }
  /// Makes sure that the bytes are on the disk, and gives them the name. Nothing can be written afterwards.
  void commit() {
    sync();
    name_it();
    if (std::FILE* const file = file_.release(); std::fclose(file) != 0) refuse(errno);
    std::error_code failure;
    std::filesystem::rename(temporary_, path_, failure);
    if (failure) refuse(failure.message());
    temporary_.clear();
#if OUTRIDER_HAS_FSYNC
    // The name is on the disk when the directory is. Some file systems cannot do this: the file is there all the same.
    if (const int directory = ::open(directory_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); directory >= 0) {
      static_cast<void>(::fsync(directory));
      ::close(directory);
    }
#endif
  }

 private:
  struct close_file {
    void operator()(std::FILE* file) const noexcept { std::fclose(file); }
  };

  [[noreturn]] void refuse(const std::string& reason) const {
    throw error(error_code::file_not_written, path_.string() + ": cannot be written: " + reason);
  }
  [[noreturn]] void refuse(int number) const { refuse(std::generic_category().message(number)); }

  static constexpr const char* open_files = "/proc/self/fd/";  // the way from an open file to its name

  static std::filesystem::path directory_of(const std::filesystem::path& path) {
    return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  }
  /// A name beside the file's that no other output_file of a running program has. One that was killed may have left its own, and process
  /// numbers come again: what is there already is passed over.
  [[nodiscard]] std::filesystem::path temporary_name() const {
    static std::atomic<unsigned> count = 0;
#if OUTRIDER_HAS_FSYNC
    const auto process = static_cast<long long>(::getpid());
#else
    const long long process = 0;
#endif
    return directory_of(path_) /
           ("." + path_.filename().string() + "." + std::to_string(process) + "-" + std::to_string(++count) + ".part");
  }

  void open() {
#ifdef O_TMPFILE
    if (::access(open_files, X_OK) == 0) {
      const int number = ::open(directory_of(path_).c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
      if (number >= 0) file_.reset(::fdopen(number, "wb"));
      if (file_) return;
      if (number >= 0) ::close(number);
    }
#endif
    std::filesystem::path name;
    do {
      name = temporary_name();
      file_.reset(std::fopen(name.string().c_str(), "wbx"));
    } while (!file_ && errno == EEXIST);
    if (!file_) refuse(errno);
    temporary_ = std::move(name);
  }
  /// Gives a file without a name its temporary one.
  void name_it() {
#ifdef O_TMPFILE
    if (!temporary_.empty()) return;
    const std::string open_file = open_files + std::to_string(::fileno(file_.get()));
    std::filesystem::path name;
    int failure = 0;
    do {
      name = temporary_name();
      failure = ::linkat(AT_FDCWD, open_file.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0 ? 0 : errno;
    } while (failure == EEXIST);
    if (failure != 0) refuse(failure);
    temporary_ = std::move(name);
#endif
  }

  std::filesystem::path path_, temporary_;  // temporary_ is empty while the file has no name
  std::unique_ptr<std::FILE, close_file> file_;
  std::uint64_t size_ = 0;
};

}  // namespace outrider::io
