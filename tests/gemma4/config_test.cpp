// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/backend/reference.hpp"
#include "outrider/gemma4/config_json.hpp"
#include "outrider/gemma4/model.hpp"
#include "released_configs.hpp"
#include "support/refusal.hpp"
#include "support/temporary_directory.hpp"

namespace fs = std::filesystem;
using nlohmann::json;
using outrider::error_code;
using outrider::reference;
using outrider::token_id;
namespace io = outrider::io;
using outrider::testing::mentions;
using outrider::testing::refusal;
using namespace outrider::gemma4;

namespace {

const fs::path root = OUTRIDER_SOURCE_DIR;
const fs::path golden = root / "tests" / "golden";
const fs::path bad_configs = golden / "bad_configs";
constexpr attention_kind S = attention_kind::sliding, F = attention_kind::full;

json document_of(const fs::path& file) { return outrider::io::parse_json(outrider::io::read_text_file(file), file.string()); }

/// Reads a config.json with that text.
text_config target_from(std::string_view text) {
  const outrider::testing::temporary_directory directory;
  return read_target_config(directory.write("config.json", text));
}
text_config target_from(const json& document) { return target_from(std::string_view(document.dump())); }
assistant_config assistant_from(const json& document) {
  const outrider::testing::temporary_directory directory;
  return read_assistant_config(directory.write("config.json", document.dump()));
}
generation_config generation_from(const json& document, std::size_t vocab_size = 64) {
  const outrider::testing::temporary_directory directory;
  directory.write("generation_config.json", document.dump());
  return read_generation_config(directory.path(), vocab_size);
}

/// A small legal target with some keys replaced.
json target_with(const json& changes) {
  json document = document_of(bad_configs / "accept" / "rope_absent.json");
  document.update(changes);
  return document;
}
/// A small legal assistant with some keys of its text config replaced.
json assistant_with(const json& changes) {
  json document = document_of(bad_configs / "accept" / "assistant_shared_zero.json");
  document["text_config"].update(changes);
  return document;
}

void check_refused(const json& changes, const std::string& key, error_code code = error_code::config_invalid) {
  CAPTURE(changes.dump());
  const std::string sentence = refusal(code, [&] { static_cast<void>(target_from(target_with(changes))); });
  CAPTURE(sentence);
  CHECK(mentions(sentence, "config.json: " + key + " is ", "; allowed: "));
}

/// Frequencies against those of the reference, which computes 1 / theta^e in single precision: rounding the exponent e costs
/// e · ln(theta) · 2^-24 relative, power, reciprocal, division and our own rounding at most another 4 · 2^-24.
void check_frequencies(const attention_shape& shape, const std::vector<double>& expected) {
  const std::vector<float> found = shape.rope.frequencies(shape.head_dim);
  REQUIRE(found.size() == expected.size());
  const double tolerance = (std::log(shape.rope.theta) + 4) * 0x1p-24;
  for (std::size_t i = 0; i < found.size(); ++i) {
    CAPTURE(i);
    CHECK(std::abs(double{found[i]} - expected[i]) <= tolerance * expected[i]);
  }
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
  CHECK(a.k_eq_v == b.k_eq_v);
  CHECK(a.double_wide_mlp == b.double_wide_mlp);
  CHECK(a.softcap == b.softcap);
  CHECK(a.ple_width == b.ple_width);
  CHECK(a.ple_vocab_size == b.ple_vocab_size);
  CHECK(a.experts == b.experts);
  CHECK(a.tied_head == b.tied_head);
  CHECK(a.eos == b.eos);
}

/// What a refused file is refused for: the key that must stand in the message.
const std::map<std::string, std::string> refused_keys{
    {"activation_unknown", "hidden_activation"},
    {"assistant_backbone_string", "backbone_hidden_size"},
    {"assistant_centroids_do_not_divide", "num_centroids"},
    {"assistant_centroids_null", "num_centroids"},
    {"assistant_double_wide", "text_config.use_double_wide_mlp"},
    {"assistant_moe", "text_config.enable_moe_block"},
    {"assistant_ordered_string", "use_ordered_embeddings"},
    {"assistant_ple", "text_config.hidden_size_per_layer_input"},
    {"assistant_ple_by_default", "text_config.hidden_size_per_layer_input"},
    {"assistant_ple_vocab", "text_config.vocab_size_per_layer_input"},
    {"assistant_ple_vocab_by_default", "text_config.vocab_size_per_layer_input"},
    {"assistant_shares_too_many", "text_config.num_kv_shared_layers"},
    {"assistant_shares_two", "text_config.num_kv_shared_layers"},
    {"assistant_text_list", "text_config"},
    {"assistant_text_null", "text_config"},
    {"assistant_text_string", "text_config"},
    {"assistant_text_unified", "text_config.model_type"},
    {"assistant_text_unknown", "text_config.model_type"},
    {"assistant_top_k_above_centroids", "centroid_intermediate_top_k"},
    {"bidirectional_bool", "use_bidirectional_attention"},
    {"bidirectional_unknown", "use_bidirectional_attention"},
    {"eos_string", "eos_token_id"},
    {"eps_string", "rms_norm_eps"},
    {"experts_missing", "num_experts"},
    {"experts_top_k_missing", "top_k_experts"},
    {"experts_top_k_too_large", "top_k_experts"},
    {"head_dim_odd", "head_dim"},
    {"heads_string", "num_attention_heads"},
    {"hidden_size_null", "hidden_size"},
    {"hidden_size_string", "hidden_size"},
    {"kv_heads_zero", "num_key_value_heads"},
    {"kv_shared_negative", "num_kv_shared_layers"},
    {"kv_shared_without_donor", "num_kv_shared_layers"},
    {"layer_types_short", "layer_types"},
    {"layer_types_string", "layer_types"},
    {"layer_types_unknown", "layer_types"},
    {"layers_string", "num_hidden_layers"},
    {"layers_zero", "num_hidden_layers"},
    {"model_type_missing", "model_type"},
    {"model_type_unknown", "model_type"},
    {"per_layer_not_a_number", "per_layer_config"},
    {"per_layer_out_of_range", "per_layer_config"},
    {"per_layer_uneven", "per_layer_config"},
    {"per_layer_unknown_field", "per_layer_config.1"},
    {"rope_empty", "rope_parameters.sliding_attention"},
    {"rope_factor_above_one", "rope_parameters.full_attention.partial_rotary_factor"},
    {"rope_flat", "rope_parameters.sliding_attention"},
    {"rope_full_missing", "rope_parameters.full_attention"},
    {"rope_list", "rope_parameters"},
    {"rope_theta_missing", "rope_parameters.full_attention.rope_theta"},
    {"rope_type_unknown", "rope_parameters.full_attention.rope_type"},
    {"softcap_string", "final_logit_softcapping"},
    {"tie_string", "tie_word_embeddings"},
    {"vocab_size_fraction", "vocab_size"},
    {"window_fraction", "sliding_window"},
    {"window_null", "sliding_window"},
    {"window_zero", "sliding_window"},
};

text_config accepted(const std::string& name) { return read_target_config(bad_configs / "accept" / (name + ".json")); }
json resolved(const std::string& name) { return document_of(bad_configs / "expected.json").at("accept").at(name).at("resolved"); }

}  // namespace

