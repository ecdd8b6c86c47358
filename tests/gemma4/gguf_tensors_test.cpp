// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/gemma4/gguf_tensors.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "outrider/backend/reference.hpp"
#include "outrider/gemma4/load.hpp"
#include "support/model_as_gguf.hpp"
#include "support/refusal.hpp"
#include "support/temporary_directory.hpp"

namespace {

using namespace outrider;
using namespace outrider::gemma4;
using testing::assistant_as_gguf;
using testing::gguf_model;
using testing::gguf_tensor;
using testing::mentions;
using testing::refusal;
using testing::target_as_gguf;
using testing::temporary_directory;

const std::filesystem::path root = OUTRIDER_SOURCE_DIR;
const std::filesystem::path golden = root / "tests" / "golden", tiny = root / "examples" / "data" / "tiny-kjv";

using edit = std::function<void(gguf_model&)>;

io::tensor_set target_set(const gguf_model& model) {
  const temporary_directory directory;
  model.write(directory.path() / "model.gguf");
  const io::gguf_file file = io::open_gguf(directory.path() / "model.gguf");
  return target_tensors(file, read_target_config(file));
}
io::tensor_set target_set_after(const edit& change, const char* name = "e2b") {
  gguf_model model = target_as_gguf(golden / name / "target");
  change(model);
  return target_set(model);
}
io::tensor_set assistant_set_after(const edit& change, assistant_scheme scheme = assistant_scheme::g) {
  gguf_model model = assistant_as_gguf(golden / "e2b" / "assistant", scheme);
  change(model);
  const temporary_directory directory;
  model.write(directory.path() / "model.gguf");
  const io::gguf_file file = io::open_gguf(directory.path() / "model.gguf");
  return assistant_tensors(file, read_assistant_config(file));
}
std::string refused(error_code code, const edit& change, const char* name = "e2b") {
  const std::string sentence = refusal(code, [&] { static_cast<void>(target_set_after(change, name)); });
  CHECK(mentions(sentence, "model.gguf"));
  return sentence;
}

bool same_tensor(const io::tensor& a, const io::tensor& b) {
  return a.type == b.type && a.shape == b.shape && a.bytes.size() == b.bytes.size() &&
         std::memcmp(a.bytes.data(), b.bytes.data(), a.bytes.size()) == 0;
}
void check_same(const io::tensor_set& read, const io::tensor_set& expected) {
  CHECK(read.size() == expected.size());
  for (const auto& entry : expected) {
    CAPTURE(entry.first);
    const io::tensor* const found = read.find(entry.first);
    REQUIRE(found);
    CHECK(same_tensor(*found, entry.second));
  }
}

gguf_tensor empty(const std::string& name) { return {name, io::dtype::f32, {0}, {}}; }

/// Joins q, k and, where it is there, v of a layer into one tensor.
void fuse(gguf_model& m, std::size_t layer) {
  const std::string at = "blk." + std::to_string(layer) + ".";
  gguf_tensor fused = m.take(at + "attn_q.weight");
  fused.name = at + "attn_qkv.weight";
  for (const char* name : {"attn_k.weight", "attn_v.weight"}) {
    if (std::none_of(m.tensors.begin(), m.tensors.end(), [&](const gguf_tensor& t) { return t.name == at + name; })) continue;
    const gguf_tensor part = m.take(at + name);
    fused.shape[0] += part.shape[0];
    fused.bytes.insert(fused.bytes.end(), part.bytes.begin(), part.bytes.end());
  }
  m.tensors.push_back(fused);
}

}  // namespace

TEST_CASE("golden models have the same tensors, from safetensors and from GGUF") {
  for (const char* name : {"e2b", "e4b", "dense31b", "moe26b", "unified12b", "e2b_bf16"}) {
    CAPTURE(name);
    check_same(target_set_after([](auto&) {}, name), io::load_safetensors(golden / name / "target"));
  }
}

TEST_CASE("pitfall 6: every naming scheme leads to the same tensors") {
  const io::tensor_set expected = io::load_safetensors(golden / "e2b" / "assistant");
  for (const scheme_names& names : assistant_schemes) {
    CAPTURE(letter_of(names.scheme));
    check_same(assistant_set_after([](auto&) {}, names.scheme), expected);
    check_same(assistant_set_after(  // with and without the suffix .weight
                   [&](gguf_model& m) {
                     for (const std::string_view name :
                          {names.pre_projection, names.post_projection, names.centroid_tensor, names.token_ordering}) {
                       const std::string bare(gemma4::detail::without_suffix(name));
                       m.tensor(std::string(name)).name = bare == name ? bare + ".weight" : bare;
                     }
                     for (gguf_tensor& t : m.tensors)
                       if (t.name.ends_with("layer_output_scale.weight")) t.name = gemma4::detail::without_suffix(t.name);
                   },
                   names.scheme),
               expected);
  }
}

