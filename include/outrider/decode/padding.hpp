// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#pragma once
#include <concepts>
#include <cstddef>
#include <ranges>
#include <span>
#include <string>
#include <vector>

#include "outrider/core/scalar.hpp"
#include "outrider/error.hpp"

namespace outrider {

/// An attention mask as tokenizers return it: integers of any type in one piece of memory, 0 for padding, 1 for a token.
template <class M>
concept attention_mask =
    std::ranges::contiguous_range<const M> && std::ranges::sized_range<const M> && std::integral<std::ranges::range_value_t<const M>>;

namespace detail {

/// How many leading places of the row are padding; `where`: of the row, for the sentence.
template <class T>
[[nodiscard]] std::size_t left_padding(std::span<const T> mask, const std::string& where) {
  const auto refuse = [&](const std::string& what) { throw error(error_code::argument_invalid, "outrider: " + what + where); };
  const std::size_t none = mask.size();
  std::size_t begin = none;
  for (std::size_t i = 0; i < mask.size(); ++i) {
    if (mask[i] != T{0} && mask[i] != T{1})
      refuse("the mask is " + std::to_string(mask[i]) + " at place " + std::to_string(i) + ", allowed are 0 and 1");
    if (mask[i] == T{1} && begin == none) begin = i;
    if (mask[i] == T{0} && begin != none)
      refuse("the mask has padding at place " + std::to_string(i) + ", behind a token at place " + std::to_string(i - 1) +
             "; padding is allowed on the left only");
  }
  if (begin == none) refuse("a text of " + std::to_string(mask.size()) + " places has no token, only padding; at least one is needed");
  return begin;
}

inline void check_mask_size(std::size_t ids, std::size_t mask) {
  if (ids != mask)
    throw error(error_code::argument_invalid,
                "outrider: " + std::to_string(ids) + " token ids have a mask of " + std::to_string(mask) + " elements; it needs as many");
}

}  // namespace detail

/// The text of a left-padded row: what lies behind the places with mask 0. Positions count from its first token, so the model sees what it
/// would see without padding. Returns a part of `ids`, never empty. Errors: argument_invalid for sizes that differ, a mask element other
/// than 0 and 1, padding behind a token, no token at all.
template <attention_mask Mask>
[[nodiscard]] std::span<const token_id> strip_left_padding(std::span<const token_id> ids, const Mask& mask) {
  const std::span<const std::ranges::range_value_t<const Mask>> elements(std::ranges::data(mask), std::ranges::size(mask));
  detail::check_mask_size(ids.size(), elements.size());
  return ids.subspan(detail::left_padding(elements, ""));
}

/// The same for each row of a batch: ids and mask are [rows, n], row after row. Errors: argument_invalid, naming the row, also if there are
/// no rows or the ids do not make rows of one length.
template <attention_mask Mask>
[[nodiscard]] std::vector<std::span<const token_id>> strip_left_padding_rows(std::span<const token_id> ids, const Mask& mask,
                                                                             std::size_t rows) {
  const std::span<const std::ranges::range_value_t<const Mask>> elements(std::ranges::data(mask), std::ranges::size(mask));
  detail::check_mask_size(ids.size(), elements.size());
  if (rows == 0 || ids.size() % rows != 0)
    throw error(error_code::argument_invalid, "outrider: " + std::to_string(ids.size()) + " token ids do not make " + std::to_string(rows) +
                                                  " rows of one length; at least one row is needed");
  const std::size_t n = ids.size() / rows;
  std::vector<std::span<const token_id>> texts;
  texts.reserve(rows);
  for (std::size_t r = 0; r < rows; ++r)
    texts.push_back(ids.subspan(r * n, n).subspan(detail::left_padding(elements.subspan(r * n, n), " (row " + std::to_string(r) + ")")));
  return texts;
}

}  // namespace outrider
