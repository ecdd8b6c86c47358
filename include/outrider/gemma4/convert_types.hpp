// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Which tensor of a GGUF file gets which element type. The choices are llama.cpp's, of its converter for f32, f16 and bf16 and of its quantiser
// (without importance matrix) for the others, so that a file made here has the types of one made there.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "outrider/error.hpp"
#include "outrider/gemma4/gguf_names.hpp"
#include "outrider/io/tensor_writer.hpp"
#include "outrider/io/tensors.hpp"

namespace outrider::gemma4 {

/// A way to store a model's weights: one type for most matrices, better ones for those that suffer most.
struct weight_recipe {
  enum class mixture : std::uint8_t { plain, medium, fewer_bits, experts };

  std::string_view name;
  io::dtype type;
  std::uint32_t file_type;  // general.file_type
  mixture mix = mixture::plain;
};

inline constexpr auto weight_recipes = std::to_array<weight_recipe>({
    {"f32", io::dtype::f32, 0},
    {"f16", io::dtype::f16, 1},
    {"bf16", io::dtype::bf16, 32},
    {"q8_0", io::dtype::q8_0, 7},
    {"q4_0", io::dtype::q4_0, 2},
    {"q4_1", io::dtype::q4_1, 3},
    {"q5_0", io::dtype::q5_0, 8},
    {"q5_1", io::dtype::q5_1, 9},
    {"q4_k_m", io::dtype::q4_k, 15, weight_recipe::mixture::medium},
    {"q4_k_s", io::dtype::q4_k, 14, weight_recipe::mixture::fewer_bits},
    {"q5_k_m", io::dtype::q5_k, 17, weight_recipe::mixture::medium},
    {"q5_k_s", io::dtype::q5_k, 16, weight_recipe::mixture::fewer_bits},
    {"q6_k", io::dtype::q6_k, 18},
    {"mxfp4_moe", io::dtype::mxfp4, 38, weight_recipe::mixture::experts},
});

/// The recipe of that name, or nothing. "q4_k" and "q5_k" are the medium mixtures, "mxfp4" is "mxfp4_moe": experts in MXFP4, the rest in Q8_0.
[[nodiscard]] inline std::optional<weight_recipe> recipe_named(std::string_view name) noexcept {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 3> also{
      {{"q4_k", "q4_k_m"}, {"q5_k", "q5_k_m"}, {"mxfp4", "mxfp4_moe"}}};
  for (const auto& [alias, meant] : also)
    if (name == alias) name = meant;
  for (const weight_recipe& recipe : weight_recipes)
    if (recipe.name == name) return recipe;
  return std::nullopt;
}

/// Element types the converter can write.
inline constexpr std::array writable_types{io::dtype::f32,  io::dtype::f16,  io::dtype::bf16, io::dtype::q8_0,
                                           io::dtype::q4_0, io::dtype::q4_1, io::dtype::q5_0, io::dtype::q5_1,
                                           io::dtype::q4_k, io::dtype::q5_k, io::dtype::q6_k, io::dtype::mxfp4};

/// Tensors whose name fits the pattern get this type. In a pattern '*' stands for any characters, none included, and '?' for one; it is for
/// the whole name.
struct type_override {
  std::string pattern;
  io::dtype type;
};

/// Whether a name fits a pattern.
[[nodiscard]] inline bool fits(std::string_view name, std::string_view pattern) noexcept {
  // Greedy with one way back, to the last '*': no other is ever needed.
  std::size_t n = 0, p = 0, star = pattern.npos, retry = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      retry = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p, ++n;
    } else if (star != pattern.npos) {
      p = star + 1;
      n = ++retry;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

namespace detail {

[[nodiscard]] inline std::size_t layer_of(std::string_view name) noexcept {
  const auto split = split_layer(name, "blk.");
  return split ? split->layer : 0;
}
/// The order of tensors in quantised files: what belongs to no layer first, then by layer, each by name. Borrows the name.
[[nodiscard]] inline std::pair<std::size_t, std::string_view> place_of(std::string_view name) noexcept {
  return {split_layer(name, "blk.") ? layer_of(name) + 1 : 0, name};
}
[[nodiscard]] inline bool is_value_projection(std::string_view name) noexcept {
  return name.ends_with("attn_v.weight") || name.ends_with("attn_qkv.weight");
}
[[nodiscard]] inline bool is_integer(io::dtype type) noexcept {
  return type == io::dtype::i64 || type == io::dtype::i32 || type == io::dtype::i16 || type == io::dtype::i8;
}

class type_chooser {
 public:
  type_chooser(const weight_recipe& recipe, std::span<const io::tensor_plan> tensors) : recipe_(recipe) {
    for (const io::tensor_plan& t : tensors) {
      layers_ = (std::max)(layers_, split_layer(t.name, "blk.") ? layer_of(t.name) + 1 : 0);
      if (is_value_projection(t.name)) value_layers_.push_back(layer_of(t.name));
      tied_ = tied_ && t.name != "output.weight";
    }
    std::sort(value_layers_.begin(), value_layers_.end());
  }

  [[nodiscard]] io::dtype operator()(const io::tensor_plan& t) const {
    if (is_integer(t.type)) return t.type;
    if (stays_float(t)) return io::dtype::f32;
    if (io::describe(recipe_.type).elements == 1) return recipe_.type;
    if (stays_exact(t)) return t.type;
    return fitting(t, wanted(t));
  }

 private:
  /// What readers expect as floats in every file.
  static bool stays_float(const io::tensor_plan& t) noexcept {
    return t.shape.size() < 2 || t.name.ends_with("_norm.weight") || t.name.ends_with("ffn_gate_inp.weight") ||
           !t.name.ends_with(weight_suffix);
  }
  /// What the quantiser leaves alone.
  static bool stays_exact(const io::tensor_plan& t) noexcept { return t.name.find("per_layer_model_proj") != t.name.npos; }

  [[nodiscard]] static bool divides(io::dtype type, const io::tensor_plan& t) noexcept {
    return t.shape.back() % io::describe(type).elements == 0;
  }
  /// Of n layers the first and last eighth and every third in between.
  static bool deserves_more_bits(std::size_t i, std::size_t n) noexcept {
    return i < n / 8 || i >= 7 * n / 8 || (i >= n / 8 && (i - n / 8) % 3 == 2);
  }

  [[nodiscard]] io::dtype wanted(const io::tensor_plan& t) const {
    using mixture = weight_recipe::mixture;
    const bool table = t.name == "token_embd.weight" || t.name == "per_layer_token_embd.weight";
    if (t.name == "output.weight" || (table && tied_)) {  // a tied table is the head as well
      if (recipe_.mix == mixture::experts || recipe_.type == io::dtype::q8_0 || !divides(recipe_.type, t)) return io::dtype::q8_0;
      return io::dtype::q6_k;
    }
    if (recipe_.mix == mixture::experts) return t.shape.size() > 2 ? io::dtype::mxfp4 : io::dtype::q8_0;
    if (recipe_.mix == mixture::plain) return recipe_.type;
    const std::size_t layer = layer_of(t.name);
    if (is_value_projection(t.name)) {
      const auto before =
          static_cast<std::size_t>(std::lower_bound(value_layers_.begin(), value_layers_.end(), layer) - value_layers_.begin());
      if (recipe_.mix == mixture::medium) return deserves_more_bits(before, value_layers_.size()) ? io::dtype::q6_k : recipe_.type;
      return recipe_.type == io::dtype::q4_k && before < 4 ? io::dtype::q5_k : recipe_.type;
    }
    if (t.name.find("ffn_down") != t.name.npos) {
      if (recipe_.mix == mixture::medium) return deserves_more_bits(layer, layers_) ? io::dtype::q6_k : recipe_.type;
      return recipe_.type == io::dtype::q4_k && layer < layers_ / 8 ? io::dtype::q5_k : recipe_.type;
    }
    return recipe_.type;
  }

  /// The type itself, or the next better one with blocks that divide the tensor's rows.
  [[nodiscard]] static io::dtype fitting(const io::tensor_plan& t, io::dtype type) noexcept {
    if (divides(type, t)) return type;
    if (type == io::dtype::q4_k) type = io::dtype::q5_0;
    if (type == io::dtype::q5_k) type = io::dtype::q5_1;
    if (type == io::dtype::q6_k) type = io::dtype::q8_0;
    return divides(type, t) ? type : io::dtype::f16;
  }

  weight_recipe recipe_;
  std::size_t layers_ = 0;
  std::vector<std::size_t> value_layers_;  // those with a value projection, ascending
  bool tied_ = true;
};

}  // namespace detail

/// Sets the types of the tensors of one model, which come with GGUF names and the types they have now. The first override that fits decides;
/// without one, norms, vectors and the experts' router are F32 in every file, a matrix the recipe leaves alone keeps its type, and where
/// rows are no whole number of blocks a better type takes over: Q5_0 for Q4_K, Q5_1 for Q5_K, Q8_0 for Q6_K, F16 for what is left.
/// Integers stay. error_code::argument_invalid for an override that fits no matrix, one that names a vector, or rows its type cannot hold.
inline void choose_types(const weight_recipe& recipe, std::span<const type_override> overrides, std::span<io::tensor_plan> tensors) {
  const detail::type_chooser choose(recipe, tensors);
  const auto is_matrix = [](const io::tensor_plan& t) { return t.shape.size() >= 2 && !detail::is_integer(t.type); };
  for (const type_override& o : overrides)
    if (std::none_of(tensors.begin(), tensors.end(),
                     [&](const io::tensor_plan& t) { return fits(t.name, o.pattern) && (is_matrix(t) || o.pattern == t.name); }))
      throw error(error_code::argument_invalid, "the pattern '" + o.pattern + "' fits no matrix of the model");
  for (io::tensor_plan& t : tensors) {
    const auto found = std::find_if(overrides.begin(), overrides.end(), [&](const type_override& o) {
      return fits(t.name, o.pattern) && (is_matrix(t) || o.pattern == t.name);  // a pattern for many tensors means their matrices
    });
    if (found == overrides.end()) {
      t.type = choose(t);
      continue;
    }
    const std::string type(io::name_of(found->type));
    if (!is_matrix(t))
      throw error(error_code::argument_invalid, "tensor '" + t.name + "' cannot be " + type + ": it is no matrix of numbers");
    if (t.shape.back() % io::describe(found->type).elements != 0)
      throw error(error_code::argument_invalid, "tensor '" + t.name + "' cannot be " + type + ": its rows have " +
                                                    std::to_string(t.shape.back()) + " elements, blocks have " +
                                                    std::to_string(io::describe(found->type).elements));
    t.type = found->type;
  }
}

}  // namespace outrider::gemma4
