// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "outrider/backend/parallel.hpp"
#include "outrider/backend/reference.hpp"
#include "outrider/core/blocks.hpp"
#include "outrider/core/extents.hpp"
#include "outrider/core/grouped.hpp"
#include "outrider/core/scalar.hpp"
#include "outrider/core/space_copy.hpp"
#include "outrider/core/storage.hpp"
#include "outrider/io/dtype_of.hpp"
#include "outrider/io/mapped_file.hpp"
#include "outrider/io/tensors.hpp"
#include "outrider/layers/linear.hpp"

namespace outrider::gemma4 {

static_assert(std::endian::native == std::endian::little, "outrider: weights are used as they lie in the file, which is little-endian");

/// In what form quantised matrices are kept.
enum class weight_form : std::uint8_t {
  preferred,  // as the backend likes it: grouped where its traits say int8_products, else stored
  stored,     // as the file has them, multiplied by float activations
  grouped,    // rearranged in groups of 16 rows, multiplied by int8 activations
};

/// How a model is loaded.
struct load_options {
  weight_form form = weight_form::preferred;
  /// Told, on the calling thread, how many bytes of how many have been rearranged; what it throws ends the loading.
  std::function<void(std::size_t done, std::size_t all)> progress = {};
  /// How many threads rearrange; 0 = one per core. Fewer do where the system gives no more.
  unsigned threads = 0;
};

/// A tensor that is rows of a matrix.
struct named_rows {
  std::string name;
  std::size_t rows;
};

/// The tensors of a model, checked against what its configuration asks for and handed out as weights of backend B. A matrix that is kept in
/// groups has memory of its own, and the file's pages of it are released; any other stays in the file's mapping wherever its alignment allows
/// it (no copy). Where B's memory is not the host's, every matrix is copied there and the file's pages are released. Vectors are widened to
/// float once. Owns what the handed-out views point to; move-only.
template <backend_tag B>
class weight_store {
  static constexpr bool in_file = host_accessible<space_of<B>>;  // matrices may stay where they lie

 public:
  explicit weight_store(std::shared_ptr<const io::tensor_set> tensors, weight_form form = weight_form::stored)
      : tensors_(std::move(tensors)),
        grouped_(form == weight_form::grouped || (form == weight_form::preferred && prefers_int8_products<B>)) {}

  [[nodiscard]] const std::string& source() const noexcept { return tensors_->source(); }
  [[nodiscard]] bool has(std::string_view name) const noexcept { return tensors_->find(name) != nullptr; }
  /// Whether a matrix in groups was handed out.
  [[nodiscard]] bool has_groups() const noexcept { return has_groups_; }

