// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// norm_append on the CPU, against the ops it stands for: norm_rope of the keys, rms_norm of the values, and append.
#include "kernel_fixture.hpp"
//
#include <algorithm>
#include <memory>
#include <vector>

#include "outrider/backend/cuda/append.cuh"
#include "outrider/backend/cuda/attention.cuh"

namespace {

using namespace kernel_test;
using outrider::elements_of;
using outrider::kv_view;
using outrider::q8_0;

constexpr float eps = 1e-6f;

struct layout {
  bool ring;
  std::size_t slots, heads, head_dim;
};

/// A cache in memory of exactly its size; what has not been written are NaNs of its type.
template <class Kv>
class cache_memory {
 public:
  explicit cache_memory(const layout& of)
      : of_(of), block_rows_(of.ring ? of.slots : 4), blocks_((of.slots + block_rows_ - 1) / block_rows_) {
    for (auto& block : blocks_) {
      block.resize(2 * of.heads * block_rows_ * of.head_dim / elements_of<Kv> * sizeof(Kv), std::byte{0xff});
      table_.push_back(reinterpret_cast<Kv*>(block.data()));
    }
  }
  cache_memory(const cache_memory& other) : cache_memory(other.of_) {
    for (std::size_t b = 0; b < blocks_.size(); ++b) std::copy(other.blocks_[b].begin(), other.blocks_[b].end(), blocks_[b].begin());
  }
  cache_memory& operator=(const cache_memory&) = delete;

  [[nodiscard]] kv_view<Kv, device_space> view() const noexcept {
    return {table_.data(), block_rows_, of_.ring ? block_rows_ : 0, of_.heads, of_.head_dim};
  }
  [[nodiscard]] bool same_elements(const cache_memory& other) const { return blocks_ == other.blocks_; }
  [[nodiscard]] static bool padding_untouched() { return true; }  // all of it is compared

 private:
  layout of_;
  std::size_t block_rows_;
  std::vector<std::vector<std::byte>> blocks_;
  std::vector<Kv*> table_;
};

/// Rows of keys and values before their norms, and the rotations of these rows.
struct projections {
  padded<float> k, v, cos, sin, weight;

  projections(random_numbers& random, std::size_t m, const layout& of, std::size_t extra)
      : k(m, of.heads * of.head_dim, extra),
        v(m, of.heads * of.head_dim, extra / 2),
        cos(m, of.head_dim / 2, extra),
        sin(m, of.head_dim / 2),
        weight(1, of.head_dim) {
    for (auto* x : {&k, &v, &weight}) x->fill(random.uniforms(3));
    for (auto* x : {&cos, &sin}) x->fill(random.uniforms());
  }
};

/// x with rows of whole heads only, as the ops of heads take them.
padded<float> dense(const padded<float>& x) {
  padded<float> copy(x.rows(), x.cols());
  for (std::size_t r = 0; r < x.rows(); ++r)
    for (std::size_t c = 0; c < x.cols(); ++c) copy(r, c) = x(r, c);
  return copy;
}

template <class Kv>
void check_against_its_parts(const layout& of, const projections& p, std::size_t first, bool weighted, bool k_is_v) {
  const float* const weight = weighted ? p.weight.data() : nullptr;
  const padded<float>& values = k_is_v ? p.k : p.v;
  const cache_memory<Kv> blank(of);
  const auto fused = result_of(blank, [&](auto& q, auto& cache) {
    device::norm_append<Kv>(q, cache.view(), on_device(p.k), on_device(values), weight, eps, on_device(p.cos), on_device(p.sin), first);
  });
  const auto in_parts = result_of(blank,
                                  [&](auto& q, auto& cache) {
                                    padded<float> k = dense(p.k), v = dense(values);
                                    const auto keys = on_device(k), vs = on_device(v);
                                    if (k.rows() != 0) {
                                      device::norm_rope(q, keys.split_cols(of.head_dim), weight, eps, on_device(p.cos), on_device(p.sin));
                                      device::rms_norm(q, vs.split_cols(of.head_dim), vs.split_cols(of.head_dim), nullptr, eps);
                                    }
                                    device::append<Kv>(q, cache.view(), keys, vs, first);
                                  },
                                  {});
  CHECK(fused.same_elements(in_parts));
}

}  // namespace

