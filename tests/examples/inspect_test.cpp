// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "outrider/core/blocks.hpp"
#include "outrider/io/gguf.hpp"
#include "outrider/text/utf8.hpp"
#include "program.hpp"
#include "support/rewrite_checkpoint.hpp"
#include "support/temporary_directory.hpp"
#include "support/write_gguf.hpp"
#include "support/write_safetensors.hpp"

namespace {

namespace fs = std::filesystem;
namespace io = outrider::io;
using nlohmann::json;
using outrider::testing::gguf_builder;
using outrider::testing::gguf_tensor;
using outrider::testing::outcome;
using outrider::testing::stored_tensor;
using outrider::testing::temporary_directory;

const std::string root = OUTRIDER_SOURCE_DIR, tiny = root + "/examples/data/tiny-kjv", golden = root + "/tests/golden";
const std::vector<std::string> target_files{tiny + "/target", tiny + "/gguf/target-bf16.gguf", tiny + "/gguf/target-q8_0.gguf",
                                            tiny + "/gguf/target-q4_0.gguf", tiny + "/gguf/target-q4_k_m.gguf"};
const std::vector<std::string> assistant_files{tiny + "/assistant", tiny + "/gguf/assistant-bf16.gguf", tiny + "/gguf/assistant-q8_0.gguf"};

outcome inspect(const std::string& arguments) { return outrider::testing::run_program(OUTRIDER_INSPECT, arguments); }

std::string quoted(const fs::path& path) { return "'" + path.string() + "'"; }

std::vector<std::string> all_files() {
  std::vector<std::string> all = target_files;
  all.insert(all.end(), assistant_files.begin(), assistant_files.end());
  return all;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

json json_of(const outcome& run, int code = 0) {
  INFO(run.err);
  REQUIRE(run.code == code);
  REQUIRE(std::count(run.out.begin(), run.out.end(), '\n') == 1);  // exactly one object
  return json::parse(run.out);
}

/// One sentence on stderr that names the thing; nothing on stdout.
void check_refused(const outcome& run, int code, const std::string& mention) {
  CAPTURE(run.err);
  CHECK(run.code == code);
  CHECK(run.out.empty());
  CHECK(contains(run.err, mention));
  CHECK_FALSE(contains(run.err, "terminate called"));
  if (code == 1) CHECK(std::count(run.err.begin(), run.err.end(), '\n') == 1);
}

/// --check finds exactly one thing, and says so with these words; the dump is there all the same.
void check_finds(const fs::path& path, const std::vector<std::string>& mentions) {
  const outcome run = inspect("--check " + quoted(path));
  CAPTURE(run.out);
  CAPTURE(run.err);
  CHECK(run.code == 1);
  CHECK(contains(run.out, "1 finding(s)"));
  const std::size_t at = run.out.find("finding: ");
  REQUIRE(at != std::string::npos);
  const std::string finding = run.out.substr(at, run.out.find('\n', at) - at);
  for (const std::string& mention : mentions) CHECK_MESSAGE(contains(finding, mention), mention);
  CHECK(json_of(inspect("--check --json " + quoted(path)), 1)["check"]["findings"].size() == 1);
}

/// A GGUF file taken apart.
struct gguf_parts {
  struct pair {
    std::string key;
    std::uint32_t type;
    std::string bytes;  // the value as it lies in the file
  };
  std::vector<pair> pairs;
  std::vector<gguf_tensor> tensors;

  pair& at(const std::string& key) {
    const auto found = std::find_if(pairs.begin(), pairs.end(), [&](const pair& p) { return p.key == key; });
    REQUIRE(found != pairs.end());
    return *found;
  }
  gguf_tensor& tensor(const std::string& name) {
    const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const gguf_tensor& t) { return t.name == name; });
    REQUIRE(found != tensors.end());
    return *found;
  }
  void add_text(const std::string& key, const std::string& text) { pairs.push_back({key, 8, gguf_builder::raw_string(text)}); }
  void add_number(const std::string& key, std::uint32_t number) { pairs.push_back({key, 4, gguf_builder::raw(number)}); }
};

void write_gguf(const gguf_parts& parts, const fs::path& to) {
  gguf_builder builder;
  for (const auto& [key, type, bytes] : parts.pairs) builder.raw_pair(key, type, bytes);
  for (const gguf_tensor& tensor : parts.tensors) builder.tensor(tensor);
  builder.write(to);
}

/// One of the tiny files, as `edit` leaves it.
fs::path edited(const temporary_directory& directory, const std::string& name, const std::function<void(gguf_parts&)>& edit) {
  const io::gguf_file file = io::open_gguf(tiny + "/gguf/" + name);
  gguf_parts parts;
  for (const io::gguf_pair& pair : file.pairs) {
    const io::gguf_value& value = pair.value;
    const auto type = static_cast<std::uint32_t>(value.type);
    const std::string bytes(reinterpret_cast<const char*>(value.bytes.data()), value.bytes.size());
    if (value.is_array)
      parts.pairs.push_back({std::string(pair.key), 9, gguf_builder::raw(type) + gguf_builder::raw(std::uint64_t{value.count}) + bytes});
    else
      parts.pairs.push_back({std::string(pair.key), type, bytes});
  }
  for (const io::tensor& t : file.tensors) parts.tensors.push_back({t.name, t.type, t.shape, {t.bytes.begin(), t.bytes.end()}});
  edit(parts);
  write_gguf(parts, directory.path() / name);
  return directory.path() / name;
}

