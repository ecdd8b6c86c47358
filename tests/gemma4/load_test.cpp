// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "outrider/backend/reference.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "support/counting_backend.hpp"
#include "support/refusal.hpp"
#include "support/rewrite_checkpoint.hpp"
#include "support/temporary_directory.hpp"

namespace {

using namespace outrider;
using testing::mentions;
using testing::refusal;
using testing::rewrite_checkpoint;
using testing::stored_tensor;
using testing::temporary_directory;

const std::filesystem::path golden = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "tests" / "golden";
const std::filesystem::path e2b = golden / "e2b";

stored_tensor& named(std::vector<stored_tensor>& tensors, const std::string& name) {
  const auto it = std::find_if(tensors.begin(), tensors.end(), [&](const stored_tensor& t) { return t.name == name; });
  REQUIRE(it != tensors.end());
  return *it;
}
void remove(std::vector<stored_tensor>& tensors, const std::string& name) {
  tensors.erase(tensors.begin() + (&named(tensors, name) - tensors.data()));
}

/// The sentence with which a target or an assistant of case e2b is refused after `edit`.
std::string refused_target(error_code code, const std::function<void(std::vector<stored_tensor>&)>& edit) {
  const temporary_directory directory;
  rewrite_checkpoint(e2b / "target", directory.path() / "target", edit);
  return refusal(code, [&] { static_cast<void>(gemma4::load_model<reference>(directory.path() / "target")); });
}
std::string refused_assistant(error_code code, const std::function<void(std::vector<stored_tensor>&)>& edit) {
  const temporary_directory directory;
  rewrite_checkpoint(e2b / "assistant", directory.path() / "assistant", edit);
  return refusal(code, [&] { static_cast<void>(gemma4::load_assistant<reference>(directory.path() / "assistant")); });
}

/// The logits of one draft step from fixed inputs over an empty cache, [V].
std::vector<float> step_logits(const gemma4::assistant<reference>& assistant) {
  context_of<reference> ctx{execution{}};
  gemma4::assistant<reference>::workspace ws(assistant.config());
  const auto input = assistant.input(ws);
  for (std::size_t i = 0; i < input.cols; ++i) input(0, i) = 0.25f * static_cast<float>(i % 7) - 0.5f;
  gemma4::shared_kv<float, host_space> no_keys;
  for (const auto kind : gemma4::attention_kinds) {
    const auto& shape = assistant.config().text.shape(kind);
    no_keys.layers[static_cast<std::size_t>(kind)] = {nullptr, 1, 0, shape.kv_heads, shape.head_dim};
  }
  const auto step = assistant.forward(ctx, ws, no_keys);
  std::vector<float> logits(assistant.config().text.vocab_size);
  assistant.dense_logits(ctx, {logits.data(), 1, logits.size(), logits.size()}, step);
  return logits;
}

std::vector<float> prompt_logits(const gemma4::model<reference>& model) {
  context_of<reference> ctx{execution{}};
  gemma4::session<reference> session(model, ctx);
  session.prefill(std::vector<token_id>{2, 5, 7});
  const auto logits = session.logits();
  return {logits.row(0), logits.row(0) + logits.cols};
}

std::vector<float> prompt_logits(const std::filesystem::path& directory) { return prompt_logits(gemma4::load_model<reference>(directory)); }

const std::string ordering = "masked_embedding.token_ordering";

/// The token ordering, stored as I64, in another element type.
template <class T>
void store_ordering_as(std::vector<stored_tensor>& tensors, const char* dtype) {
  stored_tensor& t = named(tensors, ordering);
  std::vector<std::byte> out(t.bytes.size() / sizeof(std::int64_t) * sizeof(T));
  for (std::size_t i = 0; i * sizeof(T) < out.size(); ++i) {
    std::int64_t id;
    std::memcpy(&id, t.bytes.data() + i * sizeof id, sizeof id);
    const T value = static_cast<T>(id);
    std::memcpy(out.data() + i * sizeof(T), &value, sizeof(T));
  }
  t.dtype = dtype;
  t.bytes = std::move(out);
}

}  // namespace