TEST_CASE("every config the reference refuses is refused with the file and the key") {
  std::size_t files = 0;
  const json expected = document_of(bad_configs / "expected.json").at("reject");
  for (const auto& entry : expected.items()) {
    const std::string name = entry.key();
    const fs::path file = bad_configs / "reject" / (name + ".json");
    CAPTURE(name);
    REQUIRE(refused_keys.count(name) == 1);
    // Names of algorithms and families this library does not know are a matter of support, all else is a wrong value.
    const bool unknown = name == "activation_unknown" || name == "rope_type_unknown" || name == "model_type_unknown" ||
                         name == "assistant_text_unknown" || name == "assistant_text_unified";
    const std::string sentence = refusal(unknown ? error_code::model_unsupported : error_code::config_invalid, [&] {
      if (name.starts_with("assistant_"))
        static_cast<void>(read_assistant_config(file));
      else
        static_cast<void>(read_target_config(file));
    });
    CAPTURE(sentence);
    CHECK(mentions(sentence, file.string() + ": " + refused_keys.at(name) + " is ", "; allowed: "));
    ++files;
  }
  CHECK(files == refused_keys.size());
}

TEST_CASE("every odd target the reference accepts resolves to its values") {
  std::size_t targets = 0;
  const json expected = document_of(bad_configs / "expected.json").at("accept");
  for (const auto& entry : expected.items()) {
    const std::string name = entry.key();
    CAPTURE(name);
    const json& resolved_fields = entry.value().at("resolved");
    if (resolved_fields.contains("text_config.num_kv_shared_layers")) continue;  // assistants, below
    ++targets;
    const text_config c = accepted(name);
    for (const auto& item : resolved_fields.items()) {
      const std::string field = item.key();
      const json& value = item.value();
      CAPTURE(field);
      if (field == "layer_types") {
        for (std::size_t i = 0; i < value.size(); ++i) CHECK(c.layers[i] == (value[i] == "full_attention" ? F : S));
        CHECK(c.layer_count() == value.size());
      } else if (field == "per_layer_config") {  // lists what differs from the sliding layers
        for (const auto& [layer, sizes] : value.items()) {
          const attention_shape& shape = c.shape_of(std::stoul(layer));
          CHECK(shape.head_dim == sizes.at("head_dim").get<std::size_t>());
          CHECK(shape.kv_heads == sizes.value("num_key_value_heads", c.shape(S).kv_heads));
        }
        CHECK((value.empty() == (c.shape(F).head_dim == c.shape(S).head_dim)));
      } else if (field == "rope") {
        check_frequencies(c.shape(S), value.at("sliding"));
        check_frequencies(c.shape(F), value.at("full"));
      } else if (field == "rope_parameters") {
        CHECK(c.shape(S).rope.theta == value.at("sliding_attention").at("rope_theta").get<double>());
        CHECK(c.shape(F).rope.theta == value.at("full_attention").at("rope_theta").get<double>());
      } else if (field == "eos_token_id") {
        CHECK(c.eos == (value.is_null() ? std::vector<token_id>{} : value.get<std::vector<token_id>>()));
      } else if (field == "sliding_window") {
        CHECK(c.window == value.get<std::size_t>());
      } else if (field == "vocab_size_per_layer_input") {
        CHECK(c.ple_vocab_size == value.get<std::size_t>());
      } else {  // parts of the file that mean nothing for text
        CHECK((field == "nonsense" || field == "vision_config" || field == "audio_config"));
      }
    }
  }
  CHECK(targets == 18);
}

