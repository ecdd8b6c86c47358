// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "outrider/gemma4/convert_types.hpp"
#include "support/refusal.hpp"

namespace {

using namespace outrider;
using gemma4::recipe_named;
using gemma4::type_override;
using io::dtype;
using outrider::testing::mentions;
using outrider::testing::refusal;

/// The tensors of a small model: rows of `width`, value projections in all layers but the full ones (every sixth) where `full_without_v`.
std::vector<io::tensor_plan> model_of(std::size_t layers, std::size_t width, bool full_without_v = false) {
  std::vector<io::tensor_plan> tensors{{"token_embd.weight", dtype::bf16, {64, width}},
                                       {"per_layer_token_embd.weight", dtype::bf16, {64, width}},
                                       {"per_layer_model_proj.weight", dtype::bf16, {width, width}},
                                       {"output_norm.weight", dtype::bf16, {width}}};
  for (std::size_t i = 0; i < layers; ++i) {
    const std::string at = "blk." + std::to_string(i) + ".";
    for (const char* name : {"attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up", "ffn_down"})
      tensors.push_back({at + name + ".weight", dtype::bf16, {width, width}});
    if (!full_without_v || i % 6 != 5) tensors.push_back({at + "attn_v.weight", dtype::bf16, {width, width}});
    tensors.push_back({at + "attn_norm.weight", dtype::bf16, {width}});
    tensors.push_back({at + "layer_output_scale.weight", dtype::bf16, {1}});
  }
  return tensors;
}
std::vector<io::tensor_plan> chosen(std::string_view recipe, std::vector<io::tensor_plan> tensors,
                                    const std::vector<type_override>& overrides = {}) {
  gemma4::choose_types(*recipe_named(recipe), overrides, tensors);
  return tensors;
}
std::string_view type_of(const std::vector<io::tensor_plan>& tensors, const std::string& name) {
  const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const io::tensor_plan& t) { return t.name == name; });
  REQUIRE(found != tensors.end());
  return io::name_of(found->type);
}
/// The layers whose tensor of that name has that type.
std::vector<std::size_t> layers_with(const std::vector<io::tensor_plan>& tensors, const std::string& name, dtype type) {
  std::vector<std::size_t> layers;
  for (const io::tensor_plan& t : tensors)
    if (t.name.ends_with("." + name + ".weight") && t.type == type) layers.push_back(gemma4::detail::layer_of(t.name));
  return layers;
}

}  // namespace

TEST_CASE("recipes have the names and file types of llama.cpp") {
  for (const auto& known :
       {std::pair("f32", 0u), std::pair("f16", 1u), std::pair("q4_0", 2u), std::pair("q4_1", 3u), std::pair("q8_0", 7u),
        std::pair("q5_0", 8u), std::pair("q5_1", 9u), std::pair("q4_k_s", 14u), std::pair("q4_k_m", 15u), std::pair("q5_k_s", 16u),
        std::pair("q5_k_m", 17u), std::pair("q6_k", 18u), std::pair("bf16", 32u), std::pair("mxfp4_moe", 38u)}) {
    CAPTURE(known.first);
    REQUIRE(recipe_named(known.first));
    CHECK(recipe_named(known.first)->file_type == known.second);
  }
  CHECK(recipe_named("q4_k")->file_type == 15);
  CHECK(recipe_named("mxfp4")->file_type == 38);
  CHECK_FALSE(recipe_named("q3_k_m"));
}

TEST_CASE("norms, vectors and the router are F32 in every file") {
  std::vector<io::tensor_plan> model = model_of(2, 256);
  model.push_back({"blk.0.ffn_gate_inp.weight", dtype::bf16, {8, 256}});
  model.push_back({"blk.0.ffn_down_exps.scale", dtype::bf16, {8}});
  for (const gemma4::weight_recipe& recipe : gemma4::weight_recipes) {
    CAPTURE(recipe.name);
    const auto types = chosen(recipe.name, model);
    for (const char* name : {"output_norm.weight", "blk.0.attn_norm.weight", "blk.0.layer_output_scale.weight", "blk.0.ffn_gate_inp.weight",
                             "blk.0.ffn_down_exps.scale"})
      CHECK(type_of(types, name) == "F32");
  }
}

