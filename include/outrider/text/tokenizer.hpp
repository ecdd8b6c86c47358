// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "outrider/core/scalar.hpp"
#include "outrider/error.hpp"
#include "outrider/io/gguf.hpp"
#include "outrider/io/mapped_file.hpp"
#include "outrider/text/added_token_finder.hpp"
#include "outrider/text/merge_table.hpp"
#include "outrider/text/tokenizer_gguf.hpp"
#include "outrider/text/tokenizer_json.hpp"
#include "outrider/text/tokenizer_parts.hpp"
#include "outrider/text/utf8.hpp"
#include "outrider/text/vocabulary.hpp"
#include "outrider/text/word_cache.hpp"

namespace outrider {

/// How a text becomes ids. Words of a user are encoded with parse_special off: what they spell stays text. A chat template's text has it on.
struct encode_options {
  bool add_bos = true;         // put `<bos>` in front, unless the ids start with it already
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

  /// Reads the tokenizer.ggml.* keys of a GGUF file; the file is not needed afterwards. error_code::tokenizer_malformed as above.
  [[nodiscard]] static tokenizer from_gguf(const io::gguf_file& file) { return tokenizer(parse_tokenizer_gguf(file)); }
  /// Reads what is at `path`: a GGUF file, a tokenizer.json, or a directory with one. Errors as above.
  [[nodiscard]] static tokenizer from_file(const std::filesystem::path& path) {
    std::error_code ignored;
    if (std::filesystem::is_directory(path, ignored)) return from_json_file(path / "tokenizer.json");
    const io::mapped_file file(path);
    return file.text().starts_with("GGUF") ? from_gguf(io::open_gguf(path)) : from_json(file.text(), path.string());
  }

  explicit tokenizer(tokenizer_parts parts)
      : tokens_(std::move(parts.tokens)), types_(std::move(parts.types)), merges_(std::move(parts.merges)), added_(std::move(parts.added)) {
    std::vector<added_token_finder::entry> raw, normalized;
    for (const added_token& token : added_) {
      const std::string_view text = tokens_.text(token.id);
      (token.normalized ? normalized : raw)
          .push_back({token.normalized ? escape_spaces(text) : std::string(text), token.id, token.special});
    }
    raw_finder_ = added_token_finder(std::move(raw));
    normalized_finder_ = added_token_finder(std::move(normalized));

    bytes_.fill(nothing);
    for (std::size_t id = 0; id < tokens_.size(); ++id) {
      const std::string_view text = tokens_.text(static_cast<token_id>(id));
      if (types_[id] == token_type::byte) bytes_[*detail::byte_of_name(text)] = static_cast<token_id>(id);
      longest_token_ = (std::max)(longest_token_, text.size());
    }
    for (std::size_t byte = 0; byte < bytes_.size(); ++byte)
      if (bytes_[byte] < 0) {
        constexpr std::string_view digits = "0123456789ABCDEF";
        throw error(error_code::tokenizer_malformed, parts.source + ": the vocabulary has no token '<0x" + digits[byte / 16] +
                                                         digits[byte % 16] + ">', all 256 bytes need theirs");
      }
    bos_ = marker(parts.source, parts.bos, "<bos>");
    eos_ = marker(parts.source, parts.eos, "<eos>");
    for (std::size_t c = 0; c < ascii_.size(); ++c) {
      const char text = static_cast<char>(c);
      ascii_[c] = character({&text, 1});
    }
    for (const merge_table::merge& merge : merges_.merges()) {
      if (types_[static_cast<std::size_t>(merge.left)] == token_type::byte ||
          types_[static_cast<std::size_t>(merge.right)] == token_type::byte ||
          types_[static_cast<std::size_t>(merge.result)] == token_type::byte || is_marker(merge.result))
        throw error(error_code::tokenizer_malformed,
                    parts.source + ": a merge gives " + in_quotes(tokens_.text(merge.result)) +
                        ", bytes are no parts of merges and markers no results, or a text could not be had back from its tokens");
      joined_.set(join_of(tokens_.text(merge.left).back(), tokens_.text(merge.right).front()));
    }
  }

