// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#if __has_include(<sys/mman.h>)
#define OUTRIDER_HAS_MMAP 1
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#else
#define OUTRIDER_HAS_MMAP 0
#endif

#include "outrider/error.hpp"

namespace outrider::io {

namespace detail {

[[noreturn]] inline void refuse_file(const std::filesystem::path& path, const char* action, const std::string& reason) {
  throw error(error_code::file_not_found, path.string() + ": cannot be " + action + ": " + reason);
}
/// The reason is what the system says about `number`, an errno.
[[noreturn]] inline void refuse_file(const std::filesystem::path& path, const char* action, int number) {
  refuse_file(path, action, std::generic_category().message(number));
}

/// Everything up to the end of a file or pipe, given up at `limit` bytes: at once if the size is known, while reading otherwise.
inline std::string read_file(const std::filesystem::path& path, std::size_t limit) {
  const auto refuse_length = [&] {
    throw error(error_code::file_malformed, path.string() + ": longer than the " + std::to_string(limit) + " bytes allowed");
  };
  struct close {
    void operator()(std::FILE* file) const noexcept { std::fclose(file); }
  };
  const std::unique_ptr<std::FILE, close> file(std::fopen(path.string().c_str(), "rb"));
  if (!file) refuse_file(path, "opened", errno);

  std::string contents;
  std::error_code unknown;
  if (const std::uintmax_t size = std::filesystem::file_size(path, unknown); !unknown) {
    if (size > limit) refuse_length();
    contents.reserve(static_cast<std::size_t>(size));
  }
  std::vector<char> piece(std::size_t{1} << 16);
  for (;;) {
    const std::size_t count = std::fread(piece.data(), 1, piece.size(), file.get());
    if (std::ferror(file.get())) refuse_file(path, "read", errno);
    if (count > limit - contents.size()) refuse_length();
    contents.append(piece.data(), count);
    if (count < piece.size()) return contents;
  }
}

}  // namespace detail

/// Whether there is anything at `path`. A link to nowhere is there, and so is what the system does not let us look at: opening it is refused
/// with the reason, where a missing file would be passed over.
[[nodiscard]] inline bool is_there(const std::filesystem::path& path) noexcept {
  std::error_code ignored;
  return std::filesystem::symlink_status(path, ignored).type() != std::filesystem::file_type::not_found;
}

/// The whole of a file or pipe, as it is. error_code::file_not_found if it cannot be opened or read, file_malformed beyond 1 GiB.
[[nodiscard]] inline std::string read_text_file(const std::filesystem::path& path) { return detail::read_file(path, std::size_t{1} << 30); }

/// A regular file mapped read-only: opening it costs the same whatever its size, and a page is read when somebody looks at it.
/// Move-only; the bytes stay where they are when the object moves. The file must not be shortened while it is mapped: the system answers
/// a read behind the new end with SIGBUS. A platform without mmap reads the file into memory instead.
class mapped_file {
 public:
  /// error_code::file_not_found for what is missing, unreadable or not a regular file. An empty file gives empty bytes.
  explicit mapped_file(std::filesystem::path path) : path_(std::move(path)) {
#if OUTRIDER_HAS_MMAP
    struct descriptor {
      int number;
      ~descriptor() {
        if (number >= 0) ::close(number);
      }
    };
    // O_NONBLOCK: opening a pipe must end in the refusal below, not wait for a writer.
    const descriptor file{::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    struct stat status = {};
    if (file.number < 0 || ::fstat(file.number, &status) != 0) detail::refuse_file(path_, "opened", errno);
    if (S_ISDIR(status.st_mode)) detail::refuse_file(path_, "mapped", EISDIR);
    if (!S_ISREG(status.st_mode)) detail::refuse_file(path_, "mapped", "not a regular file");
    if (!std::in_range<std::size_t>(status.st_size)) detail::refuse_file(path_, "mapped", EFBIG);
    if (status.st_size == 0) return;  // mmap refuses empty ranges
    const auto size = static_cast<std::size_t>(status.st_size);
    const void* const memory = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.number, 0);
    if (memory == MAP_FAILED) detail::refuse_file(path_, "mapped", errno);
    bytes_ = {static_cast<const std::byte*>(memory), size};
#else
    contents_ = std::make_unique<const std::string>(detail::read_file(path_, (std::numeric_limits<std::size_t>::max)()));
    bytes_ = std::as_bytes(std::span(*contents_));
#endif
  }
  mapped_file(mapped_file&& other) noexcept { swap(other); }
  mapped_file& operator=(mapped_file&& other) noexcept {
    mapped_file(std::move(other)).swap(*this);
    return *this;
  }
  ~mapped_file() {
#if OUTRIDER_HAS_MMAP
    if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
#endif
  }

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }
  /// The same bytes as characters.
  [[nodiscard]] std::string_view text() const noexcept { return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}; }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  void swap(mapped_file& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(bytes_, other.bytes_);
#if !OUTRIDER_HAS_MMAP
    std::swap(contents_, other.contents_);
#endif
  }

  std::filesystem::path path_;
  std::span<const std::byte> bytes_;
#if !OUTRIDER_HAS_MMAP
  std::unique_ptr<const std::string> contents_;
#endif
};

/// Tells the system that nobody reads these bytes of a mapped_file soon: their pages no longer count as the program's memory, and reading them
/// again costs a read of the file. Only for the bytes of a mapped_file: other memory would lose its content. A hint: it may do nothing.
inline void release_pages([[maybe_unused]] std::span<const std::byte> bytes) noexcept {
#if OUTRIDER_HAS_MMAP
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<std::uintptr_t>(bytes.data()) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(bytes.data()) + bytes.size()) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
#endif
}

}  // namespace outrider::io