TEST_CASE("float recipes give their type to all matrices") {
  const auto types = chosen("f16", model_of(1, 100));
  for (const char* name : {"token_embd.weight", "per_layer_model_proj.weight", "blk.0.attn_q.weight"}) CHECK(type_of(types, name) == "F16");
}

TEST_CASE("the projection of per-layer embeddings is not quantised") {
  CHECK(type_of(chosen("q8_0", model_of(1, 256)), "per_layer_model_proj.weight") == "BF16");
}

TEST_CASE("a table that is the head too gets a better type") {
  for (const char* recipe : {"q4_0", "q5_1", "q4_k_m", "q6_k"}) {
    CHECK(type_of(chosen(recipe, model_of(1, 256)), "token_embd.weight") == "Q6_K");
    CHECK(type_of(chosen(recipe, model_of(1, 256)), "per_layer_token_embd.weight") == "Q6_K");
    CHECK(type_of(chosen(recipe, model_of(1, 128)), "token_embd.weight") == "Q8_0");
  }
  CHECK(type_of(chosen("q8_0", model_of(1, 256)), "token_embd.weight") == "Q8_0");
  std::vector<io::tensor_plan> untied = model_of(1, 256);
  untied.push_back({"output.weight", dtype::bf16, {64, 256}});
  CHECK(type_of(chosen("q4_k_m", untied), "output.weight") == "Q6_K");
  CHECK(type_of(chosen("q4_k_m", untied), "token_embd.weight") == "Q4_K");
}

TEST_CASE("q4_k_m: Q6_K in the first and last eighth of the layers and every third between") {
  const auto types = chosen("q4_k_m", model_of(32, 256));
  const std::vector<std::size_t> better{0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31};
  CHECK(layers_with(types, "ffn_down", dtype::q6_k) == better);
  CHECK(layers_with(types, "attn_v", dtype::q6_k) == better);
  CHECK(layers_with(types, "attn_k", dtype::q6_k).empty());
  CHECK(type_of(types, "blk.4.ffn_down.weight") == "Q4_K");
}

TEST_CASE("layers without a value projection do not count for it") {
  // 12 layers, 10 of them with one: numbers 0 to 9 of 10 are layers 0 to 4 and 6 to 10; 10 / 8 = 1 is the first, 70 / 8 = 8 the last begins.
  const auto types = chosen("q4_k_m", model_of(12, 256, true));
  CHECK(layers_with(types, "attn_v", dtype::q6_k) == std::vector<std::size_t>{0, 3, 7, 9, 10});
}

TEST_CASE("pitfall 109: rows of 2112 and 704 fall back to types with blocks of 32") {
  std::vector<io::tensor_plan> model = model_of(16, 256);
  for (io::tensor_plan& t : model)
    if (t.name.ends_with("ffn_down.weight")) t.shape = {2816, 2112};
  model.push_back({"blk.0.ffn_down_exps.weight", dtype::bf16, {128, 2816, 704}});
  model.push_back({"blk.5.ffn_down_exps.weight", dtype::bf16, {128, 2816, 704}});
  const auto types = chosen("q4_k_m", model);
  CHECK(type_of(types, "blk.0.ffn_down.weight") == "Q8_0");  // for Q6_K
  CHECK(type_of(types, "blk.2.ffn_down.weight") == "Q5_0");  // for Q4_K
  CHECK(type_of(types, "blk.0.ffn_down_exps.weight") == "Q8_0");
  CHECK(type_of(types, "blk.5.ffn_down_exps.weight") == "Q5_0");
  CHECK(type_of(chosen("q5_k_m", model), "blk.2.ffn_down.weight") == "Q5_1");
}

