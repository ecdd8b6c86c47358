// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
//
// Planted bugs are found; each has a correct twin that passes, under several orders of threads.
#include <doctest/doctest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda_emulation/emulation.hpp"
#include "cuda_emulation/launch_for_message.hpp"
#include "outrider/backend/cuda/device.cuh"

namespace {

using cuda_emulation_test::for_each_seed;
using cuda_emulation_test::message_of;
using cuda_emulation_test::own_index;
using cuda_emulation_test::says;
using outrider::device::copy_async;
using outrider::device::copy_async_commit;
using outrider::device::copy_async_wait;
using outrider::device::dynamic_shared;
using outrider::device::shared_array;
namespace emu = outrider::cuda_emulation;

}  // namespace

namespace planted {

template <bool Barrier>
__global__ void reverse(int* out) {
  __shared__ shared_array<int, 64> a;
  a[own_index()] = own_index();
  if (Barrier) __syncthreads();
  out[threadIdx.x] = a[63 - own_index()];
}
template <bool Barrier>
__global__ void reuse(int* out) {  // read, then overwrite
  __shared__ shared_array<int, 64> a;
  a[own_index()] = own_index();
  __syncthreads();
  const int mine = a[(own_index() + 1) % 64];
  if (Barrier) __syncthreads();
  a[own_index()] = mine;
  __syncthreads();
  out[threadIdx.x] = a[own_index()];
}
template <bool Sync>
__global__ void within_a_warp(int* out) {
  __shared__ shared_array<int, 32> a;
  a[own_index()] = own_index();
  if (Sync) __syncwarp();
  out[threadIdx.x] = a[own_index() ^ 1];
}
template <bool Sync>
__global__ void overwrite_within_a_warp(int* out) {
  __shared__ shared_array<int, 1> a;
  if (threadIdx.x == 5) a[0] = 7;
  __syncwarp();
  out[threadIdx.x] = a[0];
  out[threadIdx.x] = a[0];
  if (Sync) __syncwarp();
  if (threadIdx.x == 9) a[0] = 8;
}
template <bool Barrier>
__global__ void overwrite_after_two_warps(int* out) {  // __syncwarp orders the writer's own warp only
  __shared__ shared_array<int, 1> a;
  if (threadIdx.x == 0) a[0] = 7;
  __syncthreads();
  out[threadIdx.x] = a[0];
  __syncwarp();
  out[threadIdx.x] = a[0];
  if (Barrier) __syncthreads();
  __syncwarp();
  if (threadIdx.x == 0) a[0] = 8;
}
template <bool One>
__global__ void same_element(int* out) {
  __shared__ shared_array<int, 1> a;
  if (!One || threadIdx.x == 3) a[0] = own_index();
  __syncthreads();
  out[threadIdx.x] = a[0];
}
__global__ void unchecked_reverse(int* out) {  // plain array: the race check is blind, the order of threads is not
  __shared__ int a[64];
  a[threadIdx.x] = own_index();
  out[threadIdx.x] = a[63 - threadIdx.x];
  __syncthreads();
  a[threadIdx.x] = -1;
}

template <unsigned Count>
__global__ void partial_barrier() {
  if (threadIdx.x < Count) __syncthreads();
}
template <bool Two>
__global__ void two_barriers() {
  if (Two && threadIdx.x < 16)
    __syncthreads();
  else
    __syncthreads();
}
template <unsigned Early>
__global__ void barrier_and_shuffle(int* out) {
  if (threadIdx.x == Early) __syncthreads();
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
  if (threadIdx.x != Early) __syncthreads();
}
template <bool Exit>
__global__ void barrier_after_exit() {
  if (Exit && threadIdx.x == 0) return;
  __syncthreads();
}

template <unsigned Mask, int Lanes>
__global__ void exchange(int* out) {
  if (threadIdx.x < 16 || Mask == 0xffffffffu) out[threadIdx.x] = __shfl_xor_sync(Mask, own_index(), Lanes);
}
__global__ void mask_without_caller(int* out) { out[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1, 1); }
template <unsigned Threads>
__global__ void full_mask_after_exit(int* out) {
  if (threadIdx.x >= Threads) return;
  out[threadIdx.x] = __shfl_down_sync(0xffffffffu, 1, 16);
}
template <unsigned Other>
__global__ void masks(int* out) {
  out[threadIdx.x] = __shfl_xor_sync(threadIdx.x < 16 ? 0xffffffffu : Other, 1, 1);
}
template <bool Two>
__global__ void operations(int* out) {
  if (Two && threadIdx.x == 4)
    out[threadIdx.x] = __any_sync(0xffffffffu, 1);
  else
    out[threadIdx.x] = __all_sync(0xffffffffu, 1);
}

__global__ void index_beyond(int* out, int i) {
  __shared__ shared_array<int, 32> a;
  a[i + own_index()] = 1;
  out[threadIdx.x] = a[i + own_index()];
}
__global__ void plain_index_beyond(int* out, int i) {
  __shared__ int a[32];
  a[i] = 1;
  out[0] = a[i];
}
__global__ void vector_at(int* out, int i) {
  __shared__ shared_array<int, 8> a;
  a.store(i, make_int4(1, 2, 3, 4));
  out[0] = a.load<int4>(i).w;
}
template <bool Written>
__global__ void unwritten(int* out) {
  __shared__ shared_array<int, 2> a;
  a[0] = 1;
  if (Written) a[1] = 2;
  out[0] = a[1];
}

template <int Wait, bool Barrier>
__global__ void copies(int* out, const int* in) {
  __shared__ shared_array<int, 64> a;
  copy_async(a, own_index(), in + threadIdx.x);
  copy_async_commit();
  copy_async_wait<Wait>();
  if (Barrier) __syncthreads();
  out[threadIdx.x] = a[Barrier ? 63 - own_index() : own_index()];
  copy_async_wait<0>();
}
template <bool Commit>
__global__ void copy_without_end(int* out, const int* in) {
  __shared__ shared_array<int, 1> a;
  copy_async(a, 0, in);
  if (Commit) copy_async_commit();
  copy_async_wait<0>();
  out[0] = a[0];
}
__global__ void copy_misaligned(const int* in, int i) {
  __shared__ shared_array<int4, 1> a;
  copy_async(a, 0, reinterpret_cast<const int4*>(in + i));
  copy_async_commit();
  copy_async_wait<0>();
}
template <int Wait>
__global__ void copy_of_vectors(int* out, const int* in) {
  __shared__ shared_array<int, 64> a;
  copy_async(a, 4 * own_index(), reinterpret_cast<const int4*>(in) + threadIdx.x);
  copy_async_commit();
  copy_async_wait<Wait>();
  __syncthreads();
  for (int i = own_index(); i < 64; i += 16) out[i] = a[i];
  copy_async_wait<0>();
}
template <bool Barrier>
__global__ void dynamic(int* out, int n) {
  const auto a = dynamic_shared<int>(16, n);
  a[own_index()] = own_index();
  if (Barrier) __syncthreads();
  out[threadIdx.x] = a[n - 1 - own_index()];
}
__global__ void dynamic_offset(int offset) { static_cast<void>(dynamic_shared<int>(offset, 1)); }

}  // namespace planted

