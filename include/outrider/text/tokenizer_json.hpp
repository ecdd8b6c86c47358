// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/core/scalar.hpp"
#include "outrider/error.hpp"
#include "outrider/io/json.hpp"
#include "outrider/text/merge_table.hpp"
#include "outrider/text/tokenizer_parts.hpp"
#include "outrider/text/vocabulary.hpp"

namespace outrider {

namespace detail {

/// Reads a tokenizer.json from the parser's events. The two big parts, model.vocab and model.merges, go straight into flat arrays (as a
/// document they would need many times the file); everything else is small and becomes an ordinary document.
class tokenizer_json_reader final : public io::detail::json_builder {
 public:
  /// Offsets are 32 bits wide: with this limit on the file no text in it can outgrow them.
  static constexpr std::size_t max_bytes = std::size_t{1} << 30;

  tokenizer_json_reader(std::string_view text, const std::string& file) : json_builder(text, file) {
    if (text.size() > max_bytes)
      refuse("the file", "has " + std::to_string(text.size()) + " bytes, at most " + std::to_string(max_bytes) + " are allowed");
  }

  tokenizer_parts read() {
    const nlohmann::json document = build(*this);
    check(document);
    return parts(document);
  }

  // The events that matter; each returns true to go on.
  bool number_unsigned(std::uint64_t value) {
    if (inside_ != place::vocab) return json_builder::number_unsigned(value);
    if (value > max_bytes) refuse(vocab_key(), "is " + std::to_string(value) + ", more than a file can have tokens");
    entries_.back().id = static_cast<std::uint32_t>(value);
    return true;
  }
  bool string(std::string& value) {
    if (inside_ == place::merges) {
      const std::size_t space = value.find(' ', 1);
      if (space == value.npos) refuse(merge_key(), "is " + in_quotes(value) + ", must be two parts with a space between them");
      add_merge_part(std::string_view(value).substr(0, space));
      add_merge_part(std::string_view(value).substr(space + 1));
      return true;
    }
    if (inside_ == place::merge_pair) {
      if (pair_parts_ == 2) refuse(merge_key(), "has more than two strings, must have two");
      ++pair_parts_;
      add_merge_part(value);
      return true;
    }
    return json_builder::string(value);
  }
  bool start_object(std::size_t size) {
    if (!at_model_key("vocab")) {
      json_builder::start_object(size);
      if (containers().size() == 2 && containers()[0]->is_object() && key_ == "model") model_ = containers()[1];
      return true;
    }
    inside_ = place::vocab;
    has_vocab_ = true;
    return true;
  }
  bool end_object() {
    if (inside_ == place::vocab) return leave();
    return json_builder::end_object();
  }
  bool start_array(std::size_t size) {
    if (inside_ == place::merges) {
      inside_ = place::merge_pair;
      pair_parts_ = 0;
      return true;
    }
    if (!at_model_key("merges")) return json_builder::start_array(size);
    inside_ = place::merges;
    has_merges_ = true;
    return true;
  }
  bool end_array() {
    if (inside_ == place::merge_pair) {
      if (pair_parts_ != 2) refuse(merge_key(), "has " + std::to_string(pair_parts_) + " strings, must have two");
      inside_ = place::merges;
      return true;
    }
    if (inside_ == place::merges) return leave();
    return json_builder::end_array();
  }
  bool key(std::string& name) {
    if (inside_ == place::vocab) {
      entries_.push_back({append(name), 0});
      return true;
    }
    key_ = name;
    return json_builder::key(name);
  }

 private:
  enum class place { document, vocab, merges, merge_pair };
  struct vocab_entry {
    vocabulary::piece text;
    std::uint32_t id;
  };

  [[noreturn]] void refuse(const std::string& key, const std::string& what) const {
    throw error(error_code::tokenizer_malformed, file() + ": " + key + " " + what);
  }

  [[nodiscard]] bool at_model_key(std::string_view name) const {
    return inside_ == place::document && containers().size() == 2 && containers()[1] == model_ && key_ == name;
  }
  bool leave() {
    inside_ = place::document;
    return true;
  }

  // ---- model.vocab and model.merges

  void check_value(const nlohmann::json& value) const override {
    const std::string type = value.type_name();
    if (inside_ == place::vocab) refuse(vocab_key(), "is of type " + type + ", must be a token id (0 or more)");
    if (inside_ == place::merges) refuse(merge_key(), "is of type " + type + ", must be a string or an array of two strings");
    if (inside_ == place::merge_pair) refuse(merge_key(), "contains a value of type " + type + ", must be two strings");
  }
  [[nodiscard]] std::string vocab_key() const { return "model.vocab[" + in_quotes(text_of(entries_.back().text)) + "]"; }
  [[nodiscard]] std::string merge_key() const {
    return merge_key((merge_parts_.size() - (inside_ == place::merge_pair ? pair_parts_ : 0)) / 2);
  }
  [[nodiscard]] static std::string merge_key(std::size_t index) { return "model.merges[" + std::to_string(index) + "]"; }

