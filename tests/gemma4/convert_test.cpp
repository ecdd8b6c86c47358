// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/backend/reference.hpp"
#include "outrider/gemma4/convert.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "outrider/text/tokenizer.hpp"
#include "support/refusal.hpp"
#include "support/rewrite_checkpoint.hpp"
#include "support/temporary_directory.hpp"

namespace {

using namespace outrider;
using gemma4::conversion_options;
using gemma4::convert;
using gemma4::recipe_named;
using outrider::testing::mentions;
using outrider::testing::refusal;
using outrider::testing::stored_tensor;
using outrider::testing::temporary_directory;
namespace fs = std::filesystem;

const fs::path root = OUTRIDER_SOURCE_DIR, tiny = root / "examples/data/tiny-kjv", golden = root / "tests/golden";

std::string contents_of(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file, std::ios::binary).rdbuf();
  return text.str();
}
conversion_options as(std::string_view recipe) {
  conversion_options options;
  options.recipe = recipe_named(recipe);
  return options;
}
conversion_options without_centroids(std::string_view recipe) {
  conversion_options options = as(recipe);
  options.centroids = false;
  return options;
}
std::vector<std::byte> bytes_of(const io::gguf_value& value) { return {value.bytes.begin(), value.bytes.end()}; }

/// Both have the same pairs and tensors, in the same order, to the byte.
void check_same(const io::gguf_file& file, const io::gguf_file& expected) {
  REQUIRE(file.pairs.size() == expected.pairs.size());
  for (std::size_t i = 0; i < file.pairs.size(); ++i) {
    const auto &pair = file.pairs[i], &want = expected.pairs[i];
    CAPTURE(want.key);
    CHECK(pair.key == want.key);
    CHECK(pair.value.type == want.value.type);
    CHECK(pair.value.is_array == want.value.is_array);
    CHECK(bytes_of(pair.value) == bytes_of(want.value));
  }
  REQUIRE(file.tensors.size() == expected.tensors.size());
  for (std::size_t i = 0; i < file.tensors.size(); ++i) {
    const auto &t = file.tensors[i], &want = expected.tensors[i];
    CAPTURE(want.name);
    CHECK(t.name == want.name);
    CHECK(t.type == want.type);
    CHECK(t.shape == want.shape);
    CHECK(std::equal(t.bytes.begin(), t.bytes.end(), want.bytes.begin(), want.bytes.end()));
  }
}
void check_same(const io::tensor_set& set, const io::tensor_set& expected) {
  CHECK(set.size() == expected.size());
  for (const auto& entry : expected) {
    const io::tensor &want = entry.second, &t = set.at(want.name);
    CAPTURE(want.name);
    CHECK(t.type == want.type);
    CHECK(t.shape == want.shape);
    CHECK(std::equal(t.bytes.begin(), t.bytes.end(), want.bytes.begin(), want.bytes.end()));
  }
}
void check_same(const gemma4::text_config& t, const gemma4::text_config& want) {
  CHECK(t.vocab_size == want.vocab_size);
  CHECK(t.hidden_size == want.hidden_size);
  CHECK(t.intermediate_size == want.intermediate_size);
  CHECK(t.heads == want.heads);
  CHECK(t.layers == want.layers);
  for (std::size_t k = 0; k < 2; ++k) {
    CHECK(t.attention[k].head_dim == want.attention[k].head_dim);
    CHECK(t.attention[k].kv_heads == want.attention[k].kv_heads);
    CHECK(t.attention[k].rope == want.attention[k].rope);
  }
  CHECK(t.window == want.window);
  CHECK(t.kv_shared_layers == want.kv_shared_layers);
  CHECK(t.double_wide_mlp == want.double_wide_mlp);
  CHECK(static_cast<float>(t.rms_norm_eps) == static_cast<float>(want.rms_norm_eps));  // a GGUF file has floats
  CHECK(t.softcap == want.softcap);
  CHECK(t.ple_width == want.ple_width);
  CHECK(t.ple_vocab_size == want.ple_vocab_size);
  CHECK(t.experts == want.experts);
  CHECK(t.experts_per_token == want.experts_per_token);
  CHECK(t.expert_width == want.expert_width);
  CHECK(t.tied_head == want.tied_head);
  if (want.first_shared() != 0) {  // what an assistant's files say about values of its own and ends of text is never used
    CHECK(t.k_eq_v == want.k_eq_v);
    CHECK(t.eos == want.eos);
  }
  CHECK(t.suppress == want.suppress);
  CHECK(t.max_positions == want.max_positions);
}
void check_same_model(const fs::path& path, const fs::path& expected) {
  const auto model = gemma4::read_model_description(path), want = gemma4::read_model_description(expected);
  REQUIRE(model.index() == want.index());
  if (const auto* const target = std::get_if<gemma4::text_config>(&want)) {
    check_same(std::get<gemma4::text_config>(model), *target);
    return;
  }
  const auto &a = std::get<gemma4::assistant_config>(model), &b = std::get<gemma4::assistant_config>(want);
  check_same(a.text, b.text);
  CHECK(a.backbone_hidden_size == b.backbone_hidden_size);
  CHECK(a.centroid_head == b.centroid_head);
  CHECK(a.centroids == b.centroids);
  CHECK(a.centroid_top_k == b.centroid_top_k);
}

