// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/gemma4/kv_mirror.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "outrider/backend/reference.hpp"
#include "outrider/layers/kv_cache.hpp"
#include "support/counting_space.hpp"

namespace {

using namespace outrider;
using gemma4::attention_kind;
using gemma4::attention_kinds;
using testing::counting_space;

/// Two layers of each kind, the last of them the donors.
gemma4::text_config config_of(std::size_t window, std::size_t heads = 2, std::size_t head_dim = 32) {
  gemma4::text_config c;
  c.layers = {attention_kind::sliding, attention_kind::full, attention_kind::sliding, attention_kind::full};
  c.attention[0] = {head_dim, heads, {}};
  c.attention[1] = {2 * head_dim, 1, {}};
  c.window = window;
  return c;
}

/// For each position a number that stands for all tokens up to it.
std::vector<std::uint32_t> prefixes_of(std::span<const token_id> tokens) {
  std::vector<std::uint32_t> hashes;
  std::uint32_t hash = 17;
  for (const token_id token : tokens) hashes.push_back(hash = hash * 31u + static_cast<std::uint32_t>(token) + (hash >> 15));
  return hashes;
}

/// The bytes of a key (half 0) or value (half 1), a function of the tokens up to its position and of where it belongs.
template <class Kv>
void make_bytes(Kv* out, std::size_t count, std::uint32_t prefix, std::size_t kind, std::size_t head, std::size_t half) {
  std::uint32_t hash = prefix ^ (static_cast<std::uint32_t>(kind * 32 + head * 2 + half) * 2654435761u);
  std::vector<unsigned char> bytes(count * sizeof(Kv));
  for (unsigned char& byte : bytes) {
    hash = hash * 1664525u + 1013904223u;
    byte = static_cast<unsigned char>(hash >> 24);
  }
  std::memcpy(static_cast<void*>(out), bytes.data(), bytes.size());
}

/// A target without a model: its cache, filled with bytes that tell positions, prefixes, heads, keys and values apart.
template <class Kv>
class sequence {
 public:
  sequence(const gemma4::text_config& config, std::size_t max_rows, std::size_t max_positions, std::size_t max_rewind = 0)
      : config_(config), cache_(layers(config), max_rows, max_positions, max_rewind) {}

  [[nodiscard]] std::span<const token_id> tokens() const { return tokens_; }
  [[nodiscard]] const gemma4::text_config& config() const { return config_; }

  /// Writes rows of which the first `kept` are then committed.
  void pass(std::span<const token_id> rows, std::size_t kept) {
    const std::size_t first = tokens_.size();
    cache_.extend(rows.size());
    tokens_.insert(tokens_.end(), rows.begin(), rows.end());
    const std::vector<std::uint32_t> prefixes = prefixes_of(tokens_);
    for (const attention_kind kind : attention_kinds) {
      const kv_view<Kv> view = cache_.layer(config_.donor(kind));
      for (std::size_t p = first; p < tokens_.size(); ++p)
        for (std::size_t h = 0; h < view.heads; ++h) {
          make_bytes(view.key(p, h), view.stride(), prefixes[p], static_cast<std::size_t>(kind), h, 0);
          make_bytes(view.value(p, h), view.stride(), prefixes[p], static_cast<std::size_t>(kind), h, 1);
        }
    }
    cache_.commit(kept);
    tokens_.resize(first + kept);
  }
  void prefill(std::span<const token_id> prompt) {
    for (std::size_t at = 0; at < prompt.size();) {
      const std::size_t m = (std::min)(cache_.max_rows(), prompt.size() - at);
      pass(prompt.subspan(at, m), m);
      at += m;
    }
  }
  bool truncate(std::size_t positions) {
    if (!cache_.truncate(positions)) return false;
    tokens_.resize(positions);
    return true;
  }
  void clear() {
    cache_.clear();
    tokens_.clear();
  }

