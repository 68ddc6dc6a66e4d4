// The library's own pool and for_each_item: every item exactly once, from several callers, nested and after fork(); the caller's
// floating-point environment in every task; no allocation.
#include "common/parallel.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cfenv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <set>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

std::atomic<std::int64_t> allocations{0};

}  // namespace

// Counts what this program allocates.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  allocations.fetch_add(1);
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace flashqla::test {
namespace {

/// How often each of `items` was run.
std::vector<int> counts_of(const Parallel& parallel, std::int64_t items) {
  std::vector<std::atomic<int>> counts(static_cast<std::size_t>(items));
  for_each_item(parallel, items, [&](std::int64_t, std::int64_t item) { counts[static_cast<std::size_t>(item)].fetch_add(1); });
  return {counts.begin(), counts.end()};
}

void expect_exactly_once(const Parallel& parallel, std::int64_t items) {
  EXPECT_EQ(counts_of(parallel, items), std::vector<int>(static_cast<std::size_t>(items), 1)) << parallel.threads << " threads";
}

TEST(Parallel, EveryItemExactlyOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    for (const std::int64_t items : {0, 1, 2, 3, 7, 8, 9, 1000}) expect_exactly_once(own_pool(threads), items);
  }
  expect_exactly_once(serial(), 10);
  expect_exactly_once(Parallel{}, 10);
  Parallel several_without_a_way_to_run;
  several_without_a_way_to_run.threads = 4;
  expect_exactly_once(several_without_a_way_to_run, 10);
}

TEST(Parallel, RunCallsEveryTaskOnce) {
  std::array<std::atomic<int>, 500> counts{};
  const Parallel parallel = own_pool(4);
  parallel.run(
      parallel.context, 500, [](void* argument, std::int64_t i) { static_cast<std::atomic<int>*>(argument)[i].fetch_add(1); },
      counts.data());
  for (const auto& count : counts) EXPECT_EQ(count.load(), 1);
}

TEST(Parallel, ManyShortCalls) {
  const Parallel parallel = own_pool(3);
  std::int64_t total = 0;
  for (int call = 0; call < 20000; ++call) {
    std::atomic<std::int64_t> sum{0};
    for_each_item(parallel, 3, [&](std::int64_t, std::int64_t item) { sum.fetch_add(item + 1); });
    total += sum.load();
  }
  EXPECT_EQ(total, 6 * 20000);
}

TEST(Parallel, ASlotIsOnOneThreadAtATime) {
  const Parallel parallel = own_pool(4);
  std::array<std::atomic<int>, 4> inside{};
  std::atomic<bool> shared{false}, out_of_range{false};
  for_each_item(parallel, 4000, [&](std::int64_t slot, std::int64_t) {
    if (slot < 0 || slot >= num_slots(parallel, 4000)) {
      out_of_range = true;
      return;
    }
    if (inside[static_cast<std::size_t>(slot)].fetch_add(1) != 0) shared = true;
    inside[static_cast<std::size_t>(slot)].fetch_sub(1);
  });
  EXPECT_FALSE(shared);
  EXPECT_FALSE(out_of_range);
}

TEST(Parallel, SlotsNeverExceedItemsOrThreads) {
  EXPECT_EQ(num_slots(own_pool(8), 3), 3);
  EXPECT_EQ(num_slots(own_pool(2), 100), 2);
  EXPECT_EQ(num_slots(serial(), 100), 1);
  EXPECT_EQ(num_slots(own_pool(8), 0), 0);
}

TEST(Parallel, WorkersHelp) {
  // Two items that each wait for the other to have begun: only two threads can finish them.
  std::atomic<int> begun{0};
  std::atomic<bool> met{true};
  for_each_item(own_pool(2), 2, [&](std::int64_t, std::int64_t) {
    begun.fetch_add(1);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (begun.load() < 2) {
      std::this_thread::yield();
      if (std::chrono::steady_clock::now() > deadline) {
        met = false;
        return;
      }
    }
  });
  EXPECT_TRUE(met);
}

TEST(Parallel, NestedCallsRunOnTheirOwnThread) {
  std::atomic<int> inner{0}, elsewhere{0};
  for_each_item(own_pool(4), 8, [&](std::int64_t, std::int64_t) {
    const auto self = std::this_thread::get_id();
    for_each_item(own_pool(4), 16, [&](std::int64_t, std::int64_t) {
      inner.fetch_add(1);
      if (std::this_thread::get_id() != self) elsewhere.fetch_add(1);
    });
  });
  EXPECT_EQ(inner.load(), 8 * 16);
  EXPECT_EQ(elsewhere.load(), 0);
  expect_exactly_once(own_pool(4), 100);  // and the pool serves on
}

TEST(Parallel, SeveralCallersAtOnce) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&, caller] {
      for (int call = 0; call < 200; ++call) {
        const std::int64_t items = 1 + (call * 7 + caller) % 40;
        for (const int count : counts_of(own_pool(1 + caller % 4), items)) wrong.fetch_add(count != 1);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

/// Exit status of a child process that runs `body`.
template <class Body>
int status_of_child(Body&& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

bool pool_works() {
  for (const int count : counts_of(own_pool(4), 200)) {
    if (count != 1) return false;
  }
  return true;
}

TEST(Parallel, AfterFork) {
  ASSERT_TRUE(pool_works());
  EXPECT_EQ(status_of_child(pool_works), 0);
  EXPECT_EQ(status_of_child([] { return pool_works() && status_of_child(pool_works) == 0; }), 0);
  EXPECT_TRUE(pool_works());
}

TEST(Parallel, ForkWhileAnotherThreadIsInside) {
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) counts_of(own_pool(3), 50);
  });
  for (int i = 0; i < 20; ++i) EXPECT_EQ(status_of_child(pool_works), 0);
  stop = true;
  busy.join();
}