std::vector<float> prompt_logits(const fs::path& path) {
  const auto model = gemma4::load_model<reference>(path);
  context_of<reference> ctx{execution{}};
  gemma4::session<reference> session(model, ctx);
  session.prefill(std::vector<token_id>{2, 5, 7, 11, 3});
  const auto logits = session.logits();
  return {logits.row(0), logits.row(0) + logits.cols};
}

/// A copy of a checkpoint of tests/golden with other files or tensors.
struct checkpoint {
  temporary_directory directory;
  fs::path path;

  explicit checkpoint(
      const fs::path& from, const std::function<void(std::vector<stored_tensor>&)>& edit = [](auto&) {})
      : path(directory.path() / "model") {
    outrider::testing::rewrite_checkpoint(from, path, edit);
  }
  void write(const std::string& name, const std::string& text) const { std::ofstream(path / name, std::ios::binary) << text; }
  void edit_json(const std::string& name, const std::function<void(nlohmann::json&)>& edit) const {
    nlohmann::json document = nlohmann::json::parse(contents_of(path / name));
    edit(document);
    write(name, document.dump());
  }
};

}  // namespace

TEST_CASE("the tiny pair becomes the files that llama.cpp made of it") {
  const temporary_directory directory;
  for (const char* type : {"bf16", "q8_0", "q4_0", "q4_k_m"}) {
    CAPTURE(type);
    const fs::path out = directory.path() / "target.gguf", expected = tiny / "gguf" / (std::string("target-") + type + ".gguf");
    static_cast<void>(convert(tiny / "target", out, as(type)));
    check_same(io::open_gguf(out), io::open_gguf(expected));
    CHECK(contents_of(out) == contents_of(expected));  // in every other byte as well
  }
  for (const char* type : {"bf16", "q8_0"}) {
    CAPTURE(type);
    const fs::path out = directory.path() / "assistant.gguf", expected = tiny / "gguf" / (std::string("assistant-") + type + ".gguf");
    static_cast<void>(convert(tiny / "assistant", out, without_centroids(type)));
    check_same(io::open_gguf(out), io::open_gguf(expected));
    CHECK(contents_of(out) == contents_of(expected));
  }
}

TEST_CASE("a bf16 file becomes the quantised files that llama.cpp made of it") {
  const temporary_directory directory;
  for (const char* type : {"q8_0", "q4_0", "q4_k_m"}) {
    CAPTURE(type);
    static_cast<void>(convert(tiny / "gguf/target-bf16.gguf", directory.path() / "x.gguf", as(type)));
    CHECK(contents_of(directory.path() / "x.gguf") == contents_of(tiny / "gguf" / (std::string("target-") + type + ".gguf")));
  }
}

