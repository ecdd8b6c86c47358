// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// What inspect.cpp prints: as text, in the rows of llama.cpp's gguf-dump and more behind them, and as JSON.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <ostream>
#include <string>
#include <string_view>

#include "inspect_contents.hpp"
#include "inspect_model.hpp"
#include "inspect_text.hpp"

namespace inspect {

/// The product of the extents, by way of the bytes, which were checked: beside an extent of zero the others may be any numbers.
[[nodiscard]] inline std::size_t elements_of(const io::tensor& t) {
  const io::dtype_description& d = io::describe(t.type);
  return t.bytes.size() / d.bytes * d.elements;
}

/// What some tensors amount to.
struct amount {
  std::size_t tensors = 0, parameters = 0, bytes = 0;
};
struct totals {
  amount all;
  std::map<io::dtype, amount> by_type;  // in the order of the enumeration
};

[[nodiscard]] inline totals totals_of(const contents& file) {
  totals result;
  for (const stored_tensor& t : file.tensors)
    for (amount* const sum : {&result.all, &result.by_type[t.tensor.type]}) {
      sum->tensors += 1;
      sum->parameters += elements_of(t.tensor);
      sum->bytes += t.tensor.bytes.size();
    }
  return result;
}

[[nodiscard]] inline std::string name_of(file_format format) {
  return format == file_format::gguf ? "gguf" : format == file_format::safetensors ? "safetensors" : "directory";
}

namespace detail {

inline std::string padded_left(std::string text, std::size_t width) {
  return text.size() < width ? std::string(width - text.size(), ' ') + text : text;
}
inline std::string padded_right(std::string text, std::size_t width) {
  return text.size() < width ? text + std::string(width - text.size(), ' ') : text;
}

inline std::string shown(const json& value, bool full) {
  if (value.is_string()) return quoted(value.get_ref<const std::string&>(), full);
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  if (value.is_number_float()) return decimal(value.get<double>());
  if (value.is_null()) return "None";
  return value.is_number() ? value.dump() : "{...}";
}

inline void print_keys(std::ostream& out, const key_values& keys, bool full) {
  out << "* Dumping " << keys.rows.size() << " key/value pair(s)" << (keys.of.empty() ? "" : " of " + keys.of) << "\n";
  for (std::size_t i = 0; i < keys.rows.size(); ++i) {
    const key_value& row = keys.rows[i];
    const std::string type = row.is_array ? "[" + row.type + "]" : row.type;
    std::string value;
    if (row.is_array) {
      for (const json& element : row.value) value += (value.empty() ? "" : ", ") + shown(element, full);
      value = "[" + value + (row.value.size() < row.count ? ", ...]" : "]");
    } else {
      value = shown(row.value, full);
    }
    out << "  " << padded_left(std::to_string(i + 1), 5) << ": " << padded_right(type, 10) << " | "
        << padded_left(std::to_string(row.count), 8) << " | " << printable(row.key) << " = " << value << "\n";
  }
}

inline void print_tensors(std::ostream& out, const contents& file) {
  out << "* Dumping " << file.tensors.size() << " tensor(s)\n";
  for (std::size_t i = 0; i < file.tensors.size(); ++i) {
    const io::tensor& t = file.tensors[i].tensor;
    std::string extents;
    for (std::size_t k = 0; k < std::max<std::size_t>(t.shape.size(), 4); ++k)
      extents += (k ? ", " : "") + padded_left(std::to_string(k < t.shape.size() ? t.shape[t.shape.size() - 1 - k] : 1), 5);
    out << "  " << padded_left(std::to_string(i + 1), 5) << ": " << padded_left(std::to_string(elements_of(t)), 10) << " | " << extents
        << " | " << padded_right(std::string(io::name_of(t.type)), 7) << " | " << printable(t.name) << " | " << t.bytes.size()
        << " bytes at " << file.tensors[i].offset;
    if (file.files.size() > 1) out << " of " << printable(std::filesystem::path(t.file).filename().string());
    out << "\n";
  }
}

inline void print_totals(std::ostream& out, const contents& file) {
  const totals sums = totals_of(file);
  const auto line = [&](std::string_view what, const amount& t) {
    out << "  " << padded_right(std::string(what), 8) << padded_left(std::to_string(t.tensors), 6) << " tensor(s) "
        << padded_left(std::to_string(t.parameters), 14) << " parameters " << padded_left(std::to_string(t.bytes), 14) << " bytes\n";
  };
  out << "* Totals\n";
  for (const auto& [type, t] : sums.by_type) line(io::name_of(type), t);
  line("all", sums.all);
}

inline void print_model(std::ostream& out, const model_facts& model) {
  const auto line = [&](const char* what, const std::string& text) {
    if (!text.empty()) out << "  " << padded_right(what, 14) << printable(text) << "\n";
  };
  out << "* Model\n";
  line("family", model.family.empty() ? "unknown" : model.family);
  line("size", model.size);
  line("names", model.names.empty() ? "" : "scheme " + model.names);
  line("chat template", model.template_problem.empty() ? model.chat_template : model.template_problem);
  const std::string print = fingerprint(model);
  line("fingerprint", print.empty() ? "" : hash_of(print) + ": " + print);
  line("problem", model.problem);
}

/// The value with what JSON has no number for as text.
inline json exact(const json& value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) return decimal(value.get<double>());
  if (!value.is_array()) return value;
  json out = json::array();
  for (const json& element : value) out.push_back(exact(element));
  return out;
}

inline json json_of(const amount& t) { return {{"tensors", t.tensors}, {"parameters", t.parameters}, {"bytes", t.bytes}}; }

inline json text_or_null(const std::string& text) { return text.empty() ? json(nullptr) : json(text); }

}  // namespace detail

