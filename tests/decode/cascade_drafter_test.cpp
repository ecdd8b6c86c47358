// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/decode/cascade_drafter.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "outrider/decode/ngram_drafter.hpp"
#include "support/refusal.hpp"

namespace {

using namespace outrider;
using testing::mentions;
using testing::refusal;
using ids = std::vector<token_id>;

struct any_target {
  std::string model = "this";
};

/// Drafts `tokens`, as many as there is room for.
struct fixed_drafter {
  static constexpr draft_needs needs{};
  ids tokens = {};
  std::size_t asked = 0;

  template <class Target>
  std::size_t propose(const Target&, const draft_request& request, std::span<token_id> out) {
    ++asked;
    const std::size_t count = (std::min)(tokens.size(), out.size());
    std::copy_n(tokens.begin(), count, out.begin());
    if (!request.confidence.empty()) std::fill_n(request.confidence.begin(), count, static_cast<float>(tokens.size()));
    return count;
  }
};

struct named_drafter : fixed_drafter {
  static constexpr const char* name = "named";
};

/// Made for the target of one model.
struct particular_drafter : fixed_drafter {
  std::string model = "this";

  void check(const any_target& target) const {
    if (target.model != model) throw error(error_code::pair_mismatch, "outrider: made for " + model);
  }
};

struct needs_hidden : fixed_drafter {
  static constexpr draft_needs needs{.hidden = true};
};
struct needs_keys_and_embedding : fixed_drafter {
  static constexpr draft_needs needs{.keys = true, .embedding = true};
};

const ids text{1};

template <class Cascade>
ids draft_of(Cascade& cascade, std::size_t most) {
  ids out(most, -1);
  draft_request request{};
  request.text = text;
  out.resize(cascade.propose(any_target{}, request, out));
  return out;
}

}  // namespace

TEST_CASE("a cascade needs what either of its drafters needs") {
  using both = cascade_drafter<needs_hidden, needs_keys_and_embedding>;
  static_assert(both::needs.hidden && both::needs.keys && both::needs.embedding);
  using one = cascade_drafter<fixed_drafter, needs_keys_and_embedding>;
  static_assert(!one::needs.hidden && one::needs.keys && one::needs.embedding);
  using none = cascade_drafter<ngram_drafter, no_draft>;
  static_assert(!none::needs.hidden && !none::needs.keys && !none::needs.embedding);
  static_assert(check_drafter<none, any_target>());
  static_assert(check_drafter<cascade_drafter<none, fixed_drafter>, any_target>());  // cascades make cascades
}

TEST_CASE("the second drafter is asked only if the first has no draft") {
  fixed_drafter first{{5, 6}}, second{{7, 8, 9}};
  cascade_drafter cascade(first, second);
  CHECK(cascade.last_source() == 0);
  CHECK(draft_of(cascade, 4) == ids{5, 6});
  CHECK(cascade.last_source() == 0);
  CHECK(second.asked == 0);
  first.tokens.clear();
  CHECK(draft_of(cascade, 4) == ids{7, 8, 9});
  CHECK(cascade.last_source() == 1);
  CHECK(first.asked == 2);
  CHECK(second.asked == 1);
}

TEST_CASE("a first draft below the least length gives way to the second") {
  fixed_drafter first{{5, 6}}, second{{7, 8, 9}};
  cascade_drafter cascade(first, second, 3);
  CHECK(draft_of(cascade, 4) == ids{7, 8, 9});
  first.tokens = {4, 5, 6};
  CHECK(draft_of(cascade, 4) == ids{4, 5, 6});
  first.tokens = {5, 6};
  second.tokens.clear();
  CHECK(draft_of(cascade, 4).empty());
}

TEST_CASE("a first draft that fills the room is long enough") {
  fixed_drafter first{{5, 6}}, second{{7, 8, 9}};
  cascade_drafter cascade(first, second, 3);
  CHECK(draft_of(cascade, 2) == ids{5, 6});
  CHECK(draft_of(cascade, 0).empty());
  CHECK(second.asked == 0);
}

TEST_CASE("the contributions of both are counted, rounds without a draft are nobody's") {
  using cascade_type = cascade_drafter<fixed_drafter, fixed_drafter>;
  fixed_drafter first{{5, 6}}, second{{7, 8, 9}};
  cascade_type cascade(first, second);
  draft_of(cascade, 4);
  draft_of(cascade, 1);
  first.tokens.clear();
  draft_of(cascade, 4);
  second.tokens.clear();
  draft_of(cascade, 4);
  CHECK(cascade.from(0) == cascade_type::contribution{2, 3});
  CHECK(cascade.from(1) == cascade_type::contribution{1, 3});
}

TEST_CASE("the source of a draft has the name of its drafter") {
  ngram_drafter first;
  named_drafter second;
  fixed_drafter nameless;
  cascade_drafter named(first, second);
  CHECK(named.source() == std::string("ngram"));
  draft_of(named, 4);
  CHECK(named.source() == std::string("named"));
  cascade_drafter unnamed(nameless, nameless);
  CHECK(unnamed.source() == std::string("first"));
  draft_of(unnamed, 4);
  CHECK(unnamed.source() == std::string("second"));
}

TEST_CASE("confidences are those of the draft that is returned") {
  fixed_drafter first{{5}}, second{{7, 8, 9}};
  cascade_drafter cascade(first, second, 2);
  std::vector<float> confidence(4);
  ids out(4);
  draft_request request{};
  request.text = text;
  request.confidence = confidence;
  CHECK(cascade.propose(any_target{}, request, out) == 3);
  CHECK(confidence == std::vector<float>{3, 3, 3, 0});
}

TEST_CASE("a cascade suits a target if both of its drafters do") {
  particular_drafter suits, other;
  other.model = "another";
  fixed_drafter any;
  const any_target target;
  CHECK_NOTHROW(cascade_drafter(any, any).check(target));
  CHECK_NOTHROW(cascade_drafter(any, suits).check(target));
  CHECK_NOTHROW(cascade_drafter(suits, any).check(target));
  CHECK(mentions(refusal(error_code::pair_mismatch, [&] { cascade_drafter(any, other).check(target); }), "made for another"));
  CHECK(mentions(refusal(error_code::pair_mismatch, [&] { cascade_drafter(other, suits).check(target); }), "made for another"));
}

TEST_CASE("a least length of 0 is refused") {
  fixed_drafter first, second;
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { cascade_drafter(first, second, 0); }), "least length of 0", "1 or more"));
}
