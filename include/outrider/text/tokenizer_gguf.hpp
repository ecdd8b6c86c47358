// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "outrider/core/scalar.hpp"
#include "outrider/error.hpp"
#include "outrider/io/gguf.hpp"
#include "outrider/text/merge_table.hpp"
#include "outrider/text/tokenizer_parts.hpp"
#include "outrider/text/vocabulary.hpp"

namespace outrider {

namespace detail {

/// The markers of Gemma 4's conversations. Converters give them any type: "user-defined" to those that a chat parser is to see, "normal" to
/// those that the model's tokenizer_config.json does not name. They are markers all the same, as in the model's tokenizer.json, so that
/// a user's words cannot become one.
inline constexpr auto gemma4_markers = std::to_array<std::string_view>(
    {"<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|\"|>", "<|think|>", "<|channel>",
     "<channel|>", "<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>", "<|video|>"});

/// Reads the tokenizer.ggml.* keys of a GGUF file.
class tokenizer_gguf_reader {
 public:
  explicit tokenizer_gguf_reader(const io::gguf_file& file) : file_(file) {}

  tokenizer_parts read() const {
    check_model();
    tokenizer_parts parts;
    parts.source = file_.source;
    parts.tokens = read_tokens();
    read_types(parts);
    parts.merges = read_merges(parts.tokens);
    for (const char* name : {"eot", "eom", "unknown", "padding", "mask", "seperator", "cls"}) (void)special_id(name, parts.tokens);
    parts.bos = special_id("bos", parts.tokens);
    parts.eos = special_id("eos", parts.tokens);
    return parts;
  }

 private:
  [[noreturn]] void refuse(const std::string& key, const std::string& what) const {
    throw error(error_code::tokenizer_malformed, file_.source + ": tokenizer.ggml." + key + " " + what);
  }
  [[nodiscard]] const io::gguf_value* find(const std::string& key) const noexcept { return file_.find("tokenizer.ggml." + key); }

  /// An array whose elements have one of two types.
  [[nodiscard]] const io::gguf_value& array(const std::string& key, io::gguf_type type, io::gguf_type or_type) const {
    const io::gguf_value* const value = find(key);
    const std::string expected =
        "an array of " + std::string(name_of(type)) + (type == or_type ? "" : " or " + std::string(name_of(or_type)));
    if (!value) refuse(key, "is missing, must be " + expected);
    if (!value->is_array || (value->type != type && value->type != or_type))
      refuse(key, "is " + std::string(value->is_array ? "an array of " : "of type ") + std::string(name_of(value->type)) + ", must be " +
                      expected);
    return *value;
  }
  [[nodiscard]] const io::gguf_value& array(const std::string& key, io::gguf_type type) const { return array(key, type, type); }
  void check_length(const std::string& key, const io::gguf_value& value, std::size_t tokens) const {
    if (value.count < tokens)
      refuse(key, "has " + std::to_string(value.count) + " entries, must have one for each of the " + std::to_string(tokens) + " tokens");
  }

  void check_model() const {
    const io::gguf_value* const model = find("model");
    if (!model) refuse("model", "is missing, must be 'gemma4'");
    if (const auto name = model->text(); name != "gemma4")
      refuse("model", "is " + (name ? in_quotes(*name) : "no string") + ", only 'gemma4' is supported");
  }

  [[nodiscard]] vocabulary read_tokens() const {
    const io::gguf_value& value = array("tokens", io::gguf_type::string);
    constexpr std::size_t most_bytes = std::size_t{1} << 30;  // offsets are 32 bits wide
    if (value.bytes.size() > most_bytes)
      refuse("tokens", "has " + std::to_string(value.bytes.size()) + " bytes, at most " + std::to_string(most_bytes) + " are allowed");
    const std::vector<std::string_view> all = *value.texts();
    std::string texts;
    texts.reserve(value.bytes.size() - sizeof(std::uint64_t) * value.count);
    std::vector<vocabulary::piece> pieces;
    pieces.reserve(value.count);
    for (const std::string_view text : all) {
      pieces.push_back({static_cast<std::uint32_t>(texts.size()), static_cast<std::uint32_t>(text.size())});
      texts += text;
    }
    return {file_.source + ": tokenizer.ggml.tokens", std::move(texts), std::move(pieces)};
  }