TEST_CASE("a missing tensor is named, with the file") {
  const std::string sentence =
      refused_target(error_code::tensor_missing, [](auto& tensors) { remove(tensors, "model.layers.2.mlp.up_proj.weight"); });
  CHECK(mentions(sentence, "target", "model.layers.2.mlp.up_proj.weight", "missing"));
}

TEST_CASE("a file without any embedding names both places it may lie in") {
  const std::string sentence =
      refused_target(error_code::tensor_missing, [](auto& tensors) { remove(tensors, "model.embed_tokens.weight"); });
  CHECK(mentions(sentence, "model.embed_tokens.weight", "model.language_model.embed_tokens.weight"));
}

TEST_CASE("a tensor of another shape is refused with both shapes") {
  const std::string sentence = refused_target(error_code::tensor_mismatch, [](auto& tensors) {
    std::swap(named(tensors, "model.layers.0.mlp.up_proj.weight").shape[0], named(tensors, "model.layers.0.mlp.up_proj.weight").shape[1]);
  });
  CHECK(mentions(sentence, "model.layers.0.mlp.up_proj.weight", "[32, 40]", "[40, 32]"));
}

TEST_CASE("a matrix of integers is refused with its type and those allowed") {
  const std::string sentence =
      refused_target(error_code::tensor_mismatch, [](auto& tensors) { named(tensors, "model.layers.0.mlp.up_proj.weight").dtype = "I32"; });
  CHECK(mentions(sentence, "model.layers.0.mlp.up_proj.weight", "I32", "F32, BF16, F16"));
}

TEST_CASE("an untied head is read from lm_head.weight, and tensors at any address give the same logits") {
  const auto want = prompt_logits(e2b / "target");
  std::size_t misaligned = 0;
  for (std::size_t shift = 0; shift < alignof(float); ++shift) {
    CAPTURE(shift);
    const temporary_directory directory;
    const auto to = directory.path() / "target";
    rewrite_checkpoint(e2b / "target", to, [&](auto& tensors) {
      stored_tensor head = named(tensors, "model.embed_tokens.weight");
      head.name = "lm_head.weight";
      tensors.push_back(head);
      tensors.insert(tensors.begin(), {"shift", "U8", {shift}, std::vector<std::byte>(shift)});
    });
    gemma4::text_config config = gemma4::read_target_config(to / "config.json");
    config.tied_head = false;
    const auto tensors = std::make_shared<const io::tensor_set>(io::load_safetensors(to));
    if (reinterpret_cast<std::uintptr_t>(tensors->at("lm_head.weight").bytes.data()) % alignof(float) != 0) ++misaligned;
    CHECK(prompt_logits(gemma4::model<reference>(config, tensors)) == want);
  }
  CHECK(misaligned >= alignof(float) - 2);  // the header's length varies with the shift by a digit at most
  gemma4::text_config untied = gemma4::read_target_config(e2b / "target" / "config.json");
  untied.tied_head = false;
  const auto tied = std::make_shared<const io::tensor_set>(io::load_safetensors(e2b / "target"));
  CHECK(mentions(refusal(error_code::tensor_missing, [&] { gemma4::model<reference>(untied, tied); }), "lm_head.weight"));
}

TEST_CASE("pitfall 5: an assistant with centroid tensors loads, and one without them loads too") {
  CHECK(gemma4::load_assistant<reference>(e2b / "assistant").config().centroid_head);
  CHECK_FALSE(gemma4::load_assistant<reference>(golden / "dense31b" / "assistant").config().centroid_head);
}

TEST_CASE("pitfall 23: the flag decides on the centroid head, not the tensors that are there") {
  auto config = gemma4::read_assistant_config(e2b / "assistant" / "config.json");
  config.centroid_head = false;
  const gemma4::assistant<reference> dense(config, std::make_shared<const io::tensor_set>(io::load_safetensors(e2b / "assistant")));
  const auto all = step_logits(dense), sparse = step_logits(gemma4::load_assistant<reference>(e2b / "assistant"));
  // Pitfall 63: candidates keep their ids and their logits, the others lie below all of them.
  const float fill = *std::min_element(sparse.begin(), sparse.end());
  std::size_t candidates = 0;
  for (std::size_t id = 0; id < all.size(); ++id)
    if (sparse[id] != fill) {
      ++candidates;
      CHECK(sparse[id] == all[id]);
    }
  CHECK(candidates == 4 * 128 / 16);  // top_k clusters of V / C ids
}