template <class T>
void put(std::vector<std::byte>& bytes, std::size_t at, T value) {
  REQUIRE(at + sizeof value <= bytes.size());
  std::memcpy(bytes.data() + at, &value, sizeof value);
}
template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

/// The tiny assistant's GGUF file with the centroid tensors that its converter dropped, the ordering as whole numbers of type F32.
void add_centroids(gguf_parts& parts) {
  const io::tensor_set set = io::load_safetensors(tiny + "/assistant");
  const io::tensor& centroids = set.at("masked_embedding.centroids.weight");
  const io::tensor& order = set.at("masked_embedding.token_ordering");
  std::vector<std::int64_t> ids(order.shape[0]);
  std::memcpy(ids.data(), order.bytes.data(), order.bytes.size());
  parts.tensors.push_back(
      {"masked_embd_centroids.weight", centroids.type, centroids.shape, {centroids.bytes.begin(), centroids.bytes.end()}});
  parts.tensors.push_back({"masked_embd_ordering", io::dtype::f32, order.shape, bytes_of(std::vector<float>(ids.begin(), ids.end()))});
  parts.add_number("gemma4-assistant.masked_embedding.centroid_count", 64);
  parts.add_number("gemma4-assistant.masked_embedding.top_k", 6);
}

/// A directory whose config.json is the tiny target's or assistant's as `edit` leaves it; its tensors do not matter.
fs::path with_config(const temporary_directory& directory, const std::string& name, const std::function<void(json&)>& edit) {
  json config = json::parse(std::ifstream(tiny + "/" + name + "/config.json"));
  edit(config);
  directory.write("config.json", config.dump());
  outrider::testing::write_safetensors(directory.path() / "model.safetensors", {{"x", "U8", {1}, std::vector<std::byte>(1)}});
  return directory.path();
}

}  // namespace

TEST_CASE("a GGUF file's keys and tensors come in the rows of gguf-dump") {
  const outcome run = inspect(tiny + "/gguf/target-q4_k_m.gguf");
  CHECK(run.code == 0);
  CHECK(run.err.empty());
  for (const char* row : {
           "* File is LITTLE endian",
           "* Dumping 41 key/value pair(s)\n",
           "      1: UINT32     |        1 | GGUF.version = 3\n",
           "      2: UINT64     |        1 | GGUF.tensor_count = 130\n",
           "      3: UINT64     |        1 | GGUF.kv_count = 38\n",
           "      4: STRING     |        1 | general.architecture = 'gemma4'\n",
           "     11: [INT32]    |        8 | gemma4.feed_forward_length = [384, 384, 384, 384, 768, 768, ...]\n",
           "     14: FLOAT32    |        1 | gemma4.rope.freq_base = 1000000.0\n",
           "     16: FLOAT32    |        1 | gemma4.attention.layer_norm_rms_epsilon = 9.999999974752427e-07\n",
           "     23: [BOOL]     |        8 | gemma4.attention.sliding_window_pattern = [True, True, True, False, True, True, ...]\n",
           "     29: [STRING]   |     2048 | tokenizer.ggml.tokens = ['<pad>', '<eos>', '<bos>', '<unk>', '<mask>', '<|turn>', ...]\n",
           "     30: [FLOAT32]  |     2048 | tokenizer.ggml.scores = [-1000.0, -1000.0, -1000.0, -1000.0, -1000.0, -1000.0, ...]\n",
           "     32: [STRING]   |     1722 | tokenizer.ggml.merges = ['t h', '▁ th', '▁th e', '▁ a', 'n d', '▁ s', ...]\n",
           "* Dumping 130 tensor(s)\n",
           "      1:        128 |   128,     1,     1,     1 | F32     | output_norm.weight | 512 bytes at 0\n",
           "      4:     524288 |   256,  2048,     1,     1 | Q6_K    | per_layer_token_embd.weight | 430080 bytes at 66176\n",
       })
    CHECK_MESSAGE(contains(run.out, row), row);
}

TEST_CASE("an array that is short is shown without dots") {
  CHECK(contains(inspect(tiny + "/gguf/assistant-bf16.gguf").out, "sliding_window_pattern = [True, True, True, False]\n"));
}

TEST_CASE("a directory's configuration and tensors come in the same rows") {
  const outcome run = inspect(tiny + "/assistant");
  CHECK(run.code == 0);
  for (const char* row :
       {"key/value pair(s) of config.json\n", "key/value pair(s) of generation_config.json\n", " | backbone_hidden_size = 128\n",
        " | text_config.rms_norm_eps = 1e-06\n", " | text_config.final_logit_softcapping = None\n",
        "[STRING]   |        4 | text_config.layer_types = ['sliding_att", "* Dumping 50 tensor(s)\n",
        "     2048 |  2048,     1,     1,     1 | I64     | masked_embedding.token_ordering | "})
    CHECK_MESSAGE(contains(run.out, row), row);
}

