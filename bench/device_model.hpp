// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What bench/device.cpp runs: pairs of the released shapes with random weights and without files. The bytes of all tensors come from one
// stretch of memory, so a pair of 24 GB needs no disk, and the host no more than its largest table.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "outrider/core/blocks.hpp"
#include "outrider/core/extents.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/gemma4/config.hpp"
#include "outrider/gemma4/config_json.hpp"
#include "outrider/io/tensors.hpp"

namespace bench {

using namespace outrider;

/// A target's configuration and its assistant's.
struct pair_config {
  gemma4::text_config target;
  gemma4::assistant_config assistant;
};

inline constexpr std::array shape_names{"e2b", "12b", "tiny"};

/// The released E2B and 12B, or a pair that fits everywhere and has every kind of layer E2B has. What is not said is the format's default.
inline pair_config config_of(const std::string& shape) {
  using nlohmann::json;
  json target{{"final_logit_softcapping", 30.0}}, drafter{{"num_hidden_layers", 4}}, assistant{{"use_ordered_embeddings", shape != "12b"}};
  const auto sizes = [](json& c, int hidden, int heads, int kv_heads, int mlp) {
    c.update({{"hidden_size", hidden}, {"num_attention_heads", heads}, {"num_key_value_heads", kv_heads}, {"intermediate_size", mlp}});
  };
  const auto layers = [&](std::size_t count, std::size_t period, int sharing) {
    std::vector<std::string> kinds(count, "sliding_attention");
    for (std::size_t i = period - 1; i < count; i += period) kinds[i] = "full_attention";
    target.update({{"num_hidden_layers", count}, {"layer_types", kinds}, {"num_kv_shared_layers", sharing}});
  };
  if (shape == "e2b") {
    sizes(target, 1536, 8, 1, 6144);
    sizes(drafter, 256, 4, 1, 2048);
    layers(35, 5, 20);
    target["use_double_wide_mlp"] = true;
  } else if (shape == "12b") {
    sizes(target, 3840, 16, 8, 15360);
    sizes(drafter, 1024, 16, 8, 8192);
    layers(48, 6, 0);
    for (json* c : {&target, &drafter}) c->update({{"attention_k_eq_v", true}, {"num_global_key_value_heads", 1}});
  } else {
    sizes(target, 64, 4, 2, 128);
    sizes(drafter, 32, 4, 2, 64);
    layers(6, 3, 3);
    target.update({{"use_double_wide_mlp", true}, {"hidden_size_per_layer_input", 32}, {"vocab_size_per_layer_input", 512}});
    for (json* c : {&target, &drafter}) c->update({{"vocab_size", 512}, {"head_dim", 32}, {"global_head_dim", 64}, {"sliding_window", 64}});
    assistant.update({{"num_centroids", 16}, {"centroid_intermediate_top_k", 4}});
  }
  const std::string family = shape == "12b" ? "gemma4_unified" : "gemma4";
  target["model_type"] = drafter["model_type"] = family + "_text";
  drafter.update({{"hidden_size_per_layer_input", 0}, {"vocab_size_per_layer_input", 0}});
  assistant.update({{"model_type", family + "_assistant"}, {"backbone_hidden_size", target["hidden_size"]}, {"text_config", drafter}});
  return {gemma4::read_target_config(target, shape), gemma4::read_assistant_config(assistant, shape + " assistant")};
}

/// Names, types and shapes of a model's tensors, without bytes. Matrices have one type; vectors are floats.
class tensor_list {
 public:
  explicit tensor_list(io::dtype type) : type_(type) {}

