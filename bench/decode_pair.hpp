// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What bench/decode.cpp measures: a pair from two paths, the facts about its weights, its prompts, and the check that it writes the right text.
#pragma once
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "machine.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"
#include "outrider/text/tokenizer.hpp"

namespace bench {

using namespace outrider;
using ids = std::vector<token_id>;

inline constexpr std::array prompts{"In the beginning God created",     "And the LORD said unto Moses,",
                                    "The LORD is my shepherd;",         "And it came to pass, when",
                                    "A wise son maketh a glad father:", "Behold, the days come, saith the LORD,"};

struct arguments {
  std::string target = OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/target",
              assistant = OUTRIDER_SOURCE_DIR "/examples/data/tiny-kjv/assistant";
  std::string backend = "cpu", kv = "f32", json_file;
  std::vector<std::string> measure{"passes", "texts", "schedules"};
  unsigned threads = 0;
  std::size_t repeat = 15, context = 128, long_context = 8192, new_tokens = 64;
  double seconds = 0.5;  // for the passes of one number of rows in one round

  [[nodiscard]] bool measures(const char* what) const { return std::find(measure.begin(), measure.end(), what) != measure.end(); }
};

/// Says on stderr what a run does that takes long.
class progress {
 public:
  void operator()(const std::string& what) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::seconds(5)) return;
    last_ = now;
    std::fprintf(stderr, "decode: %s\n", what.c_str());
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

/// What a target's file holds, in bytes of the file.
struct weight_facts {
  std::size_t parameters = 0;
  std::size_t read = 0;    // by a decoded row: the matrices of the text stack with the head in full, chosen experts only
  std::size_t macs = 0;    // products of a decoded row: the elements of these
  std::size_t used = 0;    // the same with all experts
  std::size_t expert = 0;  // one expert of one layer
};

/// Tables that are only looked up (the per-layer embeddings) and the dead keys and values of sharing layers are neither read nor used.
inline weight_facts count_weights(const io::tensor_set& tensors, const gemma4::text_config& c) {
  std::string prefix = "model.language_model.";
  if (!tensors.find(prefix + "embed_tokens.weight")) prefix = "model.";
  weight_facts facts;
  for (const auto& [name, tensor] : tensors) {
    const std::size_t elements = std::accumulate(tensor.shape.begin(), tensor.shape.end(), std::size_t{1}, std::multiplies<>());
    facts.parameters += elements;
    const bool head = name == (c.tied_head ? prefix + "embed_tokens.weight" : "lm_head.weight");
    if (!head && (!name.starts_with(prefix) || tensor.shape.size() < 2 || name.find("embed_tokens") != name.npos)) continue;
    const bool keys_or_values = name.find("self_attn.k_proj") != name.npos || name.find("self_attn.v_proj") != name.npos;
    if (keys_or_values && !c.owns_kv(std::stoul(name.substr(prefix.size() + std::string("layers.").size())))) continue;
    const bool experts = name.find(".experts.") != name.npos;
    const auto chosen = [&](std::size_t all) { return experts ? all / c.experts * c.experts_per_token : all; };
    facts.read += chosen(tensor.bytes.size());
    facts.macs += chosen(elements);
    facts.used += tensor.bytes.size();
    if (experts) facts.expert += tensor.bytes.size() / c.experts;
  }
  facts.expert /= c.layer_count();
  return facts;
}

inline weight_facts count_weights(const std::string& target) {
  const std::filesystem::path place = gemma4::locate_model(target);
  const auto config = std::get<gemma4::text_config>(gemma4::read_model_description(place));
  if (std::filesystem::is_directory(place)) return count_weights(io::load_safetensors(place), config);
  return count_weights(gemma4::target_tensors(io::open_gguf(place), config), config);
}

/// Bytes of all tensors of a model.
inline std::size_t count_bytes(const std::string& model) {
  const std::filesystem::path place = gemma4::locate_model(model);
  std::size_t sum = 0;
  if (std::filesystem::is_directory(place))
    for (const auto& [name, tensor] : io::load_safetensors(place)) sum += tensor.bytes.size();
  else
    for (const io::tensor& tensor : io::open_gguf(place).tensors) sum += tensor.bytes.size();
  return sum;
}

/// A loaded pair with one sequence. Not movable: its parts point to each other.
template <class B, class Kv>
struct loaded_pair {
  context_of<B> ctx;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  gemma4::model<B> model;
  double load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();  // of the model
  gemma4::assistant<B> assistant;
  gemma4::session<B, Kv> session{model, ctx};
  assistant_drafter<B> drafter{assistant, ctx};

