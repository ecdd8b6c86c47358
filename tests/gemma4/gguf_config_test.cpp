// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/gemma4/gguf_config.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "outrider/gemma4/config_json.hpp"
#include "outrider/gemma4/pairing.hpp"
#include "released_configs.hpp"
#include "support/model_as_gguf.hpp"
#include "support/refusal.hpp"
#include "support/temporary_directory.hpp"

namespace {

using namespace outrider;
using namespace outrider::gemma4;
using testing::assistant_as_gguf;
using testing::float_tensor;
using testing::gguf_model;
using testing::gguf_tensor;
using testing::mentions;
using testing::refusal;
using testing::target_as_gguf;
using testing::temporary_directory;

const std::filesystem::path root = OUTRIDER_SOURCE_DIR;
const std::filesystem::path golden = root / "tests" / "golden", tiny = root / "examples" / "data" / "tiny-kjv";

using edit = std::function<void(gguf_model&)>;
using u32 = std::uint32_t;

/// What is read from a file of that model.
template <class Read>
auto read_file(const gguf_model& model, const Read& read) {
  const temporary_directory directory;
  model.write(directory.path() / "model.gguf");
  return read(io::open_gguf(directory.path() / "model.gguf"));
}
text_config read_target(const gguf_model& model) {
  return read_file(model, [](const io::gguf_file& file) { return read_target_config(file); });
}
assistant_config read_assistant(const gguf_model& model) {
  return read_file(model, [](const io::gguf_file& file) { return read_assistant_config(file); });
}

/// The target of case e2b, or another, after a change.
text_config target_after(const edit& change, const char* name = "e2b") {
  gguf_model model = target_as_gguf(golden / name / "target");
  change(model);
  return read_target(model);
}
assistant_config assistant_after(const edit& change, assistant_scheme scheme = assistant_scheme::g) {
  gguf_model model = assistant_as_gguf(golden / "e2b" / "assistant", scheme);
  change(model);
  return read_assistant(model);
}

/// A target whose key is changed is refused with the file, the key, what was found and what is allowed.
std::string refused(const std::string& key, const edit& change, error_code code = error_code::config_invalid, const char* name = "e2b") {
  const std::string sentence = refusal(code, [&] { static_cast<void>(target_after(change, name)); });
  CAPTURE(sentence);
  CHECK(mentions(sentence, "model.gguf: " + key + " is ", "; allowed: "));
  return sentence;
}
template <class T>
std::string refused_value(const std::string& key, T value, error_code code = error_code::config_invalid) {
  return refused(
      "gemma4." + key, [&](gguf_model& m) { m.set("gemma4." + key, value); }, code);
}
std::string refused_assistant(const std::string& key, const edit& change, assistant_scheme scheme = assistant_scheme::g) {
  const std::string sentence = refusal(error_code::config_invalid, [&] { static_cast<void>(assistant_after(change, scheme)); });
  CAPTURE(sentence);
  CHECK(mentions(sentence, "model.gguf: ", key + " is ", "; allowed: "));
  return sentence;
}

void check_same(const text_config& a, const text_config& b) {
  CHECK(a.vocab_size == b.vocab_size);
  CHECK(a.hidden_size == b.hidden_size);
  CHECK(a.intermediate_size == b.intermediate_size);
  CHECK(a.heads == b.heads);
  CHECK(a.layers == b.layers);
  for (const attention_kind kind : attention_kinds) {
    CHECK(a.shape(kind).head_dim == b.shape(kind).head_dim);
    CHECK(a.shape(kind).kv_heads == b.shape(kind).kv_heads);
    CHECK(a.shape(kind).rope == b.shape(kind).rope);
  }
  CHECK(a.window == b.window);
  CHECK(a.causal == b.causal);
  CHECK(a.kv_shared_layers == b.kv_shared_layers);
  CHECK(a.double_wide_mlp == b.double_wide_mlp);
  CHECK(static_cast<float>(a.rms_norm_eps) == static_cast<float>(b.rms_norm_eps));
  CHECK(a.softcap == b.softcap);
  CHECK(a.ple_width == b.ple_width);
  if (a.ple_width != 0) CHECK(a.ple_vocab_size == b.ple_vocab_size);
  CHECK(a.experts == b.experts);
  CHECK(a.experts_per_token == b.experts_per_token);
  CHECK(a.expert_width == b.expert_width);
  CHECK(a.tied_head == b.tied_head);
  CHECK(a.max_positions == b.max_positions);
}
void check_same_target(const text_config& a, const text_config& b) {
  check_same(a, b);
  CHECK(a.k_eq_v == b.k_eq_v);
}

constexpr float stopped = 1e30f;

}  // namespace