  /// Its keys, seen in the space they are said to lie in.
  template <class Space>
  [[nodiscard]] gemma4::shared_kv<Kv, Space> keys() {
    gemma4::shared_kv<Kv, Space> keys;
    for (const attention_kind kind : attention_kinds) {
      const kv_view<const Kv> view = std::as_const(cache_).layer(config_.donor(kind));
      auto& out = keys.layers[static_cast<std::size_t>(kind)];
      out = {nullptr, view.block_rows, view.ring_rows, view.heads, view.head_dim};
      if constexpr (host_accessible<Space>) {
        out.blocks = view.blocks;
      } else {
        auto& table = tables_[static_cast<std::size_t>(kind)];
        table.clear();
        const std::size_t blocks = view.ring_rows != 0 ? 1 : divide_up(tokens_.size(), view.block_rows);
        for (std::size_t b = 0; b < blocks; ++b) table.push_back(Space::disguise(view.blocks[b]));
        out.blocks = Space::disguise(static_cast<const Kv* const*>(table.data()));
      }
    }
    keys.ends = {tokens_.size(), tokens_.size()};
    keys.position = tokens_.size();
    return keys;
  }

 private:
  static std::vector<kv_layer_shape> layers(const gemma4::text_config& c) {
    std::vector<kv_layer_shape> shapes;
    for (std::size_t i = 0; i < c.first_shared(); ++i)
      shapes.push_back({c.shape_of(i).kv_heads, c.shape_of(i).head_dim, c.layers[i] == attention_kind::sliding ? c.window : 0});
    return shapes;
  }
  gemma4::text_config config_;
  kv_cache<reference, Kv> cache_;
  std::vector<token_id> tokens_;
  std::array<std::vector<const Kv*>, 2> tables_;
};

/// A mirror's view with a table the test can read.
template <class Kv, class Space>
kv_view<const Kv> readable(kv_view<const Kv, Space> view, std::size_t end, std::vector<const Kv*>& table) {
  table.clear();
  const std::size_t blocks = view.ring_rows != 0 ? 1 : divide_up(end, view.block_rows);
  for (std::size_t b = 0; b < blocks; ++b)
    if constexpr (host_accessible<Space>)
      table.push_back(view.blocks[b]);
    else
      table.push_back(Space::reveal(Space::reveal(view.blocks)[b]));
  return {table.data(), view.block_rows, view.ring_rows, view.heads, view.head_dim};
}

/// Positions a drafter may look at whose bytes are not those their tokens give.
template <class Kv, class Space>
std::size_t wrong_positions(const gemma4::shared_kv<Kv, Space>& keys, const gemma4::text_config& config, std::span<const token_id> tokens) {
  std::size_t wrong = 0;
  std::vector<const Kv*> table;
  const std::vector<std::uint32_t> prefixes = prefixes_of(tokens);
  CHECK(keys.position == tokens.size());
  for (const attention_kind kind : attention_kinds) {
    const auto k = static_cast<std::size_t>(kind);
    CHECK(keys.ends[k] == tokens.size());
    if (keys.layers[k].heads == 0) continue;
    const kv_view<const Kv> view = readable(keys.layers[k], tokens.size(), table);
    const key_window seen{tokens.size(), kind == attention_kind::sliding ? config.window + 1 : key_window::unlimited};
    std::vector<Kv> want(view.stride());
    for (std::size_t p = seen.begin(0); p < tokens.size(); ++p) {
      bool same = true;
      for (std::size_t h = 0; h < view.heads; ++h)
        for (std::size_t half = 0; half < 2; ++half) {
          make_bytes(want.data(), want.size(), prefixes[p], k, h, half);
          const Kv* const got = half == 0 ? view.key(p, h) : view.value(p, h);
          same = same && std::memcmp(static_cast<const void*>(got), want.data(), want.size() * sizeof(Kv)) == 0;
        }
      if (!same) ++wrong;
    }
  }
  return wrong;
}

/// Stored objects of one position in both mirrored layers, keys and values.
template <class Kv>
std::size_t objects_of(const gemma4::text_config& c, attention_kind kind) {
  return 2 * c.shape(kind).kv_heads * c.shape(kind).head_dim / elements_of<Kv>;
}

std::vector<token_id> counted(std::size_t count, token_id first) {
  std::vector<token_id> tokens(count);
  for (std::size_t i = 0; i < count; ++i) tokens[i] = first + static_cast<token_id>(i);
  return tokens;
}

template <class Kv>
struct copied {
  std::size_t elements = 0, calls = 0;
};
template <class Kv, class Call>
copied<Kv> copied_by(Call&& call) {
  const auto before = counting_space::in<Kv>;
  call();
  return {counting_space::in<Kv>.elements - before.elements, counting_space::in<Kv>.calls - before.calls};
}

TEST_CASE_TEMPLATE("a round copies what it committed, in one call a layer, and nothing of rejected drafts", Kv, float, bf16, f16, q8_0) {
  const auto config = config_of(300);  // no ring wraps and no block ends in this test
  const std::size_t row = objects_of<Kv>(config, attention_kind::sliding) + objects_of<Kv>(config, attention_kind::full);
  sequence<Kv> target(config, 9, 200);
  gemma4::kv_mirror<host_space, counting_space, Kv> mirror(config, 200);
  const auto update = [&] { return copied_by<Kv>([&] { mirror.update(target.template keys<host_space>(), target.tokens()); }); };
  target.prefill(counted(20, 100));
  CHECK(update().elements == 20 * row);
  CHECK(update().calls == 0);  // nothing new
  for (const std::size_t kept : std::initializer_list<std::size_t>{1, 5, 9, 2}) {
    target.pass(counted(9, static_cast<token_id>(1000 + kept)), kept);
    const auto round = update();
    CHECK(round.elements == kept * row);
    CHECK(round.calls == 2);
    CHECK(wrong_positions(mirror.keys(), config, target.tokens()) == 0);
  }
}

TEST_CASE("a target that goes back and on with other tokens has only those copied") {
  const auto config = config_of(300);
  const std::size_t row = objects_of<float>(config, attention_kind::sliding) + objects_of<float>(config, attention_kind::full);
  sequence<float> target(config, 16, 200);
  gemma4::kv_mirror<host_space, counting_space, float> mirror(config, 200);
  const auto update = [&] { return copied_by<float>([&] { mirror.update(target.keys<host_space>(), target.tokens()); }).elements; };
  const auto text = counted(60, 100);
  target.prefill(text);
  CHECK(update() == 60 * row);

  REQUIRE(target.truncate(40));
  target.prefill(counted(10, 500));
  CHECK(update() == 10 * row);
  CHECK(wrong_positions(mirror.keys(), config, target.tokens()) == 0);

  REQUIRE(target.truncate(40));  // and back to what it was at first: the mirror has forgotten that
  target.prefill(std::span(text).subspan(40));
  CHECK(update() == 20 * row);

  target.clear();  // the same tokens again
  target.prefill(text);
  CHECK(update() == 0);
  target.clear();
  target.prefill(std::span(text).first(30));
  CHECK(update() == 0);
  CHECK(wrong_positions(mirror.keys(), config, target.tokens()) == 0);
  target.prefill(std::span(text).subspan(30));
  CHECK(update() == 30 * row);
  target.clear();
  CHECK(update() == 0);
  CHECK(mirror.keys().ends[1] == 0);

  target.prefill(text);
  update();
  mirror.clear();  // for another model
  CHECK(update() == 60 * row);
}

TEST_CASE("of a sliding layer no more is copied than a drafter sees") {
  const auto config = config_of(10);
  const std::size_t sliding = objects_of<float>(config, attention_kind::sliding), full = objects_of<float>(config, attention_kind::full);
  sequence<float> target(config, 8, 2000, 40);
  gemma4::kv_mirror<host_space, counting_space, float> mirror(config, 2000);
  const auto update = [&] { return copied_by<float>([&] { mirror.update(target.keys<host_space>(), target.tokens()); }).elements; };
  target.prefill(counted(700, 0));
  CHECK(update() == 700 * full + 11 * sliding);
  target.pass(counted(8, 7000), 3);
  CHECK(update() == 3 * (full + sliding));
  REQUIRE(target.truncate(690));  // the mirror holds 692 … 702 of the ring; 679 … 689 are seen now, and are still in the target's
  CHECK(update() == 11 * sliding);
  CHECK(wrong_positions(mirror.keys(), config, target.tokens()) == 0);
  REQUIRE(target.truncate(686));
  CHECK(update() == 4 * sliding);
  target.pass(counted(8, 8000), 8);
  CHECK(update() == 8 * (full + sliding));
  CHECK(wrong_positions(mirror.keys(), config, target.tokens()) == 0);
}

template <class From, class To, class Kv>
struct way {
  using from = From;
  using to = To;
  using kv = Kv;
};

TEST_CASE_TEMPLATE("whatever a target does, its mirror shows a drafter the same bytes and copies what was lacking", Way,
                   way<host_space, counting_space, float>, way<host_space, counting_space, bf16>, way<host_space, counting_space, q8_0>,
                   way<counting_space, host_space, float>, way<counting_space, host_space, q8_0>, way<host_space, host_space, bf16>) {
  using From = typename Way::from;
  using To = typename Way::to;
  using Kv = typename Way::kv;
  std::size_t laps = 0, rewinds = 0, refetched = 0, blocks = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const auto draw = [&](std::size_t low, std::size_t high) { return std::uniform_int_distribution<std::size_t>(low, high)(random); };
    const std::size_t length = draw(0, 3) == 0 ? draw(500, 700) : draw(20, 90), max_rows = draw(1, 24), max_rewind = draw(0, 20);
    const auto config = config_of(draw(0, 7) == 0 ? length + 5 : draw(1, 40), draw(1, 3));
    sequence<Kv> target(config, max_rows, length, max_rewind);
    gemma4::kv_mirror<From, To, Kv> mirror(config, length);
    if (draw(0, 1) == 0) mirror.reserve(length);
    std::vector<token_id> mirrored;                   // tokens at the last update
    std::size_t sliding_begin = 0, sliding_held = 0;  // positions of the ring held then: what was seen

    for (std::size_t step = 0; step < 40; ++step) {
      const std::size_t now = target.tokens().size(), room = length - now;
      const auto tokens = [&](std::size_t count) {
        std::vector<token_id> drawn(count);
        for (token_id& token : drawn) token = static_cast<token_id>(draw(0, 1));  // so that prefixes agree by chance
        return drawn;
      };
      switch (draw(0, 9)) {
        case 0:
          target.prefill(tokens(draw(0, (std::min<std::size_t>)(room, 300))));
          break;
        case 1:
          if (target.truncate(now - (std::min)(now, draw(0, 40)))) ++rewinds;
          break;
        case 2:
          if (draw(0, 5) == 0) target.clear();
          break;
        default: {
          const std::size_t rows = (std::min)(room, draw(1, max_rows));
          if (rows != 0) target.pass(tokens(rows), draw(1, rows));
        }
      }
      if (draw(0, 2) == 0) continue;  // the mirror is not asked after every step

      const std::span<const token_id> text = target.tokens();
      const std::size_t n = text.size(), seen = config.window + 1, first = n > seen ? n - seen : 0;
      const auto common = static_cast<std::size_t>(
          std::mismatch(text.begin(), text.begin() + static_cast<std::ptrdiff_t>((std::min)(n, mirrored.size())), mirrored.begin()).first -
          text.begin());
      std::size_t lacking = 0;
      for (std::size_t p = first; p < n; ++p) lacking += p < sliding_begin || p >= (std::min)(sliding_held, common) ? 1u : 0u;
      const std::size_t want =
          (n - common) * objects_of<Kv>(config, attention_kind::full) + lacking * objects_of<Kv>(config, attention_kind::sliding);
      if (lacking > n - common) ++refetched;
      if (n > seen) ++laps;
      if (n > 256) ++blocks;

      const auto in = counting_space::in<Kv>, out = counting_space::out<Kv>;
      mirror.update(target.template keys<From>(), text);
      if constexpr (!host_accessible<To>) CHECK(counting_space::in<Kv>.elements - in.elements == want);
      if constexpr (!host_accessible<From>) CHECK(counting_space::out<Kv>.elements - out.elements == want);
      REQUIRE(wrong_positions(mirror.keys(), config, text) == 0);
      mirrored.assign(text.begin(), text.end());
      sliding_begin = first;
      sliding_held = n;
    }
  }
  CHECK(laps > 100);
  CHECK(rewinds > 20);
  CHECK(refetched > 5);
  CHECK(blocks > 20);
}

