// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "outrider/core/scalar.hpp"
#include "outrider/error.hpp"
#include "outrider/io/mapped_file.hpp"
#include "outrider/text/added_token_finder.hpp"
#include "outrider/text/merge_table.hpp"
#include "outrider/text/tokenizer_json.hpp"
#include "outrider/text/utf8.hpp"
#include "outrider/text/vocabulary.hpp"

namespace outrider {

/// How a text becomes ids. Words of a user are encoded with parse_special off: what they spell stays text. A chat template's text has it on.
struct encode_options {
  bool add_bos = true;         // put <bos> in front, unless the ids start with it already
  bool parse_special = false;  // "<|turn>" in the text is the marker
};

/// Text to token ids and back: byte-pair encoding with byte fallback, as Gemma's. Immutable, so safe to share between threads.
class tokenizer {
 public:
  /// Reads a tokenizer.json. error_code::file_not_found, file_malformed (not JSON) or tokenizer_malformed (not a tokenizer this library
  /// runs, or one that contradicts itself: ids twice or missing, merges of unknown tokens, a byte without token …).
  [[nodiscard]] static tokenizer from_json_file(const std::filesystem::path& path) {
    const io::mapped_file file(path);
    return from_json(file.text(), path.string());
  }
  /// The same from a text in memory; `name` stands for the file in errors.
  [[nodiscard]] static tokenizer from_json(std::string_view json, const std::string& name) {
    return tokenizer(parse_tokenizer_json(json, name));
  }

  explicit tokenizer(tokenizer_parts parts)
      : tokens_(std::move(parts.tokens)), merges_(std::move(parts.merges)), kinds_(tokens_.size(), kind::normal) {
    std::vector<added_token_finder::entry> raw, normalized;
    for (const added_token& token : parts.added) {
      kinds_[static_cast<std::size_t>(token.id)] = token.special ? kind::special : kind::normal;
      const std::string_view text = tokens_.text(token.id);
      (token.normalized ? normalized : raw)
          .push_back({token.normalized ? escape_spaces(text) : std::string(text), token.id, token.special});
    }
    raw_finder_ = added_token_finder(std::move(raw));
    normalized_finder_ = added_token_finder(std::move(normalized));

    for (std::size_t byte = 0; byte < bytes_.size(); ++byte) {
      constexpr std::string_view digits = "0123456789ABCDEF";
      const std::string name = {'<', '0', 'x', digits[byte / 16], digits[byte % 16], '>'};
      const auto id = tokens_.find(name);
      if (!id)
        throw error(error_code::tokenizer_malformed, parts.source + ": model.vocab has no token '" + name + "', all 256 bytes need theirs");
      bytes_[byte] = *id;
      kinds_[static_cast<std::size_t>(*id)] = kind::byte;
    }
    bos_ = marker(parts.source, "<bos>");
    eos_ = marker(parts.source, "<eos>");
    for (const merge_table::merge& merge : merges_.merges())
      split_newlines_ = split_newlines_ && !mixes_newlines(tokens_.text(merge.result));
    for (std::size_t id = 0; id < tokens_.size(); ++id)
      longest_token_ = (std::max)(longest_token_, tokens_.text(static_cast<token_id>(id)).size());
  }

  /// The ids of any byte string. Bytes that are not valid UTF-8 become byte tokens, so decode_bytes gives back what came in, except that
  /// U+2581 ("▁", the vocabulary's own sign for a space) comes back as a space. O(n log n).
  /// error_code::argument_invalid for a text beyond 512 MiB.
  [[nodiscard]] std::vector<token_id> encode(std::string_view text, encode_options options = {}) const {
    if (text.size() > max_text)
      throw error(error_code::argument_invalid, "tokenizer::encode: the text has " + std::to_string(text.size()) + " bytes, at most " +
                                                    std::to_string(max_text) + " are allowed");
    std::vector<token_id> ids;
    const auto on_token = [&](token_id id) { ids.push_back(id); };
    raw_finder_.split(
        text, options.parse_special,
        [&](std::string_view plain) {
          normalized_finder_.split(
              escape_spaces(plain), options.parse_special, [&](std::string_view piece) { encode_plain(piece, ids); }, on_token);
        },
        on_token);
    if (options.add_bos && (ids.empty() || ids.front() != bos_)) ids.insert(ids.begin(), bos_);
    return ids;
  }