TEST_CASE("nothing is copied: tensors point into the mapped file") {
  const io::gguf_file file = io::open_gguf(tiny / "gguf" / "target-bf16.gguf");
  const io::tensor_set set = target_tensors(file, read_target_config(file));
  CHECK(set.at("model.layers.5.mlp.up_proj.weight").bytes.data() == find_tensor(file, "blk.5.ffn_up.weight")->bytes.data());
}

TEST_CASE("pitfall 11: fused projections are split by rows, whatever a layer has of them") {
  for (const char* name : {"e2b", "dense31b"}) {
    CAPTURE(name);
    const io::tensor_set expected = io::load_safetensors(golden / name / "target");
    check_same(target_set_after(
                   [](gguf_model& m) {
                     for (std::size_t i = 0; i < 3; ++i) fuse(m, i);
                   },
                   name),
               expected);
    check_same(target_set_after(  // up to the last layer: full, sharing in e2b, without values in dense31b
                   [](gguf_model& m) {
                     for (std::size_t i = 0;
                          std::any_of(m.tensors.begin(), m.tensors.end(),
                                      [&](const gguf_tensor& t) { return t.name == "blk." + std::to_string(i) + ".attn_q.weight"; });
                          ++i)
                       fuse(m, i);
                   },
                   name),
               expected);
  }
}

TEST_CASE("pitfall 12: a model in parts is whole, from any part and from the directory that holds them") {
  const gguf_model whole = target_as_gguf(golden / "e2b" / "target");
  gguf_model parts[] = {whole, {}};
  parts[0].tensors.resize(whole.tensors.size() / 2);
  parts[1].tensors.assign(whole.tensors.begin() + static_cast<std::ptrdiff_t>(parts[0].tensors.size()), whole.tensors.end());
  const temporary_directory directory;
  const std::string names[] = {"m-00001-of-00002.gguf", "m-00002-of-00002.gguf"};
  for (std::size_t i = 0; i < 2; ++i) {
    parts[i].set("split.no", static_cast<std::uint16_t>(i));
    parts[i].set("split.count", std::uint16_t{2});
    parts[i].set("split.tensors.count", static_cast<std::int32_t>(whole.tensors.size()));
    parts[i].write(directory.path() / names[i]);
  }
  const io::tensor_set expected = io::load_safetensors(golden / "e2b" / "target");
  for (const auto& path : {directory.path() / names[0], directory.path() / names[1], directory.path()}) {
    const io::gguf_file file = io::open_gguf(locate_model(path));
    check_same(target_tensors(file, read_target_config(file)), expected);
  }
}

TEST_CASE("pitfall 11: a target without scales of its layers' outputs has scales of 1") {
  const io::tensor_set set = target_set_after([](gguf_model& m) { m.take("blk.4.layer_output_scale.weight"); });
  const io::tensor& scale = set.at("model.layers.4.layer_scalar");
  float value = 0;
  REQUIRE(scale.bytes.size() == sizeof value);
  std::memcpy(&value, scale.bytes.data(), sizeof value);
  CHECK(value == 1);
}

TEST_CASE("an assistant without them is refused") {
  const std::string sentence = refusal(error_code::tensor_missing, [] {
    static_cast<void>(assistant_set_after([](gguf_model& m) { m.take("blk.2.layer_output_scale.weight"); }));
  });
  CHECK(mentions(sentence, "model.gguf", "'blk.2.layer_output_scale.weight' is missing"));
}