TEST_CASE("an assistant has its centroids beside what llama.cpp writes") {
  const temporary_directory directory;
  const fs::path out = directory.path() / "assistant.gguf";
  static_cast<void>(convert(tiny / "assistant", out));
  const io::gguf_file file = io::open_gguf(out), plain = io::open_gguf(tiny / "gguf/assistant-bf16.gguf");
  CHECK(file.find("gemma4-assistant.masked_embedding.centroid_count")->integer() == 64);
  CHECK(file.find("gemma4-assistant.masked_embedding.top_k")->integer() == 6);
  io::gguf_file rest = file;
  std::erase_if(rest.pairs, [](const io::gguf_pair& pair) { return pair.key.find("masked_embedding") != pair.key.npos; });
  std::erase_if(rest.tensors, [](const io::tensor& t) {
    if (t.name == "masked_embd_ordering") CHECK(t.type == io::dtype::i32);
    return t.name.starts_with("masked_embd_");
  });
  CHECK(file.tensors.size() == rest.tensors.size() + 2);
  check_same(rest, plain);
  check_same_model(out, tiny / "assistant");
}

TEST_CASE("pitfall 9: names of scheme b, with the ordering as floats, load to the same assistant") {
  const temporary_directory directory;
  const fs::path out = directory.path() / "assistant.gguf";
  conversion_options options = as("bf16");
  options.assist_names = true;
  static_cast<void>(convert(tiny / "assistant", out, options));
  const io::gguf_file file = io::open_gguf(out);
  CHECK(file.find("gemma4-assistant.backbone_hidden_size")->integer() == 128);
  CHECK(file.find("gemma4-assistant.assistant.num_centroids")->integer() == 64);
  CHECK(file.find("gemma4-assistant.assistant.centroid_intermediate_top_k")->integer() == 6);
  CHECK(file.find("gemma4-assistant.assistant.use_ordered_embeddings")->boolean() == true);
  CHECK(gemma4::scheme_of(file) == gemma4::assistant_scheme::b);
  const auto ordering =
      std::find_if(file.tensors.begin(), file.tensors.end(), [](const io::tensor& t) { return t.name == "assist_token_ordering.weight"; });
  REQUIRE(ordering != file.tensors.end());
  CHECK(ordering->type == io::dtype::f32);
  check_same_model(out, tiny / "assistant");
  // And back: the ordering is one of integers again.
  static_cast<void>(convert(out, directory.path() / "back"));
  CHECK(contents_of(directory.path() / "back/model.safetensors") == contents_of(tiny / "assistant/model.safetensors"));
}

TEST_CASE("to GGUF in bf16 and back, a checkpoint has the same bytes, configuration and tokens") {
  const temporary_directory directory;
  for (const char* which : {"target", "assistant"}) {
    CAPTURE(which);
    const fs::path file = directory.path() / (std::string(which) + ".gguf"), back = directory.path() / which;
    static_cast<void>(convert(tiny / which, file, as("bf16")));
    static_cast<void>(convert(file, back));
    CHECK(contents_of(back / "model.safetensors") == contents_of(tiny / which / "model.safetensors"));
    check_same_model(file, tiny / which);
    check_same_model(back, tiny / which);

    const auto before = parse_tokenizer_json(contents_of(tiny / which / "tokenizer.json"), "before");
    const auto after = parse_tokenizer_json(contents_of(back / "tokenizer.json"), "after");
    REQUIRE(after.tokens.size() == before.tokens.size());
    for (token_id id = 0; before.tokens.contains(id); ++id) CHECK(after.tokens.text(id) == before.tokens.text(id));
    CHECK(after.types == before.types);
    CHECK(after.added.size() == before.added.size());
    const auto original = tokenizer::from_json_file(tiny / which / "tokenizer.json"),
               copy = tokenizer::from_json_file(back / "tokenizer.json");
    for (const char* text :
         {"In the beginning God created the heaven and the earth.", "<|turn>user\nHi<turn|>\n", "a  b\t\xff\n\n", "Æ🙂"})
      CHECK(copy.encode(text) == original.encode(text));

    // Once more: the second file is the first.
    static_cast<void>(convert(back, directory.path() / "again.gguf", as("bf16")));
    const io::gguf_file first = io::open_gguf(file), second = io::open_gguf(directory.path() / "again.gguf");
    REQUIRE(second.pairs.size() == first.pairs.size());
    for (std::size_t i = 0; i < first.pairs.size(); ++i) CHECK(bytes_of(second.pairs[i].value) == bytes_of(first.pairs[i].value));
  }
}

