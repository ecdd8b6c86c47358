// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "outrider/config.hpp"
#include "outrider/core/scalar.hpp"

namespace outrider {

/// 128 bits, the lowest word first.
struct philox_words {
  std::uint32_t word[4] = {};
  bool operator==(const philox_words&) const = default;
};

/// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011): 128 random bits for a counter under a
/// key. Different counters give unrelated words, in any order, without state.
[[nodiscard]] OUTRIDER_HD constexpr philox_words philox4x32(philox_words counter, std::uint32_t key0, std::uint32_t key1) noexcept {
  std::uint32_t a = counter.word[0], b = counter.word[1], c = counter.word[2], d = counter.word[3];
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p = std::uint64_t{0xD2511F53u} * a, q = std::uint64_t{0xCD9E8D57u} * c;
    a = static_cast<std::uint32_t>(q >> 32) ^ b ^ key0;
    b = static_cast<std::uint32_t>(q);
    c = static_cast<std::uint32_t>(p >> 32) ^ d ^ key1;
    d = static_cast<std::uint32_t>(p);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

/// Random numbers that are functions of what they are for: noise(seed, sequence) gives every position of a text a number per token id, and
/// numbers of another kind beside them. Nothing is consumed, so it does not matter who asks, in what order, or how often.
/// Positions are below 2^32, ids and indexes below 2^31; the counter has a bit for each, so no two of them share a word.
class noise {
 public:
  OUTRIDER_HD constexpr noise(std::uint64_t seed, std::uint64_t sequence) noexcept : seed_(seed), sequence_(sequence) {}

  /// The word of each id 4·block … 4·block + 3 at `position`.
  [[nodiscard]] OUTRIDER_HD constexpr philox_words words(std::size_t position, std::uint32_t block) const noexcept {
    return philox4x32({{block, static_cast<std::uint32_t>(position), low(sequence_), high(sequence_)}}, low(seed_), high(seed_));
  }

  /// Standard Gumbel noise of a token at a position: argmax over ids of log p + gumbel is a draw from p.
  [[nodiscard]] OUTRIDER_HD double gumbel(std::size_t position, token_id id) const noexcept {
    const auto index = static_cast<std::uint32_t>(id);
    return gumbel_of(words(position, index / 4).word[index % 4]);
  }
  /// A number in (0, 1), one per position and index, independent of the noise of the tokens.
  [[nodiscard]] OUTRIDER_HD constexpr double uniform(std::size_t position, std::uint32_t index) const noexcept {
    return uniform_of(words(position, (index / 4) | 0x80000000u).word[index % 4]);
  }

  /// A word as a number in (0, 1): the middle of the word's interval, so neither end occurs.
  [[nodiscard]] OUTRIDER_HD static constexpr double uniform_of(std::uint32_t word) noexcept { return (word + 0.5) * 0x1p-32; }
  /// −log(−log u). Rises with the word; at most 22.88 = −log(−log(1 − 2^-33)).
  [[nodiscard]] OUTRIDER_HD static double gumbel_of(std::uint32_t word) noexcept { return -std::log(-std::log(uniform_of(word))); }

 private:
  OUTRIDER_HD static constexpr std::uint32_t low(std::uint64_t value) noexcept { return static_cast<std::uint32_t>(value); }
  OUTRIDER_HD static constexpr std::uint32_t high(std::uint64_t value) noexcept { return static_cast<std::uint32_t>(value >> 32); }

  std::uint64_t seed_, sequence_;
};

/// How tokens are drawn from logits: what sampling_options says of these, without penalties. Above 0: the temperature.
struct draw_rule {
  double temperature = 1;
  std::size_t top_k = 0;
  double top_p = 1, min_p = 0;
  std::uint64_t seed = 0, sequence = 0;
};

}  // namespace outrider