/// Prints everything of a file as text.
inline void print(std::ostream& out, const contents& file, const model_facts& model, bool tensors, bool full) {
  if (file.format == file_format::gguf)
    out << "* File is LITTLE endian, program is running on a LITTLE endian host.\n";
  else
    out << "* " << (file.format == file_format::directory ? "Directory" : "File") << " of safetensors, " << file.files.size()
        << " file(s), LITTLE endian.\n";
  if (file.format == file_format::gguf && file.files.size() > 1) out << "* Split into " << file.files.size() << " files.\n";
  for (const key_values& keys : file.keys) detail::print_keys(out, keys, full);
  if (tensors) detail::print_tensors(out, file);
  detail::print_totals(out, file);
  detail::print_model(out, model);
}

/// The same as one object; docs/inspect.md says what is in it.
[[nodiscard]] inline json to_json(const contents& file, const model_facts& model, bool tensors) {
  json out{{"path", file.path.string()}, {"format", name_of(file.format)}, {"files", file.files}};
  if (file.gguf)
    out["gguf"] = {{"version", file.gguf->version}, {"alignment", file.gguf->alignment}, {"data_offset", file.gguf->data_offset}};
  json& keys = out["keys"] = json::object();
  for (const key_values& of_file : file.keys) {
    json& to = of_file.of.empty() ? keys : keys[of_file.of] = json::object();
    for (const key_value& row : of_file.rows)
      to[row.key] = {{"type", row.type}, {"array", row.is_array}, {"count", row.count}, {"value", detail::exact(row.value)}};
  }
  if (tensors) {
    json& list = out["tensors"] = json::array();
    for (const stored_tensor& t : file.tensors)
      list.push_back({{"name", t.tensor.name},
                      {"type", io::name_of(t.tensor.type)},
                      {"shape", t.tensor.shape},
                      {"elements", elements_of(t.tensor)},
                      {"bytes", t.tensor.bytes.size()},
                      {"offset", t.offset},
                      {"file", t.tensor.file}});
  }
  const totals sums = totals_of(file);
  out["totals"] = detail::json_of(sums.all);
  json& by_type = out["totals"]["by_type"] = json::object();
  for (const auto& [type, t] : sums.by_type) by_type[std::string(io::name_of(type))] = detail::json_of(t);
  const std::string print = fingerprint(model);
  out["model"] = {{"family", detail::text_or_null(model.family)},
                  {"role", model.target      ? json("target")
                           : model.assistant ? json("assistant")
                                             : json(nullptr)},
                  {"size", detail::text_or_null(model.size)},
                  {"names", detail::text_or_null(model.names)},
                  {"chat_template", detail::text_or_null(model.chat_template)},
                  {"fingerprint", detail::text_or_null(print)},
                  {"fingerprint_hash", print.empty() ? json(nullptr) : json(hash_of(print))},
                  {"problem", detail::text_or_null(model.problem)}};
  return out;
}

}  // namespace inspect
