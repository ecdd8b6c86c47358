// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "program.hpp"

namespace {

using outrider::testing::outcome;
using outrider::testing::temporary_directory;
namespace fs = std::filesystem;

const std::string root = OUTRIDER_SOURCE_DIR, tiny = root + "/examples/data/tiny-kjv", golden = root + "/tests/golden";

outcome convert(const std::string& arguments) { return outrider::testing::run_program(OUTRIDER_CONVERT, arguments); }
outcome shell(const std::string& script) { return outrider::testing::run_program("/bin/sh", "-c \"" + script + "\""); }

std::string contents_of(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file, std::ios::binary).rdbuf();
  return text.str();
}
bool mentions(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

/// One sentence on stderr, nothing on stdout.
void check_refused(const outcome& run, int code, const std::string& mention) {
  CAPTURE(run.err);
  CHECK(run.code == code);
  CHECK(run.out.empty());
  CHECK(mentions(run.err, mention));
  CHECK_FALSE(mentions(run.err, "terminate called"));
}

/// A checkpoint with a tensor of 256 MiB, which takes no space on the disk: the golden target e2b, its per-layer table having more rows.
void write_large_checkpoint(const fs::path& directory) {
  const std::string source = golden + "/e2b/target/", from = contents_of(source + "model.safetensors");
  std::uint64_t length = 0;
  for (std::size_t i = 8; i-- > 0;) length = length << 8 | static_cast<unsigned char>(from[i]);
  nlohmann::json header = nlohmann::json::parse(from.substr(8, length));
  const std::string table = "model.embed_tokens_per_layer.weight";
  const std::size_t end = from.size() - 8 - length, width = header[table]["shape"][1], rows = (std::size_t{256} << 20) / 4 / width;
  const std::size_t old_begin = header[table]["data_offsets"][0],
                    old_bytes = header[table]["data_offsets"][1].get<std::size_t>() - old_begin;
  // The old table's bytes stay where they are, under a name that is left out.
  header["model.audio_tower.filler"] = {{"dtype", "F32"}, {"shape", {old_bytes / 4}}, {"data_offsets", {old_begin, old_begin + old_bytes}}};
  header[table] = {{"dtype", "F32"}, {"shape", {rows, width}}, {"data_offsets", {end, end + rows * width * 4}}};
  const std::string text = header.dump();
  fs::create_directory(directory);
  for (const char* name : {"config.json", "generation_config.json"}) fs::copy_file(source + name, directory / name);
  std::ofstream file(directory / "model.safetensors", std::ios::binary);
  for (std::uint64_t rest = text.size(), i = 0; i < 8; ++i, rest >>= 8) file.put(static_cast<char>(rest & 0xff));
  file << text << from.substr(8 + length);
  file.close();
  fs::resize_file(directory / "model.safetensors", 8 + text.size() + end + rows * width * 4);
}

}  // namespace

TEST_CASE("convert writes a GGUF file and says what is in it") {
  const temporary_directory directory;
  const std::string out = (directory.path() / "target.gguf").string();
  const outcome run = convert(tiny + "/target " + out + " --type q4_0");
  CHECK(run.code == 0);
  CHECK(run.err.empty());  // no progress bar in a pipe
  for (const char* part : {"target.gguf: 2.1 MB", "Q4_0", "64 tensors", "Q6_K", "1 tensor,"}) CHECK_MESSAGE(mentions(run.out, part), part);
  CHECK(contents_of(out) == contents_of(tiny + "/gguf/target-q4_0.gguf"));
}