TEST_CASE("races on shared memory") {
  std::vector<int> out(64);
  for_each_seed([&] {
    const auto unordered = [](const std::string& text) {
      return says(text, "race: ", "which no thread has written");
    };  // by what came first
    CHECK(unordered(message_of(&planted::reverse<false>, 64, 0, out.data())));
    CHECK(message_of(&planted::reverse<true>, 64, 0, out.data()) == "");
    CHECK(out[0] == 63);
    CHECK(says(message_of(&planted::reuse<false>, 64, 0, out.data()), "race: "));
    CHECK(message_of(&planted::reuse<true>, 64, 0, out.data()) == "");
    CHECK(unordered(message_of(&planted::within_a_warp<false>, 32, 0, out.data())));
    CHECK(message_of(&planted::within_a_warp<true>, 32, 0, out.data()) == "");
    CHECK(says(message_of(&planted::overwrite_within_a_warp<false>, 32, 0, out.data()), "race: "));
    CHECK(message_of(&planted::overwrite_within_a_warp<true>, 32, 0, out.data()) == "");
    CHECK(says(message_of(&planted::overwrite_after_two_warps<false>, 64, 0, out.data()), "race: "));
    CHECK(message_of(&planted::overwrite_after_two_warps<true>, 64, 0, out.data()) == "");
    CHECK(says(message_of(&planted::same_element<false>, 64, 0, out.data()), "race: writes after the write"));
    CHECK(message_of(&planted::same_element<true>, 64, 0, out.data()) == "");
  });
}