TEST_CASE("to GGUF in f32 and back, golden checkpoints of every kind have the same tensors and configuration") {
  for (const char* name : {"e2b", "e4b", "dense31b", "moe26b", "unified12b", "multimodal_names"})
    for (const char* which : {"target", "assistant"}) {
      CAPTURE(name);
      CAPTURE(which);
      const temporary_directory directory;
      const fs::path source = golden / name / which, file = directory.path() / "x.gguf", back = directory.path() / "back";
      const auto report = convert(source, file, as("f32"));
      CHECK(report.notes.size() == 1);  // none of them has a tokenizer
      static_cast<void>(convert(file, back));
      check_same_model(file, source);
      check_same_model(back, source);
      if (std::string_view(name) != "multimodal_names" || std::string_view(which) == "assistant") {
        check_same(io::load_safetensors(back), io::load_safetensors(source));
      } else {  // names without "language_model.": those of a text-only model
        const io::tensor_set result = io::load_safetensors(back), original = io::load_safetensors(source);
        for (const auto& [long_name, want] : original) {
          std::string short_name = long_name;
          if (const auto at = short_name.find("language_model."); at != short_name.npos)
            short_name.erase(at, std::strlen("language_model."));
          if (!result.find(short_name)) continue;  // vision
          CHECK(std::equal(want.bytes.begin(), want.bytes.end(), result.at(short_name).bytes.begin(), result.at(short_name).bytes.end()));
        }
      }
    }
}

TEST_CASE("a converted target computes the logits of the original, bit for bit") {
  for (const char* name : {"e2b", "dense31b", "moe26b", "multimodal_names"}) {
    CAPTURE(name);
    const temporary_directory directory;
    const fs::path source = golden / name / "target", file = directory.path() / "x.gguf", back = directory.path() / "back";
    static_cast<void>(convert(source, file, as("f32")));
    static_cast<void>(convert(file, back));
    const std::vector<float> want = prompt_logits(source);
    CHECK(prompt_logits(file) == want);
    CHECK(prompt_logits(back) == want);
  }
}

TEST_CASE("a quantised file becomes a directory with what its blocks stand for") {
  const temporary_directory directory;
  const auto report = convert(tiny / "gguf/target-q4_k_m.gguf", directory.path() / "f32", as("f32"));
  CHECK(report.types.size() == 1);
  const io::tensor_set tensors = io::load_safetensors(directory.path() / "f32");
  const io::gguf_file file = io::open_gguf(tiny / "gguf/target-q4_k_m.gguf");
  const io::tensor& down = tensors.at("model.layers.7.mlp.down_proj.weight");
  const auto source =
      std::find_if(file.tensors.begin(), file.tensors.end(), [](const io::tensor& t) { return t.name == "blk.7.ffn_down.weight"; });
  REQUIRE(source->type == io::dtype::q6_k);
  q6_k block;
  std::memcpy(static_cast<void*>(&block), source->bytes.data(), sizeof block);
  std::array<float, 256> want;
  dequantize(block, want.data());
  CHECK(std::memcmp(down.bytes.data(), want.data(), sizeof want) == 0);

  static_cast<void>(convert(tiny / "gguf/target-q4_k_m.gguf", directory.path() / "default"));
  for (const auto& [name, t] : io::load_safetensors(directory.path() / "default")) CHECK(t.type == io::dtype::bf16);
  CHECK(nlohmann::json::parse(contents_of(directory.path() / "default/config.json"))["dtype"] == "bfloat16");
}

