// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "program.hpp"

namespace {

using outrider::testing::outcome;
using outrider::testing::temporary_directory;

const std::string root = OUTRIDER_SOURCE_DIR, tiny = root + "/examples/data/tiny-kjv", golden = root + "/tests/golden";

outcome speculate(const std::string& arguments) { return outrider::testing::run_program(OUTRIDER_SPECULATE, arguments); }

nlohmann::json json_of(const outcome& run) {
  INFO(run.err);
  REQUIRE(run.code == 0);
  REQUIRE(std::count(run.out.begin(), run.out.end(), '\n') == 1);  // exactly one object
  return nlohmann::json::parse(run.out);
}

nlohmann::json expected_case(std::size_t i) { return nlohmann::json::parse(std::ifstream(tiny + "/expected.json"))["cases"][i]; }

/// One sentence on stderr, naming the program and the thing; nothing on stdout.
void check_refused(const outcome& run, int code, const std::string& mention) {
  CAPTURE(run.err);
  CHECK(run.code == code);
  CHECK(run.out.empty());
  CHECK(run.err.find(mention) != std::string::npos);
  CHECK(run.err.find("terminate called") == std::string::npos);
}

}  // namespace

TEST_CASE("without arguments the tiny pair writes, and a summary follows") {
  const outcome run = speculate("");
  CHECK(run.code == 0);
  CHECK(run.out.starts_with(" the house of the LORD"));
  for (const char* part : {"tokens", "rounds", "drafted", "accepted", "tokens per target pass", "tokens/s", "SIMD", "threads"})
    CHECK_MESSAGE(run.out.find(part) != std::string::npos, part);
}

TEST_CASE("--compare says that the text is that of plain decoding") {
  CHECK(speculate("--compare --max-new-tokens 32").out.find("identical to plain decoding: yes") != std::string::npos);
}

TEST_CASE("--quiet prints the text alone") {
  const outcome run = speculate("--quiet --max-new-tokens 8");
  CHECK(run.code == 0);
  CHECK(run.out == " the house of the LORD, and the house\n");
  CHECK(run.err.empty());
}

TEST_CASE("--json prints one object with every field") {
  const auto out = json_of(speculate("--json --compare --max-new-tokens 64 --draft 4 --threads 2"));
  const auto want = expected_case(0);
  CHECK(out["tokens"] == want["tokens"]);
  CHECK(out["text"] == want["text"]);
  CHECK(out["prompt_tokens"] == want["prompt_ids"].size());
  const auto& counts = want["assisted"][3];
  REQUIRE(counts["draft"] == 4);
  CHECK(out["drafted"] == counts["drafted"]);
  CHECK(out["accepted"] == counts["accepted"]);
  CHECK(out["accepted_per_position"] == counts["accepted_per_position"]);
  CHECK(out["rounds"].get<int>() + out["plain_passes"].get<int>() == counts["rounds"].get<int>());
  CHECK(out["tokens_per_round"].get<double>() == doctest::Approx(1 + out["accepted"].get<double>() / out["rounds"].get<double>()));
  for (const char* part : {"load", "prefill", "decode"}) CHECK(out["seconds"][part].get<double>() >= 0);
  CHECK(out["plain_seconds"].get<double>() >= 0);
  CHECK(out["identical"] == true);
  CHECK(out["backend"] == "cpu");
  CHECK_FALSE(out["simd"].get<std::string>().empty());
  CHECK(out["activations"] == "float");
  CHECK(out["threads"] == 2);
}

TEST_CASE("every backend and cache type writes the same text with and without drafts") {
  for (const char* backend : {"reference", "highway", "cpu"})
    for (const char* kv : {"f32", "bf16", "f16", "q8_0"}) {
      CAPTURE(backend);
      CAPTURE(kv);
      const std::string options = std::string("--json --max-new-tokens 24 --backend ") + backend + " --kv " + kv;
      const auto drafted = json_of(speculate(options + " --draft 5")), plain = json_of(speculate(options + " --draft 0"));
      CHECK(drafted["tokens"] == plain["tokens"]);
      CHECK(drafted["backend"] == backend);
      CHECK(drafted["drafted"] > 0);
      CHECK(plain["drafted"] == 0);
      CHECK(plain["rounds"] == 0);
      CHECK(plain["accepted_per_position"].empty());
    }
}

