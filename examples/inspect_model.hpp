// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Which model the contents of a file are.
#pragma once
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "inspect_contents.hpp"
#include "outrider/gemma4/config.hpp"
#include "outrider/gemma4/gguf_names.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/text/chat_template.hpp"

namespace inspect {

namespace gemma4 = outrider::gemma4;

/// What is known of a model from its configuration: at most one of target and assistant, and `problem` if there is neither.
struct model_facts {
  std::optional<gemma4::text_config> target;
  std::optional<gemma4::assistant_config> assistant;
  std::string family;            // "Gemma 4 target", "Gemma 4 assistant", or what the file calls itself; "" if it says nothing
  std::string size;              // "E2B" …, "custom"
  std::string names;             // of an assistant in a GGUF file: "A" … "G"
  std::string chat_template;     // "launch", "interleaved", "newest", or "other" for one that is not Gemma 4's; "" without one
  std::string template_problem;  // why it cannot be read
  std::string problem;           // the sentence of the reader that refused the configuration

  [[nodiscard]] std::size_t vocab_size() const { return target ? target->vocab_size : assistant ? assistant->text.vocab_size : 0; }
};

/// What check_pair compares, as text: a target and an assistant that agree in it belong together. (The rare assistant without sliding layers
/// has a shorter one.) Empty if the configuration is not known.
[[nodiscard]] inline std::string fingerprint(const model_facts& model) {
  if (!model.target && !model.assistant) return "";
  const auto shortest = [](double value, std::chars_format format) {
    std::array<char, 32> digits{};
    std::string text(digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), value, format).ptr);
    if (const std::size_t e = text.find("e+"); e != text.npos) text.erase(e + 1, text[e + 2] == '0' ? 2 : 1);  // "1e+06"
    return text;
  };
  const gemma4::text_config& text = model.target ? *model.target : model.assistant->text;
  std::string out = "hidden " + std::to_string(model.target ? text.hidden_size : model.assistant->backbone_hidden_size) + ", vocab " +
                    std::to_string(text.vocab_size);
  for (const gemma4::attention_kind kind : gemma4::attention_kinds) {
    bool used = false;  // by an assistant's layers, or offered by a target's
    for (std::size_t i = 0; i < text.layer_count(); ++i) used = used || (text.layers[i] == kind && (model.assistant || text.owns_kv(i)));
    if (!used) continue;
    const gemma4::attention_shape& shape = text.shape(kind);
    out += std::string(", ") + gemma4::name_of(kind) + " " + std::to_string(shape.kv_heads) + "x" + std::to_string(shape.head_dim);
    if (kind == gemma4::attention_kind::sliding) out += " window " + std::to_string(text.window);
    out += " rope " + shortest(shape.rope.theta, std::chars_format::scientific);
    if (shape.rope.fraction != 1 || shape.rope.factor != 1) out += "/" + shortest(shape.rope.fraction, std::chars_format::general);
    if (shape.rope.factor != 1) out += "/" + shortest(shape.rope.factor, std::chars_format::general);
  }
  return out;
}

/// A fingerprint's 64 bits (FNV-1a) in sixteen digits: shorter to compare, the same in every release.
[[nodiscard]] inline std::string hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(hash));
  return digits.data();
}

namespace detail {

/// The released models by their numbers; of assistants the target's width counts.
inline std::string size_of(const model_facts& model) {
  struct release {
    const char* name;
    std::size_t layers, hidden, experts, assistant_hidden;
  };
  constexpr std::array<release, 5> releases{{{"E2B", 35, 1536, 0, 256},
                                             {"E4B", 42, 2560, 0, 256},
                                             {"12B", 48, 3840, 0, 1024},
                                             {"26B-A4B", 30, 2816, 128, 1024},
                                             {"31B", 60, 5376, 0, 1024}}};
  for (const release& r : releases) {
    const bool is_target = model.target && model.target->layer_count() == r.layers && model.target->hidden_size == r.hidden &&
                           model.target->experts == r.experts;
    const bool is_assistant = model.assistant && model.assistant->text.layer_count() == 4 &&
                              model.assistant->backbone_hidden_size == r.hidden && model.assistant->text.hidden_size == r.assistant_hidden;
    if ((is_target || is_assistant) && model.vocab_size() == 262144) return r.name;
  }
  return "custom";
}

/// A top-level text of config.json; "" without one.
inline std::string text_of(const contents& file, std::string_view of, std::string_view key) {
  for (const key_values& keys : file.keys)
    for (const key_value& row : keys.rows)
      if (keys.of == of && row.key == key && row.value.is_string()) return row.value.get<std::string>();
  return "";
}

}  // namespace detail

/// Never throws for a configuration that is not understood: that is a `problem`.
[[nodiscard]] inline model_facts recognise(const contents& file) {
  model_facts model;
  std::string name;  // what the file calls itself
  bool assistant = false, ours = false;
  if (file.gguf) {
    name = gemma4::architecture_of(*file.gguf);
    assistant = gemma4::is_assistant(*file.gguf);
    ours = assistant || name == gemma4::target_architecture;
    if (const auto scheme = gemma4::scheme_of(*file.gguf)) model.names = gemma4::letter_of(*scheme);
  } else {
    name = detail::text_of(file, "config.json", "model_type");
    assistant = name.ends_with("assistant");
    ours = name.starts_with("gemma4");
  }
  model.family = !ours ? name : assistant ? "Gemma 4 assistant" : "Gemma 4 target";
  if (file.format == file_format::safetensors) {
    model.problem = "a safetensors file alone has no configuration; give the directory";
    return model;
  }
  try {
    const auto description = gemma4::read_model_description(file.path);
    if (const auto* target = std::get_if<gemma4::text_config>(&description)) model.target = *target;
    if (const auto* drafter = std::get_if<gemma4::assistant_config>(&description)) model.assistant = *drafter;
    model.size = detail::size_of(model);
  } catch (const outrider::error& refused) {
    model.problem = refused.what();
  }
  try {
    if (const auto text = outrider::read_chat_template(file.path)) {
      const auto form = outrider::detect_chat_template(*text);
      model.chat_template = form ? std::string(name_of(form->generation)) : "other";
    }
  } catch (const outrider::error& refused) {
    model.template_problem = refused.what();
  }
  return model;
}

}  // namespace inspect