TEST_CASE("memory that is reserved is taken then, and views stay where they are") {
  const auto config = config_of(10);
  sequence<float> target(config, 64, 1000);
  gemma4::kv_mirror<host_space, counting_space, float> mirror(config, 1000);
  const auto blocks = [] { return counting_space::in<float*>.elements; };
  const std::size_t before = blocks();
  mirror.reserve(1000);
  CHECK(blocks() == before + 4);  // 256 positions each
  const auto keys = mirror.keys();
  target.prefill(counted(1000, 0));
  mirror.update(target.keys<host_space>(), target.tokens());
  CHECK(blocks() == before + 4);
  for (std::size_t kind = 0; kind < 2; ++kind) CHECK(keys.layers[kind].blocks == mirror.keys().layers[kind].blocks);
  const gemma4::kv_mirror<host_space, counting_space, float> moved = std::move(mirror);
  CHECK(moved.keys().layers[1].blocks == keys.layers[1].blocks);
  CHECK(wrong_positions(moved.keys(), config, target.tokens()) == 0);
}

TEST_CASE("of a device's tables no more is read than the new positions need") {
  const auto config = config_of(10);
  sequence<float> target(config, 8, 2000);
  gemma4::kv_mirror<counting_space, host_space, float> mirror(config, 2000);
  const auto pointers = [&] {
    const std::size_t before = counting_space::out<const float*>.elements;
    mirror.update(target.keys<counting_space>(), target.tokens());
    return counting_space::out<const float*>.elements - before;
  };
  target.prefill(counted(764, 0));
  CHECK(pointers() == 1 + 3);  // blocks of 256
  target.pass(counted(8, 7000), 4);
  CHECK(pointers() == 1 + 1);  // 764 … 767
  target.pass(counted(8, 8000), 8);
  CHECK(pointers() == 1 + 1);
  CHECK(pointers() == 0);
}