TEST_CASE("vectors go back to the matrices' type only where that has all their values") {
  const checkpoint source(golden / "e2b_bf16/target", [](std::vector<stored_tensor>& tensors) {
    for (stored_tensor& t : tensors)
      if (t.name == "model.norm.weight") {
        std::vector<std::byte> wide(2 * t.bytes.size());
        for (std::size_t i = 0; i < t.bytes.size() / 2; ++i) {
          const float third = 1.0f / 3;
          std::memcpy(wide.data() + 4 * i, &third, 4);
        }
        t.dtype = "F32";
        t.bytes = wide;
      }
  });
  const fs::path file = source.directory.path() / "x.gguf", back = source.directory.path() / "back";
  static_cast<void>(convert(source.path, file, as("bf16")));
  static_cast<void>(convert(file, back));
  const io::tensor_set tensors = io::load_safetensors(back);
  CHECK(tensors.at("model.norm.weight").type == io::dtype::f32);
  CHECK(tensors.at("model.layers.0.input_layernorm.weight").type == io::dtype::bf16);
  check_same(tensors, io::load_safetensors(source.path));
}

TEST_CASE("the chat template is embedded, from wherever it is, and comes back as a file") {
  const std::string text = "{{ bos_token }}{% for m in messages %}\n{{ m }}\xe2\x96\x81{% endfor %}";
  for (const char* place : {"chat_template.jinja", "tokenizer_config.json"}) {
    CAPTURE(place);
    const checkpoint source(tiny / "target");
    fs::copy_file(tiny / "target/tokenizer.json", source.path / "tokenizer.json");
    fs::copy_file(tiny / "target/tokenizer_config.json", source.path / "tokenizer_config.json");
    if (std::string_view(place) == "chat_template.jinja")
      source.write(place, text);
    else
      source.edit_json(place, [&](nlohmann::json& document) { document["chat_template"] = text; });
    const fs::path file = source.directory.path() / "x.gguf";
    static_cast<void>(convert(source.path, file, as("q8_0")));
    CHECK(io::open_gguf(file).find("tokenizer.chat_template")->text() == text);
    static_cast<void>(convert(file, source.directory.path() / "back"));
    CHECK(contents_of(source.directory.path() / "back/chat_template.jinja") == text);
  }
}

TEST_CASE(
    "types of tokens: control if tokenizer_config.json names them, the visible markers user-defined, and nothing that matters is lost") {
  const checkpoint source(tiny / "target");
  nlohmann::json document = nlohmann::json::parse(contents_of(tiny / "target/tokenizer.json"));
  const auto rename = [&](int id, const std::string& text, bool special) {
    auto& vocab = document["model"]["vocab"];
    for (auto it = vocab.begin(); it != vocab.end(); ++it)
      if (it.value() == id) {
        vocab.erase(it);
        break;
      }
    vocab[text] = id;
    document["added_tokens"].push_back({{"id", id}, {"content", text}, {"special", special}, {"normalized", false}});
  };
  // The last pieces of the vocabulary, whose merges go with them.
  auto& merges = document["model"]["merges"];
  while (merges.size() > 1700) merges.erase(merges.size() - 1);
  rename(2047, "<|channel>", true);
  rename(2046, "<|think|>", true);
  rename(2045, "<table>", false);
  rename(2044, "<unheard of>", true);
  source.write("tokenizer.json", document.dump());
  source.write("tokenizer_config.json", R"({"bos_token": {"content": "<bos>"}, "eos_token": "<eos>", "think_token": "<|think|>"})");
  const fs::path file = source.directory.path() / "x.gguf";
  static_cast<void>(convert(source.path, file, as("q8_0")));
  const auto types = *io::open_gguf(file).find("tokenizer.ggml.token_type")->integers();
  CHECK(types[2047] == 4);  // a chat parser is to see it
  CHECK(types[2046] == 3);  // named
  CHECK(types[2045] == 4);  // split out of texts, but text itself
  CHECK(types[2044] == 3);  // not named, but special
  CHECK(types[5] == 1);     // <|turn>: not named, but every reader knows it
  CHECK(types[4] == 3);     // <mask>: the tokenizer class names it
  CHECK(types[7] == 6);
  static_cast<void>(convert(file, source.directory.path() / "back"));
  const auto before = tokenizer::from_json_file(source.path / "tokenizer.json");
  const auto after = tokenizer::from_json_file(source.directory.path() / "back/tokenizer.json");
  for (const char* text : {"a <table> b", "<|channel>thought\n", "<unheard of><|think|>"}) CHECK(after.encode(text) == before.encode(text));
}