  explicit loaded_pair(const arguments& args, gemma4::weight_form form = gemma4::weight_form::preferred)
      : ctx(execution{args.threads}),
        model(gemma4::load_model<B>(args.target, {.form = form})),
        assistant(gemma4::load_assistant<B>(args.assistant, {.form = form})) {}
  loaded_pair(const loaded_pair&) = delete;
  loaded_pair& operator=(const loaded_pair&) = delete;

  /// Always `count` tokens: nothing ends a text here, so that all runs are of one length.
  statistics write(const ids& prompt, std::size_t draft, std::size_t count, ids& text) {
    session.clear();
    text.clear();
    text.reserve(count);
    const generate_options options{.max_new_tokens = count, .draft = draft, .eos = {}, .suppress = {}};
    const auto keep = [&](token_id token) { text.push_back(token); };
    if (draft == 0) return generate(session, prompt, options, keep).stats;
    return speculative_decoder(session, drafter, greedy{}, fixed<max_draft_length>{}).generate(prompt, options, keep).stats;
  }
};

inline void require_same(const ids& got, const ids& want, const std::string& what, const std::string& standard) {
  const auto [a, b] = std::mismatch(got.begin(), got.end(), want.begin(), want.end());
  if (a == got.end() && b == want.end()) return;
  throw std::runtime_error("token " + std::to_string(a - got.begin()) + " of the text " + what + " is not the one " + standard +
                           " gives; no figures from a program that writes another text");
}

/// The prompts as ids: by the target's tokenizer where texts are measured and there is one, else ids spread over the vocabulary.
inline std::vector<ids> prompt_ids(const arguments& args, std::size_t vocab_size) {
  std::vector<ids> all(prompts.size());
  const std::filesystem::path place = gemma4::locate_model(args.target);
  const std::filesystem::path file = std::filesystem::is_directory(place) ? place / "tokenizer.json" : place;
  if (args.measures("texts") && std::filesystem::exists(file)) {
    const tokenizer text = tokenizer::from_file(file);
    std::transform(prompts.begin(), prompts.end(), all.begin(), [&](const char* prompt) { return text.encode(prompt); });
  } else {
    for (std::size_t p = 0; p < all.size(); ++p)
      for (std::size_t i = 0; i < 8; ++i) all[p].push_back(static_cast<token_id>((p * 7919 + i * 104729) % vocab_size));
  }
  return all;
}

/// Refuses to go on with a program that writes another text than the reference backend, or than itself without speculation. The reference
/// takes minutes for a large model, so it is asked only below 10^8 parameters. Returns what the text was compared with.
template <class B, class Kv>
std::string check_text(loaded_pair<B, Kv>& pair, const arguments& args, const ids& prompt, std::size_t parameters) {
  constexpr std::size_t drafts = 4;
  const bool tiny = parameters < 100'000'000;
  const std::size_t count = (std::min)(args.new_tokens, tiny ? std::size_t{32} : std::size_t{8});
  ids want, got;
  pair.write(prompt, 0, count, want);
  if (tiny) {
    constexpr auto form = prefers_int8_products<B> ? gemma4::weight_form::grouped : gemma4::weight_form::stored;
    loaded_pair<reference, Kv>(args, form).write(prompt, 0, count, got);
    require_same(want, got, "on backend " + args.backend, "backend reference");
  }
  pair.write(prompt, drafts, count, got);
  require_same(got, want, "with speculation", "plain decoding");
  return tiny ? "backend reference" : "plain decoding alone, backend reference takes too long for this model";
}

}  // namespace bench