  void read_types(tokenizer_parts& parts) const {
    const std::size_t tokens = parts.tokens.size();
    if (find("scores")) check_length("scores", array("scores", io::gguf_type::f32, io::gguf_type::i32), tokens);
    const io::gguf_value& value = array("token_type", io::gguf_type::i32);
    check_length("token_type", value, tokens);
    const auto numbers = *value.integers();
    parts.types.reserve(tokens);
    for (std::size_t id = 0; id < tokens; ++id) {
      const std::string_view text = parts.tokens.text(static_cast<token_id>(id));
      if (numbers[id] < 1 || numbers[id] > 6)
        refuse("token_type", "is " + std::to_string(numbers[id]) + " for token " + std::to_string(id) + ", known are 1 to 6");
      auto type = static_cast<token_type>(numbers[id]);
      if (type == token_type::byte && !byte_of_name(text))
        refuse("token_type",
               "says that token " + std::to_string(id) + ", " + in_quotes(text) + ", is a byte, whose names are '<0x00>' to '<0xFF>'");
      if (byte_of_name(text)) type = token_type::byte;
      if (std::find(gemma4_markers.begin(), gemma4_markers.end(), text) != gemma4_markers.end()) type = token_type::control;
      if (text == "</s>") type = token_type::normal;  // an HTML tag in this vocabulary, an end of text in others
      parts.types.push_back(type);
      const bool special = type == token_type::control || type == token_type::unknown;
      if (special || type == token_type::user_defined) parts.added.push_back({static_cast<token_id>(id), special, false});
    }
  }

  [[nodiscard]] merge_table read_merges(const vocabulary& tokens) const {
    const io::gguf_value& value = array("merges", io::gguf_type::string);
    const std::vector<std::string_view> all = *value.texts();
    std::vector<merge_table::merge> merges;
    merges.reserve(value.count);
    std::string result;
    for (const std::string_view text : all) {
      const auto where = [&] { return "merges[" + std::to_string(merges.size()) + "]"; };
      const std::size_t space = text.find(' ', 1);
      if (space == text.npos) refuse(where(), "is " + in_quotes(text) + ", must be two parts with a space between them");
      result.assign(text, 0, space);
      result += text.substr(space + 1);
      const auto id_of = [&](std::string_view part) {
        const auto id = tokens.find(part);
        if (!id) refuse(where(), "needs the token " + in_quotes(part) + ", which is not in tokenizer.ggml.tokens");
        return *id;
      };
      merges.push_back({id_of(text.substr(0, space)), id_of(text.substr(space + 1)), id_of(result)});
    }
    return merge_table(std::move(merges));
  }

  [[nodiscard]] std::optional<token_id> special_id(const std::string& name, const vocabulary& tokens) const {
    const std::string key = name + "_token_id";
    const io::gguf_value* const value = find(key);
    if (!value) return std::nullopt;
    const auto id = value->integer();
    if (!id || *id < 0 || *id >= static_cast<std::int64_t>(tokens.size()))
      refuse(key, "is " + (id ? std::to_string(*id) : "no integer") + ", must be the id of one of the " + std::to_string(tokens.size()) +
                      " tokens");
    return static_cast<token_id>(*id);
  }

  const io::gguf_file& file_;
};

}  // namespace detail

/// The parts of the tokenizer in a GGUF file, giving the ids that the same model's tokenizer.json gives. Nothing in them points into the
/// file. error_code::tokenizer_malformed if it is another kind of tokenizer than "gemma4" or contradicts itself; the sentence names the key.
[[nodiscard]] inline tokenizer_parts parse_tokenizer_gguf(const io::gguf_file& file) { return detail::tokenizer_gguf_reader(file).read(); }

}  // namespace outrider
