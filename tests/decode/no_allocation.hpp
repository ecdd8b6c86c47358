// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Generation takes all its memory before the first token. The test counts every call of operator new and, where the C library allows it,
// of malloc and its relatives, on all threads. This header replaces them for the whole program: include it in one file of a program.
// A backend's test is three lines:
//   #include <its header>
//   #define OUTRIDER_TESTED_BACKENDS its_tag
//   #include "no_allocation.hpp"
#pragma once

#if !defined(OUTRIDER_TESTED_BACKENDS)
#error "Define OUTRIDER_TESTED_BACKENDS as the backend tags to test before including no_allocation.hpp."
#endif

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <vector>

#include <nlohmann/json.hpp>

#include "outrider/decode/assistant_drafter.hpp"
#include "outrider/decode/cascade_drafter.hpp"
#include "outrider/decode/ngram_drafter.hpp"
#include "outrider/decode/speculative_decoder.hpp"
#include "outrider/gemma4/load.hpp"
#include "outrider/gemma4/session.hpp"

namespace no_allocation {

inline std::atomic<std::size_t> news{0}, mallocs{0};

// A sanitizer has its own malloc; operator new is counted there all the same.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OUTRIDER_TEST_COUNTS_MALLOC 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define OUTRIDER_TEST_COUNTS_MALLOC 0
#endif
#endif
#if !defined(OUTRIDER_TEST_COUNTS_MALLOC)
#if defined(__GLIBC__)
#define OUTRIDER_TEST_COUNTS_MALLOC 1
#else
#define OUTRIDER_TEST_COUNTS_MALLOC 0
#endif
#endif

inline void* count_new(std::size_t size, std::size_t alignment) noexcept {
  ++news;
  void* memory = nullptr;
  const std::size_t least = alignment < sizeof(void*) ? sizeof(void*) : alignment;
  return posix_memalign(&memory, least, size == 0 ? 1 : size) == 0 ? memory : nullptr;
}
inline void* count_new_or_throw(std::size_t size, std::size_t alignment) {
  if (void* memory = count_new(size, alignment)) return memory;
  throw std::bad_alloc();
}

}  // namespace no_allocation