TEST_CASE("convert goes back to a directory") {
  const temporary_directory directory;
  const std::string out = (directory.path() / "target").string();
  const outcome run = convert(tiny + "/gguf/target-bf16.gguf " + out + " --quiet");
  CHECK(run.code == 0);
  CHECK(run.out.empty());
  CHECK(contents_of(out + "/model.safetensors") == contents_of(tiny + "/target/model.safetensors"));
  for (const char* name : {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"})
    CHECK(fs::exists(out + "/" + name));
}

TEST_CASE("--no-centroids leaves out what llama.cpp does not take, and says so") {
  const temporary_directory directory;
  const outcome run = convert(tiny + "/assistant " + (directory.path() / "a.gguf").string() + " --no-centroids --type BF16");
  CHECK(run.code == 0);
  CHECK(mentions(run.out, "left out: 2 tensors, masked_embedding.centroids.weight, masked_embedding.token_ordering"));
  CHECK(contents_of(directory.path() / "a.gguf") == contents_of(tiny + "/gguf/assistant-bf16.gguf"));
}

TEST_CASE("--tensor-type may be repeated, and the first that fits decides") {
  const temporary_directory directory;
  const outcome run = convert("--tensor-type 'blk.*.ffn_up.weight=q5_1' --tensor-type 'blk.0.*=f16' " + tiny + "/target " +
                              (directory.path() / "x.gguf").string() + " --type q8_0 --tensor-type token_embd.weight=q4_1");
  CAPTURE(run.err);
  CHECK(run.code == 0);
  CHECK(mentions(run.out, "Q5_1      8 tensors"));
  CHECK(mentions(run.out, "F16       8 tensors"));  // of blk.0: q, k, v, output, gate, down and the two of per-layer embeddings
  CHECK(mentions(run.out, "Q4_1      1 tensor,"));
}

TEST_CASE("a directory is replaced as a whole or not at all") {
  const temporary_directory directory;
  const std::string out = (directory.path() / "model").string(), from = tiny + "/gguf/target-bf16.gguf ";
  REQUIRE(convert(from + out).code == 0);
  std::ofstream(out + "/chat_template.jinja") << "of another model";
  CHECK(convert(from + out + " --force").code == 0);
  CHECK_FALSE(std::filesystem::exists(out + "/chat_template.jinja"));
  std::ofstream(out + "/model.safetensors.index.json") << "precious";
  check_refused(convert(from + out + " --force"), 1, "'model.safetensors.index.json'");
  CHECK(contents_of(out + "/model.safetensors.index.json") == "precious");
}

TEST_CASE("what is there is not replaced without --force") {
  const temporary_directory directory;
  const std::string out = directory.write("x.gguf", "precious").string();
  check_refused(convert(tiny + "/target " + out), 1, "--force");
  CHECK(contents_of(out) == "precious");
  CHECK(convert(tiny + "/target " + out + " --force").code == 0);
  CHECK(contents_of(out) == contents_of(tiny + "/gguf/target-bf16.gguf"));
}

TEST_CASE("wrong usage is exit code 2, a wrong file 1, each with a sentence and without output") {
  const temporary_directory directory;
  const std::string out = (directory.path() / "x.gguf").string();
  CHECK(convert("--help").code == 0);
  CHECK(mentions(convert("--help").out, "--tensor-type"));
  CHECK(convert("").code == 2);
  check_refused(convert(tiny + "/target " + out + " --type q9"), 2, "q9");
  check_refused(convert(tiny + "/target " + out + " --tensor-type 'x=q9'"), 2, "q9");
  check_refused(convert(tiny + "/target " + out + " --tensor-type x"), 2, "PATTERN=TYPE");
  check_refused(convert(tiny + "/target " + out + " --names foo"), 2, "foo");
  check_refused(convert(directory.path().string() + "/missing " + out), 1, "missing");
  check_refused(convert(golden + "/gemma3n/target " + out), 1, "gemma3n");
  check_refused(convert(tiny + "/target " + directory.path().string() + "/no/x.gguf"), 1, "cannot be written");
  CHECK(fs::is_empty(directory.path()));
}

TEST_CASE("a disk that is full is one sentence, and nothing stays behind") {
  const temporary_directory directory;
  const std::string at = directory.path().string();
  // What ulimit -f does to a program is what a full disk does, but for the sentence.
  for (const std::string& arguments : {tiny + "/target " + at + "/x.gguf", tiny + "/gguf/target-bf16.gguf " + at + "/directory"}) {
    const outcome run = shell("ulimit -f 1000; exec " OUTRIDER_CONVERT " " + arguments);
    check_refused(run, 1, "cannot be written: File too large");
    CHECK(fs::is_empty(directory.path()));
  }
}

TEST_CASE("an interrupted run ends with a sentence and leaves nothing behind") {
  const temporary_directory directory;
  const std::string at = directory.path().string();
  write_large_checkpoint(directory.path() / "large");
  // The signal comes when the output file is open, however slow the machine is: /proc lists it.
  const std::string wait = OUTRIDER_CONVERT " " + at + "/large " + at +
                           "/x.gguf --type q6_k & pid=\\$!; "
                           "until ls -l /proc/\\$pid/fd 2>/dev/null | grep -q '" +
                           at + "/'; do kill -0 \\$pid || exit 99; done; ";
  for (const auto& signal : {std::pair("INT", 130), std::pair("TERM", 143)}) {
    const outcome run = shell("set -m; " + wait + "kill -" + signal.first + " \\$pid; wait \\$pid");
    CAPTURE(signal.first);
    CHECK(run.code == signal.second);
    CHECK(mentions(run.err, "interrupted"));
    CHECK(std::distance(fs::directory_iterator(directory.path()), fs::directory_iterator()) == 1);
  }
}

TEST_CASE("a hangup that the shell has the program ignore does not end it") {
  const temporary_directory directory;
  const std::string at = directory.path().string();
  write_large_checkpoint(directory.path() / "large");
  const outcome run = shell("trap '' HUP; " OUTRIDER_CONVERT " " + at + "/large " + at +
                            "/x.gguf --type bf16 & pid=\\$!; "
                            "until ls -l /proc/\\$pid/fd 2>/dev/null | grep -q '" +
                            at + "/'; do kill -0 \\$pid || exit 99; done; kill -HUP \\$pid; wait \\$pid");
  CAPTURE(run.err);
  CHECK(run.code == 0);
  CHECK(fs::exists(directory.path() / "x.gguf"));
}

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define OUTRIDER_TEST_UNDER_ASAN
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define OUTRIDER_TEST_UNDER_ASAN
#endif
#if !defined(OUTRIDER_TEST_UNDER_ASAN)  // whose own memory counts
TEST_CASE("memory: a tensor of 256 MiB is converted with 64 MiB") {
  const temporary_directory directory;
  const std::string at = directory.path().string();
  write_large_checkpoint(directory.path() / "large");
  // ulimit -d: all memory but mapped files. Threads reserve stacks, which count.
  const std::string limited = "ulimit -d 65536; export OMP_STACKSIZE=256k OMP_NUM_THREADS=2; exec " OUTRIDER_CONVERT " ";
  const outcome there = shell(limited + at + "/large " + at + "/x.gguf --type q8_0");
  CAPTURE(there.err);
  CHECK(there.code == 0);
  const outcome back = shell(limited + at + "/x.gguf " + at + "/back --type bf16");
  CAPTURE(back.err);
  CHECK(back.code == 0);
}
#endif

TEST_CASE("the gguf Python package reads our files: the same keys, names, shapes, types and values") {
  const temporary_directory directory;
  const std::string at = directory.path().string(), script = root + "/tests/examples/read_with_gguf.py ";
  const auto python = [&](const std::string& arguments) {
    const outcome run = shell("${OUTRIDER_PYTHON:-python3} " + script + arguments);
    if (run.code == 77 || run.code == 127) return false;
    CAPTURE(arguments);
    CAPTURE(run.err);
    CHECK(run.code == 0);
    CHECK(mentions(run.out, "equal"));
    return true;
  };
  REQUIRE(convert(tiny + "/target " + at + "/target.gguf").code == 0);
  if (!python(at + "/target.gguf " + tiny + "/gguf/target-bf16.gguf")) {
    MESSAGE("not tested: there is no python3 with the package gguf (pip install gguf; OUTRIDER_PYTHON names another python3)");
    return;
  }
  REQUIRE(convert(tiny + "/assistant " + at + "/assistant.gguf").code == 0);
  python(at + "/assistant.gguf " + tiny + "/gguf/assistant-bf16.gguf masked_emb");
  REQUIRE(convert(tiny + "/assistant " + at + "/plain.gguf --no-centroids --type q8_0").code == 0);
  python(at + "/plain.gguf " + tiny + "/gguf/assistant-q8_0.gguf");
  for (const char* type : {"q8_0", "q4_0", "q4_k_m"}) {
    REQUIRE(convert(tiny + "/target " + at + "/" + type + ".gguf --type " + type).code == 0);
    python(at + "/" + type + ".gguf " + tiny + "/gguf/target-" + type + ".gguf");
  }
  for (const char* name : {"e2b", "e4b", "dense31b", "moe26b", "unified12b"})
    for (const char* which : {"target", "assistant"}) {
      const std::string out = at + "/" + name + which + ".gguf", source = golden + "/" + name + "/" + which;
      REQUIRE(convert(source + " " + out + " --type f32").code == 0);
      python(out + " " + source + "/model.safetensors --values");
    }
}