TEST_CASE("the tiny pair's GGUF files have the configuration of its directories, ends of text included") {
  text_config target = read_target_config(tiny / "target" / "config.json");
  const assistant_config assistant = read_assistant_config(tiny / "assistant" / "config.json");
  for (const char* name : {"target-bf16.gguf", "target-q8_0.gguf", "target-q4_0.gguf", "target-q4_k_m.gguf"}) {
    CAPTURE(name);
    const text_config read = read_target_config(io::open_gguf(tiny / "gguf" / name));
    check_same_target(read, target);
    CHECK(read.eos == read_generation_config(tiny / "target", target.vocab_size).eos);
    CHECK(read.suppress.empty());
  }
  for (const char* name : {"assistant-bf16.gguf", "assistant-q8_0.gguf"}) {
    CAPTURE(name);
    const assistant_config read = read_assistant_config(io::open_gguf(tiny / "gguf" / name));
    check_same(read.text, assistant.text);
    CHECK(read.backbone_hidden_size == assistant.backbone_hidden_size);
    CHECK_FALSE(read.centroid_head);  // its converter dropped the tensors
    CHECK_NOTHROW(check_pair(target, read));
  }
}

TEST_CASE("golden models have one configuration, from JSON and from GGUF keys") {
  for (const char* name : {"e2b", "e4b", "dense31b", "moe26b", "unified12b", "e2b_bf16"}) {
    CAPTURE(name);
    const auto target = golden / name / "target", assistant = golden / name / "assistant";
    check_same_target(read_target(target_as_gguf(target)), read_target_config(target / "config.json"));
    const assistant_config expected = read_assistant_config(assistant / "config.json");
    const assistant_config read = read_assistant(assistant_as_gguf(assistant, assistant_scheme::g));
    check_same(read.text, expected.text);
    CHECK(read.backbone_hidden_size == expected.backbone_hidden_size);
    CHECK(read.centroid_head == expected.centroid_head);
    CHECK(read.centroids == expected.centroids);
    CHECK(read.centroid_top_k == expected.centroid_top_k);
  }
}

// With tensors that have rows but no columns: only their presence and their rows are read.
TEST_CASE("the released sizes have one configuration, from JSON and from GGUF keys") {
  for (const std::string name : testing::released_names) {
    CAPTURE(name);
    const temporary_directory directory;
    const text_config expected = read_target_config(directory.write("config.json", testing::released_target(name).dump()));
    gguf_model model = testing::text_as_gguf(expected, io::tensor_set("", {}, nullptr), "gemma4", assistant_scheme::g);
    if (expected.ple_width != 0) model.tensors.push_back({"per_layer_token_embd.weight", io::dtype::f32, {expected.ple_vocab_size, 0}, {}});
    for (std::size_t i = 0; i < expected.layer_count(); ++i)
      if (!expected.k_eq_v) model.tensors.push_back({"blk." + std::to_string(i) + ".attn_v.weight", io::dtype::f32, {0}, {}});
    check_same_target(read_target(model), expected);

    const assistant_config drafter = read_assistant_config(directory.write("config.json", testing::released_assistant(name).dump()));
    gguf_model file = testing::text_as_gguf(drafter.text, io::tensor_set("", {}, nullptr), "gemma4-assistant", assistant_scheme::g);
    file.set(file.key("embedding_length_out"), static_cast<u32>(drafter.backbone_hidden_size));
    check_same(read_assistant(file).text, drafter.text);
  }
}