[[gnu::noinline]] void* operator new(std::size_t size) { return no_allocation::count_new_or_throw(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
[[gnu::noinline]] void* operator new[](std::size_t size) {
  return no_allocation::count_new_or_throw(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t a) {
  return no_allocation::count_new_or_throw(size, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void* operator new[](std::size_t size, std::align_val_t a) {
  return no_allocation::count_new_or_throw(size, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return no_allocation::count_new(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
[[gnu::noinline]] void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  return no_allocation::count_new(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t a, const std::nothrow_t&) noexcept {
  return no_allocation::count_new(size, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void* operator new[](std::size_t size, std::align_val_t a, const std::nothrow_t&) noexcept {
  return no_allocation::count_new(size, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

#if OUTRIDER_TEST_COUNTS_MALLOC
extern "C" {
void* __libc_malloc(std::size_t size);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* memory, std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);

void* malloc(std::size_t size) noexcept {
  ++no_allocation::mallocs;
  return __libc_malloc(size);
}
void* calloc(std::size_t count, std::size_t size) noexcept {
  ++no_allocation::mallocs;
  return __libc_calloc(count, size);
}
void* realloc(void* memory, std::size_t size) noexcept {
  ++no_allocation::mallocs;
  return __libc_realloc(memory, size);
}
void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept {
  ++no_allocation::mallocs;
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** memory, std::size_t alignment, std::size_t size) noexcept {
  ++no_allocation::mallocs;
  void* found = __libc_memalign(alignment, size);
  if (!found) return ENOMEM;
  *memory = found;
  return 0;
}
}
#endif

namespace no_allocation {

using namespace outrider;

/// Counts at the first and at the last token, taken by a callback that allocates nothing itself.
struct token_log {
  std::array<std::size_t, 2> first{}, last{};
  std::size_t tokens = 0;

  void operator()(token_id) {
    last = {news.load(), mallocs.load()};
    if (tokens++ == 0) first = last;
  }
};

TEST_CASE("the counters count") {
  const std::size_t before = news.load(), mallocs_before = mallocs.load();
  std::vector<int> grown(1000);
  CHECK(grown.size() == 1000);
  CHECK(news.load() > before);
#if OUTRIDER_TEST_COUNTS_MALLOC
  void* volatile memory = std::malloc(100);
  std::free(memory);
  CHECK(mallocs.load() >= mallocs_before + 2);  // the vector's as well
#else
  CHECK(mallocs.load() == mallocs_before);
#endif
}

struct pair_names {
  const char *target, *assistant;
};
inline constexpr pair_names plain_pair{"target", "assistant"}, quantised_pair{"gguf/target-q4_0.gguf", "gguf/assistant-q8_0.gguf"};

template <class B, class Kv>
void check_generation(unsigned threads, pair_names pair) {
  const std::filesystem::path directory = std::filesystem::path(OUTRIDER_SOURCE_DIR) / "examples/data/tiny-kjv";
  const gemma4::load_options in_groups{gemma4::weight_form::grouped, {}};
  const auto target = gemma4::load_model<B>(directory / pair.target, in_groups);
  const auto assistant = gemma4::load_assistant<B>(directory / pair.assistant, in_groups);
  context_of<B> ctx{execution{threads}};
  gemma4::session<B, Kv> session(target, ctx);
  assistant_drafter<B> drafter(assistant, ctx);
  speculative_decoder decoder(session, drafter, greedy{}, fixed<max_draft_length>{});
  const auto expected = nlohmann::json::parse(std::ifstream(directory / "expected.json"));
  // Long enough for a second block of the full layers, which hold 256 positions each.
  std::vector<token_id> prompt;
  while (prompt.size() < 230)
    for (const token_id id : expected.at("cases").at(0).at("tokens").get<std::vector<token_id>>()) prompt.push_back(id);
  prompt.resize(230);

  for (const std::size_t k : {std::size_t{0}, std::size_t{1}, std::size_t{4}, std::size_t{16}}) {
    CAPTURE(threads);
    CAPTURE(k);
    session.clear();
    token_log log;
    const generation result = decoder.generate(prompt, {48, k, {}, {}}, log);
    CHECK(log.tokens == 48);
    CHECK((result.stats.drafted() > 0) == (k > 0));
    CHECK(log.last[0] == log.first[0]);
    CHECK(log.last[1] == log.first[1]);
  }
  // Drawn, with every processor, drafts by repetition first, as many as the policy likes.
  for (const bool filtered : {false, true}) {
    CAPTURE(filtered);
    sampling_options draws;
    draws.temperature = 0.8;
    if (filtered) draws.top_k = 40, draws.top_p = 0.95, draws.min_p = 0.01, draws.repetition_penalty = 1.1, draws.presence_penalty = 0.1;
    ngram_drafter lookup;
    cascade_drafter both(lookup, drafter);
    speculative_decoder drawing(session, both, sampling(draws), adaptive());
    session.clear();
    token_log log;
    CHECK(drawing.generate(prompt, {48, {}, {}, {5, 6}}, log).stats.tokens == 48);
    CHECK(log.last[0] == log.first[0]);
    CHECK(log.last[1] == log.first[1]);
  }
  session.clear();
  token_log log;
  generate(session, prompt, {48, 0, {}, {}}, log);
  CHECK(log.tokens == 48);
  CHECK(log.last[0] == log.first[0]);
  CHECK(log.last[1] == log.first[1]);
}

TEST_CASE_TEMPLATE("plain and speculative generation allocate nothing between the first and the last token", B, OUTRIDER_TESTED_BACKENDS) {
  for (const unsigned threads : {1u, 2u, 3u, 5u}) {
    if (threads > 1 && context_of<B>(execution{threads}).threads() == 1) continue;  // this backend has one thread
    check_generation<B, float>(threads, plain_pair);
    if (threads == 2) check_generation<B, float>(threads, quantised_pair);
  }
  check_generation<B, bf16>(1, plain_pair);
}

}  // namespace no_allocation