  static std::vector<io::tensor> of_target(const gemma4::text_config& c, io::dtype type) {
    tensor_list list(type);
    list.matrix("model.embed_tokens.weight", c.vocab_size, c.hidden_size);
    list.vector("model.norm.weight", c.hidden_size);
    if (c.ple_width != 0) {
      list.matrix("model.embed_tokens_per_layer.weight", c.ple_vocab_size, c.layer_count() * c.ple_width);
      list.matrix("model.per_layer_model_projection.weight", c.layer_count() * c.ple_width, c.hidden_size);
      list.vector("model.per_layer_projection_norm.weight", c.ple_width);
    }
    list.layers(c);
    return std::move(list.tensors_);
  }
  static std::vector<io::tensor> of_assistant(const gemma4::assistant_config& c, io::dtype type) {
    tensor_list list(type);
    const std::size_t width = c.text.hidden_size, vocab = c.text.vocab_size;
    list.matrix("model.embed_tokens.weight", vocab, width);
    list.vector("model.norm.weight", width);
    list.matrix("pre_projection.weight", width, 2 * c.backbone_hidden_size);
    list.matrix("post_projection.weight", c.backbone_hidden_size, width);
    if (c.centroid_head) {
      list.matrix("masked_embedding.centroids.weight", c.centroids, width);
      list.add("masked_embedding.token_ordering", io::dtype::i32, {vocab});
    }
    list.layers(c.text);
    return std::move(list.tensors_);
  }

 private:
  void layers(const gemma4::text_config& c) {
    for (std::size_t i = 0; i < c.layer_count(); ++i) {
      const std::string at = "model.layers." + std::to_string(i) + ".";
      const std::size_t width = c.hidden_size, head = c.shape_of(i).head_dim, q = c.heads * head, kv = c.shape_of(i).kv_heads * head;
      for (const char* name : {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"})
        vector(at + name + ".weight", width);
      vector(at + "layer_scalar", 1);
      matrix(at + "self_attn.q_proj.weight", q, width);
      matrix(at + "self_attn.o_proj.weight", width, q);
      vector(at + "self_attn.q_norm.weight", head);
      if (c.owns_kv(i)) {
        matrix(at + "self_attn.k_proj.weight", kv, width);
        if (!c.k_eq_v || c.layers[i] == gemma4::attention_kind::sliding) matrix(at + "self_attn.v_proj.weight", kv, width);
        vector(at + "self_attn.k_norm.weight", head);
      }
      matrix(at + "mlp.gate_proj.weight", c.mlp_width(i), width);
      matrix(at + "mlp.up_proj.weight", c.mlp_width(i), width);
      matrix(at + "mlp.down_proj.weight", width, c.mlp_width(i));
      if (c.ple_width == 0) continue;
      matrix(at + "per_layer_input_gate.weight", c.ple_width, width);
      matrix(at + "per_layer_projection.weight", width, c.ple_width);
      vector(at + "post_per_layer_input_norm.weight", width);
    }
  }
  void matrix(const std::string& name, std::size_t rows, std::size_t cols) { add(name, type_, {rows, cols}); }
  void vector(const std::string& name, std::size_t n) { add(name, io::dtype::f32, {n}); }
  void add(const std::string& name, io::dtype type, std::vector<std::size_t> shape) {
    tensors_.push_back({name, type, std::move(shape), {}, "random weights"});
  }

  io::dtype type_;
  std::vector<io::tensor> tensors_;
};

inline std::size_t bytes_of(const io::tensor& t) { return io::byte_size(t.type, t.shape).value(); }

/// Bytes of weights that a pass reads: every matrix once, the table that is looked up not.
inline std::size_t bytes_read(const std::vector<io::tensor>& target) {
  return std::accumulate(target.begin(), target.end(), std::size_t{0}, [](std::size_t sum, const io::tensor& t) {
    return sum + (t.shape.size() == 2 && t.name != "model.embed_tokens_per_layer.weight" ? bytes_of(t) : 0);
  });
}

/// Random weights for matrices of one type, and what vectors hold.
class random_weights {
  // Matrices begin at multiples of this, which both types divide; a prime number of them, after which the weights repeat.
  static constexpr std::size_t unit = 2304, period = 7919 * unit;
  static_assert(unit % sizeof(bf16) == 0 && unit % sizeof(q4_0) == 0);

 public:
  /// For BF16 or Q4_0, matrices of at most `largest` bytes, vocabularies of `vocab` tokens.
  random_weights(io::dtype type, std::size_t largest, std::size_t vocab) : bytes_(largest + period), ordering_(vocab) {
    // Loading releases the pages of what it has read, as if it were a file: shared memory keeps its content then.
    void* const memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "no memory for random weights");
    memory_ = static_cast<std::byte*>(memory);
    if (type == io::dtype::q4_0)
      fill_q4_0();
    else
      fill_bf16();
    for (std::size_t done = period; done < bytes_;) {
      const std::size_t count = (std::min)(done, bytes_ - done);
      std::memcpy(memory_ + done, memory_, count);
      done += count;
    }
    std::iota(ordering_.begin(), ordering_.end(), token_id{0});
    std::shuffle(ordering_.begin(), ordering_.end(), random_);
  }
  random_weights(const random_weights&) = delete;
  random_weights& operator=(const random_weights&) = delete;
  ~random_weights() { munmap(memory_, bytes_); }

  /// A model's tensors with these bytes.
  static std::shared_ptr<const io::tensor_set> fill(std::vector<io::tensor> tensors, const std::shared_ptr<const random_weights>& from) {
    for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].bytes = from->bytes_for(tensors[i], i);
    return std::make_shared<const io::tensor_set>("random weights", std::move(tensors), from);
  }

