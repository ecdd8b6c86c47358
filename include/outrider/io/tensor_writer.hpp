// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "outrider/error.hpp"
#include "outrider/io/output_file.hpp"
#include "outrider/io/tensors.hpp"

namespace outrider::io {

/// A tensor that is going to be written.
struct tensor_plan {
  std::string name;
  dtype type = dtype::f32;
  std::vector<std::size_t> shape;  // outermost first

  [[nodiscard]] std::optional<std::size_t> bytes() const noexcept { return byte_size(type, shape); }
};

/// Takes the next bytes of a tensor.
using byte_sink = std::function<void(std::span<const std::byte>)>;
/// Hands the bytes of tensor `index` to `sink`, in order, in pieces of any size; what it throws ends the writing.
using tensor_source = std::function<void(std::size_t index, const byte_sink& sink)>;

namespace detail {

/// Every byte of the tensors is written; nothing between them is left out.
inline void write_tensors(output_file& file, std::span<const tensor_plan> tensors, std::size_t alignment, const tensor_source& source) {
  static constexpr std::byte zeros[64] = {};
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::size_t size = *tensors[i].bytes();
    std::size_t written = 0;
    source(i, [&](std::span<const std::byte> piece) {
      written += piece.size();
      if (written <= size) file.write(piece);
    });
    if (written != size)
      throw error(error_code::argument_invalid, file.path().string() + ": tensor '" + tensors[i].name + "' takes " + std::to_string(size) +
                                                    " bytes, but was given " + std::to_string(written));
    for (std::size_t rest = (alignment - size % alignment) % alignment; rest != 0;) {
      const std::size_t n = (std::min)(rest, sizeof zeros);
      file.write(std::span(zeros, n));
      rest -= n;
    }
  }
}

}  // namespace detail

}  // namespace outrider::io