TEST_CASE("a target without sliding layers is mirrored in its full ones alone") {
  auto config = config_of(10);
  config.layers = {attention_kind::full};
  gemma4::kv_mirror<host_space, counting_space, float> mirror(config, 100);
  kv_cache<reference, float> cache(std::array{kv_layer_shape{1, 64, 0}}, 8, 100);
  cache.extend(8);
  cache.commit(8);
  gemma4::shared_kv<float, host_space> keys;
  keys.layers[1] = cache.layer(0);
  keys.ends[1] = keys.position = 8;
  CHECK(copied_by<float>([&] { mirror.update(keys, counted(8, 0)); }).elements == 8 * 2 * 64);
  CHECK(mirror.keys().layers[0].heads == 0);
}

template <class Call>
std::string refusal(Call&& call, error_code code = error_code::argument_invalid) {
  try {
    call();
  } catch (const error& e) {
    CHECK(e.code() == code);
    return e.what();
  }
  FAIL("no outrider::error was thrown");
  return {};
}
bool mentions(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

TEST_CASE("what does not fit is refused with both numbers, and the mirror stays as it was") {
  using mirror_type = gemma4::kv_mirror<host_space, counting_space, float>;
  const auto config = config_of(10);
  sequence<float> target(config, 8, 200);
  mirror_type mirror(config, 50);
  target.prefill(counted(40, 0));
  mirror.update(target.keys<host_space>(), target.tokens());
  const auto keys = target.keys<host_space>();
  const auto refused = [&](gemma4::shared_kv<float, host_space> given, const char* part) {
    const std::string text = refusal([&] { mirror.update(given, target.tokens()); });
    CAPTURE(text);
    CHECK(mentions(text, part));
    CHECK(wrong_positions(mirror.keys(), config, target.tokens()) == 0);
  };
  auto other = keys;
  other.ends[1] = 39;
  refused(other, "full layers is given keys that end at 39, the number of tokens is 40");
  other = keys;
  other.layers[0].heads = 3;
  refused(other, "sliding layers is given a number of heads of 3, it was made for 2");
  other = keys;
  other.layers[1].head_dim = 32;
  refused(other, "heads of size 32, it was made for 64");
  other = keys;
  other.layers[0].ring_rows = other.layers[0].block_rows = 10;
  refused(other, "a ring of 10 slots, a drafter sees 11");

  const auto text = std::vector<token_id>(target.tokens().begin(), target.tokens().end());
  target.prefill(counted(11, 900));
  CHECK(mentions(refusal([&] { mirror.update(target.keys<host_space>(), target.tokens()); }, error_code::context_full),
                 "51 positions, its mirror is limited to 50"));
  CHECK(wrong_positions(mirror.keys(), config, text) == 0);
  CHECK(mentions(refusal([&] { mirror_type(config, 0); }), "0 positions"));
  CHECK(mentions(refusal([&] { gemma4::kv_mirror<host_space, counting_space, q8_0>(config_of(10, 1, 24), 10); }), "a multiple of 32"));
}

}  // namespace