TEST_CASE("pitfall 113: rows that no block divides become F16") {
  for (const char* recipe : {"q4_0", "q8_0", "q4_k_m", "q6_k"})
    CHECK(type_of(chosen(recipe, model_of(1, 40)), "blk.0.attn_q.weight") == "F16");
}

TEST_CASE("mxfp4_moe: experts in MXFP4, the rest in Q8_0") {
  std::vector<io::tensor_plan> model = model_of(1, 256);
  model.push_back({"blk.0.ffn_gate_up_exps.weight", dtype::bf16, {8, 64, 256}});
  const auto types = chosen("mxfp4_moe", model);
  CHECK(type_of(types, "blk.0.ffn_gate_up_exps.weight") == "MXFP4");
  CHECK(type_of(types, "blk.0.attn_q.weight") == "Q8_0");
  CHECK(type_of(types, "token_embd.weight") == "Q8_0");
}

TEST_CASE("integers stay integers") {
  std::vector<io::tensor_plan> model = model_of(1, 256);
  model.push_back({"masked_embd_ordering", dtype::i32, {64}});
  CHECK(type_of(chosen("q4_0", model), "masked_embd_ordering") == "I32");
}

TEST_CASE("an override decides where it fits, the first of several") {
  const auto types =
      chosen("q4_0", model_of(2, 256),
             {{"blk.1.ffn_down.weight", dtype::f32}, {"blk.*.ffn_*.weight", dtype::q6_k}, {"per_layer_model_proj.*", dtype::q8_0}});
  CHECK(type_of(types, "blk.1.ffn_down.weight") == "F32");
  CHECK(type_of(types, "blk.0.ffn_down.weight") == "Q6_K");
  CHECK(type_of(types, "blk.1.ffn_up.weight") == "Q6_K");
  CHECK(type_of(types, "blk.1.attn_q.weight") == "Q4_0");
  CHECK(type_of(types, "per_layer_model_proj.weight") == "Q8_0");
}

TEST_CASE("an override that fits nothing, a vector, or rows its blocks do not divide, is refused") {
  const auto refused = [](const type_override& o) {
    return refusal(error_code::argument_invalid, [&] { static_cast<void>(chosen("f16", model_of(1, 128), {o})); });
  };
  CHECK(mentions(refused({"blk.7.*", dtype::q8_0}), "'blk.7.*'", "no matrix"));
  CHECK(mentions(refused({"output_norm.weight", dtype::q8_0}), "output_norm.weight", "no matrix"));
  CHECK(mentions(refused({"*_norm.weight", dtype::q8_0}), "'*_norm.weight'", "no matrix"));
  CHECK(mentions(refused({"token_embd.weight", dtype::q6_k}), "token_embd.weight", "Q6_K", "128", "256"));
}

TEST_CASE("an override for many tensors passes over vectors") {
  const auto types = chosen("f16", model_of(1, 256), {{"*", dtype::q8_0}});
  CHECK(type_of(types, "token_embd.weight") == "Q8_0");
  CHECK(type_of(types, "output_norm.weight") == "F32");
}

TEST_CASE("patterns: * is any text, ? one character, and the whole name must fit") {
  using gemma4::fits;
  CHECK(fits("blk.10.attn_q.weight", "blk.*.attn_q.weight"));
  CHECK(fits("blk.10.attn_q.weight", "*"));
  CHECK(fits("blk.10.attn_q.weight", "*attn*"));
  CHECK(fits("blk.1.x", "blk.?.x"));
  CHECK(fits("aXbXb", "a*Xb"));
  CHECK(fits("", "**"));
  CHECK_FALSE(fits("blk.10.x", "blk.?.x"));
  CHECK_FALSE(fits("blk.10.attn_q.weight", "attn_q"));
  CHECK_FALSE(fits("blk.10.attn_q.weight", "blk.*.attn_q"));
  CHECK_FALSE(fits("a", ""));
}