TEST_CASE("an assistant that names no shared layers shares all of them") {
  const assistant_config a = read_assistant_config(bad_configs / "accept" / "assistant_shared_zero.json");
  CHECK(a.text.kv_shared_layers == resolved("assistant_shared_zero").at("text_config.num_kv_shared_layers").get<std::size_t>());
  CHECK(a.text.first_shared() == 0);
}

TEST_CASE("pitfall 25: unified assistants are held to the rules of the others") {
  // The one file of the reference's accepted ones that is refused here: its class checks nothing, and a drafter with a double-wide MLP
  // is no model anybody has.
  const fs::path file = bad_configs / "accept" / "unified_assistant_unchecked.json";
  const std::string sentence = refusal(error_code::config_invalid, [&] { static_cast<void>(read_assistant_config(file)); });
  CHECK(mentions(sentence, file.string(), "text_config.use_double_wide_mlp"));

  json document = document_of(file);
  document["text_config"]["use_double_wide_mlp"] = false;
  CHECK(assistant_from(document).text.first_shared() == 0);
  for (const json& changes : {json{{"hidden_size_per_layer_input", 8}}, json{{"vocab_size_per_layer_input", 64}},
                              json{{"enable_moe_block", true}}, json{{"num_kv_shared_layers", 2}}}) {
    json changed = document;
    changed["text_config"].update(changes);
    const std::string why = refusal(error_code::config_invalid, [&] { static_cast<void>(assistant_from(changed)); });
    CHECK(mentions(why, "config.json: text_config." + changes.begin().key() + " is "));
  }
}