TEST_CASE("a prompt may be text, a file or ids, and ids are taken as given") {
  const auto text = json_of(speculate("--json --max-new-tokens 8 --prompt 'And God said'"));
  const temporary_directory directory;
  const auto file = directory.write("prompt.txt", "And God said");
  CHECK(json_of(speculate("--json --max-new-tokens 8 --prompt-file '" + file.string() + "'"))["tokens"] == text["tokens"]);
  const auto ids = expected_case(0)["prompt_ids"].dump();
  const auto given = json_of(speculate("--json --max-new-tokens 8 --prompt-ids " + ids.substr(1, ids.size() - 2)));
  CHECK(given["prompt_tokens"] == expected_case(0)["prompt_ids"].size());
  CHECK(given["tokens"][0] == expected_case(0)["tokens"][0]);
}

TEST_CASE("a model without tokenizer runs on ids and shows numbers") {
  const std::string pair =
      "--target " + golden + "/e2b/target --assistant " + golden + "/e2b/assistant --prompt-ids 5,6,7 --max-new-tokens 6";
  const auto out = json_of(speculate(pair + " --json"));
  CHECK(out["tokens"].size() == 6);
  CHECK(out["text"] == "");
  CHECK(speculate(pair + " --quiet").out.starts_with(std::to_string(out["tokens"][0].get<int>()) + " "));
  check_refused(speculate("--target " + golden + "/e2b/target --prompt hello"), 1, "tokenizer.json");
}

TEST_CASE("GGUF files and directories may be mixed, and bring the tokenizer along") {
  const std::string options = "--json --max-new-tokens 24 --prompt 'In the beginning God created'";
  const std::string file = tiny + "/gguf/target-bf16.gguf", drafter = tiny + "/gguf/assistant-bf16.gguf";
  const auto want = json_of(speculate(options));
  for (const std::string& pair :
       {"--target " + file + " --assistant " + drafter, "--target " + file + " --assistant " + tiny + "/assistant",
        "--target " + tiny + "/target --assistant " + drafter}) {
    CAPTURE(pair);
    const auto out = json_of(speculate(options + " --draft 4 " + pair));
    CHECK(out["tokens"] == want["tokens"]);
    CHECK(out["text"] == want["text"]);
    CHECK(out["accepted"] > 0);
  }
  check_refused(speculate("--target " + drafter), 1, "a drafter, not a target");
  check_refused(speculate("--target " + file + " --assistant " + file), 1, "a target, not a drafter");
  check_refused(speculate("--target " + tiny + "/gguf"), 1, "6 GGUF files");
}

TEST_CASE("quantised models compute with int8 activations where the backend has them, and with exact ones if asked to") {
  const std::string pair =
      "--json --max-new-tokens 16 --compare --target " + tiny + "/gguf/target-q4_0.gguf --assistant " + tiny + "/gguf/assistant-q8_0.gguf ";
  for (const char* backend : {"highway", "cpu"}) {
    CAPTURE(backend);
    const auto usual = json_of(speculate(pair + "--backend " + backend));
    CHECK(usual["activations"] == "int8");
    CHECK(usual["identical"] == true);
    CHECK(json_of(speculate(pair + "--exact-activations --backend " + backend))["activations"] == "float");
  }
  CHECK(json_of(speculate(pair + "--backend reference"))["activations"] == "float");
}

TEST_CASE("a target without assistant decodes plainly") {
  const auto out = json_of(speculate("--json --max-new-tokens 8 --target " + tiny + "/target"));
  CHECK(out["drafted"] == 0);
  CHECK(out["plain_passes"] == 7);
}

TEST_CASE("numbers are decimal, however they begin") { CHECK(json_of(speculate("--json --max-new-tokens 010"))["tokens"].size() == 10); }

TEST_CASE("the reason for the end is told") {
  CHECK(json_of(speculate("--json --max-new-tokens 4"))["finish"] == "max_new_tokens");
  CHECK(json_of(speculate("--json --max-new-tokens 1048576"))["finish"] == "context_full");
}

TEST_CASE("output that cannot be written is an error") {
  for (const char* options : {"--json", "--quiet", ""}) {
    CAPTURE(options);
    const outcome run = outrider::testing::run_program(
        "/bin/sh", std::string("-c '\"$0\" --max-new-tokens 4 ") + options + " >/dev/full' '" + OUTRIDER_SPECULATE + "'");
    CHECK(run.code == 1);
    CHECK(run.err.find("standard output") != std::string::npos);
  }
}

TEST_CASE("no tokens wanted: none written") {
  const auto out = json_of(speculate("--json --max-new-tokens 0"));
  CHECK(out["tokens"].empty());
  CHECK(out["text"] == "");
}

