// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <nlohmann/json.hpp>

#include "outrider/error.hpp"
#include "outrider/io/output_file.hpp"
#include "outrider/io/tensor_writer.hpp"
#include "outrider/io/tensors.hpp"

namespace outrider::io {

/// Writes the tensors, in the order given, as one safetensors file into `file`, which the caller commits; `source` hands over their data.
/// Holds the header and nothing of the data.
/// Errors: file_not_written; argument_invalid for a block format, which such a file cannot hold, for a name that is there twice, or if the
/// source gives a tensor too few or too many bytes.
inline void write_safetensors(output_file& file, std::span<const tensor_plan> tensors, const tensor_source& source) {
  nlohmann::ordered_json header;
  header["__metadata__"] = {{"format", "pt"}};
  std::size_t offset = 0;
  for (const tensor_plan& t : tensors) {
    if (describe(t.type).elements != 1 || !t.bytes() || header.contains(t.name))
      throw error(error_code::argument_invalid, file.path().string() + ": tensor '" + t.name + "' of type " + std::string(name_of(t.type)) +
                                                    " is there twice or nothing a safetensors file can hold");
    const std::size_t end = offset + *t.bytes();
    header[t.name] = {{"dtype", name_of(t.type)}, {"shape", t.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // the data is aligned to 8 bytes, as the format's own library does
  const std::uint64_t length = text.size();
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(text);
  detail::write_tensors(file, tensors, 1, source);
}

}  // namespace outrider::io