TEST_CASE("norm_append has the bits of norm_rope, rms_norm and append") {
  constexpr std::uint64_t seed = 2901;
  CAPTURE(seed);
  random_numbers random(seed);
  for_each_type(outrider::kv_types{}, [&]<class Kv>() {
    for (const std::size_t head_dim : sizes{2, 6, 32, 64, 96, 126, 256, 512, 544, 1056})
      for (const std::size_t heads : sizes{1, 3, 8})
        for (const std::size_t m : sizes{0, 1, 5})
          for (const bool ring : {false, true})
            for (const std::size_t extra : sizes{0, 3, 4}) {
              if (head_dim % elements_of<Kv> != 0 || (head_dim > 256 && (heads > 1 || extra == 3)) || (m == 5 && heads == 8)) continue;
              const layout of{ring, 8, heads, head_dim};
              const projections p(random, m, of, extra);
              for (const std::size_t first : sizes{0, 3}) {
                INFO("head_dim = ", head_dim, ", heads = ", heads, ", m = ", m, ", ring = ", ring, ", extra = ", extra,
                     ", first = ", first);
                check_against_its_parts<Kv>(of, p, first, first == 0, ring);
              }
            }
  });
}

TEST_CASE("norm_append of more rows than a ring has slots keeps the last of each slot, in any order of blocks") {
  random_numbers random(2902);
  const layout of{true, 4, 2, 64};
  const projections p(random, 11, of, 0);
  check_against_its_parts<float>(of, p, 2, true, false);
  check_against_its_parts<q8_0>(of, p, 2, true, false);
}

TEST_CASE("norm_append of numbers that are not finite has the bits of its parts") {
  random_numbers random(2903);
  const layout of{false, 8, 2, 64};
  projections p(random, 4, of, 0);
  p.k(1, 70) = not_a_number;
  p.v(2, 3) = infinity;
  p.k(3, 5) = 1e30f;
  check_against_its_parts<q8_0>(of, p, 0, true, false);
}

TEST_CASE("a row has the same keys and values whatever its alignment, its place and the rows beside it") {
  constexpr std::uint64_t seed = 2904;
  CAPTURE(seed);
  random_numbers random(seed);
  const layout of{false, 16, 3, 64};
  const projections p(random, 1, of, 0);
  /// Row `place` of m, at position 10.
  const auto stored = [&](std::size_t m, std::size_t place, std::size_t shift) {
    const auto among = [&](const padded<float>& row) {
      padded<float> all(m, row.cols() + shift, 2 * shift);
      for (std::size_t c = 0; c < row.cols(); ++c) all(place, shift + c) = row(0, c);
      return all;
    };
    padded<float> k = among(p.k), v = among(p.v), cos = among(p.cos), sin = among(p.sin), weight = among(p.weight);
    const auto view = [&](padded<float>& x) { return on_device(x).slice_cols(shift, x.cols() - shift); };
    cache_memory<bf16> cache(of);
    device::queue& q = the_queue();
    device::norm_append<bf16>(q, cache.view(), view(k), view(v), weight.row(place) + shift, eps, view(cos), view(sin), 10 - place);
    q.wait();
    std::vector<bf16> result;
    for (std::size_t head = 0; head < of.heads; ++head)
      for (const bf16* from : {local(cache.view()).key(10, head), local(cache.view()).value(10, head)})
        result.insert(result.end(), from, from + of.head_dim);
    return result;
  };
  const std::vector<bf16> alone = stored(1, 0, 0);
  for (const std::size_t m : sizes{1, 2, 5})
    for (const std::size_t shift : sizes{0, 1, 2}) {
      INFO("m = ", m, ", shift = ", shift);
      CHECK(same_bits(stored(m, m / 2, shift), alone));
    }
}