  vocabulary::piece append(std::string_view text) {
    const vocabulary::piece piece{static_cast<std::uint32_t>(texts_.size()), static_cast<std::uint32_t>(text.size())};
    texts_ += text;
    return piece;
  }
  [[nodiscard]] std::string_view text_of(vocabulary::piece piece) const {
    return std::string_view(texts_).substr(piece.offset, piece.length);
  }
  void add_merge_part(std::string_view text) {
    merge_texts_ += text;
    merge_parts_.push_back(static_cast<std::uint32_t>(text.size()));
  }

  // ---- after the last event

  void check(const nlohmann::json& document) const {
    if (!document.is_object()) refuse("the file", "holds a value of type " + std::string(document.type_name()) + ", must be an object");
    const auto model = document.find("model");
    if (model == document.end() || !model->is_object()) refuse("model", "is missing or not an object");
    require(*model, "model.", "type", R"("BPE")");
    require(*model, "model.", "byte_fallback", "true");
    require_if_set(*model, "model.", "ignore_merges", "false");
    require_if_set(*model, "model.", "dropout", "0");
    require_if_set(*model, "model.", "continuing_subword_prefix", R"("")");
    require_if_set(*model, "model.", "end_of_word_suffix", R"("")");
    if (!has_vocab_) refuse("model.vocab", "is missing or not an object");
    if (!has_merges_) refuse("model.merges", "is missing or not an array");
    require(document, "", "normalizer", R"({"content":"▁","pattern":{"String":" "},"type":"Replace"})");
    // After the normaliser no space is left, so this split never happens: it is the only one that changes nothing.
    require_if_set(document, "", "pre_tokenizer",
                   R"({"behavior":"MergedWithPrevious","invert":false,"pattern":{"String":" "},"type":"Split"})");
    require(document, "", "decoder",
            R"({"decoders":[{"content":" ","pattern":{"String":"▁"},"type":"Replace"},{"type":"ByteFallback"},{"type":"Fuse"}],)"
            R"("type":"Sequence"})");
  }
  /// The value must equal `allowed`, a JSON text.
  void require(const nlohmann::json& object, const std::string& prefix, const char* key, const std::string& allowed) const {
    const auto found = object.find(key);
    if (found == object.end()) refuse(prefix + key, "is missing, must be " + allowed);
    if (*found != nlohmann::json::parse(allowed)) refuse(prefix + key, "is " + shown(*found) + ", must be " + allowed);
  }
  /// Like require, but the key may be missing or null.
  void require_if_set(const nlohmann::json& object, const std::string& prefix, const char* key, const std::string& allowed) const {
    if (const auto found = object.find(key); found != object.end() && !found->is_null()) require(object, prefix, key, allowed);
  }
  [[nodiscard]] static std::string shown(const nlohmann::json& value) {
    const std::string text = value.dump();
    return text.size() <= 200 ? text : "of type " + std::string(value.type_name());
  }

  /// The flag of an added token. Everything but a boolean is refused.
  [[nodiscard]] bool flag(const nlohmann::json& token, const std::string& where, const char* key, bool otherwise) const {
    const auto found = token.find(key);
    if (found == token.end()) return otherwise;
    if (!found->is_boolean()) refuse(where + key, "is " + shown(*found) + ", must be true or false");
    return found->get<bool>();
  }