  /// A matrix [rows, cols], of any type of weight_types, for products: in groups if the store makes some and the type has that form; their
  /// contents are there after rearrange(). Errors: tensor_missing; tensor_mismatch for another shape or type; out_of_memory.
  [[nodiscard]] weight<B> matrix(std::string_view name, std::size_t rows, std::size_t cols) { return load(name, {rows, cols}, rows, cols); }
  /// `count` matrices [rows, cols] in one tensor [count, rows, cols], stacked to [count · rows, cols]; in groups only if none holds rows of two.
  [[nodiscard]] weight<B> stacked(std::string_view name, std::size_t count, std::size_t rows, std::size_t cols) {
    return load(name, {count, rows, cols}, count * rows, cols, rows % group_rows == 0);
  }
  /// Matrices [rows, cols] of the same columns one below the other, [Σ rows, cols]: one product for all that reads the same rows. None if they are
  /// not to be copied, as a file has them apart, or are of several types, or if groups would hold rows of two. Errors: as for matrix().
  [[nodiscard]] std::optional<weight<B>> joined(std::span<const named_rows> parts, std::size_t cols) {
    std::vector<tensor_rows> pieces;
    bool alike = true;
    for (const named_rows& part : parts) {
      pieces.push_back({&find(part.name, {part.rows, cols}), part.rows});
      alike = alike && pieces.back().tensor->type == pieces.front().tensor->type && part.rows % group_rows == 0;
    }
    std::optional<weight<B>> loaded;
    if (!alike) return loaded;
    const io::dtype type = pieces.front().tensor->type;
    if (grouped_)
      [&]<class... W>(type_list<grouped<W>...>) {
        ((type == io::dtype_of<W> ? static_cast<void>(loaded = in_groups<W>(pieces, cols)) : void()), ...);
      }(grouped_types{});
    if constexpr (!in_file)
      [&]<class... W>(type_list<W...>) {
        ((!loaded && type == io::dtype_of<W> ? static_cast<void>(loaded = copied<W>(pieces, cols)) : void()), ...);
      }(weight_types{});
    return loaded;
  }
  /// A matrix [rows, cols] as the file has it, for products with single rows.
  [[nodiscard]] stored_weight<B> stored_matrix(std::string_view name, std::size_t rows, std::size_t cols) {
    return as_stored<stored_weight<B>>(find(name, {rows, cols}), rows, cols);
  }
  /// Whether a table whose rows are looked up stays on the host, because B's memory, which is not the host's, has no room to spare for it beside
  /// everything else of the file: a quarter is left to keys, values and activations. To be asked before anything is loaded.
  [[nodiscard]] bool keeps_on_host(std::string_view table) const {
    if constexpr (requires { space_limits<space_of<B>>::free_bytes(); }) {
      std::size_t all = 0;
      for (const auto& [name, t] : *tensors_) all += t.bytes.size();
      return has(table) && all > space_limits<space_of<B>>::free_bytes() / 4 * 3;
    } else {
      return false;
    }
  }
  /// Such a table, as the file has it: nothing of it is read here, it may be larger than memory.
  [[nodiscard]] stored_weight<reference> host_table(std::string_view name, std::size_t rows, std::size_t cols) {
    return as_stored<stored_weight<reference>>(find(name, {rows, cols}), rows, cols);
  }
  /// A table [rows, cols] whose rows are looked up, as the file has it. In host memory nothing of it is read here, it may be larger than memory.
  [[nodiscard]] weight<B> table(std::string_view name, std::size_t rows, std::size_t cols) {
    return as_stored<weight<B>>(find(name, {rows, cols}), rows, cols);
  }

  /// Fills the matrices in groups handed out so far, or all of them where B's memory is not the host's, and gives the file's pages of them back
  /// to the system. Errors: out_of_memory, which names what all of them need and what was free; until then a device's lack of room is no error.
  void rearrange(const load_options& options) {
    if constexpr (!in_file)
      if (lacks_room_)
        throw error(error_code::out_of_memory,
                    source() + ": its weights need " + mebibytes(needed_) + " of device memory, " + mebibytes(free_before_) + " were free");
    if (tasks_.empty()) return;
    std::size_t done = 0, all = 0, told = 0;
    for (const task& t : tasks_) all += t.source.size();
    const auto tell = [&](std::size_t bytes) {
      const std::size_t percent = bytes / (all / 100 + 1);
      if (options.progress && (percent != told || bytes == all)) options.progress(bytes, all);
      told = percent;
    };
    std::optional<thread_pool> team;
    try {
      team.emplace(options.threads == 0 ? thread_pool::default_threads() : options.threads);
    } catch (const std::system_error&) {
      team.emplace(1u);
    }
    for (const task& t : tasks_) {
      buffer<std::byte, host_space> aligned;
      const std::byte* const source = aligned_bytes(t.source, t.alignment, aligned);
      const std::size_t group_bytes = t.source.size() / t.groups, piece = piece_bytes / (group_bytes + 1) + 1;
      for (std::size_t first = 0; first < t.groups; first += piece) {  // in pieces, so that progress is steady
        const std::size_t count = (std::min)(piece, t.groups - first);
        if (t.fill) {
          const std::span<std::byte> room = room_for(t, first, count);
          team->for_ranges(count, 1, [&](std::size_t begin, std::size_t end) noexcept {
            t.fill(t, source, first + begin, first + end, room.data() + begin * t.group_bytes);
          });
          if constexpr (!in_file) space_copy<host_space, space_of<B>>::copy(t.out + first * t.group_bytes, room.data(), room.size());
        } else {
          space_copy<host_space, space_of<B>>::copy(t.out + first * t.group_bytes, source + first * t.group_bytes, count * t.group_bytes);
        }
        if (first + count < t.groups) tell(done + group_bytes * (first + count));
      }
      io::release_pages(t.source);
      tell(done += t.source.size());
    }
    tasks_.clear();
    staging_ = {};
  }

