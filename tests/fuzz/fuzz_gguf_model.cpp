// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
// A model in a GGUF file, target or assistant: keys and tensors of an accepted one fit together, and a target reads a few tokens.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "fuzz/config_numbers.hpp"
#include "fuzz/finding.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/gemma4/assistant.hpp"
#include "outrider/gemma4/gguf_config.hpp"
#include "outrider/gemma4/gguf_tensors.hpp"
#include "outrider/gemma4/model.hpp"
#include "outrider/gemma4/session.hpp"
#include "outrider/io/gguf.hpp"

namespace gemma4 = outrider::gemma4;
namespace io = outrider::io;
using outrider::error_code;
using outrider::testing::accepts;
using outrider::testing::check_numbers;
using outrider::testing::require;

namespace {

/// Tensors that point into the input: they need no keeping alive.
std::shared_ptr<const io::tensor_set> checked(io::tensor_set tensors) {
  for (const auto& [name, t] : tensors)
    require(name == t.name && io::byte_size(t.type, t.shape) == t.bytes.size(), "a tensor is as large as its type and shape say");
  return std::make_shared<const io::tensor_set>(std::move(tensors));
}
void read_tokens(const gemma4::model<outrider::reference>& model) {
  if (model.config().window > 4096) return;  // a cache of that many positions takes long, and shows nothing new
  outrider::context_of<outrider::reference> ctx{outrider::execution{}};
  gemma4::session<outrider::reference> session(model, ctx, {.max_draft = 1, .prompt_chunk = 2, .max_positions = 8});
  session.prefill(std::vector<outrider::token_id>{0, static_cast<outrider::token_id>(model.config().vocab_size - 1), 0});
  require(session.logits().rows == 1 && session.logits().cols == model.config().vocab_size, "a token has a logit");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  io::gguf_file file;
  if (!accepts("input.gguf", {error_code::file_malformed},
               [&] { file = io::detail::gguf_reader(std::as_bytes(std::span(data, size)), "input.gguf").read(); }))
    return 0;
  const auto refusals = {error_code::config_invalid, error_code::model_unsupported, error_code::file_malformed, error_code::tensor_missing,
                         error_code::tensor_mismatch};
  const bool target = accepts("input.gguf", refusals, [&] {
    const gemma4::text_config config = gemma4::read_target_config(file);
    check_numbers(config);
    read_tokens(gemma4::model<outrider::reference>(config, checked(gemma4::target_tensors(file, config))));
  });
  const bool assistant = accepts("input.gguf", refusals, [&] {
    const gemma4::assistant_config config = gemma4::read_assistant_config(file);
    check_numbers(config.text);
    gemma4::assistant<outrider::reference>(config, checked(gemma4::assistant_tensors(file, config)));
  });
  require(!target || !assistant, "no file is a target and an assistant");
  return 0;
}