TEST_CASE("pitfalls 6 and 21: another architecture, an assistant as target and a target as assistant are refused by name") {
  const auto architecture = [](const char* name) { return [name](gguf_model& m) { m.set<std::string>("general.architecture", name); }; };
  CHECK(mentions(refused("general.architecture", architecture("gemma3n"), error_code::model_unsupported), "\"gemma3n\"", "gemma4"));
  CHECK(mentions(refused("general.architecture", architecture("gemma4_mtp"), error_code::model_unsupported), "a drafter, not a target"));
  CHECK(mentions(refused("general.architecture", [](gguf_model& m) { m.erase("general.architecture"); }), "missing"));
  CHECK(mentions(refused("general.architecture", [](gguf_model& m) { m.set("general.architecture", u32{4}); }), "is 4"));

  const auto as_assistant = [](const gguf_model& m) {
    return refusal(error_code::model_unsupported, [&] { static_cast<void>(read_assistant(m)); });
  };
  gguf_model target = target_as_gguf(golden / "e2b" / "target");
  CHECK(mentions(as_assistant(target), "\"gemma4\", a target, not a drafter", "gemma4_assistant"));
  target.set<std::string>("general.architecture", "dflash");
  CHECK(mentions(as_assistant(target), "\"dflash\"", "gemma4_assistant"));
}

TEST_CASE("pitfall 10: a target without any keys and values of its own is refused as a drafter's file") {
  const std::string sentence = refused_value("attention.shared_kv_layers", u32{10}, error_code::model_unsupported);
  CHECK(mentions(sentence, "as in a drafter"));
  CHECK(assistant_after([](auto&) {}).text.kv_shared_layers == 4);
}

TEST_CASE("a target needs every key its shapes come from") {
  for (const char* key : {"block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
                          "attention.key_length", "attention.key_length_swa", "attention.sliding_window",
                          "attention.sliding_window_pattern", "attention.layer_norm_rms_epsilon", "embedding_length_per_layer_input"}) {
    CAPTURE(key);
    const std::string full = std::string("gemma4.") + key;
    CHECK(mentions(refused(full, [&](gguf_model& m) { m.erase(full); }), "missing"));
  }
}

TEST_CASE("what a file may leave out has the value that every released model has") {
  const text_config full = target_after([](auto&) {});
  const text_config read = target_after([](gguf_model& m) {
    for (const char* key : {"rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.dimension_count_swa",
                            "attention.value_length", "attention.value_length_swa", "vocab_size"})
      m.erase(m.key(key));
    m.take("rope_freqs.weight");
  });
  check_same_target(read, full);
  CHECK(target_after([](gguf_model& m) { m.erase(m.key("final_logit_softcapping")); }).softcap == 0);
  CHECK(target_after([](gguf_model& m) { m.erase(m.key("attention.shared_kv_layers")); }, "dense31b").kv_shared_layers == 0);
}

TEST_CASE("malformed numbers of a model are refused: zero heads, heads that KV heads do not divide, zero window, softcap, epsilon") {
  CHECK(mentions(refused_value("attention.head_count", u32{0}), "is 0", "from 1 to"));
  CHECK(mentions(refused_value("attention.head_count_kv", u32{3}), "is 3", "divisors of attention.head_count, which is 4"));
  CHECK(mentions(refused_value("attention.head_count_kv", u32{0}), "is 0"));
  CHECK(mentions(refused_value("attention.sliding_window", u32{0}), "is 0"));
  CHECK(mentions(refused_value("attention.shared_kv_layers", u32{11}), "is 11", "from 0 to 10"));
  CHECK(mentions(refused_value("attention.shared_kv_layers", u32{9}), "leaves no full layer"));
  CHECK(mentions(refused_value("final_logit_softcapping", 0.0f), "is 0.0"));
  CHECK(mentions(refused_value("attention.layer_norm_rms_epsilon", 0.0f), "is 0.0"));
  CHECK(mentions(refused_value("attention.layer_norm_rms_epsilon", std::numeric_limits<float>::quiet_NaN()), "is nan", "from 1e-30 to 1"));
  CHECK(mentions(refused_value("rope.freq_base", -std::numeric_limits<float>::infinity()), "is -inf"));
  CHECK(mentions(refused_value("attention.key_length", u32{15}), "an even number"));
  CHECK(mentions(refused_value("attention.key_length", u32{0}), "is 0"));
  CHECK(mentions(refused_value("attention.value_length", u32{8}), "is 8", "allowed: 16"));
  CHECK(mentions(refused_value("rope.dimension_count_swa", u32{4}), "is 4", "allowed: 8"));
  CHECK(mentions(refused_value("rope.dimension_count", u32{8}), "is 8", "allowed: 16"));
  CHECK(mentions(refused_value("rope.freq_base", 0.5f), "is 0.5"));
  CHECK(mentions(refused_value("embedding_length", u32{0}), "is 0"));
  CHECK(mentions(refused_value("embedding_length", u32{1} << 21), "is 2097152"));
  CHECK(mentions(refused_value("block_count", u32{0}), "is 0"));
  CHECK(mentions(refused_value("block_count", u32{5000}), "is 5000"));
  CHECK(mentions(refused_value("context_length", u32{0}), "is 0"));
}

