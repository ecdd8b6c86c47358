// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// tokenizer.json and its companions to the keys of a GGUF file, and back.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/error.hpp"
#include "outrider/io/gguf.hpp"
#include "outrider/io/gguf_writer.hpp"
#include "outrider/io/json_file.hpp"
#include "outrider/io/mapped_file.hpp"
#include "outrider/io/output_file.hpp"
#include "outrider/text/tokenizer_gguf.hpp"
#include "outrider/text/tokenizer_json.hpp"
#include "outrider/text/tokenizer_parts.hpp"

namespace outrider::gemma4::detail {

/// What tokens are called in tokenizer_config.json and config.json, and in a GGUF file ("seperator" is spelled so there).
inline constexpr std::array<std::pair<std::string_view, std::string_view>, 7> token_roles{
    {{"bos", "bos"}, {"eos", "eos"}, {"unk", "unknown"}, {"sep", "seperator"}, {"pad", "padding"}, {"cls", "cls"}, {"mask", "mask"}}};

/// A JSON object in a file of the directory; an empty one if there is no such file.
inline nlohmann::json read_optional_object(const std::filesystem::path& file) {
  if (!io::is_there(file)) return nlohmann::json::object();
  nlohmann::json document = io::read_json_file(file);
  if (!document.is_object())
    throw error(error_code::file_malformed, file.string() + ": holds JSON of type " + document.type_name() + ", allowed is an object");
  return document;
}
/// "text", or {"content": "text", …}; nothing for something else.
inline std::optional<std::string> token_text(const nlohmann::json& value) {
  const nlohmann::json& text = value.is_object() && value.contains("content") ? value.at("content") : value;
  return text.is_string() ? std::optional(text.get<std::string>()) : std::nullopt;
}
inline std::optional<std::string> token_text(const nlohmann::json& object, const std::string& key) {
  const auto found = object.find(key);
  return found == object.end() ? std::nullopt : token_text(*found);
}

/// The tokenizer of a Hugging Face directory on its way into a GGUF header, with the values that llama.cpp's converter gives it.
class tokenizer_to_gguf {
 public:
  explicit tokenizer_to_gguf(std::filesystem::path directory)
      : directory_(std::move(directory)), settings_(read_optional_object(directory_ / "tokenizer_config.json")) {
    const std::filesystem::path file = directory_ / "tokenizer.json";
    if (!io::is_there(file)) return;
    const io::mapped_file text(file);
    parts_ = parse_tokenizer_json(text.text(), file.string());
    find_flags(text.text());
  }

  /// Nothing if the directory has no tokenizer.json.
  [[nodiscard]] std::optional<std::size_t> token_count() const noexcept {
    return parts_ ? std::optional(parts_->tokens.size()) : std::nullopt;
  }

  /// Adds the keys; without a tokenizer only the special ids. `config` is config.json.
  void add_to(io::gguf_header& header, const nlohmann::json& config) const {
    if (parts_) {
      header.add("tokenizer.ggml.model", "gemma4");
      add_tokens(header);
      add_merges(header);
    }
    add_special_ids(header, config);
    for (const auto& [role, value] : flags_) header.add("tokenizer.ggml.add_" + role + "_token", value);
    if (const auto text = chat_template()) header.add("tokenizer.chat_template", *text);
    if (!parts_) return;
    header.add("tokenizer.ggml.add_space_prefix", false);
    if (std::none_of(flags_.begin(), flags_.end(), [](const auto& flag) { return flag.first == "bos"; }))
      header.add("tokenizer.ggml.add_bos_token", true);
  }

 private:
  static std::string id_key(std::string_view role) { return "tokenizer.ggml." + std::string(role) + "_token_id"; }

