// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "outrider/error.hpp"
#include "outrider/io/gguf.hpp"
#include "outrider/io/json_file.hpp"
#include "outrider/io/mapped_file.hpp"

namespace outrider {

/// Gemma 4's templates in the order they were published. They agree on plain conversations and differ around tools and pictures.
enum class chat_generation : std::uint8_t { launch, interleaved, newest };
[[nodiscard]] constexpr std::string_view name_of(chat_generation generation) noexcept {
  constexpr std::string_view names[] = {"launch", "interleaved", "newest"};
  return names[static_cast<std::size_t>(generation)];
}

/// What a template's text says about the form of its conversations.
struct chat_form {
  chat_generation generation = chat_generation::newest;
  bool empty_thought = true;  // without thinking, the answer begins behind an empty thought: 26B and 31B; E2B and E4B leave it out
  bool operator==(const chat_form&) const = default;
};

/// The form that a template's text describes, told by what only that generation contains; nothing if it is no template of Gemma 4. The
/// template is looked at, never executed.
[[nodiscard]] inline std::optional<chat_form> detect_chat_template(std::string_view text) noexcept {
  const auto has = [text](std::string_view part) { return text.find(part) != text.npos; };
  if (!has("<|turn>") || !has("<turn|>")) return std::nullopt;
  chat_form form;
  form.generation = has("format_tool_response_block") ? chat_generation::newest
                    : has("reasoning_content")        ? chat_generation::interleaved
                                                      : chat_generation::launch;
  form.empty_thought = has("'<|channel>thought\\n<channel|>'") || has("\"<|channel>thought\\n<channel|>\"");
  return form;
}

/// The template that comes with a model: of a GGUF file its key tokenizer.chat_template; of a directory chat_template.jinja, or the member
/// chat_template of tokenizer_config.json (of several, the one named "default"). Nothing if the model has none.
/// Errors: file_not_found, file_malformed.
[[nodiscard]] inline std::optional<std::string> read_chat_template(const std::filesystem::path& path) {
  std::error_code unknown;
  if (!std::filesystem::is_directory(path, unknown)) {
    const io::gguf_file file = io::open_gguf(path);
    const io::gguf_value* const value = file.find("tokenizer.chat_template");
    if (!value) return std::nullopt;
    const auto text = value->text();
    if (!text) throw error(error_code::file_malformed, path.string() + ": tokenizer.chat_template is no string");
    return std::string(*text);
  }
  if (const auto file = path / "chat_template.jinja"; io::is_there(file)) return io::read_text_file(file);
  const auto file = path / "tokenizer_config.json";
  if (!io::is_there(file)) return std::nullopt;
  const nlohmann::json config = io::read_json_file(file);
  const auto found = config.is_object() ? config.find("chat_template") : config.end();
  if (found == config.end() || found->is_null()) return std::nullopt;
  if (found->is_string()) return found->get<std::string>();
  if (found->is_array())
    for (const nlohmann::json& entry : *found)
      if (entry.is_object() && entry.value("name", nlohmann::json()) == "default")
        if (const auto text = entry.find("template"); text != entry.end() && text->is_string()) return text->get<std::string>();
  throw error(error_code::file_malformed,
              file.string() + ": chat_template is of type " + found->type_name() + ", must be a string or a list with a \"default\"");
}

}  // namespace outrider