TEST_CASE("a race is named with both threads and the last barrier") {
  std::vector<int> out(64);
  const std::string text = message_of(&planted::reuse<false>, 64, 0, out.data());
  CHECK(says(text,
             "block (0,0,0) thread (1,0,0): race: writes after the read of thread (0,0,0) on shared element 1, no barrier since "
             "planted_bugs_test.cpp:"));
}

TEST_CASE("without the race check") {
  std::vector<int> out(64);
  emu::settings.check_races = false;
  CHECK(message_of(&planted::reuse<false>, 64, 0, out.data()) == "");
  emu::settings.check_races = true;
}

TEST_CASE("a race on a plain array shows as a result that depends on the seed") {
  std::vector<std::vector<int>> results;
  for_each_seed([&] {
    std::vector<int> out(64);
    CHECK(message_of(&planted::unchecked_reverse, 64, 0, out.data()) == "");
    results.push_back(out);
  });
  CHECK(results[1] != results[2]);
}

TEST_CASE("barriers that not all threads reach, or at different lines") {
  std::vector<int> out(64);
  for_each_seed([&] {
    CHECK(says(message_of(&planted::partial_barrier<16>, 32, 0), "__syncthreads at planted_bugs_test.cpp:"));
    CHECK(message_of(&planted::partial_barrier<32>, 32, 0) == "");
    CHECK(says(message_of(&planted::two_barriers<true>, 32, 0), "is in the one at planted_bugs_test.cpp:"));
    CHECK(message_of(&planted::two_barriers<false>, 32, 0) == "");
    CHECK(says(message_of(&planted::barrier_and_shuffle<7>, 32, 0, out.data()), "every thread waits for another"));
    CHECK(message_of(&planted::barrier_and_shuffle<32>, 32, 0, out.data()) == "");
    CHECK(says(message_of(&planted::barrier_after_exit<true>, 64, 0), "__syncthreads"));
    CHECK(message_of(&planted::barrier_after_exit<false>, 64, 0) == "");
  });
}

TEST_CASE("masks of warp operations") {
  std::vector<int> out(64);
  for_each_seed([&] {
    CHECK(says(message_of(&planted::mask_without_caller, 32, 0, out.data()), "the mask omits the calling lane"));
    CHECK(message_of(&planted::mask_without_caller, 16, 0, out.data()) == "");
    CHECK(says(message_of(&planted::exchange<0x0000ffffu, 16>, 32, 0, out.data()), "which takes no part"));
    CHECK(message_of(&planted::exchange<0x0000ffffu, 8>, 32, 0, out.data()) == "");
    CHECK(out[3] == 11);
    CHECK(message_of(&planted::exchange<0xffffffffu, 16>, 32, 0, out.data()) == "");
    CHECK(out[3] == 19);
    CHECK(says(message_of(&planted::full_mask_after_exit<20>, 32, 0, out.data()), "which takes no part"));
    CHECK(message_of(&planted::full_mask_after_exit<32>, 32, 0, out.data()) == "");
    CHECK(says(message_of(&planted::masks<0xffff0000u>, 32, 0, out.data()), "one operation with one mask is wanted"));
    CHECK(message_of(&planted::masks<0xffffffffu>, 32, 0, out.data()) == "");
    CHECK(says(message_of(&planted::operations<true>, 32, 0, out.data()), "one operation with one mask is wanted"));
    CHECK(message_of(&planted::operations<false>, 32, 0, out.data()) == "");
  });
}