  /// Control are the tokens that tokenizer_config.json or the tokenizer's class names, but the markers a chat parser is to see are
  /// user-defined. Markers the file does not name are normal, which readers know about; anything else that is split out of texts would
  /// be lost by that, and so it gets a type that tells.
  void add_tokens(io::gguf_header& header) const {
    const tokenizer_parts& parts = *parts_;
    constexpr std::array<std::string_view, 7> visible{"<|channel>",       "<channel|>",       "<|tool_call>", "<tool_call|>",
                                                      "<|tool_response>", "<tool_response|>", "<|\"|>"};
    const auto& markers = outrider::detail::gemma4_markers;
    const std::set<std::string> named = named_tokens();
    std::vector<std::string> texts;
    std::vector<std::int32_t> types;
    for (std::size_t id = 0; id < parts.tokens.size(); ++id) {
      const std::string& text = texts.emplace_back(parts.tokens.text(static_cast<token_id>(id)));
      token_type type = parts.types[id];
      const bool marker = std::find(markers.begin(), markers.end(), text) != markers.end();
      if (std::find(visible.begin(), visible.end(), text) != visible.end())
        type = token_type::user_defined;
      else if (type != token_type::byte && named.count(text) != 0)
        type = token_type::control;
      else if (marker)
        type = token_type::normal;
      types.push_back(static_cast<std::int32_t>(type));
    }
    header.add("tokenizer.ggml.tokens", texts);
    header.add("tokenizer.ggml.scores", std::vector<float>(texts.size(), -1000.0f));
    header.add("tokenizer.ggml.token_type", types);
  }
  void add_merges(io::gguf_header& header) const {
    std::vector<std::string> merges;
    merges.reserve(parts_->merges.merges().size());
    for (const merge_table::merge& m : parts_->merges.merges())
      merges.push_back(std::string(parts_->tokens.text(m.left)) + " " + std::string(parts_->tokens.text(m.right)));
    if (!merges.empty()) header.add("tokenizer.ggml.merges", merges);
  }
  /// The values of "…_token" and the lists "…_tokens", and what the class GemmaTokenizer names by itself.
  [[nodiscard]] std::set<std::string> named_tokens() const {
    std::set<std::string> named{"<pad>", "<eos>", "<bos>", "<unk>", "<mask>"};
    const auto add = [&](const nlohmann::json& value) {
      if (auto text = token_text(value)) named.insert(std::move(*text));
    };
    for (const auto& [key, value] : settings_.items()) {
      if (key.ends_with("_token")) add(value);
      if ((key.ends_with("_tokens") && value.is_structured()) || key == "model_specific_special_tokens")
        for (const nlohmann::json& entry : value) add(entry);
    }
    return named;
  }

  void add_special_ids(io::gguf_header& header, const nlohmann::json& config) const {
    std::set<std::string_view> done;
    const auto add = [&](std::string_view role, std::uint64_t id) {
      if (id <= 0xffffffffu && done.insert(role).second) header.add(id_key(role), static_cast<std::uint32_t>(id));
    };
    if (parts_)
      for (const auto& [name, role] : token_roles)
        if (const auto text = token_text(settings_, std::string(name) + "_token"))
          for (const added_token& token : parts_->added)
            if (parts_->tokens.text(token.id) == *text) add(role, static_cast<std::uint64_t>(token.id));
    for (const auto& [name, role] : token_roles)
      for (const nlohmann::json* const object : {&config, config.contains("text_config") ? &config.at("text_config") : nullptr}) {
        if (!object || !object->is_object()) continue;
        const auto found = object->find(std::string(name) + "_token_id");
        if (found == object->end()) continue;
        const nlohmann::json& id = found->is_array() && !parts_ && !found->empty() ? found->front() : *found;
        if (id.is_number_unsigned()) add(role, id.get<std::uint64_t>());
      }
  }

