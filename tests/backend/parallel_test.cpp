// outrider: speculative decoding for Gemma 4. SPDX-License-Identifier: Apache-2.0
#include "outrider/backend/parallel.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

using outrider::openmp;
using outrider::serial;
using outrider::thread_pool;

constexpr std::size_t counts[] = {0, 1, 2, 7, 16, 97, 1000}, grains[] = {1, 2, 3, 16, 64};

/// Runs one job and checks that it covers 0 … count - 1 once, cut at multiples of grain.
template <class Team>
void check_job(Team& team, std::size_t count, std::size_t grain) {
  CAPTURE(count);
  CAPTURE(grain);
  std::vector<std::atomic<int>> visits(count);
  std::atomic<int> wrong_borders{0};
  team.for_ranges(count, grain, [&](std::size_t begin, std::size_t end) noexcept {
    if (begin >= end || end > count || begin % grain != 0 || (end % grain != 0 && end != count)) ++wrong_borders;
    for (std::size_t i = begin; i < end; ++i) ++visits[i];
  });
  CHECK(wrong_borders == 0);
  std::size_t wrong = 0;
  for (const auto& visit : visits) wrong += visit != 1 ? 1u : 0u;
  CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("a job covers every index once, in ranges cut at multiples of the grain", Team, serial, openmp, thread_pool) {
  for (const unsigned threads : {1u, 2u, 3u, 8u}) {
    CAPTURE(threads);
    Team team(threads);
    for (const std::size_t count : counts)
      for (const std::size_t grain : grains) {
        if (std::is_same_v<Team, serial> && count % grain != 0) continue;  // one range, whatever the grain
        check_job(team, count, grain);
      }
  }
}

TEST_CASE("thread_pool: thousands of jobs back to back, none of which sees a range of another") {
  thread_pool team(4);
  for (std::size_t job = 0; job < 20000; ++job) {
    std::atomic<std::size_t> sum{0};
    const std::size_t count = 1 + job % 50;
    team.for_ranges(count, 1, [&](std::size_t begin, std::size_t end) noexcept {
      for (std::size_t i = begin; i < end; ++i) sum += i + job;
    });
    REQUIRE(sum == count * (count - 1) / 2 + count * job);
  }
}

TEST_CASE("thread_pool: what a job wrote is seen by its caller and by the next job") {
  thread_pool team(3);
  std::vector<std::size_t> values(1000, 0);
  for (std::size_t round = 1; round <= 500; ++round) {
    team.for_ranges(values.size(), 1, [&](std::size_t begin, std::size_t end) noexcept {
      for (std::size_t i = begin; i < end; ++i) ++values[i];
    });
    REQUIRE(values[round % values.size()] == round);
  }
  for (const std::size_t value : values) REQUIRE(value == 500);
}

TEST_CASE("thread_pool: jobs that come one by one from a busy caller find threads that went to sleep") {
  thread_pool team(2);
  for (int job = 0; job < 20; ++job) {
    for (int i = 0; i < 2000; ++i) std::this_thread::yield();  // longer than a waiting thread is patient, most of the times
    check_job(team, 64, 1);
  }
}

TEST_CASE("thread_pool: several pools of several callers do not disturb each other") {
  std::vector<std::thread> callers;
  std::atomic<std::size_t> total{0};
  for (int c = 0; c < 3; ++c)
    callers.emplace_back([&] {
      thread_pool team(3);
      for (int job = 0; job < 300; ++job)
        team.for_ranges(10, 1, [&](std::size_t begin, std::size_t end) noexcept { total += end - begin; });
    });
  for (std::thread& caller : callers) caller.join();
  CHECK(total == 3 * 300 * 10);
}

TEST_CASE("thread_pool: made and destroyed without a job, with any number of threads") {
  for (const unsigned threads : {0u, 1u, 2u, 16u}) {
    CAPTURE(threads);
    thread_pool team(threads);
    CHECK(team.threads() == (threads == 0 ? 1 : threads));
  }
}

}  // namespace
