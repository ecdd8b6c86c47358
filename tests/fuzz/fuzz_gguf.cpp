// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
// The GGUF container: whatever is accepted lies inside the file and is as large as its type and shape say.
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "fuzz/finding.hpp"
#include "outrider/io/gguf.hpp"

namespace io = outrider::io;
using outrider::testing::is_inside;
using outrider::testing::require;

namespace {

void check_value(const io::gguf_value& value, std::span<const std::byte> file) {
  require(is_inside(value.bytes, file), "a value lies inside the file");
  require(!value.integer() || value.number(), "an integer is a number");
  const auto check_count = [&](const auto& elements) {
    require(!elements || elements->size() == value.count, "an array has as many elements as it says");
  };
  check_count(value.integers());
  check_count(value.numbers());
  check_count(value.booleans());
  const auto texts = value.texts();
  check_count(texts);
  if (texts)
    for (const std::string_view text : *texts) require(is_inside(std::as_bytes(std::span(text)), file), "a string lies inside the file");
  if (const auto text = value.text()) require(is_inside(std::as_bytes(std::span(*text)), file), "a string lies inside the file");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  outrider::testing::accepts("input.gguf: ", {outrider::error_code::file_malformed}, [&] {
    const io::gguf_file file = io::detail::gguf_reader(bytes, "input.gguf").read();
    for (const io::gguf_pair& pair : file.pairs) {
      require(!pair.key.empty() && file.find(pair.key) == &pair.value, "a key is not empty and there once");
      check_value(pair.value, bytes);
    }
    std::set<std::string> names;
    const std::byte* end = bytes.data() + (file.tensors.empty() ? 0 : file.data_offset);
    for (const io::tensor& t : file.tensors) {
      require(names.insert(t.name).second, "a tensor is there once");
      require(is_inside(t.bytes, bytes), "a tensor lies inside the file");
      require(t.bytes.data() >= end, "tensors do not overlap");
      require(static_cast<std::size_t>(t.bytes.data() - bytes.data()) % file.alignment == 0, "a tensor is aligned");
      require(io::byte_size(t.type, t.shape) == t.bytes.size(), "a tensor is as large as its type and shape say");
      end = t.bytes.data() + t.bytes.size();
    }
  });
  return 0;
}