TEST_CASE("a bidirectional model is read, with its window, but cannot be run") {
  const text_config c = accepted("bidirectional_all");
  CHECK_FALSE(c.causal);
  const auto no_tensors =
      std::make_shared<const io::tensor_set>("dir", std::vector<io::tensor>{{"model.embed_tokens.weight", {}, {}, {}, ""}}, nullptr);
  CHECK(mentions(refusal(error_code::model_unsupported, [&] { model<reference>(c, no_tensors); }), "dir", "use_bidirectional_attention"));
}

TEST_CASE("the configs of all golden pairs and of the bundled pair load") {
  for (const fs::path& pair : {golden / "e2b", golden / "e4b", golden / "dense31b", golden / "moe26b", golden / "unified12b",
                               golden / "e2b_bf16", golden / "multimodal_names", root / "examples" / "data" / "tiny-kjv"}) {
    CAPTURE(pair.string());
    const text_config t = read_target_config(pair / "target" / "config.json");
    const assistant_config a = read_assistant_config(pair / "assistant" / "config.json");
    CHECK(a.backbone_hidden_size == t.hidden_size);
    CHECK(a.text.first_shared() == 0);
    CHECK(a.text.softcap == 0);
    CHECK(t.softcap == 30);
    CHECK_FALSE(read_generation_config(pair / "target", t.vocab_size).eos.empty());
  }
}

TEST_CASE("the fields of a golden target arrive where they belong") {
  const text_config e2b = read_target_config(golden / "e2b" / "target" / "config.json");
  CHECK(e2b.vocab_size == 128);
  CHECK(e2b.hidden_size == 32);
  CHECK(e2b.intermediate_size == 40);
  CHECK(e2b.heads == 4);
  CHECK(e2b.layers == std::vector{S, S, S, S, F, S, S, S, S, F});
  CHECK(e2b.shape(S).head_dim == 8);
  CHECK(e2b.shape(F).head_dim == 16);
  CHECK(e2b.shape(F).kv_heads == 1);
  CHECK(e2b.window == 8);
  CHECK(e2b.kv_shared_layers == 5);
  CHECK(e2b.double_wide_mlp);
  CHECK(e2b.rms_norm_eps == 1e-6);
  CHECK(e2b.ple_width == 8);
  CHECK(e2b.ple_vocab_size == 128);
  CHECK(e2b.eos == std::vector<token_id>{1});
  const text_config moe = read_target_config(golden / "moe26b" / "target" / "config.json");
  CHECK(moe.k_eq_v);
  CHECK(moe.experts == 8);
  CHECK(moe.experts_per_token == 2);
  CHECK(moe.expert_width == 16);
  CHECK(moe.ple_width == 0);
  CHECK(moe.shape(S).kv_heads == 2);
  CHECK(moe.shape(F).kv_heads == 1);
}

TEST_CASE("pitfall 16: flat and per-layer head sizes of one model are equal, with padded keys or without") {
  check_same(read_target_config(golden / "multimodal_names" / "target" / "config.json"),
             read_target_config(golden / "multimodal_names" / "target_flat" / "config.json"));
  json document = document_of(golden / "e4b" / "target" / "config.json");
  const text_config padded = target_from(document);
  CHECK(padded.shape(F).head_dim == 16);
  document["per_layer_config"] = {{"5", {{"head_dim", 16}}}, {"11", {{"head_dim", 16}}}};
  check_same(padded, target_from(document));
  document["per_layer_config"] = {{"5", {{"head_dim", 16}}}, {"05", {{"head_dim", 16}}}, {"11", {{"head_dim", 16}}}};
  CHECK(mentions(refusal(error_code::config_invalid, [&] { static_cast<void>(target_from(document)); }), "per_layer_config",
                 "layer 5 twice"));
}

