// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
// The safetensors container: the tensors of an accepted file cover its data, each as large as its type and shape say.
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>

#include "fuzz/finding.hpp"
#include "outrider/io/safetensors.hpp"

namespace io = outrider::io;
using outrider::testing::require;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  outrider::testing::accepts("input.safetensors: ", {outrider::error_code::file_malformed}, [&] {
    const auto tensors = io::detail::safetensors_reader(bytes, "input.safetensors").read();
    std::set<std::string> names;
    std::size_t covered = 0;
    for (const io::tensor& t : tensors) {
      require(names.insert(t.name).second, "a tensor is there once");
      require(outrider::testing::is_inside(t.bytes, bytes), "a tensor lies inside the file");
      require(io::byte_size(t.type, t.shape) == t.bytes.size(), "a tensor is as large as its type and shape say");
      covered += t.bytes.size();
    }
    require(covered + 8 < size, "the header is no tensor's");
  });
  return 0;
}