  /// A vector [n] of F32, BF16 or F16 as floats.
  [[nodiscard]] const float* vector(std::string_view name, std::size_t n) {
    const io::tensor& t = find(name, {n});
    std::vector<float> values(n);
    for (std::size_t i = 0; i < n; ++i) values[i] = read_float(t, i);
    return keep(values);
  }
  [[nodiscard]] float scalar(std::string_view name) const { return read_float(find(name, {1}), 0); }

  /// Floats the model computes itself (frequencies), kept with its weights.
  [[nodiscard]] const float* keep(const std::vector<float>& values) { return keep_in<float>(values); }

  /// A permutation of 0 … n - 1, stored as I32, I64 or whole F32 numbers in a tensor [n], viewed as [rows, n / rows].
  [[nodiscard]] matrix_for<const token_id, B> permutation(std::string_view name, std::size_t n, std::size_t rows) {
    const io::tensor& t = find(name, {n});
    std::vector<token_id> ids(n);
    std::vector<bool> seen(n, false);
    for (std::size_t i = 0; i < n; ++i) {
      const std::int64_t id = read_integer(t, i);
      if (id < 0 || static_cast<std::size_t>(id) >= n || seen[static_cast<std::size_t>(id)])
        throw error(error_code::tensor_mismatch, t.file + ": tensor '" + t.name + "' is no permutation of 0 to " + std::to_string(n - 1) +
                                                     ": element " + std::to_string(i) + " is " + std::to_string(id) +
                                                     ", out of range or a second time");
      seen[static_cast<std::size_t>(id)] = true;
      ids[i] = static_cast<token_id>(id);
    }
    return {keep_in<token_id>(ids), rows, n / rows, n / rows};
  }

 private:
  /// A matrix to rearrange, or to copy as it is, in which case `fill` is null and a group is a row.
  struct task {
    std::span<const std::byte> source;
    std::size_t alignment, rows, cols, groups, group_bytes;
    std::byte* out;
    void (*fill)(const task&, const std::byte* aligned_source, std::size_t begin, std::size_t end,
                 std::byte* to) noexcept;  // to: of group `begin`
  };

  /// A tensor that is rows of a matrix.
  struct tensor_rows {
    const io::tensor* tensor;
    std::size_t rows;
  };

  const io::tensor& find(std::string_view name, const std::vector<std::size_t>& shape) const {
    const io::tensor& t = tensors_->at(name);
    if (t.shape != shape)
      throw error(error_code::tensor_mismatch,
                  t.file + ": tensor '" + t.name + "' has shape " + text(t.shape) + ", the configuration asks for " + text(shape));
    return t;
  }

  weight<B> load(std::string_view name, const std::vector<std::size_t>& shape, std::size_t rows, std::size_t cols,
                 bool may_be_grouped = true) {
    const io::tensor& t = find(name, shape);
    if (!grouped_ || !may_be_grouped) return as_stored<weight<B>>(t, rows, cols);
    std::optional<weight<B>> loaded;
    [&]<class... W>(type_list<grouped<W>...>) {
      ((t.type == io::dtype_of<W> ? static_cast<void>(loaded = in_groups<W>({{&t, rows}}, cols)) : void()), ...);
    }(grouped_types{});
    return loaded ? *std::move(loaded) : as_stored<weight<B>>(t, rows, cols);
  }

  template <class T>
  const T* keep_in(const std::vector<T>& values) {
    const std::size_t bytes = values.size() * sizeof(T);
    auto* const there = reinterpret_cast<T*>(in_file ? bytes_.emplace_back(bytes).data() : take(bytes));
    if (there) space_copy<host_space, space_of<B>>::copy(there, values.data(), values.size());
    return there;
  }