TEST_CASE("pitfall 17: KV heads of full layers are overridden only with attention_k_eq_v") {
  CHECK(accepted("global_kv_heads").shape(F).kv_heads == 1);
  CHECK(accepted("global_kv_heads_ignored").shape(F).kv_heads == 2);
}

TEST_CASE("pitfall 18: the last layer of a target is full whatever the file says, an assistant's must say so") {
  CHECK(accepted("last_layer_forced_full").layers.back() == F);
  const json sliding = assistant_with({{"layer_types", std::vector<std::string>(4, "sliding_attention")}});
  CHECK(mentions(refusal(error_code::config_invalid, [&] { static_cast<void>(assistant_from(sliding)); }), "text_config.layer_types"));
}

TEST_CASE("pitfall 21: a target given as drafter, and a drafter given as target, are refused") {
  for (const std::string pair : {"e2b", "unified12b", "multimodal_names"}) {
    CAPTURE(pair);
    const fs::path target = golden / pair / "target" / "config.json", assistant = golden / pair / "assistant" / "config.json";
    CHECK(mentions(refusal(error_code::model_unsupported, [&] { static_cast<void>(read_assistant_config(target)); }), target.string(),
                   "a target"));
    CHECK(mentions(refusal(error_code::model_unsupported, [&] { static_cast<void>(read_target_config(assistant)); }), assistant.string(),
                   "a drafter"));
  }
}

TEST_CASE("pitfalls 7 and 8: an assistant is recognised under all its names") {
  json document = assistant_with(json::object());
  document["model_type"] = "gemma4-assistant";
  CHECK(assistant_from(document).backbone_hidden_size == 16);
  CHECK(read_assistant_config(golden / "unified12b" / "assistant" / "config.json").backbone_hidden_size == 40);
}

TEST_CASE("pitfall 10: a model without keys and values of its own is an assistant, never a target") {
  check_refused({{"num_kv_shared_layers", 4}}, "num_kv_shared_layers");
  CHECK(assistant_from(assistant_with({{"num_kv_shared_layers", 4}})).text.first_shared() == 0);
}

TEST_CASE("pitfall 23: the flag decides about the centroid head, not the count") {
  const assistant_config dense =
      read_assistant_config(golden / "moe26b" / "assistant" / "config.json");  // names 2048 centroids for 128 tokens
  CHECK_FALSE(dense.centroid_head);
  CHECK(dense.centroids == 0);
  const assistant_config sparse = read_assistant_config(golden / "e2b" / "assistant" / "config.json");
  CHECK(sparse.centroid_head);
  CHECK(sparse.centroids == 16);
  CHECK(sparse.centroid_top_k == 4);
}

TEST_CASE("other families are refused by name") {
  for (const std::string name : {"gemma3n", "mtp_heads"}) {
    const fs::path file = golden / name / "target" / "config.json";
    const std::string type = document_of(file).at("model_type");
    CHECK(mentions(refusal(error_code::model_unsupported, [&] { static_cast<void>(read_target_config(file)); }), file.string(), type));
    CHECK(mentions(refusal(error_code::model_unsupported, [&] { static_cast<void>(read_assistant_config(file)); }), file.string(), type));
  }
  const json wrapped{{"model_type", "gemma4"}, {"text_config", {{"model_type", "gemma3n_text"}}}};
  CHECK(mentions(refusal(error_code::model_unsupported, [&] { static_cast<void>(target_from(wrapped)); }), "text_config.model_type",
                 "gemma3n_text"));
}

TEST_CASE("pitfall 28: rotation frequencies of the released head sizes") {
  const text_config e2b = target_from(outrider::testing::released_target("E2B"));
  const std::vector<float> sliding = e2b.shape(S).rope.frequencies(256), full = e2b.shape(F).rope.frequencies(512);
  REQUIRE(sliding.size() == 128);
  REQUIRE(full.size() == 256);
  const auto near = [](float found, double expected) {
    return std::abs(double{found} - expected) <= 0x1p-23 * expected;
  };  // one rounding, printed digits
  CHECK(near(sliding[0], 1.0));
  CHECK(near(sliding[1], 0.9305720409));
  CHECK(near(sliding[2], 0.8659643234));
  CHECK(near(sliding[127], 1.0746078e-4));
  CHECK(near(full[0], 1.0));
  CHECK(near(full[1], 0.9474635257));
  CHECK(near(full[2], 0.8976871325));
  CHECK(near(full[63], 0.0333762469));
  for (std::size_t i = 64; i < 256; ++i) CHECK(full[i] == 0);
  CHECK(std::abs(full[1] - 0.8058421878f) > 0.1f);  // the denominator of a rotated share of 128 dimensions
}

