// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// A Hugging Face directory as a GGUF file: which keys and tensors it has, in the order in which llama.cpp writes them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/error.hpp"
#include "outrider/gemma4/config.hpp"
#include "outrider/gemma4/config_json.hpp"
#include "outrider/gemma4/convert_tokenizer.hpp"
#include "outrider/gemma4/convert_types.hpp"
#include "outrider/gemma4/convert_values.hpp"
#include "outrider/gemma4/gguf_names.hpp"
#include "outrider/io/gguf_writer.hpp"
#include "outrider/io/json_file.hpp"
#include "outrider/io/safetensors.hpp"
#include "outrider/io/tensors.hpp"

namespace outrider::gemma4::detail {

/// A GGUF file to be: its header, and where each of its tensors comes from.
struct gguf_plan {
  io::gguf_header header;
  std::vector<io::tensor> sources;   // in the order of the header's tensors; of rows that are cut off there is nothing here
  std::vector<std::string> skipped;  // names of tensors left out
  std::vector<std::string> notes;    // sentences about what the file does not have
};

/// "3.0M", "128x2.4B": the number of parameters, in two digits at least; with experts their number, times the parameters of one and of
/// everything around it.
inline std::string size_label(std::span<const io::tensor_plan> tensors) {
  double shared = 0, expert = 0;
  std::size_t experts = 0;
  for (const io::tensor_plan& t : tensors) {
    double count = 1;
    for (const std::size_t extent : t.shape) count *= static_cast<double>(extent);
    if (t.name.find("_exps.") != t.name.npos && t.shape.size() == 3) {
      experts = t.shape[0];
      expert += count / static_cast<double>(experts);
    } else {
      shared += count;
    }
  }
  const double total = shared + expert;
  const auto [scale, letter] = total > 1e12  ? std::pair(1e-12, 'T')
                               : total > 1e9 ? std::pair(1e-9, 'B')
                               : total > 1e6 ? std::pair(1e-6, 'M')
                                             : std::pair(1e-3, 'K');
  char text[64];
  const double scaled = total * scale, rounded = std::nearbyint(scaled);
  std::snprintf(text, sizeof text, "%.*f%c", rounded >= 10 ? 0 : rounded >= 1 ? 1 : 2, scaled, letter);
  return (experts != 0 ? std::to_string(experts) + "x" : "") + text;
}

/// "gemma-4-E2B-it" as "Gemma 4 E2B It".
inline std::string title_of(const std::filesystem::path& directory) {
  std::error_code failure;
  const std::filesystem::path full = std::filesystem::canonical(directory, failure);
  std::string name = (failure ? directory : full).filename().string(), title;
  std::replace(name.begin(), name.end(), '-', ' ');
  const auto is_lower = [](char c) { return c >= 'a' && c <= 'z'; };
  for (std::size_t at = 0; at < name.size();) {
    const std::size_t end = (std::min)(name.find(' ', at), name.size());
    std::string word = name.substr(at, end - at);
    at = end + 1;
    if (word.empty()) continue;
    const bool mixed = std::any_of(word.begin(), word.end(), [](char c) { return c >= 'A' && c <= 'Z'; });
    const bool number = (word[0] >= '0' && word[0] <= '9') || (word[0] == 'v' && word.find_first_not_of("0123456789.", 1) == word.npos);
    bool inside = false;  // a run of letters
    for (char& c : word) {
      const bool letter = is_lower(c);
      if (letter && !inside && !mixed && !number) c = static_cast<char>(c - 'a' + 'A');
      inside = letter;
    }
    title += (title.empty() ? "" : " ") + word;
  }
  return title;
}

class gguf_planner {
 public:
  struct options {
    weight_recipe recipe;
    std::span<const type_override> overrides;
    bool centroids = true;      // an assistant's centroid tensors and their keys
    bool assist_names = false;  // scheme b instead of g
  };

