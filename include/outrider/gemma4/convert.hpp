// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "outrider/error.hpp"
#include "outrider/gemma4/convert_to_gguf.hpp"
#include "outrider/gemma4/convert_to_hf.hpp"
#include "outrider/gemma4/convert_tokenizer.hpp"
#include "outrider/gemma4/convert_types.hpp"
#include "outrider/gemma4/convert_values.hpp"
#include "outrider/io/gguf.hpp"
#include "outrider/io/gguf_writer.hpp"
#include "outrider/io/mapped_file.hpp"
#include "outrider/io/output_file.hpp"
#include "outrider/io/safetensors.hpp"
#include "outrider/io/safetensors_writer.hpp"
#include "outrider/text/tokenizer_gguf.hpp"

namespace outrider::gemma4 {

struct conversion_options {
  /// How weights are stored. Without one: BF16 in a GGUF file; in a Hugging Face directory as they are, quantised ones as BF16. A directory
  /// has plain types only.
  std::optional<weight_recipe> recipe;
  std::vector<type_override> overrides;  // of tensors in a GGUF file; the first that fits decides
  /// An assistant's centroid tensors and their keys, which llama.cpp does not take. From a directory to a GGUF file only, as the next one.
  bool centroids = true;
  bool assist_names = false;  // the assistant's naming scheme b, with token_ordering as floats
  /// Called with the bytes of tensors written so far and in all, every few MiB. What it throws ends the conversion, and nothing stays behind.
  std::function<void(std::uint64_t done, std::uint64_t all)> progress;
};

struct conversion_report {
  struct type_total {
    std::size_t tensors = 0;
    std::uint64_t bytes = 0;
  };
  std::uint64_t bytes = 0;                       // of all files written
  std::map<std::string_view, type_total> types;  // by name
  std::vector<std::string> skipped;              // tensors of the source that the result does not have
  std::vector<std::string> notes;                // sentences for the user
};

namespace detail {

inline conversion_report report_of(std::span<const io::tensor_plan> tensors) {
  conversion_report report;
  for (const io::tensor_plan& t : tensors) {
    conversion_report::type_total& total = report.types[io::name_of(t.type)];
    ++total.tensors;
    total.bytes += *t.bytes();
  }
  return report;
}

/// The source with a progress call behind every piece.
inline io::tensor_source with_progress(std::span<const io::tensor_plan> tensors, const conversion_options& options,
                                       io::tensor_source source) {
  if (!options.progress) return source;
  std::uint64_t all = 0;
  for (const io::tensor_plan& t : tensors) all += *t.bytes();
  options.progress(0, all);
  return [all, done = std::uint64_t{0}, source = std::move(source), &options](std::size_t i, const io::byte_sink& sink) mutable {
    source(i, [&](std::span<const std::byte> piece) {
      sink(piece);
      done += piece.size();
      options.progress(done, all);
    });
  };
}

inline conversion_report directory_to_gguf(const std::filesystem::path& in, const std::filesystem::path& out,
                                           const conversion_options& options) {
  const io::tensor_set tensors = io::load_safetensors(in);
  gguf_planner planner(in, {options.recipe.value_or(*recipe_named("bf16")), options.overrides, options.centroids, options.assist_names});
  gguf_plan plan = planner.plan(tensors);
  const auto planned = plan.header.tensors();
  conversion_report report = report_of(planned);
  report.skipped = std::move(plan.skipped);
  report.notes = std::move(plan.notes);
  report.bytes = io::write_gguf(out, plan.header, with_progress(planned, options, [&](std::size_t i, const io::byte_sink& sink) {
                                  const io::tensor& source = plan.sources[i];
                                  if (planned[i].name == rope_factors_name) {
                                    sink(planner.rope_factors());
                                  } else if (source.name == token_ordering_name) {
                                    convert_ids(source, planned[i].type, sink);
                                  } else {
                                    convert_tensor(source, planned[i].type, sink);
                                  }
                                  io::release_pages(source.bytes);
                                }));
  return report;
}

/// Types change, and with quantised ones the order of the tensors; keys and names stay, whatever their scheme.
inline conversion_report gguf_to_gguf(const std::filesystem::path& in, const std::filesystem::path& out,
                                      const conversion_options& options) {
  const io::gguf_file file = io::open_gguf(in);
  if (!options.centroids || options.assist_names)
    throw error(error_code::argument_invalid,
                in.string() + ": names and tensors of a GGUF file stay as they are; convert it to a directory first");
  if (!options.recipe) throw error(error_code::argument_invalid, in.string() + ": from one GGUF file to another a type is needed");
  if (architecture_of(file) != target_architecture && !gemma4::is_assistant(file))
    throw error(error_code::model_unsupported, file.source + ": general.architecture is '" + std::string(architecture_of(file)) +
                                                   "'; allowed: " + std::string(target_architecture) + " and its assistants");
  const bool quantises = io::describe(options.recipe->type).elements > 1;
  io::gguf_header header;
  for (const io::gguf_pair& pair : file.pairs) {
    const bool replaced = pair.key == "general.file_type" || pair.key == "general.quantization_version";
    if (replaced || pair.key.starts_with("split.") || pair.key == "general.alignment") continue;
    header.add(std::string(pair.key), pair.value);
  }
  header.add("general.quantization_version", std::uint32_t{2});
  header.add("general.file_type", options.recipe->file_type);

  std::vector<const io::tensor*> order;
  for (const io::tensor& t : file.tensors) order.push_back(&t);
  if (quantises)
    std::sort(order.begin(), order.end(), [](const io::tensor* a, const io::tensor* b) { return place_of(a->name) < place_of(b->name); });
  std::vector<io::tensor_plan> planned;
  for (const io::tensor* t : order) planned.push_back({t->name, t->type, t->shape});
  choose_types(*options.recipe, options.overrides, planned);
  for (const io::tensor_plan& t : planned) header.add(t);
  conversion_report report = report_of(planned);
  report.bytes = io::write_gguf(out, header, with_progress(planned, options, [&](std::size_t i, const io::byte_sink& sink) {
                                  convert_tensor(*order[i], planned[i].type, sink);
                                  io::release_pages(order[i]->bytes);
                                }));
  return report;
}

/// The files of a directory that a conversion makes, in the order in which they get their names.
inline constexpr auto directory_files = std::to_array<std::string_view>(
    {"model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json"});

/// A directory that is removed again, if it was not there before, unless kept. One that is there may hold nothing but files of an earlier
/// conversion: shards of another model, say, would be taken for parts of this one.
class new_directory {
 public:
  explicit new_directory(std::filesystem::path path) : path_(std::move(path)) {
    std::error_code failure;
    created_ = std::filesystem::create_directory(path_, failure);
    if (failure || (!created_ && !std::filesystem::is_directory(path_)))
      throw error(error_code::file_not_written,
                  path_.string() + ": cannot be created: " + (failure ? failure.message() : "there is something else than a directory"));
    for (const auto& entry : std::filesystem::directory_iterator(path_, failure)) {
      const std::string name = entry.path().filename().string();
      if (std::find(directory_files.begin(), directory_files.end(), name) == directory_files.end())
        throw error(error_code::file_not_written, path_.string() + ": holds '" + name +
                                                      "', which is no file of a converted model; choose a new directory or an empty one");
    }
  }
  new_directory(const new_directory&) = delete;
  new_directory& operator=(const new_directory&) = delete;
  ~new_directory() {
    std::error_code ignored;
    if (created_) std::filesystem::remove(path_, ignored);  // only if it is empty
  }
  /// Keeps the directory with the files in `written` and no other.
  void keep(std::span<const std::string> written) noexcept {
    created_ = false;
    std::error_code ignored;
    for (const std::string_view name : directory_files)
      if (std::find(written.begin(), written.end(), name) == written.end()) std::filesystem::remove(path_ / name, ignored);
  }