  /// The tensor where it lies, or where it will be copied. Weight is a variant of views into one space.
  template <class Weight>
  Weight as_stored(const io::tensor& t, std::size_t rows, std::size_t cols) {
    std::optional<Weight> loaded;
    std::string allowed;
    [&]<class... W>(type_list<W...>) {
      ((t.type == io::dtype_of<W> ? static_cast<void>(loaded = stored_view<Weight, W>(t, rows, cols)) : void()), ...);
      if (!loaded) ((allowed += (allowed.empty() ? "" : ", ") + std::string(io::name_of(io::dtype_of<W>))), ...);
    }(weight_types{});
    if (!loaded) throw wrong_type(t, allowed);
    return *std::move(loaded);
  }

  template <class Weight, class W>
  auto stored_view(const io::tensor& t, std::size_t rows, std::size_t cols) {
    static_assert(io::describe(io::dtype_of<W>).bytes == sizeof(W) && io::describe(io::dtype_of<W>).elements == elements_of<W>);
    if constexpr (in_file || !std::constructible_from<Weight, weight_for<W, B>>) {
      buffer<std::byte, host_space> aligned;
      const std::byte* const data = aligned_bytes(t.bytes, alignof(W), aligned);
      if (aligned.size() != 0) host_bytes_.push_back(std::move(aligned));
      return weight_view<W>{reinterpret_cast<const W*>(data), rows, cols, cols / elements_of<W>};
    } else {
      return copied<W>({{&t, rows}}, cols);
    }
  }

  /// Memory for tensors, one below the other as they are, to be filled by rearrange().
  template <class W>
  weight_for<W, B> copied(const std::vector<tensor_rows>& pieces, std::size_t cols) {
    const std::size_t row_bytes = cols / elements_of<W> * sizeof(W), rows = rows_of(pieces);
    std::byte* const out = take(rows * row_bytes);
    std::size_t offset = 0;
    for (const tensor_rows& p : pieces) {
      if (!p.tensor->bytes.empty())
        tasks_.push_back({p.tensor->bytes, 1, p.rows, cols, p.rows, row_bytes, out ? out + offset : out, nullptr});
      offset += p.rows * row_bytes;
    }
    return {reinterpret_cast<const W*>(out), rows, cols, cols / elements_of<W>};
  }

  /// `bytes`, or their copy in `copy` if they lie at an address that is legal in a file but not for the processor.
  static const std::byte* aligned_bytes(std::span<const std::byte> bytes, std::size_t alignment, buffer<std::byte, host_space>& copy) {
    if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignment == 0) return bytes.data();
    copy = buffer<std::byte, host_space>(bytes.size());
    std::memcpy(copy.data(), bytes.data(), bytes.size());
    return copy.data();
  }

  /// The same in groups.
  template <class W>
  weight_for<grouped<W>, B> in_groups(const std::vector<tensor_rows>& pieces, std::size_t cols) {
    has_groups_ = true;
    const std::size_t records = cols / W::elements, group_bytes = records * sizeof(grouped<W>), rows = rows_of(pieces);
    std::byte* const out = take(divide_up(rows, group_rows) * group_bytes);
    std::size_t offset = 0;
    for (const tensor_rows& p : pieces) {
      const std::size_t groups = divide_up(p.rows, group_rows);
      if (groups != 0)
        tasks_.push_back({p.tensor->bytes, alignof(W), p.rows, cols, groups, group_bytes, out ? out + offset : out,
                          [](const task& job, const std::byte* source, std::size_t begin, std::size_t end, std::byte* to) noexcept {
                            const weight_view<W> w{reinterpret_cast<const W*>(source), job.rows, job.cols, job.cols / W::elements};
                            auto* next = reinterpret_cast<grouped<W>*>(to);
                            for (std::size_t g = begin; g < end; ++g, next += w.stride)
                              group(next, w, g * group_rows, (std::min)(group_rows, w.rows - g * group_rows));
                          }});
      offset += groups * group_bytes;
    }
    return {reinterpret_cast<const grouped<W>*>(out), rows, cols, records};
  }
  static std::size_t rows_of(const std::vector<tensor_rows>& pieces) noexcept {
    std::size_t rows = 0;
    for (const tensor_rows& p : pieces) rows += p.rows;
    return rows;
  }