TEST_CASE("totals and the model are told of all tiny files") {
  for (const std::string& path : all_files()) {
    CAPTURE(path);
    const outcome run = inspect(path);
    CHECK(run.code == 0);
    const bool assistant = contains(path, "/assistant");
    for (const std::string part : {"* Totals", "* Model", "size          custom", "fingerprint   "})
      CHECK_MESSAGE(contains(run.out, part), part);
    CHECK(contains(run.out, assistant ? "family        Gemma 4 assistant" : "family        Gemma 4 target"));
    CHECK(contains(run.out, "names         scheme A") == (assistant && contains(path, ".gguf")));
  }
}

TEST_CASE("files that belong together have one fingerprint, others another") {
  std::vector<std::string> prints, hashes;
  for (const std::string& path : all_files()) {
    const json model = json_of(inspect("--json " + path))["model"];
    prints.push_back(model["fingerprint"]);
    hashes.push_back(model["fingerprint_hash"]);
  }
  CHECK(prints[0] == "hidden 128, vocab 2048, sliding 1x32 window 48 rope 1e4, full 1x64 rope 1e6/0.25");
  CHECK(hashes[0] == "c608537bd202506d");  // the same in every release
  CHECK(std::count(prints.begin(), prints.end(), prints[0]) == std::ptrdiff_t(prints.size()));
  CHECK(std::count(hashes.begin(), hashes.end(), hashes[0]) == std::ptrdiff_t(hashes.size()));
  for (const std::string name : {"e2b", "e4b", "dense31b", "moe26b", "unified12b"}) {
    CAPTURE(name);
    const json target = json_of(inspect("--json " + golden + "/" + name + "/target"))["model"];
    CHECK(target["fingerprint"] == json_of(inspect("--json " + golden + "/" + name + "/assistant"))["model"]["fingerprint"]);
    CHECK(target["fingerprint_hash"] != hashes[0]);
  }
}

TEST_CASE("--json holds what the text shows") {
  for (const std::string& path : all_files()) {
    CAPTURE(path);
    const json out = json_of(inspect("--json " + path));
    const std::string text = inspect(path).out;
    CHECK(out["path"] == path);
    CHECK(out["format"] == (contains(path, ".gguf") ? "gguf" : "directory"));
    CHECK(contains(text, "* Dumping " + std::to_string(out["tensors"].size()) + " tensor(s)\n"));
    std::size_t bytes = 0, elements = 0;
    for (const json& t : out["tensors"]) {
      bytes += t["bytes"].get<std::size_t>();
      elements += t["elements"].get<std::size_t>();
      CHECK(contains(text, " | " + t["name"].get<std::string>() + " | " + t["bytes"].dump() + " bytes at " + t["offset"].dump() + "\n"));
    }
    CHECK(out["totals"]["bytes"] == bytes);
    CHECK(out["totals"]["parameters"] == elements);
    CHECK(out["totals"]["tensors"] == out["tensors"].size());
    std::size_t by_type = 0;
    for (const auto& item : out["totals"]["by_type"].items()) by_type += item.value()["bytes"].get<std::size_t>();
    CHECK(by_type == bytes);
    CHECK(out["model"]["role"] == (contains(path, "/assistant") ? "assistant" : "target"));
    CHECK(out["model"]["problem"].is_null());
    CHECK_FALSE(out.contains("check"));
  }
}

TEST_CASE("--json gives values with their types, numbers exactly") {
  const json out = json_of(inspect("--json " + tiny + "/gguf/target-q4_0.gguf"));
  const json& keys = out["keys"];
  CHECK(keys["general.architecture"] == json{{"type", "STRING"}, {"array", false}, {"count", 1}, {"value", "gemma4"}});
  CHECK(keys["gemma4.attention.layer_norm_rms_epsilon"]["value"] == double{1e-6f});
  CHECK(keys["tokenizer.ggml.tokens"]["count"] == 2048);
  CHECK(keys["tokenizer.ggml.tokens"]["array"] == true);
  CHECK(keys["tokenizer.ggml.tokens"]["value"].size() == 6);
  CHECK(out["gguf"]["version"] == 3);
  CHECK(out["gguf"]["alignment"] == 32);
  CHECK(json_of(inspect("--json " + tiny + "/target"))["keys"]["config.json"]["sliding_window"]["value"] == 48);
}

TEST_CASE("extremes of every scalar type are shown exactly") {
  const temporary_directory directory;
  gguf_builder b;
  b.pair("u64", std::uint64_t{18446744073709551615u}).pair("i64", std::int64_t{-9223372036854775807 - 1}).pair("u8", std::uint8_t{255});
  b.pair("i8", std::int8_t{-128}).pair("u16", std::uint16_t{65535}).pair("i16", std::int16_t{-32768}).pair("no", false);
  b.pair("f64", 0.1).pair("huge", 1e300).pair("nan", double{std::numeric_limits<float>::quiet_NaN()});
  b.array("inf", std::vector<float>{-std::numeric_limits<float>::infinity(), 1.0f}).array("none", std::vector<std::string>{});
  b.write(directory.path() / "x.gguf");
  const std::string path = quoted(directory.path() / "x.gguf"), text = inspect(path).out;
  for (const char* row :
       {"u64 = 18446744073709551615\n", "i64 = -9223372036854775808\n", "u8 = 255\n", "i8 = -128\n", "u16 = 65535\n", "i16 = -32768\n",
        "no = False\n", "f64 = 0.1\n", "huge = 1e+300\n", "nan = nan\n", "inf = [-inf, 1.0]\n", "none = []\n"})
    CHECK_MESSAGE(contains(text, row), row);
  const json keys = json_of(inspect("--json " + path))["keys"];
  CHECK(keys["u64"]["value"] == 18446744073709551615u);
  CHECK(keys["i64"]["value"] == -9223372036854775807 - 1);
  CHECK(keys["nan"]["value"] == "nan");
  CHECK(keys["inf"]["value"] == json{"-inf", 1.0});
}

