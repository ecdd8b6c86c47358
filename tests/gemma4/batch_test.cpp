// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/backend/reference.hpp"
#define OUTRIDER_TESTED_BACKENDS outrider::reference
#include "batch.hpp"

namespace {

using namespace batches;

struct fixture {
  gemma4::model<reference> model = gemma4::load_model<reference>(golden_directory / "e2b" / "target");
  context_of<reference> ctx{execution{}};
  gemma4::batch<reference> batch{model, ctx, {.max_sequences = 3, .max_rows = 10, .max_draft = 3, .prompt_chunk = 8, .max_positions = 20}};
  std::vector<token_id> tokens = std::vector<token_id>(100, 5);

  [[nodiscard]] std::span<const token_id> some(std::size_t count) const { return std::span(tokens).first(count); }
  [[nodiscard]] std::string refused(std::vector<sequence_rows> entries) {
    return refusal(error_code::argument_invalid, [&] { batch.forward(entries); });
  }
  void pass(std::size_t slot, std::size_t count) {
    const sequence_rows entry{slot, some(count), 1, true};
    batch.forward(std::span(&entry, 1));
    batch.commit(slot, count);
  }
};

}  // namespace

TEST_CASE_FIXTURE(fixture, "a batch refuses options it cannot have, with what is allowed") {
  const auto refused_options = [&](gemma4::batch_options options) {
    return refusal(error_code::argument_invalid, [&] { gemma4::batch<reference>(model, ctx, options); });
  };
  CHECK(mentions(refused_options({.max_sequences = 0}), "sequences of 0", "1 to 4096"));
  CHECK(mentions(refused_options({.max_sequences = (std::numeric_limits<std::size_t>::max)()}), "1 to 4096"));
  CHECK(mentions(refused_options({.max_rows = 127}), "rows of 127", "128 to"));
  CHECK(mentions(refused_options({.max_rows = 8, .max_draft = 8, .prompt_chunk = 1}), "rows of 8", "9 to"));
  CHECK(mentions(refused_options({.max_draft = 17}), "17", "0 to 16"));
  CHECK(mentions(refused_options({.prompt_chunk = 0}), "0", "1 to 65536"));
  CHECK(mentions(refused_options({.max_positions = std::size_t{1} << 31}), "2147483647"));
  CHECK(mentions(refused_options({.max_rewind = std::size_t{1} << 31}), "2147483647"));
  CHECK(gemma4::batch<reference>(model, ctx, {.max_sequences = 2, .max_draft = 3, .prompt_chunk = 8}).max_rows() == 16);
  CHECK_FALSE(std::is_constructible_v<gemma4::batch<reference>, gemma4::model<reference>, context_of<reference>&>);
}

TEST_CASE_FIXTURE(fixture, "slots are lent, returned and lent again") {
  CHECK(batch.size() == 0);
  CHECK(batch.add() == 0);
  CHECK(batch.add() == 1);
  CHECK(batch.fork(1) == 2);
  CHECK(batch.size() == 3);
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { static_cast<void>(batch.add()); }), "all 3 slots"));
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { static_cast<void>(batch.fork(0)); }), "all 3 slots"));
  pass(1, 8);
  batch.close(1);
  CHECK_FALSE(batch.is_open(1));
  CHECK(batch.is_open(2));
  CHECK(batch.add() == 1);
  CHECK(batch.committed(1) == 0);
  CHECK(batch.tokens(1).empty());
  CHECK(batch.target(1).hidden().rows == 0);
}

TEST_CASE_FIXTURE(fixture, "a slot without a sequence is refused everywhere") {
  const std::size_t slot = batch.add();
  batch.close(slot);
  for (const std::size_t none : {slot, std::size_t{3}, (std::numeric_limits<std::size_t>::max)()}) {
    const auto says = [&](auto&& call) { return mentions(refusal(error_code::argument_invalid, call), "no sequence in slot", "0 of 3"); };
    CHECK(says([&] { batch.close(none); }));
    CHECK(says([&] { static_cast<void>(batch.fork(none)); }));
    CHECK(says([&] { static_cast<void>(batch.committed(none)); }));
    CHECK(says([&] { static_cast<void>(batch.tokens(none)); }));
    CHECK(says([&] { static_cast<void>(batch.target(none)); }));
    CHECK(says([&] { batch.reserve(none, 1); }));
    CHECK(says([&] { static_cast<void>(batch.truncate(none, 0)); }));
    CHECK(says([&] { batch.commit(none, 1); }));
    CHECK(mentions(refused({{none, some(1), 1}}), "no sequence in slot"));
  }
}