  /// Zeroed memory of B, cut from slabs: matrices lie one behind the other, whatever their sizes, and the system can back them with large pages.
  /// Memory of a device that nobody uses is lost, so there a large matrix has an allocation of its own; null, and noted, if it has no room.
  std::byte* take(std::size_t bytes) {
    bytes = divide_up(bytes, buffer_alignment) * buffer_alignment;
    if constexpr (in_file) {
      if (bytes > room_.size()) prefer_large_pages(begin_slab((std::max)(bytes, slab_bytes)));
      return take_from_slab(bytes);
    } else {
      if (needed_ == 0) free_before_ = space_limits<space_of<B>>::free_bytes();
      needed_ += bytes;
      if (lacks_room_) return nullptr;
      try {
        if (bytes >= device_slab_bytes / 2) return bytes_.emplace_back(bytes).data();
        if (bytes > room_.size()) begin_slab(device_slab_bytes);
        return take_from_slab(bytes);
      } catch (const error& e) {
        if (e.code() != error_code::out_of_memory) throw;
        lacks_room_ = true;
        return nullptr;
      }
    }
  }
  std::span<std::byte> begin_slab(std::size_t bytes) { return room_ = {bytes_.emplace_back(bytes).data(), bytes}; }
  std::byte* take_from_slab(std::size_t bytes) {
    std::byte* const taken = room_.data();
    room_ = room_.subspan(bytes);
    return taken;
  }

  /// Where `count` groups of a matrix from `first` on are filled: in their place, or in host memory on their way there.
  std::span<std::byte> room_for(const task& t, std::size_t first, std::size_t count) {
    if constexpr (in_file) {
      return {t.out + first * t.group_bytes, count * t.group_bytes};
    } else {
      if (staging_.size() < count * t.group_bytes) staging_ = buffer<std::byte, host_space>(count * t.group_bytes);
      return staging_.span().first(count * t.group_bytes);
    }
  }

  template <class T>
  static T element(const io::tensor& t, std::size_t i) noexcept {
    T value;
    std::memcpy(&value, t.bytes.data() + i * sizeof(T), sizeof(T));
    return value;
  }
  static float read_float(const io::tensor& t, std::size_t i) {
    switch (t.type) {
      case io::dtype::f32:
        return element<float>(t, i);
      case io::dtype::bf16:
        return to_float(element<bf16>(t, i));
      case io::dtype::f16:
        return to_float(element<f16>(t, i));
      default:
        throw wrong_type(t, "F32, BF16 or F16");
    }
  }
  static std::int64_t read_integer(const io::tensor& t, std::size_t i) {
    switch (t.type) {
      case io::dtype::i64:
        return element<std::int64_t>(t, i);
      case io::dtype::i32:
        return element<std::int32_t>(t, i);
      case io::dtype::f32: {
        const float value = element<float>(t, i);
        return value >= 0 && value < 0x1p31f && value == static_cast<float>(static_cast<std::int64_t>(value))
                   ? static_cast<std::int64_t>(value)
                   : -1;
      }
      default:
        throw wrong_type(t, "I32, I64 or F32");
    }
  }
  static error wrong_type(const io::tensor& t, const std::string& allowed) {
    return {error_code::tensor_mismatch,
            t.file + ": tensor '" + t.name + "' has elements of type " + std::string(io::name_of(t.type)) + ", allowed are " + allowed};
  }
  static std::string text(const std::vector<std::size_t>& shape) {
    std::string out = "[";
    for (std::size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
    return out + "]";
  }

  static constexpr std::size_t buffer_alignment = 256;  // the strictest of all devices
  static constexpr std::size_t slab_bytes = 32 * 1024 * 1024, device_slab_bytes = 4 * 1024 * 1024, piece_bytes = 16 * 1024 * 1024;

  std::shared_ptr<const io::tensor_set> tensors_;
  bool grouped_, has_groups_ = false;
  std::vector<task> tasks_;
  std::vector<buffer<std::byte, space_of<B>>> bytes_;
  std::vector<buffer<std::byte, host_space>> host_bytes_;  // of tensors at an address that is not legal for the processor
  buffer<std::byte, host_space> staging_;
  std::span<std::byte> room_;                 // what is left of the last slab
  std::size_t needed_ = 0, free_before_ = 0;  // of a device's memory: by all that was handed out; before any of it
  bool lacks_room_ = false;
};

}  // namespace outrider::gemma4