  /// add_…_token: what the post-processor's templates show, then what tokenizer_config.json says.
  void find_flags(std::string_view tokenizer) {
    // The vocabulary and the merges are skipped: as a document they would take many times the file.
    const nlohmann::json document =
        nlohmann::json::parse(tokenizer, [](int depth, nlohmann::json::parse_event_t event, nlohmann::json& key) {
          return !(depth == 1 && event == nlohmann::json::parse_event_t::key && key == "model");
        });
    if (const auto found = document.find("post_processor"); found != document.end() && found->is_object()) {
      if (const auto list = found->find("processors"); list != found->end() && list->is_array())
        for (const nlohmann::json& processor : *list) read_template(processor);
      else
        read_template(*found);
    }
    for (const char* const role : {"bos", "eos", "sep"})
      if (const auto found = settings_.find("add_" + std::string(role) + "_token"); found != settings_.end() && found->is_boolean())
        set_flag(role, found->get<bool>());
  }
  void set_flag(std::string_view role, bool value) {
    const auto found = std::find_if(flags_.begin(), flags_.end(), [&](const auto& flag) { return flag.first == role; });
    if (found == flags_.end())
      flags_.emplace_back(role, value);
    else
      found->second = value;
  }
  /// A template like "<bos> A" for one text and "<bos> A <bos> B" for two.
  void read_template(const nlohmann::json& processor) {
    if (!processor.is_object() || processor.value("type", nlohmann::json()) != "TemplateProcessing") return;
    const auto special = [](const nlohmann::json& entry) -> std::optional<std::string> {
      if (!entry.is_object() || !entry.contains("SpecialToken")) return std::nullopt;
      return token_text(entry.at("SpecialToken"), "id");
    };
    const auto list = [&](const char* key) {
      const auto found = processor.find(key);
      return found != processor.end() && found->is_array() ? found->get<std::vector<nlohmann::json>>() : std::vector<nlohmann::json>();
    };
    const std::string bos = token_text(settings_, "bos_token").value_or("<bos>"),
                      eos = token_text(settings_, "eos_token").value_or("<eos>");
    const auto sep = token_text(settings_, "sep_token");
    const auto one = list("single"), two = list("pair");
    if (one.size() > 1) {
      if (const auto first = special(one.front())) set_flag("bos", first == bos);
      if (const auto last = special(one.back())) set_flag("eos", last == eos);
    }
    std::vector<std::size_t> texts;
    for (std::size_t i = 0; i < two.size(); ++i)
      if (!special(two[i])) texts.push_back(i);
    if (texts.size() != 2 || texts[1] == texts[0] + 1) return;  // nothing stands between the two texts
    bool separated = false;
    for (std::size_t i = texts[0] + 1; i < texts[1]; ++i) separated = separated || special(two[i]) == sep || special(two[i]) == eos;
    set_flag("sep", separated);
  }

  [[nodiscard]] std::optional<std::string> chat_template() const {
    for (const char* const name : {"tokenizer_config.json", "chat_template.jinja", "chat_template.json"}) {
      const std::filesystem::path file = directory_ / name;
      if (file.extension() == ".jinja") {
        if (io::is_there(file)) return io::read_text_file(file);
        continue;
      }
      const nlohmann::json document = read_optional_object(file);
      const auto found = document.find("chat_template");
      if (found == document.end()) continue;
      if (found->is_string()) return found->get<std::string>();
      if (found->is_array())  // several, each with a name
        for (const nlohmann::json& entry : *found)
          if (entry.is_object() && entry.value("name", nlohmann::json()) == "default") return token_text(entry, "template");
    }
    return std::nullopt;
  }