TEST_CASE("pitfall 29: a rotation factor of 1e30 survives") {
  const text_config c =
      target_from(target_with({{"rope_parameters",
                                {{"sliding_attention", {{"rope_theta", 1e4}}},
                                 {"full_attention", {{"rope_type", "proportional"}, {"rope_theta", 1e6}, {"factor", 1e30}}}}}}));
  CHECK(c.shape(F).rope.factor == 1e30);
  CHECK(c.shape(F).rope.frequencies(16)[0] == 1e-30f);
}

TEST_CASE("the released targets have the donors and MLP widths of their architecture") {
  const std::map<std::string, std::pair<std::size_t, std::size_t>> donors{
      {"E2B", {13, 14}}, {"E4B", {22, 23}}, {"12B", {46, 47}}, {"26B-A4B", {28, 29}}, {"31B", {58, 59}}};
  for (const std::string name : outrider::testing::released_names) {
    CAPTURE(name);
    const text_config c = target_from(outrider::testing::released_target(name));
    CHECK(c.donor(S) == donors.at(name).first);
    CHECK(c.donor(F) == donors.at(name).second);
    CHECK(c.shape(S).head_dim == 256);
    CHECK(c.shape(F).head_dim == 512);
  }
  const text_config e2b = target_from(outrider::testing::released_target("E2B"));
  CHECK(e2b.mlp_width(14) == 6144);  // pitfall 37: it switches at the first layer that shares
  CHECK(e2b.mlp_width(15) == 12288);
}

TEST_CASE("absent fields have the defaults of the class") {
  const text_config plain = target_from(json{{"model_type", "gemma4_text"}});
  CHECK(plain.vocab_size == 262144);
  CHECK(plain.hidden_size == 2304);
  CHECK(plain.intermediate_size == 9216);
  CHECK(plain.layer_count() == 30);
  CHECK(plain.heads == 8);
  CHECK(plain.shape(S).kv_heads == 4);
  CHECK(plain.shape(F).kv_heads == 4);
  CHECK(plain.window == 512);
  CHECK(plain.ple_width == 256);
  CHECK(plain.ple_vocab_size == 262144);
  CHECK(plain.softcap == 0);
  CHECK(plain.tied_head);
  CHECK(plain.max_positions == 131072);
  const text_config unified = target_from(json{{"model_type", "gemma4_unified_text"}});
  CHECK(unified.window == 1024);
  CHECK(unified.ple_width == 0);
  CHECK(unified.max_positions == 262144);
  CHECK(assistant_from(assistant_with(json::object())).backbone_hidden_size == 16);
}

TEST_CASE("a unified config may carry the fields of the other class as 0, false or null, nothing else") {
  const json unified{{"model_type", "gemma4_unified_text"}};
  for (const json& fields :
       {json{{"hidden_size_per_layer_input", 0}, {"enable_moe_block", false}, {"num_experts", 0}},
        json{{"hidden_size_per_layer_input", nullptr}, {"enable_moe_block", nullptr}, {"vocab_size_per_layer_input", nullptr}}}) {
    json document = unified;
    document.update(fields);
    CHECK(target_from(document).ple_width == 0);
  }
  for (const json& fields : {json{{"hidden_size_per_layer_input", 8}}, json{{"enable_moe_block", true}}}) {
    json document = unified;
    document.update(fields);
    CHECK(mentions(refusal(error_code::config_invalid, [&] { static_cast<void>(target_from(document)); }), fields.begin().key()));
  }
}