TEST_CASE("pitfall 24: an assistant that is hardly ever right is remarked upon, and only such a one") {
  const outcome off = speculate("--target " + golden + "/e2b/target --assistant " + golden +
                                "/e2b/assistant --prompt-ids 9,9,9 --max-new-tokens 64 --draft 4");
  CHECK(off.code == 0);
  CHECK(off.err.find("few drafts were accepted") != std::string::npos);
  CHECK(speculate("--draft 16").err.empty());
}

TEST_CASE("--help is readable and names every option") {
  const outcome run = speculate("--help");
  CHECK(run.code == 0);
  for (const char* option : {"--target",         "--assistant", "--prompt",         "--prompt-file", "--prompt-ids",
                             "--max-new-tokens", "--draft",     "--backend",        "--threads",     "--kv",
                             "--json",           "--compare",   "--quiet",          "--temperature", "--top-k",
                             "--top-p",          "--min-p",     "--repeat-penalty", "--seed",        "--samples",
                             "--drafter",        "--p-min",     "--stop",           "--trace",       "--chat"})
    CHECK_MESSAGE(run.out.find(option) != std::string::npos, option);
}

TEST_CASE("wrong usage is exit code 2") {
  check_refused(speculate("--nonsense"), 2, "--nonsense");
  check_refused(speculate("--draft 17"), 2, "--draft");
  check_refused(speculate("--draft -1"), 2, "--draft");
  check_refused(speculate("--draft x"), 2, "--draft");
  check_refused(speculate("--backend metal"), 2, "--backend");
  check_refused(speculate("--kv q4_0"), 2, "--kv");
  check_refused(speculate("--threads 0"), 2, "--threads");
  check_refused(speculate("--max-new-tokens -3"), 2, "--max-new-tokens");
  check_refused(speculate("--prompt a --prompt-ids 2"), 2, "--prompt");
  for (const char* list : {"''", "2,", ",2", "2,,3", "2.5", "[2,3]", "'2 3'", "99999999999"}) {
    CAPTURE(list);
    check_refused(speculate(std::string("--prompt-ids ") + list), 2, "--prompt-ids");
  }
  check_refused(speculate("--target " + tiny + "/target --draft 4"), 2, "--assistant");
}

TEST_CASE("without CUDA, or without a device, what needs one is refused in a sentence") {
  if (speculate("--devices").code == 0) return;  // this program has both
  check_refused(speculate("--devices"), 1, "CUDA");
  check_refused(speculate("--backend cuda"), 1, "CUDA");
}

TEST_CASE("every drafter writes the text of plain decoding, drawn or not") {
  for (const char* draws : {"", "--temperature 0.9 --top-k 50 --top-p 0.95 --min-p 0.01 --repeat-penalty 1.1 --seed 5"}) {
    const auto plain = json_of(speculate(std::string("--json --drafter none --max-new-tokens 60 ") + draws));
    CHECK(plain["drafted"] == 0);
    for (const char* drafter : {"assistant", "ngram", "cascade"})
      for (const char* draft : {"auto", "1", "16"}) {
        CAPTURE(draws);
        CAPTURE(drafter);
        CAPTURE(draft);
        const auto out =
            json_of(speculate(std::string("--json --max-new-tokens 60 --drafter ") + drafter + " --draft " + draft + " " + draws));
        CHECK(out["tokens"] == plain["tokens"]);
        CHECK(out["drafter"] == drafter);
      }
  }
}

TEST_CASE("a seed fixes the text, and samples of one seed differ") {
  const std::string options = "--json --temperature 1 --max-new-tokens 24 --seed 9 ";
  const auto first = json_of(speculate(options)), again = json_of(speculate(options + "--threads 1 --draft 2"));
  CHECK(first["tokens"] == again["tokens"]);
  CHECK(json_of(speculate("--json --temperature 1 --max-new-tokens 24 --seed 10"))["tokens"] != first["tokens"]);
  const auto several = json_of(speculate(options + "--samples 3 --compare"));
  REQUIRE(several["samples"].size() == 3);
  CHECK(several["samples"][0]["tokens"] == first["tokens"]);
  CHECK(several["samples"][1]["tokens"] != first["tokens"]);
  CHECK(several["samples"][2]["tokens"] != several["samples"][1]["tokens"]);
  CHECK(several["identical"] == true);
}

TEST_CASE("a stop string ends the text, and neither it nor anything behind it is shown") {
  for (const char* draft : {"0", "7"}) {
    const outcome run = speculate(std::string("--quiet --stop 'LORD, and the house of' --draft ") + draft);
    CHECK(run.out == " the house of the \n");
    const auto out = json_of(speculate(std::string("--json --stop xyzzy --stop ', and' --draft ") + draft));
    CHECK(out["text"] == " the house of the LORD");
    CHECK(out["finish"] == "stop_string");
  }
}