TEST_CASE("sampling settings and suppressed tokens go there and back") {
  const checkpoint source(golden / "unified12b/target");
  source.write("generation_config.json",
               R"({"eos_token_id": [1, 7], "temperature": 1.0, "top_k": 64, "top_p": 0.95, "suppress_tokens": [5, 9]})");
  const fs::path file = source.directory.path() / "x.gguf";
  static_cast<void>(convert(source.path, file, as("f32")));
  const io::gguf_file gguf = io::open_gguf(file);
  CHECK(gguf.find("general.sampling.top_k")->integer() == 64);
  CHECK(gguf.find("general.sampling.top_k")->type == io::gguf_type::i32);
  CHECK(gguf.find("general.sampling.top_p")->number() == double{0.95f});
  CHECK(gguf.find("general.sampling.temp")->number() == 1.0);
  CHECK(gguf.find("tokenizer.ggml.suppress_tokens")->integers() == std::vector<std::int64_t>{5, 9});
  static_cast<void>(convert(file, source.directory.path() / "back"));
  const auto back = nlohmann::json::parse(contents_of(source.directory.path() / "back/generation_config.json"));
  CHECK(back["top_p"] == 0.95);
  CHECK(back["top_k"] == 64);
  CHECK(back["suppress_tokens"] == std::vector<int>{5, 9});
}

TEST_CASE("numbers that the format's types do not hold are refused, whatever else is in the files beside the model is not used") {
  const checkpoint source(golden / "e2b/target");
  const fs::path out = source.directory.path() / "x.gguf";
  for (const char* key : {"top_k", "top_p", "temperature"}) {
    source.write("generation_config.json", std::string("{\"") + key + "\": 1e300}");
    CHECK(mentions(refusal(error_code::config_invalid, [&] { static_cast<void>(convert(source.path, out)); }),
                   "generation_config.json: " + std::string(key), "1e+300", "2147483647"));
  }
  source.write("generation_config.json", R"({"top_k": "many"})");
  source.write("tokenizer_config.json", R"({"chat_template": [{"name": 5}, 6]})");
  CHECK_NOTHROW(static_cast<void>(convert(source.path, out)));
  CHECK_FALSE(io::open_gguf(out).find("general.sampling.top_k"));

  const checkpoint talking(tiny / "target");
  fs::copy_file(tiny / "target/tokenizer.json", talking.path / "tokenizer.json");
  talking.edit_json("tokenizer.json", [](nlohmann::json& tokenizer) { tokenizer["post_processor"] = {{"type", 5}}; });
  CHECK_NOTHROW(static_cast<void>(convert(talking.path, talking.directory.path() / "x.gguf")));
}

TEST_CASE("an ordering of what are no token ids is refused with its place, and nothing is written") {
  for (const auto& element : {std::pair<std::string, double>{"I64", -1}, {"I64", 16777216}, {"F32", 0.5}, {"F32", 1e30}}) {
    const auto& type = element.first;
    const double value = element.second;
    CAPTURE(value);
    const checkpoint source(golden / "e2b/assistant", [&](std::vector<stored_tensor>& tensors) {
      for (stored_tensor& t : tensors) {
        if (t.name != "masked_embedding.token_ordering") continue;
        const auto whole = static_cast<std::int64_t>(type == "I64" ? value : 0);
        const auto number = static_cast<float>(value);
        if (type == "I64")
          std::memcpy(t.bytes.data() + 24, &whole, sizeof whole);
        else
          t.bytes.resize(t.bytes.size() / 2), std::memcpy(t.bytes.data() + 12, &number, sizeof number);
        t.dtype = type;
      }
    });
    const fs::path out = source.directory.path() / "x.gguf";
    conversion_options options;
    options.assist_names = true;
    const std::string sentence = refusal(error_code::tensor_mismatch, [&] { static_cast<void>(convert(source.path, out, options)); });
    CHECK(mentions(sentence, "token_ordering", "allowed are token ids"));
    CHECK_FALSE(fs::exists(out));
  }
}