TEST_CASE("values of another type are refused, numbers of another width are not") {
  CHECK(mentions(refused_value("block_count", std::string("10")), "\"10\""));
  CHECK(mentions(refused_value("block_count", 10.0f), "is 10.0"));
  CHECK(refused_value("block_count", std::string(1000, 'x')).size() < 300);  // a file's text is not repeated whole
  CHECK(mentions(refused_value("block_count", std::int32_t{-10}), "is -10"));
  CHECK(mentions(refused_value("attention.sliding_window_pattern", u32{5}), "is 5", "an array of booleans"));
  CHECK(mentions(refused_value("attention.layer_norm_rms_epsilon", true), "is true"));
  CHECK(target_after([](gguf_model& m) { m.set(m.key("block_count"), std::uint64_t{10}); }).layer_count() == 10);
  CHECK(target_after([](gguf_model& m) { m.set(m.key("rope.freq_base"), 1e6); }).shape(attention_kind::full).rope.theta == 1e6);
}

TEST_CASE("an array per layer has exactly one entry for each") {
  for (const char* key : {"feed_forward_length", "attention.head_count_kv"})
    for (const std::size_t count : {std::size_t{9}, std::size_t{11}, std::size_t{0}}) {
      CAPTURE(key);
      const std::string full = std::string("gemma4.") + key;
      const std::string sentence = refused(full, [&](gguf_model& m) { m.set_array(full, std::vector<std::int32_t>(count, 1)); });
      CHECK(mentions(sentence, "an array of " + std::to_string(count), "one entry per layer, 10 of them"));
    }
  const std::string pattern = "gemma4.attention.sliding_window_pattern";
  CHECK(mentions(refused(pattern, [&](gguf_model& m) { m.set_array(pattern, std::vector<bool>(9, false)); }), "an array of 9"));
  const std::string widths = "gemma4.feed_forward_length";
  CHECK(mentions(refused(widths, [&](gguf_model& m) { m.set_array(widths, std::vector<std::int32_t>(10, -1)); }), "an array with -1"));
  CHECK(mentions(refused(widths, [&](gguf_model& m) { m.set_array(widths, std::vector<float>(10, 1)); }), "an array of 10 FLOAT32"));
}

TEST_CASE("scaled rotations and attention to later tokens, which no Gemma 4 has, are refused, not ignored") {
  const std::string type = "gemma4.rope.scaling.type", factor = "gemma4.rope.scaling.factor", causal = "gemma4.attention.causal";
  constexpr error_code code = error_code::model_unsupported;
  CHECK(mentions(refused_value("rope.scaling.type", std::string("yarn"), code), "\"yarn\"", "\"linear\""));
  CHECK(mentions(refused_value("rope.scaling.factor", 4.0f, code), "is 4.0", "allowed: 1"));
  CHECK(mentions(refused_value("attention.causal", false, code), "is false"));
  const auto accepted = [](const edit& change) { CHECK_NOTHROW(static_cast<void>(target_after(change))); };
  accepted([&](gguf_model& m) { m.set<std::string>(type, "linear"), m.set(factor, 1.0f), m.set(causal, true); });
  accepted([&](gguf_model& m) { m.set<std::string>(type, "none"), m.set(factor, 4.0f); });
}