  /// The bytes the ids stand for; special tokens are left out, or spelled out if `special`. Not always valid UTF-8: see decode_text.
  /// error_code::argument_invalid for an id outside the vocabulary.
  [[nodiscard]] std::string decode_bytes(std::span<const token_id> ids, bool special = false) const {
    std::string bytes;
    for (const token_id id : ids) append_bytes(id, bytes, special);
    return bytes;
  }
  /// The same as valid UTF-8: every maximal invalid sub-sequence becomes one U+FFFD.
  [[nodiscard]] std::string decode_text(std::span<const token_id> ids, bool special = false) const {
    std::string text;
    utf8_repair repair;
    repair.push(decode_bytes(ids, special), text);
    repair.finish(text);
    return text;
  }
  /// Appends the bytes of one token, at most longest_token() of them; what decode_bytes does for each.
  void append_bytes(token_id id, std::string& bytes, bool special = false) const {
    std::string_view text = token_text(id);
    const kind k = kinds_[static_cast<std::size_t>(id)];
    if (k == kind::byte) {
      const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'A' + 10; };
      bytes += static_cast<char>(16 * digit(text[3]) + digit(text[4]));  // "<0xHH>"
    } else if (k == kind::normal || special) {
      for (std::size_t sign; (sign = text.find(space_sign)) != text.npos; text.remove_prefix(sign + space_sign.size())) {
        bytes += text.substr(0, sign);
        bytes += ' ';
      }
      bytes += text;
    }
  }

  [[nodiscard]] std::size_t vocab_size() const noexcept { return tokens_.size(); }
  /// The token as the vocabulary spells it: "▁the", "<0x0A>", "<|turn>". Lives as long as the tokenizer. error_code::argument_invalid for
  /// an id outside the vocabulary.
  [[nodiscard]] std::string_view token_text(token_id id) const {
    check(id);
    return tokens_.text(id);
  }
  /// The token with that spelling, if there is one.
  [[nodiscard]] std::optional<token_id> find(std::string_view text) const noexcept { return tokens_.find(text); }
  [[nodiscard]] token_id bos() const noexcept { return bos_; }
  [[nodiscard]] token_id eos() const noexcept { return eos_; }
  /// Whether the token is a marker, which is no part of decoded text. error_code::argument_invalid for an id outside the vocabulary.
  [[nodiscard]] bool is_special(token_id id) const {
    check(id);
    return kinds_[static_cast<std::size_t>(id)] == kind::special;
  }
  /// Bytes of the longest spelling.
  [[nodiscard]] std::size_t longest_token() const noexcept { return longest_token_; }

 private:
  enum class kind : std::uint8_t { normal, byte, special };
  static constexpr std::string_view space_sign = "▁";
  static constexpr std::size_t max_text = std::size_t{1} << 29;  // three symbols per byte at most, counted with 32 bits

  void check(token_id id) const {
    if (!tokens_.contains(id))
      throw error(error_code::argument_invalid, "tokenizer: token id " + std::to_string(id) + " is outside the vocabulary of " +
                                                    std::to_string(tokens_.size()) + " tokens");
  }
  [[nodiscard]] token_id marker(const std::string& source, std::string_view name) const {
    const auto id = tokens_.find(name);
    if (!id || !is_special(*id))
      throw error(error_code::tokenizer_malformed,
                  source + ": added_tokens has no special token '" + std::string(name) + "', texts start with <bos> and end with <eos>");
    return *id;
  }
  [[nodiscard]] static std::string escape_spaces(std::string_view text) {
    std::string escaped;
    escaped.reserve(text.size());
    for (const char c : text) c == ' ' ? escaped.append(space_sign) : escaped.append(1, c);
    return escaped;
  }
  [[nodiscard]] static bool mixes_newlines(std::string_view text) noexcept {
    const auto newlines = static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
    return newlines != 0 && newlines != text.size();
  }

  void encode_plain(std::string_view text, std::vector<token_id>& ids) const {
    if (!split_newlines_) return encode_run(text, ids);
    while (!text.empty()) {
      const std::size_t end = text[0] == '\n' ? text.find_first_not_of('\n') : text.find('\n');
      encode_run(text.substr(0, end), ids);
      text.remove_prefix((std::min)(end, text.size()));
    }
  }
  void encode_run(std::string_view text, std::vector<token_id>& ids) const {
    std::vector<token_id> symbols;
    symbols.reserve(text.size() + 1);
    while (!text.empty()) {
      const std::size_t length = utf8_character_length(text);
      const std::string_view character = text.substr(0, (std::max)(length, std::size_t{1}));
      const auto id = length != 0 ? tokens_.find(character) : std::nullopt;
      if (id) {
        symbols.push_back(*id);
      } else {
        for (const char byte : character) symbols.push_back(bytes_[static_cast<unsigned char>(byte)]);
      }
      text.remove_prefix(character.size());
    }
    merges_.apply(symbols);
    ids.insert(ids.end(), symbols.begin(), symbols.end());
  }

  vocabulary tokens_;
  merge_table merges_;
  std::vector<kind> kinds_;
  added_token_finder raw_finder_, normalized_finder_;
  std::array<token_id, 256> bytes_{};  // byte -> its token
  token_id bos_ = 0, eos_ = 0;
  std::size_t longest_token_ = 0;
  bool split_newlines_ = true;  // no merge joins a newline with something else: lines can be encoded one by one, which keeps them short
};

}  // namespace outrider
