// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "outrider/gemma4/gguf_names.hpp"
#include "outrider/io/safetensors.hpp"
#include "support/model_as_gguf.hpp"
#include "support/temporary_directory.hpp"

namespace {

using namespace outrider;
using namespace outrider::gemma4;
using testing::assistant_as_gguf;
using testing::gguf_model;
using testing::temporary_directory;

const std::filesystem::path root = OUTRIDER_SOURCE_DIR;
const std::filesystem::path golden = root / "tests" / "golden";

io::gguf_file opened(const gguf_model& model, const temporary_directory& directory) {
  model.write(directory.path() / "model.gguf");
  return io::open_gguf(directory.path() / "model.gguf");
}

}  // namespace

TEST_CASE("every tensor of the golden models has a GGUF name that leads back to it") {
  for (const char* name : {"e2b", "e4b", "dense31b", "moe26b", "unified12b"})
    for (const char* role : {"target", "assistant"}) {
      CAPTURE(name);
      CAPTURE(role);
      for (const auto& entry : io::load_safetensors(golden / name / role))
        for (const scheme_names& scheme : assistant_schemes) {
          const auto& [internal, tensor] = entry;
          CAPTURE(entry.first);
          const auto gguf = gguf_name(internal, scheme.scheme);
          REQUIRE(gguf);
          CHECK(internal_name(*gguf) == internal);
          CHECK(known(*gguf)->rank == tensor.shape.size());
        }
    }
}

TEST_CASE("names of multimodal files are those of text-only ones in GGUF, and their encoders have none") {
  CHECK(gguf_name("model.language_model.layers.12.mlp.up_proj.weight") == "blk.12.ffn_up.weight");
  CHECK_FALSE(gguf_name("model.vision_tower.encoder.layers.0.mlp.up_proj.weight"));
  CHECK_FALSE(gguf_name("model.layers.0.mlp.up_proj.bias"));
}

TEST_CASE("the three norms that are easily confused keep apart") {
  CHECK(internal_name("blk.3.post_norm.weight") == "model.layers.3.post_per_layer_input_norm.weight");
  CHECK(internal_name("blk.3.post_attention_norm.weight") == "model.layers.3.post_attention_layernorm.weight");
  CHECK(internal_name("blk.3.post_ffw_norm.weight") == "model.layers.3.post_feedforward_layernorm.weight");
  CHECK(internal_name("blk.3.post_ffw_norm_2.weight") == "model.layers.3.post_feedforward_layernorm_2.weight");
}

TEST_CASE("names that are none of Gemma's are not known") {
  for (const char* name : {"", ".weight", "blk.", "blk.0", "blk.0.", "blk.x.attn_q.weight", "blk.-1.attn_q.weight", "blk.01.attn_q.weight",
                           "blk.0.attn_q", "blk.0.ssm_a", "blk.99999999999999999999.attn_q.weight", "rope_freqs.weight", "token_embd",
                           "v.blk.0.attn_q.weight", "altup_proj.weight"}) {
    CAPTURE(name);
    CHECK_FALSE(internal_name(name));
  }
}

TEST_CASE("an assistant's own names and layer_output_scale are known with and without .weight") {
  for (const scheme_names& scheme : assistant_schemes)
    for (const scheme_tensor_names& tensor : assistant_tensor_names) {
      const std::string written(scheme.*tensor.gguf), bare(gemma4::detail::without_suffix(written));
      CAPTURE(written);
      CHECK(internal_name(bare) == tensor.internal);
      CHECK(internal_name(bare + ".weight") == tensor.internal);
    }
  CHECK(internal_name("blk.7.layer_output_scale") == "model.layers.7.layer_scalar");
  CHECK(internal_name("nextn.centroids") == "masked_embedding.centroids.weight");
  CHECK(internal_name("nextn.token_ordering.weight") == "masked_embedding.token_ordering");
}

TEST_CASE("no external name stands for two tensors") {
  std::set<std::string_view> names;
  for (const tensor_names& t : model_tensor_names) CHECK(names.insert(t.gguf).second);
  for (const tensor_names& t : layer_tensor_names) CHECK(names.insert(t.gguf).second);
  for (const scheme_names& scheme : assistant_schemes)
    for (const scheme_tensor_names& tensor : assistant_tensor_names)
      for (const scheme_tensor_names& other : assistant_tensor_names)
        if (&tensor != &other)
          for (const scheme_names& s : assistant_schemes) CHECK(scheme.*tensor.gguf != s.*other.gguf);
}

TEST_CASE("pitfalls 6 and 7: the scheme of an assistant is recognised from architecture, keys and tensors") {
  const temporary_directory directory;
  for (const scheme_names& names : assistant_schemes) {
    CAPTURE(letter_of(names.scheme));
    gguf_model model = assistant_as_gguf(golden / "e2b" / "assistant", names.scheme);
    if (names.scheme == assistant_scheme::a || names.scheme == assistant_scheme::e) {
      model.take(std::string(names.centroid_tensor));
      model.take(std::string(names.token_ordering));
    }
    if (names.scheme == assistant_scheme::e)  // the target's table, [V, T]
      model.tensors.push_back({"target_token_embd.weight", io::dtype::f32, {128, 32}, std::vector<std::byte>(128 * 32 * sizeof(float))});
    const io::gguf_file file = opened(model, directory);
    CHECK(is_assistant(file));
    CHECK(scheme_of(file) == names.scheme);
  }
}

TEST_CASE("a scheme whose two architecture names are in use is recognised under both") {
  const temporary_directory directory;
  for (const char* architecture : {"gemma4-assistant", "gemma4_assistant"}) {
    gguf_model model;
    model.set<std::string>("general.architecture", architecture);
    model.set(std::string(architecture) + ".backbone_hidden_size", std::uint32_t{8});
    CHECK(scheme_of(opened(model, directory)) == assistant_scheme::b);
  }
}

TEST_CASE("a target has no scheme, and neither has an assistant without the target's width") {
  const temporary_directory directory;
  CHECK_FALSE(is_assistant(opened(testing::target_as_gguf(golden / "e2b" / "target"), directory)));
  CHECK_FALSE(scheme_of(opened(testing::target_as_gguf(golden / "e2b" / "target"), directory)));
  gguf_model model = assistant_as_gguf(golden / "e2b" / "assistant", assistant_scheme::g);
  model.erase(model.key("embedding_length_out"));
  CHECK(is_assistant(opened(model, directory)));
  CHECK_FALSE(scheme_of(opened(model, directory)));
}

TEST_CASE("the files of the tiny pair are an assistant of scheme a and targets") {
  const std::filesystem::path files = root / "examples" / "data" / "tiny-kjv" / "gguf";
  CHECK(scheme_of(io::open_gguf(files / "assistant-bf16.gguf")) == assistant_scheme::a);
  CHECK(architecture_of(io::open_gguf(files / "target-q4_k_m.gguf")) == target_architecture);
}
