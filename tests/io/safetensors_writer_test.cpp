// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "outrider/io/output_file.hpp"
#include "outrider/io/safetensors.hpp"
#include "outrider/io/safetensors_writer.hpp"
#include "support/refusal.hpp"
#include "support/temporary_directory.hpp"

namespace {

using namespace outrider;
using outrider::testing::mentions;
using outrider::testing::refusal;
using outrider::testing::temporary_directory;

}  // namespace

TEST_CASE("what is written is read back: names, types, shapes, bytes") {
  const temporary_directory directory;
  const auto path = directory.path() / "model.safetensors";
  const std::vector<io::tensor_plan> tensors{{"ids", io::dtype::i64, {3}},
                                             {"a \"quoted\" name", io::dtype::bf16, {2, 5}},
                                             {"scalar", io::dtype::f32, {}},
                                             {"empty", io::dtype::f16, {0, 4}}};
  io::output_file file(path);
  io::write_safetensors(file, tensors, [&](std::size_t i, const io::byte_sink& sink) {
    sink(std::vector<std::byte>(*tensors[i].bytes(), static_cast<std::byte>(i + 1)));
  });
  file.commit();
  const io::tensor_set set = io::load_safetensors(path);
  CHECK(set.size() == tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const io::tensor& t = set.at(tensors[i].name);
    CHECK(t.type == tensors[i].type);
    CHECK(t.shape == tensors[i].shape);
    CHECK(std::vector(t.bytes.begin(), t.bytes.end()) == std::vector<std::byte>(*tensors[i].bytes(), static_cast<std::byte>(i + 1)));
  }
  CHECK(reinterpret_cast<std::uintptr_t>(set.at("ids").bytes.data()) % 8 == 0);
}

TEST_CASE("blocks and a name that is there twice are refused") {
  const temporary_directory directory;
  io::output_file file(directory.path() / "model.safetensors");
  const auto refused = [&](std::vector<io::tensor_plan> tensors) {
    return refusal(error_code::argument_invalid, [&] { io::write_safetensors(file, tensors, {}); });
  };
  CHECK(mentions(refused({{"t", io::dtype::q8_0, {2, 32}}}), "'t'", "Q8_0"));
  CHECK(mentions(refused({{"t", io::dtype::f32, {2}}, {"t", io::dtype::f32, {2}}}), "'t'", "twice"));
}