TEST_CASE("--chat puts the prompt into the template") {
  const auto chat = json_of(speculate("--json --chat --prompt Hello --max-new-tokens 4")),
             plain = json_of(speculate("--json --prompt Hello --max-new-tokens 4"));
  CHECK(chat["prompt_tokens"].get<int>() > plain["prompt_tokens"].get<int>() + 3);
}

TEST_CASE("--trace writes a line for the text, one for each pass and one for the end") {
  const temporary_directory directory;
  const std::string file = (directory.path() / "trace.jsonl").string();
  const auto out = json_of(speculate("--json --draft 3 --max-new-tokens 40 --trace '" + file + "'"));
  std::ifstream in(file);
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
  REQUIRE(lines.size() > 3);
  CHECK(lines.front()["outrider_trace"] == 1);
  CHECK(lines.front()["policy"] == "fixed 3");
  CHECK(lines.back()["finish"] == "max_new_tokens");
  int position = out["prompt_tokens"].get<int>() + 1, drafted = 0, accepted = 0;
  for (std::size_t i = 1; i + 1 < lines.size(); ++i) {
    CHECK(lines[i]["position"] == position);
    position += lines[i]["emitted"].get<int>();
    drafted += lines[i]["drafted"].get<int>();
    accepted += lines[i]["accepted"].get<int>();
  }
  CHECK(position == out["prompt_tokens"].get<int>() + 40);
  CHECK(drafted == out["drafted"].get<int>());
  CHECK(accepted == out["accepted"].get<int>());
  check_refused(speculate("--trace /no/such/directory/trace.jsonl"), 1, "/no/such/directory/trace.jsonl");
  const auto words = directory.write("prompt.txt", "And God said");
  check_refused(speculate("--prompt-file '" + words.string() + "' --trace '" + words.string() + "'"), 1, "overwrite");
  CHECK(std::filesystem::file_size(words) == 12);
}

TEST_CASE("sampling that means nothing is refused with its value") {
  check_refused(speculate("--temperature nan"), 2, "temperature");
  check_refused(speculate("--temperature -1"), 2, "temperature");
  check_refused(speculate("--top-p 0"), 2, "top_p");
  check_refused(speculate("--top-p 1.5"), 2, "top_p");
  check_refused(speculate("--min-p 2"), 2, "min_p");
  check_refused(speculate("--repeat-penalty 0"), 2, "repetition penalty");
  check_refused(speculate("--top-k -1"), 2, "--top-k");
  check_refused(speculate("--seed -1"), 2, "--seed");
  check_refused(speculate("--p-min 1.2"), 2, "confidence");
  check_refused(speculate("--samples 2"), 2, "--samples");
  check_refused(speculate("--samples 0"), 2, "--samples");
  check_refused(speculate("--drafter oracle"), 2, "--drafter");
  check_refused(speculate("--drafter none --draft 3"), 2, "--draft");
  check_refused(speculate("--drafter cascade --target " + tiny + "/target"), 2, "--assistant");
  check_refused(speculate("--stop ''"), 2, "empty");
  check_refused(speculate("--temperature ''"), 2, "--temperature");
  check_refused(speculate("--seed 18446744073709551616"), 2, "--seed");
  check_refused(speculate("--prompt-ids 5 --chat"), 2, "--chat");
  check_refused(speculate("--target " + golden + "/e2b/target --prompt-ids 5,6 --stop a"), 1, "--stop");
}

TEST_CASE("what cannot be carried out is exit code 1 and one sentence that names the thing") {
  check_refused(speculate("--target /no/such/directory"), 1, "/no/such/directory");
  check_refused(speculate("--prompt-file /no/such/file"), 1, "/no/such/file");
  check_refused(speculate("--prompt-file ''"), 1, "cannot be opened");
  check_refused(speculate("--prompt-ids 2,99999"), 1, "99999");
  check_refused(speculate("--prompt-ids 2,-5"), 1, "-5");
  check_refused(speculate("--target " + tiny + "/assistant"), 1, "assistant");
  check_refused(speculate("--target " + tiny + "/target --assistant " + tiny + "/target"), 1, "target");
  check_refused(speculate("--target " + tiny + "/target --assistant " + golden + "/e2b/assistant"), 1, "hidden size");
  const outcome run = speculate("--target /no/such/directory");
  CHECK(std::count(run.err.begin(), run.err.end(), '\n') == 1);
}