TEST_CASE("rows are counted whatever extents of 1 are around a matrix") {
  const auto extend = [](gguf_tensor& t) { t.shape.insert(t.shape.begin(), 4 - t.shape.size(), 1); };
  const text_config read = target_after([&](gguf_model& m) {
    for (const char* name : {"token_embd.weight", "per_layer_token_embd.weight"}) extend(m.tensor(name));
    m.erase(m.key("vocab_size"));
  });
  CHECK(read.vocab_size == 128);
  CHECK(read.ple_vocab_size == target_after([](auto&) {}).ple_vocab_size);
  const assistant_config assistant = assistant_after([&](gguf_model& m) {
    extend(m.tensor("masked_embd_centroids.weight"));
    m.erase(m.key("masked_embedding.centroid_count"));
  });
  CHECK(assistant.centroids == 16);
}

TEST_CASE("pitfall 18: a target whose last layer slides is refused") {
  const std::string key = "gemma4.attention.sliding_window_pattern";
  CHECK(mentions(refused(key, [&](gguf_model& m) { m.set_array(key, std::vector<bool>(10, true)); }), "ends with true"));
}

TEST_CASE("KV heads are read per kind, and uneven ones refused") {
  const std::string key = "gemma4.attention.head_count_kv";
  const text_config dense = target_after([](auto&) {}, "dense31b");
  CHECK(dense.shape(attention_kind::sliding).kv_heads == 4);
  CHECK(dense.shape(attention_kind::full).kv_heads == 2);
  CHECK(mentions(refused(key,
                         [&](gguf_model& m) {
                           m.set_array(key, std::vector<u32>{1, 1, 2, 1, 1, 1, 1, 1, 1, 1});
                         }),
                 "uneven: 1 for layer 0 but 2 for layer 2", "all sliding layers"));
}

TEST_CASE("pitfall 37: the MLP is double wide exactly in the sharing layers, or nowhere") {
  const std::string key = "gemma4.feed_forward_length";
  const text_config wide = target_after([](auto&) {});
  CHECK(wide.double_wide_mlp);
  CHECK(wide.mlp_width(wide.first_shared() - 1) == wide.intermediate_size);
  CHECK(wide.mlp_width(wide.first_shared()) == 2 * wide.intermediate_size);
  CHECK_FALSE(target_after([&](gguf_model& m) { m.set(key, u32{40}); }).double_wide_mlp);
  std::vector<std::int32_t> widths;
  for (std::size_t i = 0; i < wide.layer_count(); ++i) widths.push_back(i < wide.first_shared() ? 40 : 120);
  CHECK(mentions(refused(key, [&](gguf_model& m) { m.set_array(key, widths); }), "40 and", "120", "twice as much"));
  widths.back() = 80;
  CHECK(mentions(refused(key, [&](gguf_model& m) { m.set_array(key, widths); }), "uneven", "all shared layers"));
}

TEST_CASE("values come from the key projection where no full layer has another, and a mixture is refused") {
  CHECK(target_after([](auto&) {}, "dense31b").k_eq_v);
  CHECK_FALSE(target_after([](auto&) {}).k_eq_v);
  const temporary_directory directory;
  const text_config large = read_target_config(directory.write("config.json", testing::released_target("31B").dump()));
  gguf_model model = testing::text_as_gguf(large, io::tensor_set("", {}, nullptr), "gemma4", assistant_scheme::g);
  model.tensors.push_back({"blk.59.attn_v.weight", io::dtype::f32, {0}, {}});
  const std::string sentence = refusal(error_code::tensor_missing, [&] { static_cast<void>(read_target(model)); });
  CHECK(mentions(sentence, "model.gguf", "'blk.5.attn_v.weight' is missing, unlike in layer 59", "or in none"));
}

TEST_CASE("the rotation of full layers is read from its factors") {
  const auto rope_of = [](const std::vector<float>& factors) {
    return target_after([&](gguf_model& m) { m.tensor("rope_freqs.weight") = float_tensor("rope_freqs.weight", factors); })
        .shape(attention_kind::full);
  };
  const auto live = [](const attention_shape& shape) {
    std::size_t n = 0;
    for (const float f : shape.rope.frequencies(shape.head_dim)) n += f != 0;
    return n;
  };
  for (std::size_t n = 0; n <= 8; ++n) {  // a head of 16
    CAPTURE(n);
    std::vector<float> factors(8, stopped);
    std::fill_n(factors.begin(), n, 1.0f);
    CHECK(live(rope_of(factors)) == n);
    CHECK(rope_of(factors).rope.factor == 1);
  }
  const attention_shape scaled = rope_of({8, 8, stopped, stopped, stopped, stopped, stopped, stopped});
  CHECK(scaled.rope == rope_parameters{.theta = 1e6, .fraction = 0.25, .factor = 8});
}