 private:
  std::filesystem::path path_;
  bool created_ = false;
};

inline conversion_report gguf_to_directory(const std::filesystem::path& in, const std::filesystem::path& out,
                                           const conversion_options& options) {
  const io::gguf_file file = io::open_gguf(in);
  if (options.recipe && io::describe(options.recipe->type).elements > 1)
    throw error(error_code::argument_invalid, out.string() + ": a Hugging Face directory cannot hold " + std::string(options.recipe->name) +
                                                  "; allowed are f32, f16 and bf16");
  if (!options.overrides.empty() || !options.centroids || options.assist_names)
    throw error(error_code::argument_invalid, out.string() + ": types of single tensors and names are for GGUF files only");
  const hf_plan plan(file, options.recipe ? std::optional(options.recipe->type) : std::nullopt);
  conversion_report report = report_of(plan.tensors());
  new_directory directory(out);
  std::deque<io::output_file> files;  // all are on the disk before the first gets its name
  std::vector<std::string> names;
  const auto open = [&](const char* name) -> io::output_file& {
    names.emplace_back(name);
    return files.emplace_back(out / name);
  };

  const auto source = [&](std::size_t i, const io::byte_sink& sink) { plan.produce(i, sink); };
  io::write_safetensors(open("model.safetensors"), plan.tensors(), with_progress(plan.tensors(), options, source));
  if (file.find("tokenizer.ggml.tokens")) {
    const tokenizer_parts parts = parse_tokenizer_gguf(file);
    write_tokenizer_json(open("tokenizer.json"), parts);
    open("tokenizer_config.json").write(tokenizer_settings(file, parts).dump(2) + "\n");
  } else {
    report.notes.push_back("the file has no tokenizer, so the directory has none");
  }
  if (const io::gguf_value* const text = file.find("tokenizer.chat_template"); text && text->text())
    open("chat_template.jinja").write(*text->text());
  open("generation_config.json").write(plan.generation_config().dump(2) + "\n");
  open("config.json").write(plan.config().dump(2) + "\n");  // last: without it the directory is no model
  for (io::output_file& f : files) f.sync();
  for (io::output_file& f : files) {
    report.bytes += f.size();
    f.commit();
  }
  directory.keep(names);
  return report;
}

}  // namespace detail

/// Converts a target or an assistant of any size. `in` is a Hugging Face directory or a GGUF file; `out` is a GGUF file if its name ends in
/// ".gguf", a Hugging Face directory otherwise. A directory becomes a GGUF file with the keys, names, types and bytes that llama.cpp gives it,
/// plus an assistant's centroids; a GGUF file becomes a directory, or a GGUF file with other types. An existing file is replaced when the new
/// one is complete; what fails or is ended leaves everything as it was. Memory: the headers, the tokenizer and some MiB.
///
/// From a directory to a GGUF file (BF16, F32) and back, tensors, configuration and tokenizer stay the same: a GGUF file has norms and other
/// vectors in F32, and on the way back they get the type of the embedding table where it has all their values.
///
/// Errors: file_not_found, file_not_written, file_malformed, config_invalid, model_unsupported, tensor_missing, tensor_mismatch (a value that
/// is infinite, no number, or too large for its new type), tokenizer_malformed, argument_invalid.
inline conversion_report convert(const std::filesystem::path& in, const std::filesystem::path& out,
                                 const conversion_options& options = {}) {
  std::error_code ignored;
  const bool from_directory = std::filesystem::is_directory(in, ignored), to_gguf = out.extension() == ".gguf";
  if (from_directory && !to_gguf)
    throw error(error_code::argument_invalid, out.string() + ": a directory becomes a GGUF file, whose name must end in .gguf");
  if (from_directory) return detail::directory_to_gguf(in, out, options);
  return to_gguf ? detail::gguf_to_gguf(in, out, options) : detail::gguf_to_directory(in, out, options);
}

}  // namespace outrider::gemma4