  tokenizer_parts parts(const nlohmann::json& document) {
    static const nlohmann::json none = nlohmann::json::array();
    const auto found = document.find("added_tokens");
    const nlohmann::json& list = found == document.end() || found->is_null() ? none : *found;
    if (!list.is_array()) refuse("added_tokens", "is of type " + std::string(list.type_name()) + ", must be an array");

    // Every id below this bound is in the file at most once, so no array is longer than the file.
    const std::size_t bound = entries_.size() + list.size();
    std::vector<std::optional<vocabulary::piece>> by_id(bound);
    for (const vocab_entry& entry : entries_) {
      const std::string key = "model.vocab[" + in_quotes(text_of(entry.text)) + "]";
      if (entry.id >= bound)
        refuse(key, "is " + std::to_string(entry.id) + ", but the file has at most " + std::to_string(bound) + " tokens");
      if (by_id[entry.id])
        refuse(key, "is " + std::to_string(entry.id) + ", which is also the id of " + in_quotes(text_of(*by_id[entry.id])));
      by_id[entry.id] = entry.text;
    }
    entries_ = {};

    std::vector<added_token> added;
    std::vector<bool> listed(bound);
    for (std::size_t i = 0; i < list.size(); ++i) {
      const nlohmann::json& token = list[i];
      const std::string where = "added_tokens[" + std::to_string(i) + "].";
      if (!token.is_object())
        refuse(where.substr(0, where.size() - 1), "is of type " + std::string(token.type_name()) + ", must be an object");
      const auto id = token.find("id"), content = token.find("content");
      if (id == token.end() || !id->is_number_unsigned()) refuse(where + "id", "is missing or not a token id (0 or more)");
      if (content == token.end() || !content->is_string() || content->get_ref<const std::string&>().empty())
        refuse(where + "content", "is missing or not a string with at least one character");
      const auto index = id->get<std::uint64_t>();
      const auto& text = content->get_ref<const std::string&>();
      if (index >= bound)
        refuse(where + "id", "is " + std::to_string(index) + ", but the file has at most " + std::to_string(bound) + " tokens");
      if (listed[index]) refuse(where + "id", "is " + std::to_string(index) + ", which is listed twice");
      listed[index] = true;
      if (!by_id[index]) by_id[index] = append(text);
      if (text_of(*by_id[index]) != text)
        refuse(where + "content", "is " + in_quotes(text) + ", but token " + std::to_string(index) + " is " +
                                      in_quotes(text_of(*by_id[index])) + " in model.vocab");
      for (const char* key : {"single_word", "lstrip", "rstrip"})
        if (flag(token, where, key, false)) refuse(where + key, "is true, only false is supported");
      const bool special = flag(token, where, "special", false);
      added.push_back({static_cast<token_id>(index), special, flag(token, where, "normalized", !special)});
    }

    while (!by_id.empty() && !by_id.back()) by_id.pop_back();
    std::vector<vocabulary::piece> pieces;
    pieces.reserve(by_id.size());
    for (std::size_t id = 0; id < by_id.size(); ++id) {
      if (!by_id[id])
        refuse("model.vocab", "has no token with the id " + std::to_string(id) + ", ids must be 0 to " + std::to_string(by_id.size() - 1) +
                                  " without a gap");
      pieces.push_back(*by_id[id]);
    }
    by_id = {};
    vocabulary tokens(file(), std::move(texts_), std::move(pieces));
    std::vector<token_type> types(tokens.size(), token_type::normal);
    for (const added_token& token : added)
      types[static_cast<std::size_t>(token.id)] = token.special ? token_type::control : token_type::user_defined;
    for (std::size_t id = 0; id < types.size(); ++id)
      if (byte_of_name(tokens.text(static_cast<token_id>(id)))) types[id] = token_type::byte;
    merge_table merges(resolve_merges(tokens));
    return {file(), std::move(tokens), std::move(types), std::move(merges), std::move(added), std::nullopt, std::nullopt};
  }

  [[nodiscard]] std::vector<merge_table::merge> resolve_merges(const vocabulary& tokens) const {
    std::vector<merge_table::merge> merges;
    merges.reserve(merge_parts_.size() / 2);
    std::string_view rest = merge_texts_;
    for (std::size_t i = 0; i < merge_parts_.size(); i += 2) {
      const std::string_view result = rest.substr(0, std::size_t{merge_parts_[i]} + merge_parts_[i + 1]);  // the parts lie side by side
      const auto id_of = [&](std::string_view text) {
        const auto id = tokens.find(text);
        if (!id) refuse(merge_key(i / 2), "needs the token " + in_quotes(text) + ", which is not in model.vocab");
        return *id;
      };
      merges.push_back({id_of(result.substr(0, merge_parts_[i])), id_of(result.substr(merge_parts_[i])), id_of(result)});
      rest.remove_prefix(result.size());
    }
    return merges;
  }

  const nlohmann::json* model_ = nullptr;  // to know its keys by; moves at the end of the text
  std::string key_;                        // the last key in the document
  place inside_ = place::document;
  bool has_vocab_ = false, has_merges_ = false;
  std::string texts_;                       // of the tokens, one after the other
  std::vector<vocab_entry> entries_;        // in the file's order
  std::string merge_texts_;                 // left, right, left, right …
  std::vector<std::uint32_t> merge_parts_;  // their lengths
  std::size_t pair_parts_ = 0;
};

}  // namespace detail

/// The parts of a tokenizer.json: BPE with byte fallback, "▁" for a space, as Gemma's. `file` names it in errors.
/// error_code::file_malformed if it is not JSON, error_code::tokenizer_malformed if it is another kind of tokenizer or contradicts itself.
/// The post-processor, padding and truncation are not read: the caller says what surrounds a text.
[[nodiscard]] inline tokenizer_parts parse_tokenizer_json(std::string_view text, const std::string& file) {
  return detail::tokenizer_json_reader(text, file).read();
}

}  // namespace outrider