// A count over half a head of three, five … pairs is no binary fraction; the count must survive being stored as one.
TEST_CASE("every count of rotating pairs survives as a share of the head") {
  for (std::size_t half = 1; half <= 300; ++half)
    for (std::size_t live = 0; live <= half; ++live) {
      std::vector<float> factors(half, stopped);
      std::fill_n(factors.begin(), live, 1.0f);
      rope_parameters rope;
      const io::tensor t{"rope_freqs.weight", io::dtype::f32, {half}, std::as_bytes(std::span(factors)), "model.gguf"};
      gemma4::detail::read_rope_factors(t, 2 * half, rope);
      const std::vector<float> f = rope.frequencies(2 * half);
      const auto turning = static_cast<std::size_t>(std::count_if(f.begin(), f.end(), [](float x) { return x != 0; }));
      if (turning != live) {
        CAPTURE(half);
        CHECK(turning == live);
      }
    }
}

TEST_CASE("pitfall 29: factors in half precision, of another length or in another pattern are refused") {
  const auto with = [](const gguf_tensor& tensor) { return [tensor](gguf_model& m) { m.tensor("rope_freqs.weight") = tensor; }; };
  const auto sentence = [&](error_code code, const gguf_tensor& tensor) {
    return refusal(code, [&] { static_cast<void>(target_after(with(tensor))); });
  };
  const gguf_tensor half{"rope_freqs.weight", io::dtype::f16, {8}, std::vector<std::byte>(16)};
  CHECK(mentions(sentence(error_code::tensor_mismatch, half), "model.gguf", "rope_freqs.weight", "F16", "allowed is F32"));
  CHECK(mentions(sentence(error_code::tensor_mismatch, float_tensor("rope_freqs.weight", {1, 1, 1, 1})), "4 elements", "asks for 8"));
  for (const std::vector<float>& factors : std::vector<std::vector<float>>{{1, 2, stopped, stopped, stopped, stopped, stopped, stopped},
                                                                           {1, stopped, 1, stopped, stopped, stopped, stopped, stopped},
                                                                           {0, 0, stopped, stopped, stopped, stopped, stopped, stopped},
                                                                           {-1, -1, stopped, stopped, stopped, stopped, stopped, stopped},
                                                                           {1, 1, 1e31f, 1e31f, 1e31f, 1e31f, 1e31f, 1e31f}})
    CHECK(mentions(sentence(error_code::model_unsupported, float_tensor("rope_freqs.weight", factors)), "rope_freqs.weight", "at pair "));
}

TEST_CASE("the vocabulary is the token list's, else the key's, else the table's") {
  const auto tokens = [](std::size_t n) {
    std::vector<std::string> list;
    for (std::size_t i = 0; i < n; ++i) list.push_back("t" + std::to_string(i));
    return list;
  };
  const auto size = [](const edit& change) { return target_after(change, "dense31b").vocab_size; };
  CHECK(size([](gguf_model& m) { m.erase(m.key("vocab_size")); }) == 128);
  CHECK(size([](gguf_model& m) { m.set(m.key("vocab_size"), u32{100}); }) == 100);
  CHECK(size([&](gguf_model& m) { m.set_array("tokenizer.ggml.tokens", tokens(90)); }) == 90);
  CHECK(mentions(refused("tokenizer.ggml.tokens", [](gguf_model& m) { m.set_array("tokenizer.ggml.tokens", std::vector<u32>{1}); }),
                 "an array of 1 ", "strings"));
  CHECK(
      mentions(refused("tokenizer.ggml.tokens", [&](gguf_model& m) { m.set_array("tokenizer.ggml.tokens", tokens(0)); }), "an array of 0"));
}