TEST_CASE("--no-tensors leaves the list out, the totals stay") {
  const std::string path = tiny + "/gguf/target-q8_0.gguf", text = inspect("--no-tensors " + path).out;
  CHECK_FALSE(contains(text, "tensor(s)\n  "));
  CHECK(contains(text, "* Totals"));
  const json out = json_of(inspect("--json --no-tensors " + path));
  CHECK_FALSE(out.contains("tensors"));
  CHECK(out["totals"]["tensors"] == 130);
}

TEST_CASE("--full shows whole arrays and texts") {
  const temporary_directory directory;
  const std::string sixty(60, 'a'), longer = std::string(57, 'b') + "€€€€";
  gguf_builder b;
  b.pair("sixty", sixty).pair("longer", longer).array("seven", std::vector<std::int32_t>{1, 2, 3, 4, 5, 6, 7});
  b.write(directory.path() / "x.gguf");
  const std::string path = quoted(directory.path() / "x.gguf"), text = inspect(path).out, full = inspect("--full " + path).out;
  CHECK(contains(text, "sixty = '" + sixty + "'\n"));
  CHECK(contains(text, "longer = '" + std::string(57, 'b') + "...'\n"));
  CHECK(contains(text, "seven = [1, 2, 3, 4, 5, 6, ...]\n"));
  CHECK(contains(full, "longer = '" + longer + "'\n"));
  CHECK(contains(full, "seven = [1, 2, 3, 4, 5, 6, 7]\n"));
  CHECK(json_of(inspect("--json --full " + path))["keys"]["seven"]["value"].size() == 7);
}

TEST_CASE("a safetensors file alone is shown with its metadata") {
  const temporary_directory directory;
  const fs::path file = directory.write(
      "x.safetensors", outrider::testing::safetensors_file(
                           R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"a":{"dtype":"U8",)"
                           R"("shape":[3],"data_offsets":[8,11]}})",
                           std::string(11, '\0')));
  const outcome run = inspect(quoted(file));
  CHECK(run.code == 0);
  for (const char* row :
       {" of __metadata__\n", "format = 'pt'\n", "1:          2 |     2,     1,     1,     1 | F32     | b | 8 bytes at 0\n",
        "2:          3 |     3,     1,     1,     1 | U8      | a | 3 bytes at 8\n", "family        unknown", "give the directory"})
    CHECK_MESSAGE(contains(run.out, row), row);
  CHECK(json_of(inspect("--json " + quoted(file)))["model"]["role"].is_null());
  CHECK(inspect("--check " + quoted(file)).code == 0);
}

TEST_CASE("shards of a directory are named, their offsets counted in each") {
  const temporary_directory directory;
  outrider::testing::write_safetensors(directory.path() / "one.safetensors",
                                       {{"skipped", "U8", {5}, std::vector<std::byte>(5)}, {"a", "U8", {2}, std::vector<std::byte>(2)}});
  outrider::testing::write_safetensors(directory.path() / "two.safetensors", {{"b", "U8", {3}, std::vector<std::byte>(3)}});
  directory.write("model.safetensors.index.json", R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})");
  const outcome run = inspect(quoted(directory.path()));
  CHECK(contains(run.out, "| a | 2 bytes at 5 of one.safetensors\n"));
  CHECK(contains(run.out, "| b | 3 bytes at 0 of two.safetensors\n"));
  CHECK(contains(run.out, "problem"));  // no config.json
  CHECK(run.code == 0);
}

TEST_CASE("any part of a split set stands for the set") {
  const temporary_directory directory;
  for (std::uint16_t number = 0; number < 2; ++number) {
    gguf_builder b;
    if (number == 0) b.pair("general.name", "split");
    b.pair("split.no", number).pair("split.count", std::uint16_t{2}).pair("split.tensors.count", std::int32_t{2});
    b.tensor({number == 0 ? "a" : "b", io::dtype::f32, {4}, std::vector<std::byte>(16)});
    b.write(directory.path() / ("x-0000" + std::to_string(number + 1) + "-of-00002.gguf"));
  }
  for (const char* name : {"x-00001-of-00002.gguf", "x-00002-of-00002.gguf", ""}) {
    CAPTURE(name);
    const outcome run = inspect(quoted(directory.path() / name));
    CHECK(run.code == 0);
    CHECK(contains(run.out, "* Split into 2 files."));
    CHECK(contains(run.out, "general.name = 'split'"));
    CHECK(contains(run.out, "| b | 16 bytes at 0 of x-00002-of-00002.gguf\n"));
  }
  CHECK(json_of(inspect("--json " + quoted(directory.path() / "x-00002-of-00002.gguf")))["files"].size() == 2);
}

