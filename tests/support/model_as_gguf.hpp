// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Checkpoints of Hugging Face directories as GGUF files, written by the shortest way: keys from the configuration, tensors as they are. Tests
// change keys and tensors before they write the file.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "outrider/gemma4/config.hpp"
#include "outrider/gemma4/config_json.hpp"
#include "outrider/gemma4/gguf_names.hpp"
#include "outrider/io/safetensors.hpp"
#include "support/write_gguf.hpp"

namespace outrider::testing {

/// A GGUF file that is not written yet.
class gguf_model {
 public:
  std::string architecture = "gemma4";
  std::vector<gguf_tensor> tensors;

  /// Sets or replaces a pair.
  template <class T>
  void set(const std::string& key, T value) {
    pairs_[key] = [key, value](gguf_builder& b) { b.pair(key, value); };
  }
  template <class T>
  void set_array(const std::string& key, std::vector<T> values) {
    pairs_[key] = [key, values](gguf_builder& b) { b.array(key, values); };
  }
  void erase(const std::string& key) { pairs_.erase(key); }
  [[nodiscard]] bool has(const std::string& key) const { return pairs_.count(key) != 0; }
  /// The key behind the architecture's name.
  [[nodiscard]] std::string key(const std::string& rest) const { return architecture + "." + rest; }

  [[nodiscard]] gguf_tensor& tensor(const std::string& name) {
    const auto it = std::find_if(tensors.begin(), tensors.end(), [&](const gguf_tensor& t) { return t.name == name; });
    if (it == tensors.end()) throw std::runtime_error("the test's model has no tensor " + name);
    return *it;
  }
  /// Removes the tensor and hands it out.
  gguf_tensor take(const std::string& name) {
    gguf_tensor& found = tensor(name);
    gguf_tensor taken = std::move(found);
    tensors.erase(tensors.begin() + (&found - tensors.data()));
    return taken;
  }

  void write(const std::filesystem::path& path) const {
    gguf_builder builder;
    for (const auto& [key, add] : pairs_) add(builder);
    for (const gguf_tensor& t : tensors) builder.tensor(t);
    builder.write(path);
  }

 private:
  std::map<std::string, std::function<void(gguf_builder&)>> pairs_;
};

inline gguf_tensor float_tensor(const std::string& name, const std::vector<float>& values) {
  gguf_tensor t{name, io::dtype::f32, {values.size()}, std::vector<std::byte>(values.size() * sizeof(float))};
  std::memcpy(t.bytes.data(), values.data(), t.bytes.size());
  return t;
}

/// The keys and tensors of a text stack under `architecture`.
inline gguf_model text_as_gguf(const gemma4::text_config& c, const io::tensor_set& tensors, const std::string& architecture,
                               gemma4::assistant_scheme scheme) {
  using gemma4::attention_kind;
  gguf_model m;
  m.architecture = architecture;
  const auto set = [&](const char* key, std::size_t n) { m.set(m.key(key), static_cast<std::uint32_t>(n)); };
  const auto& sliding = c.shape(attention_kind::sliding);
  const auto& full = c.shape(attention_kind::full);
  m.set<std::string>("general.architecture", architecture);
  set("block_count", c.layer_count());
  set("context_length", c.max_positions);
  set("embedding_length", c.hidden_size);
  set("vocab_size", c.vocab_size);
  set("attention.head_count", c.heads);
  set("attention.key_length", full.head_dim);
  set("attention.value_length", full.head_dim);
  set("attention.key_length_swa", sliding.head_dim);
  set("attention.value_length_swa", sliding.head_dim);
  set("rope.dimension_count", full.head_dim);
  set("rope.dimension_count_swa", sliding.head_dim);
  set("attention.sliding_window", c.window);
  set("attention.shared_kv_layers", c.kv_shared_layers);
  set("embedding_length_per_layer_input", c.ple_width);
  m.set(m.key("attention.layer_norm_rms_epsilon"), static_cast<float>(c.rms_norm_eps));
  m.set(m.key("rope.freq_base"), static_cast<float>(full.rope.theta));
  m.set(m.key("rope.freq_base_swa"), static_cast<float>(sliding.rope.theta));
  if (c.softcap != 0) m.set(m.key("final_logit_softcapping"), static_cast<float>(c.softcap));
  if (c.experts != 0) {
    set("expert_count", c.experts);
    set("expert_used_count", c.experts_per_token);
    set("expert_feed_forward_length", c.expert_width);
  }
  std::vector<std::int32_t> widths, kv_heads;
  std::vector<bool> pattern;
  for (std::size_t i = 0; i < c.layer_count(); ++i) {
    widths.push_back(static_cast<std::int32_t>(c.mlp_width(i)));
    kv_heads.push_back(static_cast<std::int32_t>(c.shape_of(i).kv_heads));
    pattern.push_back(c.layers[i] == attention_kind::sliding);
  }
  m.set_array(m.key("feed_forward_length"), widths);
  m.set_array(m.key("attention.head_count_kv"), kv_heads);
  m.set_array(m.key("attention.sliding_window_pattern"), pattern);
  m.set("tokenizer.ggml.eos_token_id", static_cast<std::uint32_t>(c.eos.at(0)));

  std::vector<float> factors(full.head_dim / 2, 1e30f);
  const std::vector<float> frequencies = full.rope.frequencies(full.head_dim);
  for (std::size_t i = 0; i < factors.size() && frequencies[i] != 0; ++i) factors[i] = static_cast<float>(full.rope.factor);
  m.tensors.push_back(float_tensor(std::string(gemma4::rope_factors_name), factors));
  for (const auto& [name, t] : tensors)
    if (const auto gguf = gemma4::gguf_name(name, scheme)) m.tensors.push_back({*gguf, t.type, t.shape, {t.bytes.begin(), t.bytes.end()}});
  return m;
}

inline gguf_model target_as_gguf(const std::filesystem::path& directory) {
  return text_as_gguf(gemma4::read_target_config(directory / "config.json"), io::load_safetensors(directory), "gemma4",
                      gemma4::assistant_scheme::g);
}

/// An assistant under a naming scheme, with the centroid tensors it has and the keys the scheme has for them.
inline gguf_model assistant_as_gguf(const std::filesystem::path& directory, gemma4::assistant_scheme scheme) {
  const gemma4::assistant_config c = gemma4::read_assistant_config(directory / "config.json");
  const gemma4::scheme_names& names = gemma4::names_of(scheme);
  gguf_model m = text_as_gguf(c.text, io::load_safetensors(directory), std::string(names.architecture), scheme);
  const auto set = [&](std::string_view key, std::size_t n) {
    if (!key.empty()) m.set(m.key(std::string(key)), static_cast<std::uint32_t>(n));
  };
  set(names.target_width, c.backbone_hidden_size);
  if (c.centroid_head) {
    set(names.centroids, c.centroids);
    set(names.top_k, c.centroid_top_k);
  }
  if (!names.ordered.empty()) m.set(m.key(std::string(names.ordered)), c.centroid_head);
  if (scheme == gemma4::assistant_scheme::f) m.set<std::string>(std::string(gemma4::assistant_type_key), "mtp");
  return m;
}

}  // namespace outrider::testing