  gguf_planner(const std::filesystem::path& directory, const options& wanted)
      : directory_(directory),
        options_(wanted),
        file_((directory / "config.json").string()),
        config_json_(io::read_json_file(file_)),
        tokenizer_(directory) {
    const bool typed = config_json_.is_object() && config_json_.contains("model_type") && config_json_.at("model_type").is_string();
    assistant_ = typed && detail::is_assistant(config_json_.at("model_type").get<std::string>());
    if (assistant_) {
      config_ = read_assistant_config(file_);
    } else {
      config_.text = read_target_config(file_);
      generation_ = read_generation_config(directory, config_.text.vocab_size);
    }
    check_expressible();
    if (!config_.centroid_head) options_.centroids = false;
    scheme_ = options_.assist_names ? assistant_scheme::b : assistant_scheme::g;
    architecture_ = assistant_ ? std::string(names_of(scheme_).architecture) : std::string(target_architecture);
  }

  /// `tensors` must outlive the plan.
  gguf_plan plan(const io::tensor_set& tensors) {
    const std::size_t tokens = token_count();
    list_tensors(tensors, tokens);
    choose_types(options_.recipe, options_.overrides, planned_);
    order_tensors();
    add_keys(tokens);
    for (io::tensor_plan& t : planned_) plan_.header.add(std::move(t));
    return std::move(plan_);
  }

 private:
  [[nodiscard]] const text_config& text() const noexcept { return config_.text; }
  [[nodiscard]] const attention_shape& full() const noexcept { return text().shape(attention_kind::full); }
  [[nodiscard]] const attention_shape& sliding() const noexcept { return text().shape(attention_kind::sliding); }
  [[nodiscard]] bool quantises() const noexcept { return io::describe(options_.recipe.type).elements > 1; }

  void check_expressible() const {
    const auto refuse = [&](const std::string& what) {
      throw error(error_code::model_unsupported, file_ + ": cannot become a GGUF file: " + what);
    };
    if (!text().causal) refuse("use_bidirectional_attention is \"all\", for which the format has no key");
    const rope_parameters& rope = sliding().rope;
    if (sliding().head_dim != 0 && (rope.fraction != 1 || rope.factor != 1))
      refuse("rope_parameters.sliding_attention rotates a part of the head, for which the format has no key");
  }

  /// Tokens of the file's vocabulary: those of the tokenizer, if there is one.
  std::size_t token_count() {
    const std::size_t rows = text().vocab_size;
    const auto tokens = tokenizer_.token_count();
    if (!tokens) plan_.notes.push_back("there is no tokenizer.json, so the file has no tokenizer");
    if (tokens && (*tokens > rows || (*tokens < rows && options_.centroids)))
      throw error(error_code::config_invalid, file_ + ": vocab_size is " + std::to_string(rows) + "; allowed: " + std::to_string(*tokens) +
                                                  ", the number of tokens in tokenizer.json" + (options_.centroids ? "" : ", or more"));
    return tokens.value_or(rows);
  }

  void list_tensors(const io::tensor_set& tensors, std::size_t tokens) {
    add_rope_factors();
    for (const auto& [name, t] : tensors) {
      const auto known = gguf_name(name, scheme_);
      const bool centroid = name.starts_with("masked_embedding.");
      if (!known && is_foreign(name)) plan_.skipped.push_back(name);
      if (!known && !is_foreign(name))
        throw error(error_code::model_unsupported, t.file + ": tensor '" + name + "' is none that a Gemma 4 model has");
      if (known && ((centroid && !options_.centroids) || (name == "lm_head.weight" && text().tied_head)))
        plan_.skipped.push_back(name);
      else if (known)
        add_tensor(*known, t, tokens);
    }
  }
  static bool is_foreign(std::string_view name) noexcept {
    for (const std::string_view part : {"vision", "audio", "multi_modal_projector", "rotary_emb.inv_freq"})
      if (name.find(part) != name.npos) return true;
    return false;
  }
  void add_tensor(const std::string& name, const io::tensor& t, std::size_t tokens) {
    io::tensor source = t;
    if (name == "token_embd.weight" && source.shape.size() == 2 && source.shape[0] > tokens) {  // rows no token has
      source.bytes = source.bytes.first(source.bytes.size() / source.shape[0] * tokens);
      source.shape[0] = tokens;
    }
    // As its own type the ordering would be I64, which readers of scheme g do not expect; scheme b has whole numbers as floats.
    if (t.name == token_ordering_name) source.type = options_.assist_names ? io::dtype::f32 : io::dtype::i32;
    planned_.push_back({name, source.type, source.shape});
    source.type = t.type;
    plan_.sources.push_back(std::move(source));
  }
  /// What of the full layers' heads rotates: 1 for pairs that do, 1e30 for the others.
  void add_rope_factors() {
    const std::size_t half = full().head_dim / 2;
    factors_.assign(half, 1e30f);
    const auto live = static_cast<std::size_t>(full().rope.fraction * static_cast<double>(full().head_dim) / 2);
    std::fill_n(factors_.begin(), (std::min)(live, half), static_cast<float>(full().rope.factor));
    planned_.push_back({std::string(rope_factors_name), io::dtype::f32, {half}});
    plan_.sources.push_back({std::string(rope_factors_name), io::dtype::f32, {half}, {}, file_});
  }