TEST_CASE("pitfall 9: a token ordering stored as I32, I64 or F32 gives the same head") {
  const auto want = step_logits(gemma4::load_assistant<reference>(e2b / "assistant"));
  for (const char* dtype : {"I32", "F32"}) {
    CAPTURE(dtype);
    const temporary_directory directory;
    rewrite_checkpoint(e2b / "assistant", directory.path() / "assistant", [&](auto& tensors) {
      dtype == std::string("I32") ? store_ordering_as<std::int32_t>(tensors, dtype) : store_ordering_as<float>(tensors, dtype);
    });
    CHECK(step_logits(gemma4::load_assistant<reference>(directory.path() / "assistant")) == want);
  }
}

TEST_CASE("pitfall 9: a token ordering that is no permutation is refused") {
  const auto with_first = [](std::int64_t id) {
    return [id](std::vector<stored_tensor>& tensors) { std::memcpy(named(tensors, ordering).bytes.data(), &id, sizeof id); };
  };
  std::int64_t second = 0;
  const auto original = io::load_safetensors(e2b / "assistant");
  std::memcpy(&second, original.at(ordering).bytes.data() + sizeof second, sizeof second);
  for (const std::int64_t id : {std::int64_t{-1}, std::int64_t{128}, std::int64_t{1} << 40, second}) {
    CAPTURE(id);
    CHECK(mentions(refused_assistant(error_code::tensor_mismatch, with_first(id)), ordering, "permutation"));
  }
  CHECK(mentions(refused_assistant(error_code::tensor_mismatch,
                                   [](auto& tensors) {
                                     store_ordering_as<float>(tensors, "F32");
                                     const float half = 0.5f;
                                     std::memcpy(named(tensors, ordering).bytes.data(), &half, sizeof half);
                                   }),
                 ordering, "permutation"));
  CHECK(mentions(refused_assistant(error_code::tensor_mismatch, [](auto& tensors) { store_ordering_as<std::int16_t>(tensors, "I16"); }),
                 ordering, "I16", "I32, I64 or F32"));
}

TEST_CASE("pitfall 21: a drafter's tensors are no target, whatever its config says") {
  const auto config = gemma4::read_assistant_config(e2b / "assistant" / "config.json");
  const auto tensors = std::make_shared<const io::tensor_set>(io::load_safetensors(e2b / "assistant"));
  CHECK(mentions(refusal(error_code::model_unsupported, [&] { gemma4::model<reference>(config.text, tensors); }), "drafter"));
}

TEST_CASE("pitfall 53: an input of another width than [embedding, hidden] of the target is refused by shape") {
  const std::string sentence = refused_assistant(error_code::tensor_mismatch, [](auto& tensors) {
    stored_tensor& t = named(tensors, "pre_projection.weight");  // as if made from the drafter's own embedding: 24 + 32
    t.shape = {24, 56};
    t.bytes.resize(24 * 56 * sizeof(float));
  });
  CHECK(mentions(sentence, "pre_projection.weight", "[24, 56]", "[24, 64]"));
}

TEST_CASE("pitfall 93: all ends of text of generation_config.json end it, and its suppressed ids come along") {
  const temporary_directory directory;
  const auto to = directory.path() / "target";
  rewrite_checkpoint(e2b / "target", to, [](auto&) {});
  CHECK(gemma4::load_model<reference>(to).config().eos == std::vector<token_id>{1});
  directory.write("target/generation_config.json", R"({"eos_token_id": [1, 106, 50], "suppress_tokens": [7, 8]})");
  const auto model = gemma4::load_model<reference>(to);
  CHECK(model.config().eos == std::vector<token_id>{1, 106, 50});
  CHECK(model.config().suppress == std::vector<token_id>{7, 8});
}

TEST_CASE("a generation_config.json that is a link to nowhere is refused, not passed over") {
  const temporary_directory directory;
  const auto to = directory.path() / "target";
  rewrite_checkpoint(e2b / "target", to, [](auto&) {});
  std::filesystem::create_symlink(directory.path() / "nowhere", to / "generation_config.json");
  CHECK(mentions(refusal(error_code::file_not_found, [&] { static_cast<void>(gemma4::load_model<reference>(to)); }),
                 "generation_config.json"));
}