TEST_CASE_FIXTURE(fixture, "a pass that is not allowed is refused and changes nothing") {
  const std::size_t a = batch.add(), b = batch.add(), c = batch.add();
  pass(a, 8);
  const std::vector<sequence_rows> good{{a, some(2), 2}, {b, some(3), 1, true}};
  batch.forward(good);
  const std::vector<float> logits = copy_of(batch.logits(0));

  CHECK(mentions(refused({}), "no sequence"));
  CHECK(mentions(refused({{a, some(1), 1}, {b, some(1), 1}, {a, some(1), 1}}), "two entries of slot 0"));
  CHECK(mentions(refused({{a, {}, 0}}), "0 tokens in slot 0", "1 to 4"));
  CHECK(mentions(refused({{a, some(5), 1}}), "5 tokens", "1 to 4"));
  CHECK(mentions(refused({{a, some(9), 1, true}}), "9 tokens of a prompt", "1 to 8"));
  CHECK(mentions(refused({{a, some(2), 3}}), "3 wanted rows", "0 to 2"));
  CHECK(mentions(refused({{a, some(8), 5, true}}), "5 wanted rows", "0 to 4"));
  CHECK(mentions(refused({{b, some(8), 1, true}, {a, some(3), 3}}), "11 rows", "up to 10"));
  const std::vector<token_id> negative{5, -1}, beyond{5, 128};
  CHECK(mentions(refused({{c, some(1), 1}, {a, negative, 2}}), "-1 as a token in slot 0", "0 to 127"));
  CHECK(mentions(refused({{a, beyond, 2}}), "128 as a token"));

  CHECK(same_bits(copy_of(batch.logits(0)), logits));
  batch.commit(b, 3);  // what was pending still is
  batch.commit(a, 1);
  CHECK(batch.committed(a) == 9);
  CHECK(batch.committed(b) == 3);
}

TEST_CASE_FIXTURE(fixture, "a sequence that is full ends with context_full; the others of the pass are as they were") {
  const std::size_t a = batch.add(), b = batch.add();
  for (const std::size_t rows : {8u, 8u, 3u}) pass(a, rows);
  const std::vector<sequence_rows> too_long{{b, some(4), 1}, {a, some(2), 1}};
  refusal(error_code::context_full, [&] { batch.forward(too_long); });
  CHECK(batch.committed(b) == 0);
  CHECK(batch.cache(b).pending() == 0);
  refusal(error_code::argument_invalid, [&] { batch.commit(b, 1); });
  refusal(error_code::context_full, [&] { batch.reserve(a, 21); });
  pass(a, 1);
  CHECK(batch.committed(a) == batch.max_positions());
}

TEST_CASE_FIXTURE(fixture, "rows are committed once, at least one, and before the next pass") {
  const std::size_t a = batch.add(), b = batch.add();
  const std::vector<sequence_rows> both{{b, some(4), 4}, {a, some(3), 3}};
  batch.forward(both);
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { batch.commit(a, 0); }), "0 rows"));
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { batch.commit(a, 4); }), "4 rows", "3 are pending"));
  batch.commit(a, 2);
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { batch.commit(a, 1); }), "none are pending"));
  pass(a, 1);
  CHECK(mentions(refusal(error_code::argument_invalid, [&] { batch.commit(b, 1); }), "slot 1", "none are pending"));
  CHECK(batch.committed(a) == 3);
  CHECK(batch.committed(b) == 0);
}

TEST_CASE_FIXTURE(fixture, "a fork has what is committed, not what is pending") {
  const std::size_t a = batch.add();
  pass(a, 6);
  const sequence_rows more{a, some(3), 3};
  batch.forward(std::span(&more, 1));
  const std::size_t b = batch.fork(a);
  CHECK(batch.committed(b) == 6);
  CHECK(batch.tokens(b).size() == 6);
  CHECK(same_bits(copy_of(batch.target(b).hidden()), copy_of(batch.target(a).hidden())));
  refusal(error_code::argument_invalid, [&] { batch.commit(b, 1); });
  batch.commit(a, 3);
  CHECK(batch.committed(a) == 9);
  CHECK(batch.committed(b) == 6);
  batch.close(a);
  CHECK(batch.truncate(b, 4));
  CHECK(batch.target(b).hidden().rows == 0);
  CHECK_FALSE(batch.truncate(b, 5));
}

TEST_CASE_FIXTURE(fixture, "a model's pass over several caches opens rows in all of them or in none") {
  const std::size_t rows = 4;
  models::passes<reference> run(model, ctx, 2 * rows);
  std::vector<kv_cache<reference, float>> caches;
  for (const std::size_t most : {100u, 3u}) caches.emplace_back(model.kv_layers(), rows, most);
  using part = gemma4::batch_part<reference, float>;
  std::vector<part> parts{{&caches[0], 4, 1}, {&caches[1], 4, 1}};
  const auto pass_over = [&](std::size_t count) {
    return model.forward(ctx, run.workspace, std::span<const part>(parts), some(count), row_kind::decode);
  };
  refusal(error_code::context_full, [&] { pass_over(8); });
  parts[1].rows = 5;
  refusal(error_code::argument_invalid, [&] { pass_over(9); });
  for (const auto& cache : caches) CHECK(cache.pending() == 0);

  parts = {{&caches[0], 0, 0}, {&caches[1], 2, 1}};  // a part may have no rows
  CHECK(same_bits(copy_of(pass_over(2).logits), copy_of(run.forward(some(2), 1, row_kind::decode).logits)));
}
