// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
// Stands in for libFuzzer where there is none: gives the files of the directories named on the command line to the target, once each. With
// the inputs of old findings this is an ordinary test.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "fuzz/finding.hpp"
#include "outrider/io/mapped_file.hpp"

int main(int count, char** arguments) {
  std::size_t replayed = 0;
  for (int i = 1; i < count; ++i) {
    if (!std::filesystem::is_directory(arguments[i])) continue;  // a target without findings has no directory of them
    for (const auto& entry : std::filesystem::directory_iterator(arguments[i])) {
      std::printf("%s\n", entry.path().c_str());
      std::fflush(stdout);  // so that the last line names the input of a crash
      const std::string text = outrider::io::read_text_file(entry.path());
      const std::vector<std::uint8_t> input(text.begin(), text.end());  // exactly as long as the file
      LLVMFuzzerTestOneInput(input.data(), input.size());
      ++replayed;
    }
  }
  std::printf("%zu inputs\n", replayed);
  return replayed == 0;
}