  /// The ids of any byte string. Bytes that are not valid UTF-8 become byte tokens, so decode_bytes gives back what came in, except that
  /// U+2581 ("▁", the vocabulary's own sign for a space) comes back as a space. O(n log n).
  /// error_code::argument_invalid for a text beyond 512 MiB.
  [[nodiscard]] std::vector<token_id> encode(std::string_view text, encode_options options = {}) const {
    if (text.size() > max_text)
      throw error(error_code::argument_invalid, "tokenizer::encode: the text has " + std::to_string(text.size()) + " bytes, at most " +
                                                    std::to_string(max_text) + " are allowed");
    std::vector<token_id> ids;
    word_cache words(text.size());
    const auto on_token = [&](token_id id) { ids.push_back(id); };
    raw_finder_.split(
        text, options.parse_special,
        [&](std::string_view plain) {
          normalized_finder_.split(
              escape_spaces(plain), options.parse_special, [&](std::string_view piece) { encode_plain(piece, ids, words); }, on_token);
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
    if (types_[static_cast<std::size_t>(id)] == token_type::byte) {
      bytes += static_cast<char>(*detail::byte_of_name(text));
    } else if (special || !is_special(id)) {
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
  /// The tokens that begin and end a text: those that the file names, otherwise "<bos>" and "<eos>".
  [[nodiscard]] token_id bos() const noexcept { return bos_; }
  [[nodiscard]] token_id eos() const noexcept { return eos_; }
  /// Whether the token is a marker, which is no part of decoded text. error_code::argument_invalid for an id outside the vocabulary.
  [[nodiscard]] bool is_special(token_id id) const {
    check(id);
    return is_marker(id);
  }
  /// What the tokenizer consists of. All live as long as the tokenizer.
  [[nodiscard]] std::span<const token_type> types() const noexcept { return types_; }                     // by id
  [[nodiscard]] std::span<const merge_table::merge> merges() const noexcept { return merges_.merges(); }  // best first
  [[nodiscard]] std::span<const added_token> added() const noexcept { return added_; }
  /// Bytes of the longest spelling.
  [[nodiscard]] std::size_t longest_token() const noexcept { return longest_token_; }

 private:
  static constexpr std::string_view space_sign = "▁";
  static constexpr std::size_t max_text = std::size_t{1} << 29;  // three symbols per byte at most, counted with 32 bits

  static constexpr token_id nothing = -1;

  [[nodiscard]] static constexpr std::size_t join_of(char last, char first) noexcept {
    return std::size_t{static_cast<unsigned char>(last)} << 8 | static_cast<unsigned char>(first);
  }
  [[nodiscard]] bool is_marker(token_id id) const noexcept {
    const token_type type = types_[static_cast<std::size_t>(id)];
    return type == token_type::control || type == token_type::unknown;
  }
  void check(token_id id) const {
    if (!tokens_.contains(id))
      throw error(error_code::argument_invalid, "tokenizer: token id " + std::to_string(id) + " is outside the vocabulary of " +
                                                    std::to_string(tokens_.size()) + " tokens");
  }
  [[nodiscard]] token_id marker(const std::string& source, std::optional<token_id> named, std::string_view name) const {
    const auto id = named ? named : tokens_.find(name);
    if (!id) throw error(error_code::tokenizer_malformed, source + ": the vocabulary has no token " + in_quotes(name));
    if (!is_special(*id))
      throw error(error_code::tokenizer_malformed, source + ": token " + std::to_string(*id) + ", " + in_quotes(tokens_.text(*id)) +
                                                       ", begins or ends texts, but is no special token");
    return *id;
  }
  [[nodiscard]] static std::string escape_spaces(std::string_view text) {
    std::string escaped;
    escaped.reserve(text.size());
    for (const char c : text) c == ' ' ? escaped.append(space_sign) : escaped.append(1, c);
    return escaped;
  }
  /// The token of one character, or nothing. Characters are what a user writes: never a marker.
  [[nodiscard]] token_id character(std::string_view text) const noexcept {
    const auto id = tokens_.find(text);
    return id && !is_marker(*id) ? *id : nothing;
  }
  /// Bytes of the character at the front of `text`, 1 for a byte that is none.
  [[nodiscard]] static std::size_t character_length(std::string_view text) noexcept {
    return (std::max)(utf8_character_length(text), std::size_t{1});
  }
  /// Bytes at the front of `text` up to the first place where no merge can join two characters: a word, as a rule.
  [[nodiscard]] std::size_t word_length(std::string_view text) const noexcept {
    std::size_t length = character_length(text);
    while (length < text.size() && joined_[join_of(text[length - 1], text[length])]) length += character_length(text.substr(length));
    return length;
  }
  /// Appends the ids of `text`, which holds no added token.
  void encode_plain(std::string_view text, std::vector<token_id>& ids, word_cache& words) const {
    while (!text.empty()) {
      const std::string_view word = text.substr(0, word_length(text));
      words.append(word, ids, [&] { encode_word(word, ids); });
      text.remove_prefix(word.size());
    }
  }
  void encode_word(std::string_view word, std::vector<token_id>& ids) const {
    const std::size_t begin = ids.size();
    while (!word.empty()) {
      const std::string_view text = word.substr(0, character_length(word));
      const auto first = static_cast<unsigned char>(text[0]);
      const token_id id = first < ascii_.size() ? ascii_[first] : character(text);
      if (id != nothing)
        ids.push_back(id);
      else
        for (const char byte : text) ids.push_back(bytes_[static_cast<unsigned char>(byte)]);
      word.remove_prefix(text.size());
    }
    merges_.apply(ids, begin);
  }

  vocabulary tokens_;
  std::vector<token_type> types_;
  merge_table merges_;
  std::vector<added_token> added_;
  added_token_finder raw_finder_, normalized_finder_;
  std::array<token_id, 256> bytes_{};  // byte -> its token
  std::array<token_id, 128> ascii_{};  // character -> its token, or nothing
  std::bitset<65536> joined_;          // join_of(last byte of a merge's left part, first byte of its right part)
  token_id bos_ = 0, eos_ = 0;
  std::size_t longest_token_ = 0;
};

}  // namespace outrider