TEST_CASE("places in shared memory") {
  std::vector<int> out(64);
  for_each_seed([&] {
    CHECK(says(message_of(&planted::index_beyond, 32, 0, out.data(), 1), "shared element 32 of 32 is out of range"));
    CHECK(says(message_of(&planted::index_beyond, 32, 0, out.data(), -1), "shared element -1 of 32 is out of range"));
    CHECK(message_of(&planted::index_beyond, 32, 0, out.data(), 0) == "");
    CHECK(says(message_of(&planted::vector_at, 1, 0, out.data(), 1), "is not aligned"));
    CHECK(says(message_of(&planted::vector_at, 1, 0, out.data(), 8), "is out of range"));
    CHECK(message_of(&planted::vector_at, 1, 0, out.data(), 4) == "");
    CHECK(out[0] == 4);
    CHECK(says(message_of(&planted::unwritten<false>, 1, 0, out.data()), "which no thread has written"));
    CHECK(message_of(&planted::unwritten<true>, 1, 0, out.data()) == "");
    CHECK(says(message_of(&planted::dynamic<true>, 64, 16 + 63 * 4, out.data(), 64), "more than the launch gave"));
    CHECK(message_of(&planted::dynamic<true>, 64, 16 + 64 * 4, out.data(), 64) == "");
    CHECK(out[0] == 63);
    CHECK(message_of(&planted::dynamic<false>, 64, 16 + 64 * 4, out.data(), 64) != "");
    CHECK(says(message_of(&planted::dynamic_offset, 1, 64, 4), "not a multiple of 16"));
    CHECK(says(message_of(&planted::dynamic_offset, 1, 64, -16), "more than the launch gave"));
    CHECK(message_of(&planted::dynamic_offset, 1, 64, 48) == "");
  });
}

TEST_CASE("shared memory of an earlier block counts as never written") {
  int out = 0;
  CHECK(message_of(&planted::unwritten<true>, 1, 0, &out) == "");
  CHECK(message_of(&planted::unwritten<false>, 1, 0, &out) != "");
}

TEST_CASE("asynchronous copies arrive when they are waited for, and not before") {
  std::vector<int> out(64);
  const std::vector<int> in(64, 1);
  for_each_seed([&] {
    CHECK(message_of(&planted::copies<0, true>, 64, 0, out.data(), in.data()) == "");
    CHECK(out[5] == 1);
    CHECK(says(message_of(&planted::copies<1, true>, 64, 0, out.data(), in.data()), "race: "));
    CHECK(message_of(&planted::copies<1, false>, 64, 0, out.data(), in.data()) == "");  // in one thread a forgotten wait is stale data
    CHECK(out[5] == -1);
    CHECK(message_of(&planted::copies<0, false>, 64, 0, out.data(), in.data()) == "");
    CHECK(out[5] == 1);
    CHECK(says(message_of(&planted::copy_of_vectors<1>, 16, 0, out.data(), in.data()), "race: "));
    CHECK(message_of(&planted::copy_of_vectors<0>, 16, 0, out.data(), in.data()) == "");
    CHECK(out == in);
    CHECK(says(message_of(&planted::copy_without_end<false>, 1, 0, out.data(), in.data()), "asynchronous copies under way"));
    CHECK(message_of(&planted::copy_without_end<true>, 1, 0, out.data(), in.data()) == "");
    CHECK(says(message_of(&planted::copy_misaligned, 1, 0, in.data(), 1), "the source is not aligned"));
    CHECK(message_of(&planted::copy_misaligned, 1, 0, in.data(), 4) == "");
  });
}

// ---------------------------------------------------------------- AddressSanitizer

#if defined(__SANITIZE_ADDRESS__)
namespace {
bool dies(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    std::fclose(stderr);
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status != 0;
}
}  // namespace

TEST_CASE("AddressSanitizer sees a plain shared array and a buffer overrun from inside a fiber") {
  int out = 0;
  CHECK(dies([&] { message_of(&planted::plain_index_beyond, 1, 0, &out, 32); }));
  CHECK_FALSE(dies([&] { message_of(&planted::plain_index_beyond, 1, 0, &out, 31); }));
  for (const std::size_t size : {std::size_t{63}, std::size_t{64}}) {
    const std::unique_ptr<int[]> exact(new int[size]);
    CHECK(dies([&] { message_of(&planted::reverse<true>, 64, 0, exact.get()); }) == (size < 64));
  }
}
#endif