TEST_CASE("extents of 1 may be more or fewer than usual") {
  check_same(target_set_after([](gguf_model& m) {
               const auto extend = [&](const char* name) {
                 auto& shape = m.tensor(name).shape;
                 shape.insert(shape.begin(), 4 - shape.size(), 1);
               };
               for (const char* name : {"blk.0.attn_norm.weight", "blk.0.layer_output_scale.weight", "blk.1.attn_q.weight",
                                        "token_embd.weight", "per_layer_token_embd.weight"})
                 extend(name);
             }),
             io::load_safetensors(golden / "e2b" / "target"));
  // The height of a fused projection says whether full layers have values of their own: layer 5 is one.
  check_same(target_set_after([](gguf_model& m) {
               for (std::size_t i = 0; i < 10; ++i) {
                 const std::string name = "blk." + std::to_string(i) + ".attn_qkv.weight";
                 fuse(m, i);
                 m.tensor(name).shape.insert(m.tensor(name).shape.begin(), 1);
               }
             }),
             io::load_safetensors(golden / "e2b" / "target"));
  // Writers that drop outer extents of 1 leave a matrix of one row as a vector.
  const io::tensor_set set = target_set_after([](gguf_model& m) {
    m.tensors.push_back({"output.weight", io::dtype::f32, {32}, std::vector<std::byte>(32 * sizeof(float))});
  });
  CHECK(set.at("lm_head.weight").shape == std::vector<std::size_t>{1, 32});
}

TEST_CASE("pitfall 14: dead projections of sharing layers may be there") {
  const io::tensor_set set = target_set_after([](gguf_model& m) {
    for (const char* name : {"blk.7.attn_k.weight", "blk.7.attn_v.weight", "blk.7.attn_k_norm.weight"}) m.tensors.push_back(empty(name));
  });
  CHECK(set.find("model.layers.7.self_attn.k_norm.weight"));
}

TEST_CASE("what is missing is named as the file would name it") {
  for (const char* name :
       {"token_embd.weight", "output_norm.weight", "per_layer_model_proj.weight", "blk.9.ffn_up.weight", "blk.0.attn_k.weight",
        "blk.0.attn_k_norm.weight", "blk.0.attn_v.weight", "blk.3.post_norm.weight", "blk.8.attn_q_norm.weight"}) {
    CAPTURE(name);
    CHECK(mentions(refused(error_code::tensor_missing, [&](gguf_model& m) { m.take(name); }), "'" + std::string(name) + "' is missing"));
  }
  CHECK(mentions(refused(
                     error_code::tensor_missing, [](gguf_model& m) { m.take("blk.1.ffn_gate_up_exps.weight"); }, "moe26b"),
                 "'blk.1.ffn_gate_exps.weight' is missing"));
  const std::string sentence = refusal(error_code::tensor_missing, [] {
    static_cast<void>(assistant_set_after([](gguf_model& m) { m.take("mtp_post_proj.weight"); }, assistant_scheme::d));
  });
  CHECK(mentions(sentence, "'mtp_post_proj.weight' is missing"));
}

TEST_CASE("a tensor of another shape is refused under both its names") {
  gguf_model model = target_as_gguf(golden / "e2b" / "target");
  std::swap(model.tensor("blk.0.ffn_up.weight").shape[0], model.tensor("blk.0.ffn_up.weight").shape[1]);
  const temporary_directory directory;
  model.write(directory.path() / "model.gguf");
  const std::string sentence =
      refusal(error_code::tensor_mismatch, [&] { static_cast<void>(load_model<reference>(directory.path() / "model.gguf")); });
  CHECK(mentions(sentence, "model.gguf, blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight", "[32, 40]", "[40, 32]"));
}

TEST_CASE("a fused projection of another height is refused") {
  CHECK(mentions(refused(error_code::tensor_mismatch,
                         [](gguf_model& m) {
                           fuse(m, 0);
                           gguf_tensor& t = m.tensor("blk.0.attn_qkv.weight");
                           t.bytes.resize(t.bytes.size() / t.shape[0] * (t.shape[0] - 1));
                           --t.shape[0];
                         }),
                 "blk.0.attn_qkv.weight", "rows, the configuration asks for"));
}

TEST_CASE("tensors that the model does not read are refused") {
  const auto added = [](const char* name, const char* model = "e2b") {
    return [=](error_code code) {
      return refused(
          code, [&](gguf_model& m) { m.tensors.push_back(empty(name)); }, model);
    };
  };
  CHECK(mentions(added("blk.0.attn_q.bias")(error_code::model_unsupported), "'blk.0.attn_q.bias'", "none that a Gemma 4 target has"));
  CHECK(mentions(added("altup_proj.weight")(error_code::model_unsupported), "altup_proj.weight"));
  CHECK(mentions(added("blk.10.attn_q.weight")(error_code::tensor_mismatch), "blk.10.attn_q.weight", "only 10 layers"));
  CHECK(mentions(added("blk.0.ffn_gate_inp.weight")(error_code::tensor_mismatch), "blk.0.ffn_gate_inp.weight", "no experts"));
  CHECK(mentions(added("per_layer_token_embd.weight", "dense31b")(error_code::tensor_mismatch), "no per-layer embeddings"));
  CHECK(mentions(added("blk.0.layer_output_scale")(error_code::file_malformed), "layer_scalar", "twice"));
}