TEST_CASE("released sizes are recognised by their numbers") {
  struct release {
    const char* size;
    int layers, hidden, experts, assistant_hidden;
  };
  for (const release& r : {release{"E2B", 35, 1536, 0, 256}, release{"E4B", 42, 2560, 0, 256}, release{"12B", 48, 3840, 0, 1024},
                           release{"26B-A4B", 30, 2816, 128, 1024}, release{"31B", 60, 5376, 0, 1024}}) {
    CAPTURE(r.size);
    const temporary_directory target, assistant;
    with_config(target, "target", [&](json& c) {
      c.erase("per_layer_config");
      c.erase("layer_types");
      c["num_kv_shared_layers"] = 0;
      c["num_hidden_layers"] = r.layers;
      c["hidden_size"] = r.hidden;
      c["vocab_size"] = c["vocab_size_per_layer_input"] = 262144;
      if (r.experts != 0) {
        c["enable_moe_block"] = true;
        c["num_experts"] = r.experts;
        c["top_k_experts"] = 8;
        c["moe_intermediate_size"] = 704;
      }
    });
    CHECK(json_of(inspect("--json " + quoted(target.path())))["model"]["size"] == r.size);
    with_config(assistant, "assistant", [&](json& c) {
      c["backbone_hidden_size"] = r.hidden;
      c["text_config"]["hidden_size"] = r.assistant_hidden;
      c["text_config"]["vocab_size"] = 262144;
    });
    CHECK(json_of(inspect("--json " + quoted(assistant.path())))["model"]["size"] == r.size);
  }
}

TEST_CASE("the naming scheme of an assistant's file is told") {
  const temporary_directory directory;
  const auto scheme = [&](const std::function<void(gguf_parts&)>& edit) {
    return json_of(inspect("--json " + quoted(edited(directory, "assistant-bf16.gguf", edit))))["model"]["names"];
  };
  CHECK(scheme([](gguf_parts&) {}) == "A");
  CHECK(scheme([](gguf_parts& p) { p.at("gemma4-assistant.embedding_length_out").key = "gemma4-assistant.backbone_hidden_size"; }) == "B");
  CHECK(scheme(add_centroids) == "G");
}

TEST_CASE("the generation of the chat template is told") {
  const temporary_directory directory;
  const auto generation = [&](const std::string& text) {
    const fs::path file = edited(directory, "target-q4_0.gguf", [&](gguf_parts& p) { p.add_text("tokenizer.chat_template", text); });
    return json_of(inspect("--json " + quoted(file)))["model"]["chat_template"];
  };
  CHECK(generation("<|turn>user <turn|>") == "launch");
  CHECK(generation("<start_of_turn>") == "other");
  CHECK(json_of(inspect("--json " + tiny + "/target"))["model"]["chat_template"].is_null());
}

TEST_CASE("another family is shown, with the reason why it cannot run") {
  const outcome run = inspect(golden + "/gemma3n/target");
  CHECK(run.code == 0);
  CHECK(contains(run.out, "family        gemma3n_text"));
  CHECK(contains(run.out, "problem       "));
}

TEST_CASE("--check finds nothing in good files") {
  std::vector<std::string> good = all_files();
  for (const std::string name : {"e2b", "e4b", "dense31b", "moe26b", "unified12b", "multimodal_names"})
    for (const char* part : {"/target", "/assistant"}) good.push_back(golden + "/" + name + part);
  for (const std::string& path : good) {
    CAPTURE(path);
    const outcome run = inspect("--check " + path);
    CHECK(run.code == 0);
    CHECK_MESSAGE(contains(run.out, " 0 finding(s)"), run.out.substr(run.out.find("* Check")));
    CHECK(run.err.empty());
    const json out = json_of(inspect("--check --json " + path));
    CHECK(out["check"]["bytes"] == out["totals"]["bytes"]);  // every byte was read
    CHECK(out["check"]["findings"].empty());
  }
}

TEST_CASE("--check finds nothing in an assistant with centroid tensors") {
  const temporary_directory directory;
  CHECK(inspect("--check " + quoted(edited(directory, "assistant-q8_0.gguf", add_centroids))).code == 0);
}

TEST_CASE("--check finds a NaN, with its row") {
  const temporary_directory directory;
  check_finds(edited(directory, "target-bf16.gguf",
                     [](gguf_parts& p) {
                       gguf_tensor& t = p.tensor("blk.2.ffn_up.weight");  // [384, 128]
                       put(t.bytes, 2 * (5 * 128 + 7), std::uint16_t{0x7fc0});
                       put(t.bytes, 2 * (6 * 128 + 1), std::uint16_t{0xff80});
                     }),
              {"'blk.2.ffn_up.weight'", "nan in row 5, column 7", "first of 2"});
  outrider::testing::rewrite_checkpoint(tiny + "/target", directory.path() / "hf", [](std::vector<stored_tensor>& tensors) {
    for (stored_tensor& t : tensors)
      if (t.name == "model.norm.weight") put(t.bytes, 2 * 3, std::uint16_t{0x7f80});
  });
  check_finds(directory.path() / "hf", {"'model.norm.weight'", "inf in row 0, column 3"});
}