TEST_CASE("pitfall 93: Gemma's three ends of text count, whichever of them the file names") {
  const auto eos = [](const edit& change) {
    return target_after([&](gguf_model& m) {
             std::vector<std::string> tokens(128);
             for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = "t" + std::to_string(i);
             tokens[1] = "<eos>";
             tokens[50] = "<|tool_response>";
             tokens[106] = "<turn|>";
             m.set_array("tokenizer.ggml.tokens", tokens);
             change(m);
           })
        .eos;
  };
  const std::string key = "tokenizer.ggml.eos_token_id";
  CHECK(eos([&](gguf_model& m) { m.set(key, u32{1}); }) == std::vector<token_id>{1, 50, 106});
  CHECK(eos([&](gguf_model& m) { m.set(key, u32{106}); }) == std::vector<token_id>{106, 1, 50});
  CHECK(eos([&](gguf_model& m) { m.erase(key); }) == std::vector<token_id>{1, 50, 106});
  CHECK(eos([&](gguf_model& m) { m.set("tokenizer.ggml.eot_token_id", u32{7}); }) == std::vector<token_id>{1, 7, 50, 106});
}

TEST_CASE("pitfall 3: an end of text outside the vocabulary is refused, suppressed ids beyond it are left out") {
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"})
    CHECK(mentions(refused(key, [&](gguf_model& m) { m.set(key, u32{128}); }), "is 128", "from 0 to 127"));
  const std::string key = "tokenizer.ggml.suppress_tokens";
  CHECK(target_after([&](gguf_model& m) {
          m.set_array(key, std::vector<std::int32_t>{5, 128, 127, 258882});
        }).suppress == std::vector<token_id>{5, 127});
  CHECK(mentions(refused(key, [&](gguf_model& m) { m.set_array(key, std::vector<std::int32_t>{5, -1}); }), "an array with -1"));
  CHECK(mentions(refused(key, [&](gguf_model& m) { m.set(key, u32{5}); }), "is 5"));
}

TEST_CASE("a head of its own is one where the file has output.weight") {
  CHECK(target_after([](auto&) {}).tied_head);
  CHECK_FALSE(target_after([](gguf_model& m) { m.tensors.push_back({"output.weight", io::dtype::f32, {0}, {}}); }).tied_head);
}

TEST_CASE("a per-layer table has a row for every token, and is there") {
  const std::string table = "per_layer_token_embd.weight";
  CHECK(mentions(refusal(error_code::tensor_missing, [&] { static_cast<void>(target_after([&](gguf_model& m) { m.take(table); })); }),
                 "model.gguf", table));
  const std::string sentence = refusal(error_code::tensor_mismatch, [&] {
    static_cast<void>(target_after([&](gguf_model& m) { m.tensor(table) = {table, io::dtype::f32, {127, 0}, {}}; }));
  });
  CHECK(mentions(sentence, table, "127 rows", "128 to"));
}

TEST_CASE("experts come with their numbers") {
  for (const char* key : {"gemma4.expert_used_count", "gemma4.expert_feed_forward_length"}) {
    CHECK(mentions(refused(
                       key, [&](gguf_model& m) { m.erase(key); }, error_code::config_invalid, "moe26b"),
                   "missing"));
    CHECK(mentions(refused(
                       key, [&](gguf_model& m) { m.set(key, u32{0}); }, error_code::config_invalid, "moe26b"),
                   "is 0"));
  }
  const char* used = "gemma4.expert_used_count";
  CHECK(mentions(refused(
                     used, [&](gguf_model& m) { m.set(used, u32{9}); }, error_code::config_invalid, "moe26b"),
                 "from 1 to 8"));
  CHECK(target_after([](gguf_model& m) { m.set(m.key("expert_count"), u32{0}); }).experts == 0);
}

TEST_CASE("an assistant has the numbers of its scheme's keys") {
  for (const scheme_names& names : assistant_schemes) {
    CAPTURE(letter_of(names.scheme));
    const assistant_config read = assistant_after([](auto&) {}, names.scheme);
    CHECK(read.backbone_hidden_size == 32);
    CHECK(read.centroid_head);
    CHECK(read.centroids == 16);
    CHECK(read.centroid_top_k == (names.top_k.empty() ? 16 : 4));  // without a key 32, but no more than there are
  }
}