TEST_CASE("the tie of the head is a matter of the outer config") {
  json document{{"model_type", "gemma4"}, {"text_config", target_with({{"tie_word_embeddings", false}})}};
  CHECK_FALSE(target_from(document).tied_head);
  document["tie_word_embeddings"] = true;
  CHECK(target_from(document).tied_head);
  CHECK_FALSE(target_from(target_with({{"tie_word_embeddings", false}})).tied_head);
}

TEST_CASE("query heads that KV heads do not divide are refused") {
  check_refused({{"num_attention_heads", 3}, {"num_key_value_heads", 2}}, "num_key_value_heads");
  check_refused({{"num_attention_heads", 4}, {"num_key_value_heads", 2}, {"attention_k_eq_v", true}, {"num_global_key_value_heads", 3}},
                "num_global_key_value_heads");
  check_refused({{"per_layer_config", {{"1", {{"head_dim", 16}, {"num_key_value_heads", 3}}}}}}, "per_layer_config.1.num_key_value_heads");
}

TEST_CASE("odd head sizes are refused in all forms") {
  check_refused({{"global_head_dim", 15}}, "global_head_dim");
  check_refused({{"per_layer_config", {{"1", {{"head_dim", 15}}}, {"3", {{"head_dim", 15}}}}}}, "per_layer_config.1.head_dim");
}

TEST_CASE("numbers of any absurd size are refused where a size is read") {
  for (const json& value : {json(-1), json(1e300), json(9223372036854775808u), json(18446744073709551615u), json(2147483648u), json(3.5),
                            json(16.0), json(true), json(nullptr), json("16"), json(json::array({16})), json(json::object())})
    for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                            "num_key_value_heads", "head_dim", "global_head_dim", "sliding_window", "num_kv_shared_layers",
                            "hidden_size_per_layer_input", "vocab_size_per_layer_input", "max_position_embeddings"})
      check_refused({{key, value}}, key);
}

TEST_CASE("real fields take whole numbers but no text, no null and nothing outside their limits") {
  CHECK(target_from(target_with({{"final_logit_softcapping", 30}})).softcap == 30);
  CHECK(target_from(target_with({{"final_logit_softcapping", nullptr}})).softcap == 0);
  for (const json& value : {json(0), json(-1e-6), json("1"), json(nullptr), json(true), json(1e300), json(1e-300)})
    check_refused({{"rms_norm_eps", value}}, "rms_norm_eps");
  for (const json& value : {json(0), json(-30), json(1e300), json(1e-300), json(false)})
    check_refused({{"final_logit_softcapping", value}}, "final_logit_softcapping");
  for (const json& value : {json(0), json(-1), json(1e300), json("1e4"), json(nullptr)})
    check_refused({{"rope_parameters", {{"sliding_attention", {{"rope_theta", value}}}, {"full_attention", {{"rope_theta", 1e6}}}}}},
                  "rope_parameters.sliding_attention.rope_theta");
}

TEST_CASE("text that is no JSON, and JSON that is no object, are refused with the file") {
  for (const std::string_view text : {"", "{", R"({"model_type": "gemma4_text", "rms_norm_eps": NaN})", R"({"rms_norm_eps": 1e400})"})
    CHECK(mentions(refusal(error_code::file_malformed, [&] { static_cast<void>(target_from(text)); }), "config.json"));
  for (const std::string_view text : {"[1]", "null", "3", "\"gemma4_text\"", "[[[[[[[[]]]]]]]]"})
    CHECK(mentions(refusal(error_code::config_invalid, [&] { static_cast<void>(target_from(text)); }), "config.json: the document is "));
  CHECK(mentions(refusal(error_code::file_not_found, [&] { static_cast<void>(read_target_config(golden / "no such file.json")); }),
                 "no such file.json"));
}