TEST_CASE("--check finds scales that are not finite in blocks") {
  struct planted {
    const char *file, *tensor;
    std::size_t offset;  // of the scale in the tensor
    const char* mention;
  };
  constexpr std::size_t row = 128 / 32 * sizeof(outrider::q8_0);
  for (const planted& p :
       {planted{"target-q8_0.gguf", "blk.1.attn_q.weight", 3 * row + sizeof(outrider::q8_0), "in row 3, column "},
        planted{"target-q4_0.gguf", "blk.1.attn_q.weight", 0, "in row 0, column 0"},
        planted{"target-q4_k_m.gguf", "per_layer_token_embd.weight", 3 * sizeof(outrider::q6_k) + 208, "in row 3, column "},
        planted{"target-q4_k_m.gguf", "blk.4.ffn_down.weight", 2, ""}}) {
    CAPTURE(p.tensor);
    const temporary_directory directory;
    check_finds(edited(directory, p.file, [&](gguf_parts& parts) { put(parts.tensor(p.tensor).bytes, p.offset, std::uint16_t{0x7c00}); }),
                {p.tensor, p.mention, "not finite"});
  }
}

TEST_CASE("pitfall 9: --check finds a token ordering that is no permutation, in every type") {
  const temporary_directory directory;
  const auto in_directory = [&](const std::string& name, std::int64_t id) {
    outrider::testing::rewrite_checkpoint(tiny + "/assistant", directory.path() / name, [&](std::vector<stored_tensor>& tensors) {
      for (stored_tensor& t : tensors)
        if (t.name == "masked_embedding.token_ordering") put(t.bytes, 8 * 5, id);
    });
    return directory.path() / name;
  };
  check_finds(in_directory("negative", -1), {"masked_embedding.token_ordering", "element 5 is -1, out of range"});
  check_finds(in_directory("large", 2048), {"element 5 is 2048, out of range"});
  const auto in_file = [&](float id) {
    return edited(directory, "assistant-bf16.gguf", [&](gguf_parts& p) {
      add_centroids(p);
      put(p.tensor("masked_embd_ordering").bytes, 0, id);
      put(p.tensor("masked_embd_ordering").bytes, 4, id);
    });
  };
  check_finds(in_file(7), {"'masked_embd_ordering'", "element 1 is 7, for the second time"});
  check_finds(in_file(0.5f), {"element 0 is no whole number"});
}

TEST_CASE("--check finds bytes behind the data, and notes padding that is not zero") {
  const temporary_directory directory;
  const fs::path file = edited(directory, "assistant-bf16.gguf", [](gguf_parts&) {});
  const auto size = fs::file_size(file);
  std::ofstream(file, std::ios::binary | std::ios::app) << "rest";
  check_finds(file, {file.string(), "4 bytes behind the last tensor's data", std::to_string(size)});

  const json before = json_of(inspect("--json " + tiny + "/gguf/assistant-bf16.gguf"));
  fs::copy_file(tiny + "/gguf/assistant-bf16.gguf", directory.path() / "padding.gguf");
  for (const json& t : before["tensors"])
    if (t["name"] == "blk.0.layer_output_scale.weight") {
      std::fstream stream(directory.path() / "padding.gguf", std::ios::binary | std::ios::in | std::ios::out);
      stream.seekp(before["gguf"]["data_offset"].get<std::streamoff>() + t["offset"].get<std::streamoff>() + 4);
      stream << 'x';
    }
  const json check = json_of(inspect("--check --json " + quoted(directory.path() / "padding.gguf")))["check"];
  REQUIRE(check["notes"].size() == 1);
  CHECK(contains(check["notes"][0], "padding"));
}

TEST_CASE("--check takes a file without tensors, whose data would begin behind its end") {
  const temporary_directory directory;
  const fs::path file = directory.path() / "empty.gguf";
  gguf_builder().write(file);
  check_finds(file, {"general.architecture is missing"});
}

TEST_CASE("a truncated file is one sentence") {
  const temporary_directory directory;
  for (const std::string name : {"gguf/target-q8_0.gguf", "target/model.safetensors"}) {
    const fs::path file = directory.path() / fs::path(name).filename();
    fs::copy_file(tiny + "/" + name, file);
    fs::resize_file(file, fs::file_size(file) - 100);
    for (const char* options : {"", "--check ", "--json "}) check_refused(inspect(options + quoted(file)), 1, file.filename().string());
  }
}

TEST_CASE("--check finds a missing tensor and one of a wrong shape") {
  const temporary_directory directory;
  const auto without = [](gguf_parts& p) {
    std::erase_if(p.tensors, [](const gguf_tensor& t) { return t.name == "blk.3.ffn_up.weight"; });
  };
  check_finds(edited(directory, "target-q8_0.gguf", without), {"'blk.3.ffn_up.weight' is missing"});
  const auto reshaped = [](gguf_parts& p) { p.tensor("blk.3.ffn_up.weight").shape = {192, 256}; };
  check_finds(edited(directory, "target-q8_0.gguf", reshaped), {"blk.3.ffn_up.weight", "192", "384"});
  outrider::testing::rewrite_checkpoint(tiny + "/assistant", directory.path() / "hf",
                                        [](std::vector<stored_tensor>& tensors) { tensors.pop_back(); });
  check_finds(directory.path() / "hf", {"'pre_projection.weight' is missing"});
}