TEST_CASE("a file that is neither a directory nor GGUF is refused for what it is") {
  const temporary_directory directory;
  const auto file = directory.write("model.bin", "something else");
  CHECK(
      mentions(refusal(error_code::file_malformed, [&] { static_cast<void>(gemma4::load_model<reference>(file)); }), "model.bin", "GGUF"));
  CHECK(mentions(refusal(error_code::file_malformed, [&] { static_cast<void>(gemma4::load_assistant<reference>(file)); }), "model.bin"));
  CHECK(mentions(refusal(error_code::file_not_found, [&] { static_cast<void>(gemma4::load_model<reference>(directory.path() / "none")); }),
                 "none"));
  CHECK(mentions(refusal(error_code::file_not_found, [&] { static_cast<void>(gemma4::load_model<reference>(directory.path())); }),
                 "config.json"));
}

TEST_CASE("pitfall 21: a drafter's GGUF file is no target, and a target's no drafter") {
  const auto files = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "examples" / "data" / "tiny-kjv" / "gguf";
  CHECK(mentions(
      refusal(error_code::model_unsupported, [&] { static_cast<void>(gemma4::load_model<reference>(files / "assistant-bf16.gguf")); }),
      "assistant-bf16.gguf", "general.architecture", "a drafter, not a target"));
  CHECK(mentions(
      refusal(error_code::model_unsupported, [&] { static_cast<void>(gemma4::load_assistant<reference>(files / "target-bf16.gguf")); }),
      "target-bf16.gguf", "general.architecture", "a target, not a drafter"));
}

namespace {

const std::filesystem::path tiny_files = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "examples" / "data" / "tiny-kjv" / "gguf";

/// The bytes of a file's tensors of type Q8_0, but for the one of that name.
std::size_t bytes_of_q8_0(const std::filesystem::path& file, std::string_view without) {
  std::size_t bytes = 0;
  for (const io::tensor& t : io::open_gguf(file).tensors)
    if (t.type == io::dtype::q8_0 && t.name != without) bytes += t.bytes.size();
  return bytes;
}

/// Options for matrices in groups that note how many bytes are rearranged.
gemma4::load_options noting(std::size_t& rearranged) {
  return {gemma4::weight_form::grouped, [&rearranged](std::size_t done, std::size_t) { rearranged = done; }};
}

}  // namespace

TEST_CASE("every quantised matrix of a target is rearranged once, a table that is also the head too, the per-layer table never") {
  std::size_t rearranged = 0;
  const auto model = gemma4::load_model<reference>(tiny_files / "target-q8_0.gguf", noting(rearranged));
  REQUIRE(model.config().tied_head);
  CHECK(model.int8_activations());
  CHECK(rearranged == bytes_of_q8_0(tiny_files / "target-q8_0.gguf", "per_layer_token_embd.weight"));
}

TEST_CASE("an assistant's matrices are rearranged like a target's") {
  std::size_t rearranged = 0;
  static_cast<void>(gemma4::load_assistant<reference>(tiny_files / "assistant-q8_0.gguf", noting(rearranged)));
  CHECK(rearranged == bytes_of_q8_0(tiny_files / "assistant-q8_0.gguf", ""));
}

TEST_CASE("a target without quantised matrices has no int8 activations, whatever is asked for") {
  std::size_t rearranged = 0;
  CHECK_FALSE(gemma4::load_model<reference>(tiny_files / "target-bf16.gguf", noting(rearranged)).int8_activations());
  CHECK(rearranged == 0);
}

TEST_CASE("a pass quantises what a layer's products read once each: six inputs with per-layer embeddings, and the head's") {
  using testing::counting;
  for (const auto form : {gemma4::weight_form::grouped, gemma4::weight_form::stored}) {
    const auto model = gemma4::load_model<counting>(tiny_files / "target-q8_0.gguf", {form, {}});
    context_of<counting> ctx;
    gemma4::session<counting> session(model, ctx);
    counting::quantised = 0;
    session.prefill(std::vector<token_id>{2});
    CHECK(counting::quantised == (form == gemma4::weight_form::grouped ? 6 * model.config().layer_count() + 1 : 0));
  }
}