TEST_CASE("vision and audio are left out and reported; a tensor nobody knows is refused") {
  const auto with = [](const std::string& name) {
    return checkpoint(golden / "e2b/target", [&](std::vector<stored_tensor>& tensors) {
      tensors.push_back({name, "F32", {1}, std::vector<std::byte>(4)});
    });
  };
  const checkpoint vision = with("model.vision_tower.patch.weight"), strange = with("model.layers.0.secret.weight");
  const auto report = convert(vision.path, vision.directory.path() / "x.gguf", as("f32"));
  CHECK(report.skipped == std::vector<std::string>{"model.vision_tower.patch.weight"});
  const std::string sentence =
      refusal(error_code::model_unsupported, [&] { static_cast<void>(convert(strange.path, strange.directory.path() / "x.gguf")); });
  CHECK(mentions(sentence, "model.layers.0.secret.weight"));
}

TEST_CASE("rows of the embedding table beyond the tokenizer's tokens are cut off") {
  const checkpoint source(tiny / "target", [](std::vector<stored_tensor>& tensors) {
    for (stored_tensor& t : tensors)
      if (t.name == "model.embed_tokens.weight" || t.name == "model.embed_tokens_per_layer.weight") {
        t.bytes.resize(t.bytes.size() / t.shape[0] * 2056);
        t.shape[0] = 2056;
      }
  });
  source.edit_json("config.json", [](nlohmann::json& config) { config["vocab_size"] = config["vocab_size_per_layer_input"] = 2056; });
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json"})
    fs::copy_file(tiny / "target" / name, source.path / name);
  const fs::path file = source.directory.path() / "target.gguf";
  static_cast<void>(convert(source.path, file, as("bf16")));
  const io::gguf_file gguf = io::open_gguf(file), expected = io::open_gguf(tiny / "gguf/target-bf16.gguf");
  REQUIRE(gguf.tensors[1].name == "token_embd.weight");
  CHECK(gguf.tensors[1].shape == std::vector<std::size_t>{2048, 128});
  CHECK(std::equal(gguf.tensors[1].bytes.begin(), gguf.tensors[1].bytes.end(), expected.tensors[1].bytes.begin()));
  CHECK(gguf.tensors[2].shape == std::vector<std::size_t>{2056, 256});
}

TEST_CASE("f16, bf16 and f32 sources are all taken") {
  std::vector<std::vector<float>> values;
  for (const char* type : {"F16", "BF16", "F32"}) {
    const checkpoint source(golden / "e2b_bf16/target", [&](std::vector<stored_tensor>& tensors) {
      for (stored_tensor& t : tensors) {
        if (std::string_view(type) == "BF16") continue;
        std::vector<std::byte> out;
        for (std::size_t i = 0; i < t.bytes.size(); i += 2) {
          bf16 value;
          std::memcpy(&value, t.bytes.data() + i, 2);
          const float wide = to_float(value);
          const f16 half(wide);
          const auto bytes = std::string_view(type) == "F32" ? std::as_bytes(std::span(&wide, 1)) : std::as_bytes(std::span(&half, 1));
          out.insert(out.end(), bytes.begin(), bytes.end());
        }
        t.dtype = type;
        t.bytes = out;
      }
    });
    const fs::path file = source.directory.path() / "x.gguf";
    static_cast<void>(convert(source.path, file, as("f32")));
    const io::gguf_file gguf = io::open_gguf(file);
    CHECK(gguf.tensors[1].type == io::dtype::f32);
    values.emplace_back(gguf.tensors[1].bytes.size() / 4);
    std::memcpy(values.back().data(), gguf.tensors[1].bytes.data(), gguf.tensors[1].bytes.size());
  }
  CHECK(values[1] == values[2]);
  for (std::size_t i = 0; i < values[0].size(); ++i)  // half precision: 11 bits, and 2^-25 where they are subnormal
    CHECK(std::fabs(values[0][i] - values[1][i]) <= std::fabs(values[1][i]) * 0x1p-11f + 0x1p-25f);
}