TEST_CASE("lists and objects with wrong things inside are refused") {
  check_refused({{"layer_types", {"full_attention", 1, "full_attention", "full_attention"}}}, "layer_types");
  check_refused({{"layer_types", {{"0", "full_attention"}}}}, "layer_types");
  check_refused({{"eos_token_id", {1, "2"}}}, "eos_token_id");
  check_refused({{"eos_token_id", {{1}}}}, "eos_token_id");
  check_refused({{"eos_token_id", true}}, "eos_token_id");
  check_refused({{"per_layer_config", {{"1", 16}}}}, "per_layer_config.1");
  check_refused({{"per_layer_config", {{"-1", json::object()}}}}, "per_layer_config");
  check_refused({{"per_layer_config", {{"99999999999999999999999", json::object()}}}}, "per_layer_config");
  check_refused({{"per_layer_config", {{"", json::object()}}}}, "per_layer_config");
  check_refused({{"rope_parameters", {{"sliding_attention", nullptr}, {"full_attention", {{"rope_theta", 1e6}}}}}},
                "rope_parameters.sliding_attention");
  check_refused({{"model_type", 4}}, "model_type");
  check_refused({{"model_type", nullptr}}, "model_type");
}

TEST_CASE("pitfall 3: an end-of-text id outside the vocabulary is refused") {
  check_refused({{"eos_token_id", 64}}, "eos_token_id");
  check_refused({{"eos_token_id", {1, -1}}}, "eos_token_id");
  CHECK(target_from(target_with({{"eos_token_id", 63}})).eos == std::vector<token_id>{63});
}

TEST_CASE("a per-layer table with fewer rows than the vocabulary is refused") {
  check_refused({{"vocab_size_per_layer_input", 63}}, "vocab_size_per_layer_input");
}

TEST_CASE("biases and other rotations, which no kernel here has, are refused as unsupported") {
  check_refused({{"attention_bias", true}}, "attention_bias", error_code::model_unsupported);
  check_refused({{"hidden_activation", "silu"}}, "hidden_activation", error_code::model_unsupported);
  const json yarn{{"sliding_attention", {{"type", "yarn"}, {"rope_theta", 1e4}}}, {"full_attention", {{"rope_theta", 1e6}}}};
  check_refused({{"rope_parameters", yarn}}, "rope_parameters.sliding_attention.type", error_code::model_unsupported);
}

TEST_CASE("what a file says is quoted short and printable") {
  const std::string sentence = refusal(error_code::config_invalid, [&] {
    static_cast<void>(target_from(target_with({{"sliding_window", "\x1b[2J\n" + std::string(100000, 'x')}})));
  });
  CHECK(sentence.size() < 400);
  for (const char c : sentence) CHECK(static_cast<unsigned char>(c) >= 0x20);
}

TEST_CASE("a model directory without generation config has the defaults") {
  const outrider::testing::temporary_directory directory;
  const generation_config g = read_generation_config(directory.path(), 64);
  CHECK(g.eos.empty());
  CHECK(g.suppress.empty());
}

TEST_CASE("generation config: ends as number, list or null, suppressed ids, draft count") {
  const generation_config g = generation_from({{"eos_token_id", {1, 50, 10}}, {"suppress_tokens", {7, 8}}, {"top_k", 64}});
  CHECK(g.eos == std::vector<token_id>{1, 50, 10});
  CHECK(g.suppress == std::vector<token_id>{7, 8});
  CHECK(generation_from({{"eos_token_id", 3}}).eos == std::vector<token_id>{3});
  const generation_config nulls = generation_from({{"eos_token_id", nullptr}, {"suppress_tokens", nullptr}});
  CHECK(nulls.eos.empty());
  CHECK(nulls.suppress.empty());
}

TEST_CASE("pitfall 3: generation config with ids outside the vocabulary or of a wrong type is refused") {
  for (const json& changes : {json{{"eos_token_id", 64}}, json{{"eos_token_id", "1"}}, json{{"eos_token_id", 1.0}},
                              json{{"suppress_tokens", 7}}, json{{"suppress_tokens", {64}}}, json{{"suppress_tokens", {-1}}}}) {
    CAPTURE(changes.dump());
    const std::string sentence = refusal(error_code::config_invalid, [&] { static_cast<void>(generation_from(changes)); });
    CHECK(mentions(sentence, "generation_config.json: " + changes.begin().key() + " is ", "; allowed: "));
  }
}