TEST(Parallel, ChildThatUsedThePoolExitsCleanly) {
  ASSERT_TRUE(pool_works());
  std::fflush(nullptr);  // or the child prints what is buffered once more
  const pid_t child = fork();
  if (child == 0) {
    if (!pool_works()) _exit(1);
    std::exit(0);  // static destructors included
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(Parallel, AllocatesNothingOnceStarted) {
  const Parallel parallel = own_pool(3);
  for_each_item(parallel, 10, [](std::int64_t, std::int64_t) {});
  const std::int64_t before = allocations.load();
  for (int call = 0; call < 100; ++call) for_each_item(parallel, 10, [](std::int64_t, std::int64_t) {});
  EXPECT_EQ(allocations.load(), before);
}

TEST(Parallel, ProcessorsOfThisProcess) {
  EXPECT_GE(usable_processors(), 1);
  EXPECT_LE(usable_processors(), 4096);
  EXPECT_EQ(own_pool().threads, usable_processors());
  EXPECT_EQ(own_pool(5).threads, 5);
  EXPECT_EQ(serial().threads, 1);
}

/// 1 + 1e-10 as rounded in each of 64 items that take long enough for every thread to get some.
std::set<float> sums_inside(const Parallel& parallel) {
  std::array<float, 64> sums{};
  volatile float one = 1.0f, little = 1e-10f;
  for_each_item(parallel, 64, [&](std::int64_t, std::int64_t item) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    sums[static_cast<std::size_t>(item)] = one + little;
  });
  return {sums.begin(), sums.end()};
}

TEST(ParallelEnvironment, RoundingModeOfTheCallerInEveryTask) {
  const Parallel parallel = own_pool(4);
  EXPECT_EQ(sums_inside(parallel), std::set<float>{1.0f});
  std::fesetround(FE_UPWARD);
  const std::set<float> inside = sums_inside(parallel);
  const int after = std::fegetround();
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(inside, std::set<float>{1.0f + 0x1p-23f});
  EXPECT_EQ(after, FE_UPWARD);
  EXPECT_EQ(sums_inside(parallel), std::set<float>{1.0f});  // the workers are as before
}

#if defined(__x86_64__)

constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040, kRoundUp = 0x4000, kFlags = 0x3f;

std::set<unsigned> control_inside(const Parallel& parallel) {
  std::array<std::atomic<unsigned>, 64> words{};
  for_each_item(parallel, 64, [&](std::int64_t, std::int64_t item) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    words[static_cast<std::size_t>(item)] = _mm_getcsr() & ~kFlags;
  });
  return {words.begin(), words.end()};
}

TEST(ParallelEnvironment, FlushToZeroOfTheCallerInEveryTaskAndNowhereElse) {
  const Parallel parallel = own_pool(4);
  const unsigned plain = _mm_getcsr() & ~kFlags;
  for (const unsigned extra : {kFlushToZero, kDenormalsAreZero, kFlushToZero | kDenormalsAreZero, kRoundUp}) {
    _mm_setcsr(plain | extra);
    const std::set<unsigned> inside = control_inside(parallel);
    const unsigned after = _mm_getcsr() & ~kFlags;
    _mm_setcsr(plain);
    EXPECT_EQ(inside, std::set<unsigned>{plain | extra});
    EXPECT_EQ(after, plain | extra);
    EXPECT_EQ(control_inside(parallel), std::set<unsigned>{plain});
  }
}

TEST(ParallelEnvironment, WorkersThatFlushDenormalsDoNotWhenTheCallerDoesNot) {
  // A caller's pool may set its threads to flush denormals; results must not depend on it.
  struct Flushing {
    static void run(void*, std::int64_t tasks, Parallel::Task task, void* argument) {
      std::vector<std::thread> threads;
      for (std::int64_t i = 0; i < tasks; ++i) {
        threads.emplace_back([=] {
          _mm_setcsr(_mm_getcsr() | kFlushToZero | kDenormalsAreZero);
          const unsigned before = _mm_getcsr();
          task(argument, i);
          EXPECT_EQ(_mm_getcsr(), before);
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
  };
  const Parallel parallel{3, nullptr, Flushing::run};
  std::array<float, 3> halves{};
  volatile float smallest_normal = 0x1p-126f;
  for_each_item(parallel, 3,
                [&](std::int64_t, std::int64_t item) { halves[static_cast<std::size_t>(item)] = smallest_normal * 0.5f; });
  for (const float half : halves) EXPECT_EQ(half, 0x1p-127f);
}

#endif

}  // namespace
}  // namespace flashqla::test