TEST_CASE("--check finds a configuration and a tokenizer that cannot be used") {
  const temporary_directory directory;
  check_finds(
      edited(directory, "target-q4_0.gguf", [](gguf_parts& p) { p.at("gemma4.block_count").bytes = gguf_builder::raw(std::uint32_t{0}); }),
      {"gemma4.block_count"});
  check_finds(edited(directory, "target-q4_0.gguf",
                     [](gguf_parts& p) {  // type i32 and length 1, then one element
                       p.at("tokenizer.ggml.token_type").bytes =
                           gguf_builder::raw(std::uint32_t{5}) + gguf_builder::raw(std::uint64_t{1}) + gguf_builder::raw(std::int32_t{1});
                     }),
              {"tokenizer.ggml.token_type"});
  fs::copy(tiny + "/target", directory.path() / "hf");
  directory.write("hf/tokenizer.json", "{}");
  check_finds(directory.path() / "hf", {"tokenizer.json"});
}

TEST_CASE("--check notes rows of zeros and tensors that are of no use") {
  const temporary_directory directory;
  const fs::path file = edited(directory, "target-bf16.gguf", [](gguf_parts& p) {
    gguf_tensor& t = p.tensor("blk.2.ffn_up.weight");
    std::fill_n(t.bytes.begin() + 2 * 128 * 9, 2 * 128 * 2, std::byte{0});
    p.tensors.push_back({"v.patch_embd.weight", io::dtype::iq2_xxs, {256}, std::vector<std::byte>(66)});
  });
  const json check = json_of(inspect("--check --json " + quoted(file)))["check"];
  const std::string notes = check["notes"].dump();
  CHECK(contains(notes, "'blk.2.ffn_up.weight': 2 rows are all zero, the first is row 9"));
  CHECK(contains(notes, "1 tensors are of no use to the text model, the first is 'v.patch_embd.weight'"));
  CHECK(contains(notes, "elements of type IQ2_XXS are not looked at"));
}

TEST_CASE("--pair: what belongs together, in any order and format") {
  for (const std::string& target : target_files)
    for (const std::string& assistant : assistant_files) {
      CAPTURE(target);
      CAPTURE(assistant);
      const outcome run = inspect("--pair " + target + " " + assistant);
      CHECK(run.code == 0);
      CHECK(contains(run.out, "Yes: the assistant drafts for the target.\n"));
      CHECK_FALSE(contains(run.out, "warning"));
      CHECK_FALSE(contains(run.out, "named first"));
    }
  const json swapped = json_of(inspect("--json --pair " + assistant_files[0] + " " + target_files[1]));
  CHECK(swapped["fits"] == true);
  CHECK(swapped["swapped"] == true);
  CHECK(swapped["target"] == target_files[1]);
  CHECK(swapped["misfit"].is_null());
  CHECK(contains(inspect("--pair " + assistant_files[0] + " " + target_files[1]).out, "named first"));
}

TEST_CASE("--pair: what does not belong together, and why") {
  const outcome run = inspect("--pair " + tiny + "/target " + golden + "/e2b/assistant");
  CHECK(run.code == 1);
  CHECK(contains(run.out, "No: "));
  CHECK(contains(run.out, "hidden size is 128 in the target, but the assistant is made for 32"));
  const json out = json_of(inspect("--json --pair " + tiny + "/target " + golden + "/e2b/assistant"), 1);
  CHECK(out["fits"] == false);
  CHECK(contains(out["misfit"], "hidden size"));
}

TEST_CASE("pitfall 21: two targets or two assistants are no pair") {
  CHECK(contains(inspect("--pair " + target_files[0] + " " + target_files[1]).out, "both are targets"));
  CHECK(inspect("--pair " + target_files[0] + " " + target_files[1]).code == 1);
  CHECK(contains(inspect("--pair " + assistant_files[1] + " " + assistant_files[0]).out, "both are assistants"));
}

TEST_CASE("--pair compares the texts of tokens") {
  const temporary_directory directory;
  const fs::path file = edited(directory, "assistant-bf16.gguf", [](gguf_parts& p) {
    std::string& bytes = p.at("tokenizer.ggml.tokens").bytes;
    const std::size_t at = bytes.find(gguf_builder::raw_string("<mask>"));
    REQUIRE(at != std::string::npos);
    bytes.replace(at, 14, gguf_builder::raw_string("<musk>"));
  });
  const outcome run = inspect("--pair " + tiny + "/target " + quoted(file));
  CHECK(run.code == 1);
  CHECK(contains(run.out, "token 4 is '<mask>' in the target, '<musk>' in the assistant"));
}

TEST_CASE("--pair says that a tokenizer is missing") {
  const outcome run = inspect("--pair " + golden + "/e2b/target " + golden + "/e2b/assistant");
  CHECK(run.code == 0);
  CHECK(contains(run.out, "warning: " + golden + "/e2b/target has no tokenizer to compare\n"));
}

