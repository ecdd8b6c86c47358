// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <stdexcept>
#include <string>

namespace outrider {

/// What kind of thing went wrong, for programs; what() is the sentence for people: file, field, found, expected.
enum class error_code {
  file_not_found,       // a file or directory is missing or cannot be opened or mapped
  file_not_written,     // a file cannot be created, written to the end or put in its place: no space, no permission
  file_malformed,       // bytes that are not what the format says: truncated, overlapping, oversized, not JSON
  config_invalid,       // a configuration value of the wrong type or outside what is allowed
  model_unsupported,    // a legal file of a family, activation or layout this library does not run
  tensor_missing,       // a tensor the configuration asks for is not in the file
  tensor_mismatch,      // a tensor with another shape or element type than the configuration asks for
  pair_mismatch,        // target and assistant do not belong together
  tokenizer_malformed,  // a tokenizer file that cannot be used
  argument_invalid,     // a request outside what the call allows: token ids, lengths, counts
  context_full,         // the sequence would outgrow the cache's limit
  out_of_memory,        // storage could not be had, on the host or on a device
  device_unavailable,   // no device, or none that this library or this driver can use
  device_failed,        // a call to a device's own library failed
};

/// The one exception type of the library (a context whose threads the system refuses throws std::system_error). Thrown at load and at the API
/// boundary, never from an op or inside the decode loop.
class error : public std::runtime_error {
 public:
  /// Names from a file become part of `what`: control characters in it are replaced by '?', and what is beyond 2000 bytes by "…".
  error(error_code code, const std::string& what) : std::runtime_error(printable(what)), code_(code) {}
  [[nodiscard]] error_code code() const noexcept { return code_; }

 private:
  static std::string printable(std::string text) {
    constexpr std::size_t longest = 2000;
    if (text.size() > longest) text = text.substr(0, longest) + "…";
    for (char& c : text)
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
    return text;
  }

  error_code code_;
};

/// Bytes as messages name them, rounded up: "3 MiB".
[[nodiscard]] inline std::string mebibytes(std::size_t bytes) { return std::to_string((bytes >> 20) + (bytes % (1u << 20) != 0)) + " MiB"; }

}  // namespace outrider