TEST_CASE("a value that the new type cannot hold is refused with its tensor, and nothing is written") {
  const auto with = [](float value) {
    return checkpoint(golden / "e2b/target", [&](std::vector<stored_tensor>& tensors) {
      for (stored_tensor& t : tensors)
        if (t.name == "model.layers.0.self_attn.q_proj.weight") std::memcpy(t.bytes.data() + 40, &value, sizeof value);
    });
  };
  const auto refused = [](const checkpoint& source, const char* type) {
    const fs::path out = source.directory.path() / "x.gguf";
    const std::string sentence = refusal(error_code::tensor_mismatch, [&] { static_cast<void>(convert(source.path, out, as(type))); });
    CHECK_FALSE(fs::exists(out));
    return sentence;
  };
  CHECK(mentions(refused(with(std::numeric_limits<float>::quiet_NaN()), "q8_0"), "model.layers.0.self_attn.q_proj.weight", "Q8_0",
                 "no number"));
  CHECK(mentions(refused(with(std::numeric_limits<float>::infinity()), "q4_0"), "self_attn.q_proj.weight", "Q4_0"));
  CHECK(mentions(refused(with(1e6f), "f16"), "self_attn.q_proj.weight", "F16", "too large"));
  const checkpoint nan = with(std::numeric_limits<float>::quiet_NaN());
  CHECK_NOTHROW(static_cast<void>(convert(nan.path, nan.directory.path() / "x.gguf", as("bf16"))));  // a float type has it
}

TEST_CASE("progress counts every byte of the tensors, and what it throws leaves nothing behind") {
  const temporary_directory directory;
  conversion_options options = as("q8_0");
  std::uint64_t last = 0, all = 0;
  options.progress = [&](std::uint64_t done, std::uint64_t of) {
    CHECK(done >= last);
    last = done, all = of;
  };
  const auto report = convert(tiny / "target", directory.path() / "x.gguf", options);
  CHECK(last == all);
  std::uint64_t bytes = 0;
  for (const auto& [type, total] : report.types) bytes += total.bytes;
  CHECK(bytes == all);
  CHECK(report.bytes == fs::file_size(directory.path() / "x.gguf"));

  options.progress = [](std::uint64_t done, std::uint64_t of) {
    if (done > of / 2) throw std::runtime_error("enough");
  };
  CHECK_THROWS_AS(static_cast<void>(convert(tiny / "target", directory.path() / "y.gguf", options)), std::runtime_error);
  options.recipe.reset();
  CHECK_THROWS_AS(static_cast<void>(convert(tiny / "gguf/target-bf16.gguf", directory.path() / "directory", options)), std::runtime_error);
  CHECK(std::distance(fs::directory_iterator(directory.path()), fs::directory_iterator()) == 1);  // x.gguf
}

TEST_CASE("what cannot be converted is refused with one sentence") {
  const temporary_directory directory;
  const auto refused = [&](error_code code, const fs::path& in, const fs::path& out, const conversion_options& options = {}) {
    return refusal(code, [&] { static_cast<void>(convert(in, directory.path() / out, options)); });
  };
  CHECK(mentions(refused(error_code::argument_invalid, tiny / "target", "directory"), ".gguf"));
  CHECK(mentions(refused(error_code::argument_invalid, tiny / "gguf/target-bf16.gguf", "directory", as("q8_0")), "q8_0",
                 "f32, f16 and bf16"));
  CHECK(mentions(refused(error_code::argument_invalid, tiny / "gguf/target-bf16.gguf", "x.gguf"), "type"));
  CHECK(mentions(refused(error_code::argument_invalid, tiny / "gguf/assistant-bf16.gguf", "x.gguf", without_centroids("q8_0")),
                 "directory first"));
  CHECK(mentions(refused(error_code::model_unsupported, golden / "gemma3n/target", "x.gguf"), "gemma3n"));
  CHECK(mentions(refused(error_code::file_not_found, directory.path() / "missing", "x.gguf"), "missing"));
  CHECK(mentions(refused(error_code::file_malformed, tiny / "target/config.json", "x.gguf", as("f16")), "not a GGUF file"));
  CHECK(mentions(refused(error_code::file_not_written, tiny / "target", "no/such/directory/x.gguf"), "x.gguf"));
  CHECK(fs::is_empty(directory.path()));
}