TEST_CASE("pitfall 24: --pair warns if names say that only one was tuned for instructions") {
  const temporary_directory directory;
  const auto named = [&](const std::string& name, const std::string& finetune) {
    const fs::path file = edited(directory, name, [&](gguf_parts& p) { p.add_text("general.finetune", finetune); });
    return quoted(file);
  };
  const std::string it = named("assistant-bf16.gguf", "it");
  const std::string warning = "tuned for instructions and the assistant is";
  CHECK(contains(inspect("--pair " + named("target-q4_0.gguf", "pt") + " " + it).out, warning));
  CHECK_FALSE(contains(inspect("--pair " + named("target-q8_0.gguf", "IT") + " " + it).out, warning));
  CHECK_FALSE(contains(inspect("--pair " + tiny + "/target " + it).out, warning));  // it says nothing
}

TEST_CASE("texts from a file never act on the terminal") {
  const temporary_directory directory;
  const std::string hostile = "a\x1b[2J\x07\r\n\x7f\xc2\x9b\xff\xe2\x80\xae'\\\xf3\xa0\x80\x81z";
  gguf_builder b;
  b.pair("general.architecture", hostile).pair(hostile, hostile).array("list", std::vector<std::string>{hostile, ""});
  b.tensor({hostile, io::dtype::f32, {1}, std::vector<std::byte>(4)});
  b.tensor({"nan\x1b", io::dtype::f32, {1}, bytes_of(std::vector<float>{std::numeric_limits<float>::quiet_NaN()})});
  b.write(directory.path() / "x.gguf");
  const std::string path = quoted(directory.path() / "x.gguf");
  const auto check_harmless = [](const std::string& text) {
    for (std::string_view rest = text; !rest.empty();) {
      const std::size_t length = outrider::utf8_character_length(rest);
      REQUIRE(length != 0);
      const std::string_view character = rest.substr(0, length);
      const bool control =
          (length == 1 && character != "\n" && (static_cast<unsigned char>(character[0]) < 0x20 || character[0] == 0x7f)) ||
          character == "\xc2\x9b" || character == "\xe2\x80\xae" || character == "\xf3\xa0\x80\x81";
      CHECK_FALSE(control);
      rest.remove_prefix(length);
    }
  };
  for (const char* options : {"", "--check ", "--full ", "--json ", "--json --check "}) {
    CAPTURE(options);
    const outcome run = inspect(options + path);
    CHECK(run.code == (contains(options, "--check") ? 1 : 0));
    if (!contains(options, "--json")) {
      check_harmless(run.out);
      CHECK(contains(run.out, R"('a\x1b[2J\x07\r\n\x7f\x9b\xff\u202e\'\\\U000e0001z')"));
      CHECK(contains(run.out, R"( | a\x1b[2J)"));
    } else {
      CHECK(json_of(run, run.code)["tensors"].size() == 2);
      CHECK(std::none_of(run.out.begin(), run.out.end() - 1, [](char c) { return static_cast<unsigned char>(c) < 0x20; }));
    }
    check_harmless(run.err);
  }
  check_harmless(inspect("$'/no/such\\x1b\\xff'").err);
}

TEST_CASE("wrong usage is exit code 2") {
  check_refused(inspect(""), 2, "PATH");
  check_refused(inspect("''"), 2, "PATH");
  check_refused(inspect("--nonsense " + tiny), 2, "--nonsense");
  check_refused(inspect(tiny + "/target " + tiny + "/assistant"), 2, "assistant");
  check_refused(inspect("--pair " + tiny + "/target"), 2, "--pair");
  for (const char* option : {"--check", "--no-tensors", "--full"})
    check_refused(inspect(std::string(option) + " --pair " + tiny + "/target " + tiny + "/assistant"), 2, option);
}

TEST_CASE("what cannot be read is exit code 1 and one sentence") {
  const temporary_directory directory;
  check_refused(inspect("/no/such/file.gguf"), 1, "/no/such/file.gguf");
  check_refused(inspect("--json /no/such/file.gguf"), 1, "/no/such/file.gguf");
  check_refused(inspect(quoted(directory.path())), 1, directory.path().string());
  check_refused(inspect(quoted(directory.write("text", "hello, this is no model"))), 1, "neither a GGUF file nor a safetensors file");
  check_refused(inspect(quoted(directory.write("empty", ""))), 1, "neither");
  check_refused(inspect(quoted(directory.write("x.gguf", "FUGG"))), 1, "x.gguf");
  check_refused(inspect("/dev/null"), 1, "/dev/null");
  check_refused(inspect("--pair " + tiny + "/target /no/such/file"), 1, "/no/such/file");
  check_refused(inspect("--pair " + tiny + "/target " + golden + "/gemma3n/target"), 1, "gemma3n");
}

TEST_CASE("output that cannot be written is an error") {
  for (const char* options : {"", "--json", "--check"}) {
    CAPTURE(options);
    const outcome run = outrider::testing::run_program(
        "/bin/sh", std::string("-c '\"$0\" ") + options + " " + tiny + "/target >/dev/full' '" + OUTRIDER_INSPECT + "'");
    CHECK(run.code == 1);
    CHECK(contains(run.err, "standard output"));
  }
}

TEST_CASE("--help names every option") {
  const outcome run = inspect("--help");
  CHECK(run.code == 0);
  for (const char* option : {"PATH", "--pair", "--json", "--check", "--no-tensors", "--full", "docs/inspect.md"})
    CHECK_MESSAGE(contains(run.out, option), option);
}