TEST_CASE("pitfalls 5 and 23: the head is dense without centroid tensors, and where a flag says so") {
  for (const scheme_names& names : assistant_schemes) {
    CAPTURE(letter_of(names.scheme));
    const auto drop = [&](gguf_model& m) {
      m.take(std::string(names.centroid_tensor));
      m.take(std::string(names.token_ordering));
    };
    CHECK_FALSE(assistant_after(drop, names.scheme).centroid_head);
    if (names.ordered.empty()) continue;
    CHECK_FALSE(assistant_after([&](gguf_model& m) { m.set(m.key(std::string(names.ordered)), false); }, names.scheme).centroid_head);
    CHECK(assistant_after([&](gguf_model& m) { m.erase(m.key(std::string(names.ordered))); }, names.scheme).centroid_head);
  }
}

TEST_CASE("an assistant's centroids divide the vocabulary, and are not searched more than there are") {
  const std::string count = "masked_embedding.centroid_count", top_k = "masked_embedding.top_k";
  const auto set = [](const std::string& key, u32 value) { return [=](gguf_model& m) { m.set(m.key(key), value); }; };
  CHECK(mentions(refused_assistant(count, set(count, 15)), "is 15", "a divisor of the vocabulary size, which is 128"));
  CHECK(mentions(refused_assistant(count, set(count, 0)), "is 0"));
  CHECK(mentions(refused_assistant(top_k, set(top_k, 17)), "is 17", "from 1 to 16"));
  CHECK(mentions(refused_assistant(top_k, set(top_k, 0)), "is 0"));
  const std::string lone = refusal(error_code::tensor_missing, [] {
    static_cast<void>(assistant_after([](gguf_model& m) { m.take("masked_embd_centroids.weight"); }));
  });
  CHECK(mentions(lone, "model.gguf", "centroids", "masked_embd_ordering"));
}

TEST_CASE("an assistant without the target's width is refused with the keys it may stand under") {
  const std::string sentence =
      refused_assistant("gemma4-assistant.embedding_length_out", [](gguf_model& m) { m.erase(m.key("embedding_length_out")); });
  CHECK(mentions(sentence, "missing", "backbone_hidden_size", "n_embd_backbone", "backbone_embedding_length"));
  CHECK(mentions(refused_assistant("embedding_length_out", [](gguf_model& m) { m.set(m.key("embedding_length_out"), u32{0}); }), "is 0"));
}

TEST_CASE("an assistant shares all its layers or says nothing, ends with a full layer, and has no per-layer embeddings and no experts") {
  const std::string shared = "attention.shared_kv_layers", pattern = "attention.sliding_window_pattern";
  const auto set = [](const std::string& key, u32 value) { return [=](gguf_model& m) { m.set(m.key(key), value); }; };
  CHECK(assistant_after(set(shared, 0)).text.kv_shared_layers == 4);
  CHECK(assistant_after([&](gguf_model& m) { m.erase(m.key(shared)); }).text.kv_shared_layers == 4);
  CHECK(mentions(refused_assistant(shared, set(shared, 2)), "is 2", "0 or 4"));
  CHECK(
      mentions(refused_assistant(pattern, [&](gguf_model& m) { m.set_array(m.key(pattern), std::vector<bool>(4, true)); }), "full layer"));
  CHECK(mentions(refused_assistant("embedding_length_per_layer_input", set("embedding_length_per_layer_input", 8)), "is 8"));
  CHECK(mentions(refused_assistant("expert_count", set("expert_count", 8)), "is 8"));
  CHECK(assistant_after([](gguf_model& m) { m.erase(m.key("embedding_length_per_layer_input")); }).text.ple_width == 0);
}

TEST_CASE("rotations that differ by the single precision of GGUF keys belong together, others do not") {
  const text_config target = target_after([](auto&) {});
  const auto with_theta = [](double theta) {
    text_config c = read_target_config(golden / "e2b" / "target" / "config.json");
    c.attention[1].rope.theta = theta;
    return c;
  };
  assistant_config assistant = assistant_after([](auto&) {});
  for (const double theta : {1234567.8, 10000.3, 3e6 / 7}) {
    assistant.text.attention[1].rope.theta = double{static_cast<float>(theta)};
    CHECK_NOTHROW(check_pair(with_theta(theta), assistant));
    assistant.text.attention[1].rope.theta = theta * 1.00001;
    CHECK(mentions(refusal(error_code::pair_mismatch, [&] { check_pair(with_theta(theta), assistant); }), "the rotation of full layers"));
  }
}