  /// As they come for float files; as place_of says for quantised ones.
  void order_tensors() {
    std::vector<std::size_t> order(planned_.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    if (quantises())
      std::sort(order.begin(), order.end(),
                [&](std::size_t a, std::size_t b) { return place_of(planned_[a].name) < place_of(planned_[b].name); });
    std::vector<io::tensor_plan> planned;
    std::vector<io::tensor> sources;
    for (const std::size_t i : order) {
      planned.push_back(planned_[i]);
      sources.push_back(plan_.sources[i]);
    }
    planned_ = std::move(planned);
    plan_.sources = std::move(sources);
  }

  template <class T>
  void add(const char* key, const T& value) {
    plan_.header.add(architecture_ + "." + key, value);
  }
  void add_count(const char* key, std::size_t value) { add(key, static_cast<std::uint32_t>(value)); }
  void add_number(const char* key, double value) { add(key, static_cast<float>(value)); }

  void add_keys(std::size_t tokens) {
    const text_config& t = text();
    plan_.header.add("general.architecture", architecture_);
    plan_.header.add("general.type", "model");
    add_sampling();
    plan_.header.add("general.name", title_of(directory_));
    plan_.header.add("general.size_label", label());
    add_count("block_count", t.layer_count());
    add_count("context_length", t.max_positions);
    add_count("embedding_length", t.hidden_size);
    if (t.double_wide_mlp)
      add("feed_forward_length", per_layer([&](std::size_t i) { return t.mlp_width(i); }));
    else
      add_count("feed_forward_length", t.intermediate_size);
    add_count("attention.head_count", t.heads);
    if (sliding().head_dim != 0 && sliding().kv_heads != full().kv_heads)
      add("attention.head_count_kv", per_layer([&](std::size_t i) { return t.shape_of(i).kv_heads; }));
    else
      add_count("attention.head_count_kv", full().kv_heads);
    add_number("rope.freq_base", full().rope.theta);
    add_number("rope.freq_base_swa", sliding().rope.theta);
    add_number("attention.layer_norm_rms_epsilon", t.rms_norm_eps);
    if (t.experts != 0) {
      add_count("expert_count", t.experts);
      add_count("expert_used_count", t.experts_per_token);
    }
    add_count("attention.key_length", full().head_dim);
    add_count("attention.value_length", full().head_dim);
    if (!quantises()) plan_.header.add("general.file_type", options_.recipe.file_type);
    if (t.softcap != 0) add_number("final_logit_softcapping", t.softcap);
    add_count("attention.sliding_window", t.window);
    add_count("attention.shared_kv_layers", t.kv_shared_layers);
    add_count("embedding_length_per_layer_input", t.ple_width);
    std::vector<bool> pattern;
    for (const attention_kind kind : t.layers) pattern.push_back(kind == attention_kind::sliding);
    add("attention.sliding_window_pattern", pattern);
    const std::size_t narrow = sliding().head_dim != 0 ? sliding().head_dim : full().head_dim;
    add_count("attention.key_length_swa", narrow);
    add_count("attention.value_length_swa", narrow);
    if (t.experts != 0) add_count("expert_feed_forward_length", t.expert_width);
    add_count("rope.dimension_count", full().head_dim);
    add_count("rope.dimension_count_swa", narrow);
    if (!generation_.suppress.empty()) plan_.header.add("tokenizer.ggml.suppress_tokens", generation_.suppress);
    if (assistant_) add_assistant_keys();
    if (!quantises()) add_quantisation_version();
    tokenizer_.add_to(plan_.header, config_json_);
    if (!tokenizer_.token_count()) add_count("vocab_size", tokens);
    if (!quantises()) return;
    add_quantisation_version();
    plan_.header.add("general.file_type", options_.recipe.file_type);
  }
  void add_quantisation_version() { plan_.header.add("general.quantization_version", std::uint32_t{2}); }

  void add_assistant_keys() {
    const scheme_names& names = names_of(scheme_);
    const auto add_named = [&](std::string_view key, const auto& value) {
      if (!key.empty()) add(std::string(key).c_str(), value);
    };
    add_named(names.target_width, static_cast<std::uint32_t>(config_.backbone_hidden_size));
    if (!options_.assist_names) add_count("nextn_predict_layers", text().layer_count());
    if (options_.centroids) {
      add_named(names.centroids, static_cast<std::uint32_t>(config_.centroids));
      add_named(names.top_k, static_cast<std::uint32_t>(config_.centroid_top_k));
    }
    add_named(names.ordered, options_.centroids);
  }

  /// generation_config.json says how the model likes to be sampled.
  void add_sampling() {
    const std::filesystem::path file = directory_ / "generation_config.json";
    const nlohmann::json document = read_optional_object(file);
    constexpr double most = 0x7fffffff;  // what both types of the format hold
    const auto number = [&](const char* key) -> std::optional<double> {
      const auto found = document.find(key);
      if (found == document.end() || !found->is_number()) return std::nullopt;
      const auto value = found->get<double>();
      if (std::fabs(value) > most)
        throw error(error_code::config_invalid,
                    file.string() + ": " + key + " is " + found->dump() + "; allowed: -2147483647 to 2147483647");
      return value;
    };
    if (const auto top_k = number("top_k")) plan_.header.add("general.sampling.top_k", static_cast<std::int32_t>(*top_k));
    if (const auto top_p = number("top_p")) plan_.header.add("general.sampling.top_p", static_cast<float>(*top_p));
    if (const auto min_p = number("min_p")) plan_.header.add("general.sampling.min_p", static_cast<float>(*min_p));
    if (const auto temperature = number("temperature")) plan_.header.add("general.sampling.temp", static_cast<float>(*temperature));
  }

  template <class F>
  std::vector<std::int32_t> per_layer(const F& f) const {
    std::vector<std::int32_t> out;
    for (std::size_t i = 0; i < text().layer_count(); ++i) out.push_back(static_cast<std::int32_t>(f(i)));
    return out;
  }
  /// The centroid tensors do not count: the label is that of a file without them.
  [[nodiscard]] std::string label() const {
    const scheme_names& names = names_of(scheme_);
    std::vector<io::tensor_plan> counted;
    for (const io::tensor_plan& t : planned_)
      if (t.name != names.centroid_tensor && t.name != names.token_ordering) counted.push_back(t);
    return size_label(counted);
  }

 public:
  /// The bytes of the tensor that is in no checkpoint.
  [[nodiscard]] std::span<const std::byte> rope_factors() const noexcept { return std::as_bytes(std::span(factors_)); }

 private:
  std::filesystem::path directory_;
  options options_;
  std::string file_;
  nlohmann::json config_json_;
  tokenizer_to_gguf tokenizer_;
  bool assistant_ = false;
  assistant_config config_;  // of a target only .text
  generation_config generation_;
  assistant_scheme scheme_{};
  std::string architecture_;
  std::vector<float> factors_;
  std::vector<io::tensor_plan> planned_;
  gguf_plan plan_;
};

}  // namespace outrider::gemma4::detail
