// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/gemma4/pairing.hpp"

#include <doctest/doctest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "outrider/gemma4/config_json.hpp"
#include "released_configs.hpp"
#include "support/refusal.hpp"
#include "support/temporary_directory.hpp"

namespace fs = std::filesystem;
using outrider::error_code;
using outrider::testing::mentions;
using outrider::testing::refusal;
using namespace outrider::gemma4;

namespace {

const fs::path root = OUTRIDER_SOURCE_DIR;
constexpr attention_kind S = attention_kind::sliding, F = attention_kind::full;

struct pair {
  text_config target;
  assistant_config assistant;
};

pair read_pair(const fs::path& directory) {
  return {read_target_config(directory / "target" / "config.json"), read_assistant_config(directory / "assistant" / "config.json")};
}
/// A pair with different head sizes and KV heads per kind.
pair good_pair() { return read_pair(root / "tests" / "golden" / "dense31b"); }

pair released_pair(const std::string& name) {
  const outrider::testing::temporary_directory directory;
  return {read_target_config(directory.write("target.json", outrider::testing::released_target(name).dump())),
          read_assistant_config(directory.write("assistant.json", outrider::testing::released_assistant(name).dump()))};
}

std::string mismatch(const pair& p) {
  return refusal(error_code::pair_mismatch, [&] { check_pair(p.target, p.assistant); });
}

attention_shape& shape(text_config& config, attention_kind kind) { return config.attention[static_cast<std::size_t>(kind)]; }

}  // namespace

TEST_CASE("the golden pairs and the bundled pair belong together") {
  for (const fs::path& directory : {root / "tests/golden/e2b", root / "tests/golden/e4b", root / "tests/golden/dense31b",
                                    root / "tests/golden/moe26b", root / "tests/golden/unified12b", root / "tests/golden/e2b_bf16",
                                    root / "tests/golden/multimodal_names", root / "examples/data/tiny-kjv"}) {
    CAPTURE(directory.string());
    const pair p = read_pair(directory);
    CHECK_NOTHROW(check_pair(p.target, p.assistant));
  }
}

TEST_CASE("pitfall 19: of the 25 pairs of released sizes exactly the five right ones are accepted, the others refused with both sizes") {
  std::vector<pair> released;
  for (const std::string name : outrider::testing::released_names) released.push_back(released_pair(name));
  for (std::size_t t = 0; t < released.size(); ++t)
    for (std::size_t a = 0; a < released.size(); ++a) {
      CAPTURE(t);
      CAPTURE(a);
      const pair mixed{released[t].target, released[a].assistant};
      if (t == a)
        CHECK_NOTHROW(check_pair(mixed.target, mixed.assistant));
      else
        CHECK(mentions(mismatch(mixed), "the hidden size is " + std::to_string(mixed.target.hidden_size),
                       "made for " + std::to_string(mixed.assistant.backbone_hidden_size)));
    }
}

TEST_CASE("of the golden pairs with equal hidden sizes, mixed ones are still refused") {
  const pair e2b = read_pair(root / "tests/golden/e2b"), e4b = read_pair(root / "tests/golden/e4b"),
             moe = read_pair(root / "tests/golden/moe26b");
  CHECK(mentions(mismatch({e2b.target, e4b.assistant}), "the vocabulary size is 128", "made for 144"));
  CHECK(mentions(mismatch({e4b.target, e2b.assistant}), "the vocabulary size is 144", "made for 128"));
  CHECK(mentions(mismatch({e2b.target, moe.assistant}), "the number of KV heads of sliding layers is 1", "made for 2"));
  CHECK(mentions(mismatch({moe.target, e2b.assistant}), "the number of KV heads of sliding layers is 2", "made for 1"));
}

TEST_CASE("pitfall 20: wrong vocabulary size is refused") {
  pair p = good_pair();
  p.assistant.text.vocab_size = 256;
  CHECK(mentions(mismatch(p), "the vocabulary size is 128", "made for 256"));
}

TEST_CASE("pitfall 20: wrong head size of either attention kind is refused") {
  for (const attention_kind kind : attention_kinds) {
    pair p = good_pair();
    const std::size_t right = std::exchange(shape(p.assistant.text, kind).head_dim, 64);
    CHECK(mentions(mismatch(p), std::string("the head size of ") + name_of(kind) + " layers is " + std::to_string(right), "made for 64"));
  }
}

TEST_CASE("pitfall 20: wrong number of KV heads of either attention kind is refused") {
  for (const attention_kind kind : attention_kinds) {
    pair p = good_pair();
    const std::size_t right = std::exchange(shape(p.assistant.text, kind).kv_heads, 1);
    CHECK(mentions(mismatch(p), std::string("the number of KV heads of ") + name_of(kind) + " layers is " + std::to_string(right),
                   "made for 1"));
  }
}

TEST_CASE("pitfall 20: a drafter that ends with a sliding layer is refused") {
  pair p = good_pair();
  p.assistant.text.layers.back() = S;
  CHECK(mentions(mismatch(p), "the last layer is full", "a sliding one"));
}

TEST_CASE("pitfall 62: a target without keys and values of a kind the drafter reads is refused") {
  pair p = good_pair();
  p.target.layers.assign(p.target.layer_count(), F);
  CHECK(mentions(mismatch(p), "sliding layers with keys and values of their own is 0"));
}

TEST_CASE("pitfall 10: an assistant's own stack is no target: it has no keys and values") {
  pair p = good_pair();
  p.target.kv_shared_layers = p.target.layer_count();
  CHECK(mentions(mismatch(p), "keys and values of their own is 0"));
}

TEST_CASE("another window is refused, unless the drafter has no sliding layer") {
  pair p = good_pair();
  p.assistant.text.window = 8;
  CHECK(mentions(mismatch(p), "the sliding window is 16", "made for 8"));
  p.assistant.text.layers.assign(4, F);
  CHECK_NOTHROW(check_pair(p.target, p.assistant));
}

TEST_CASE("another rotation of either attention kind is refused") {
  for (const attention_kind kind : attention_kinds)
    for (double rope_parameters::*const part : {&rope_parameters::theta, &rope_parameters::fraction, &rope_parameters::factor}) {
      pair p = good_pair();
      shape(p.assistant.text, kind).rope.*part = 0.5;
      CHECK(mentions(mismatch(p), std::string("the rotation of ") + name_of(kind) + " layers is theta ", " 0.5"));
    }
}