  std::filesystem::path directory_;
  nlohmann::json settings_;  // tokenizer_config.json
  std::optional<tokenizer_parts> parts_;
  std::vector<std::pair<std::string, bool>> flags_;  // add_…_token, in the order they were found
};

/// Writes the tokenizer of a GGUF file as tokenizer.json. Nothing of its size is held: it goes to the file entry by entry.
inline void write_tokenizer_json(io::output_file& out, const tokenizer_parts& parts) {
  const auto quoted = [&](token_id id) {
    try {
      return nlohmann::json(parts.tokens.text(id)).dump();
    } catch (const nlohmann::json::exception&) {
      throw error(error_code::tokenizer_malformed, parts.source + ": token " + std::to_string(id) + " is not UTF-8, which JSON needs");
    }
  };
  out.write(R"({"version":"1.0","truncation":null,"padding":null,"added_tokens":[)");
  for (std::size_t i = 0; i < parts.added.size(); ++i) {
    const added_token& token = parts.added[i];
    out.write((i == 0 ? "" : ",") + (R"({"id":)" + std::to_string(token.id)) + R"(,"content":)" + quoted(token.id) +
              R"(,"single_word":false,"lstrip":false,"rstrip":false,"normalized":)" + (token.normalized ? "true" : "false") +
              R"(,"special":)" + (token.special ? "true}" : "false}"));
  }
  out.write(R"(],"normalizer":{"type":"Replace","pattern":{"String":" "},"content":"▁"},)");
  out.write(R"("pre_tokenizer":{"type":"Split","pattern":{"String":" "},"behavior":"MergedWithPrevious","invert":false},)");
  const std::optional<token_id> bos = parts.bos ? parts.bos : parts.tokens.find("<bos>");
  if (bos) {
    const std::string text = quoted(*bos), start = R"({"SpecialToken":{"id":)" + text + R"(,"type_id":)";
    out.write(R"("post_processor":{"type":"TemplateProcessing","single":[)" + start +
              R"(0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[)" + start + R"(0}},{"Sequence":{"id":"A","type_id":0}},)" + start +
              R"(1}},{"Sequence":{"id":"B","type_id":1}}],"special_tokens":{)" + text + R"(:{"id":)" + text + R"(,"ids":[)" +
              std::to_string(*bos) + R"(],"tokens":[)" + text + "]}}},");
  } else {
    out.write(R"("post_processor":null,)");
  }
  out.write(R"("decoder":{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},)");
  out.write(R"({"type":"ByteFallback"},{"type":"Fuse"}]},"model":{"type":"BPE","dropout":null,"unk_token":)");
  const auto unknown = parts.tokens.find("<unk>");
  out.write((unknown ? quoted(*unknown) : "null") + R"(,"continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":true,)");
  out.write(R"("byte_fallback":true,"ignore_merges":false,"vocab":{)");
  for (std::size_t id = 0; id < parts.tokens.size(); ++id)
    out.write((id == 0 ? "" : ",") + quoted(static_cast<token_id>(id)) + ":" + std::to_string(id));
  out.write(R"(},"merges":[)");
  for (std::size_t i = 0; i < parts.merges.merges().size(); ++i) {
    const merge_table::merge& m = parts.merges.merges()[i];
    out.write((i == 0 ? "[" : ",[") + quoted(m.left) + "," + quoted(m.right) + "]");
  }
  out.write("]}}\n");
}

/// tokenizer_config.json of a GGUF file, without the chat template, which has a file of its own.
inline nlohmann::ordered_json tokenizer_settings(const io::gguf_file& file, const tokenizer_parts& parts) {
  nlohmann::ordered_json out;
  out["tokenizer_class"] = "GemmaTokenizer";
  std::set<std::string> named;
  for (const auto& [name, role] : token_roles) {
    const io::gguf_value* const value = file.find("tokenizer.ggml." + std::string(role) + "_token_id");
    const auto id = value ? value->integer() : std::nullopt;
    if (!id || *id < 0 || *id >= static_cast<std::int64_t>(parts.tokens.size())) continue;
    const std::string text(parts.tokens.text(static_cast<token_id>(*id)));
    out[std::string(name) + "_token"] = text;
    named.insert(text);
  }
  for (const char* const role : {"bos", "eos", "sep"})
    if (const io::gguf_value* const value = file.find("tokenizer.ggml.add_" + std::string(role) + "_token"); value && value->boolean())
      out["add_" + std::string(role) + "_token"] = *value->boolean();
  // The rest of those the file calls control, so that they are control again when this is converted back.
  nlohmann::ordered_json more = nlohmann::ordered_json::array();
  const auto types = file.find("tokenizer.ggml.token_type")->integers();
  for (std::size_t id = 0; id < parts.tokens.size(); ++id) {
    const std::string text(parts.tokens.text(static_cast<token_id>(id)));
    if ((*types)[id] == static_cast<std::int64_t>(token_type::control) && named.count(text) == 0) more.push_back(text);
  }
  if (!more.empty()) out["additional_special_tokens"] = more;
  return out;
}

}  // namespace outrider::gemma4::detail