TEST_CASE("scales of NVFP4 weights are refused for what they are") {
  for (const char* name : {"blk.0.ffn_up.scale", "blk.0.attn_q.input_scale"})
    CHECK(mentions(refused(error_code::model_unsupported, [&](gguf_model& m) { m.tensors.push_back(empty(name)); }), name, "NVFP4"));
}

TEST_CASE("a target's file may hold encoders and a drafter beside it") {
  const io::tensor_set set = target_set_after([](gguf_model& m) {
    for (const char* name : {"v.patch_embd.weight", "a.conv1d.weight", "mm.input_projection.weight", "nextn.pre_projection.weight",
                             "mtp.blk.0.attn_q.weight", "assist_pre_proj.weight"})
      m.tensors.push_back(empty(name));
  });
  check_same(set, io::load_safetensors(golden / "e2b" / "target"));
}

TEST_CASE("an assistant's file holds nothing but the assistant") {
  for (const char* name : {"v.patch_embd.weight", "mtp.norm.weight", "nextn.eh_proj.weight", "blk.0.attn_q.bias"}) {
    const std::string sentence = refusal(error_code::model_unsupported, [&] {
      static_cast<void>(assistant_set_after([&](gguf_model& m) { m.tensors.push_back(empty(name)); }));
    });
    CHECK(mentions(sentence, "model.gguf", name, "none that a Gemma 4 assistant has"));
  }
}

TEST_CASE("scheme e: the copy of the target's table is passed over, under whatever name") {
  const io::tensor_set expected = io::load_safetensors(golden / "e2b" / "assistant");
  const gguf_tensor table{"backbone_embd.weight", io::dtype::f32, {128, 32}, std::vector<std::byte>(128 * 32 * sizeof(float))};
  check_same(assistant_set_after([&](gguf_model& m) { m.tensors.push_back(table); }, assistant_scheme::e), expected);

  const io::tensor_set swapped = assistant_set_after(
      [&](gguf_model& m) {
        m.tensor("token_embd.weight").name = "output.weight";
        m.tensors.push_back(table);
        m.tensors.back().name = "token_embd.weight";
      },
      assistant_scheme::e);
  CHECK(same_tensor(swapped.at("lm_head.weight"), expected.at("model.embed_tokens.weight")));
  CHECK_FALSE(swapped.find("model.embed_tokens.weight"));
}

TEST_CASE("a GGUF file is found by its own path or as the only one of a directory, and a set of parts as one") {
  const temporary_directory directory;
  const auto touch = [&](const std::string& name) { return directory.write(name, ""); };
  CHECK(locate_model(directory.path()) == directory.path());
  const auto file = touch("model.gguf");
  CHECK(locate_model(file) == file);
  CHECK(locate_model(directory.path()) == file);
  touch("model-00001-of-00002.gguf");
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { static_cast<void>(locate_model(directory.path())); }), "2 GGUF files"));
  touch("config.json");
  CHECK(locate_model(directory.path()) == directory.path());

  const temporary_directory parts;
  const auto first = parts.write("m-00001-of-00002.gguf", "");
  parts.write("m-00002-of-00002.gguf", "");
  CHECK(locate_model(parts.path()) == first);
}

TEST_CASE("a path is described as the target or the assistant it holds") {
  const auto is_target = [](const std::filesystem::path& path) { return read_model_description(path).index() == 0; };
  for (const char* name : {"target", "gguf/target-q4_0.gguf"}) CHECK(is_target(tiny / name));
  for (const char* name : {"assistant", "gguf/assistant-q8_0.gguf"}) CHECK_FALSE(is_target(tiny / name));
  CHECK(std::get<text_config>(read_model_description(tiny / "target")).eos == std::vector<token_id>{1, 6});
  CHECK(mentions(refusal(error_code::file_malformed, [] { static_cast<void>(read_model_description(root / "README.md")); }), "README.md"));
  CHECK(mentions(refusal(error_code::file_not_found, [] { static_cast<void>(read_model_description(root / "nothing.gguf")); }),
                 "nothing.gguf"));
}