 private:
  [[nodiscard]] std::span<const std::byte> bytes_for(const io::tensor& t, std::size_t place) const {
    const std::size_t bytes = bytes_of(t);
    if (t.shape.size() == 2) return {memory_ + place * 1009 * unit % period, bytes};
    if (t.type == io::dtype::i32) return std::as_bytes(std::span(ordering_));
    const bool of_heads = t.name.ends_with("q_norm.weight") || t.name.ends_with("k_norm.weight");
    return std::as_bytes(std::span(of_heads ? small_ : ones_)).first(bytes);
  }

  // Their deviation is that of a layer that keeps the size of what 4096 columns bring.
  static constexpr float deviation = 1.0f / 64;
  void fill_bf16() {
    std::normal_distribution<float> normal(0, deviation);
    for (std::size_t i = 0; i < period; i += sizeof(bf16)) put(i, bf16(normal(random_)));
  }
  void fill_q4_0() {
    // Codes are even in −8 … 7, whose mean square is 21.5.
    std::uniform_real_distribution<float> scale(0.5f * deviation / 4.637f, 1.5f * deviation / 4.637f);
    for (std::size_t i = 0; i < period; i += sizeof(q4_0)) {
      q4_0 block{};
      block.d = f16(scale(random_));
      for (std::size_t b = 0; b < sizeof block.qs; b += sizeof(std::uint32_t)) {
        const std::uint32_t codes = static_cast<std::uint32_t>(random_());
        std::memcpy(block.qs + b, &codes, sizeof codes);
      }
      put(i, block);
    }
  }
  template <class T>
  void put(std::size_t at, const T& value) {
    std::memcpy(memory_ + at, &value, sizeof value);
  }

  std::mt19937 random_{1};
  std::size_t bytes_;
  std::byte* memory_ = nullptr;
  std::vector<token_id> ordering_;
  std::vector<float> ones_ = std::vector<float>(1 << 14, 1.0f),
                     small_ = std::vector<float>(512, 0.3f);  // small: scores of a plausible size
};

/// The tensors of a pair, and what its target's passes read of them.
struct random_tensors {
  std::shared_ptr<const io::tensor_set> target, assistant;
  std::size_t bytes_read = 0;

  random_tensors(const pair_config& config, io::dtype type) {
    auto of_target = tensor_list::of_target(config.target, type), of_assistant = tensor_list::of_assistant(config.assistant, type);
    std::size_t largest = 0;
    for (const auto* list : {&of_target, &of_assistant})
      for (const io::tensor& t : *list) largest = (std::max)(largest, bytes_of(t));
    const auto weights = std::make_shared<const random_weights>(type, largest, config.target.vocab_size);
    bytes_read = bench::bytes_read(of_target);
    target = random_weights::fill(std::move(of_target), weights);
    assistant = random_weights::fill(std::move(of_assistant), weights);
  }
};

}  // namespace bench
