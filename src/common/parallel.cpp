// The library's own thread pool: one list of running jobs, workers that help whichever job still has tasks to give, and callers
// that always work on their own job, so that no call ever waits for a worker to become free. Idle workers spin briefly, then
// sleep.
#include "common/parallel.hpp"

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace flashqla {

namespace {

using Task = Parallel::Task;

/// A call of run(). Lives on the caller's stack; the caller leaves only when no worker holds it.
struct Job {
  Task task;
  void* argument;
  std::int64_t tasks;
  std::int64_t max_helpers;  // workers that may join, over the whole job
  std::atomic<std::int64_t> next{0};
  std::atomic<std::int64_t> helpers{0};  // workers inside; rises only under the pool's mutex while the job is listed
  std::int64_t joined = 0;               // guarded by the pool's mutex
  Job* older = nullptr;

  void work() {
    for (std::int64_t i = next.fetch_add(1); i < tasks; i = next.fetch_add(1)) task(argument, i);
  }
  bool wants_help() const { return joined < max_helpers && next.load(std::memory_order_relaxed) < tasks; }
};

/// Set in threads that are inside a task: what such a task starts runs on its own thread.
thread_local bool inside_task = false;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

constexpr int kSpins =
    2000;  // some tens of microseconds: longer than the gap between two calls of one layer, short against a time slice

class Pool {
 public:
  Pool() : owner_(getpid()) {}

  pid_t owner() const { return owner_; }

  void run(Job& job) {
    {
      const std::lock_guard lock(mutex_);
      start_workers(job.max_helpers);
      job.older = newest_;
      newest_ = &job;
      signal_.fetch_add(1, std::memory_order_release);
    }
    work_.notify_all();
    inside_task = true;
    job.work();
    inside_task = false;
    {
      const std::lock_guard lock(mutex_);
      Job** link = &newest_;
      while (*link != &job) link = &(*link)->older;
      *link = job.older;
    }
    for (int spin = 0; spin < kSpins && job.helpers.load(std::memory_order_acquire) > 0; ++spin) pause();
    std::unique_lock lock(mutex_);  // taken in any case: a worker's last touch of the job is under it
    done_.wait(lock, [&] { return job.helpers.load(std::memory_order_acquire) == 0; });
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      signal_.fetch_add(1, std::memory_order_release);
    }
    work_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

 private:
  void start_workers(std::int64_t wanted) {
    try {
      while (static_cast<std::int64_t>(workers_.size()) < wanted) workers_.emplace_back([this] { serve(); });
    } catch (const std::system_error&) {
      return;  // no more threads to be had: the caller and the workers there are do the work
    }
  }

  Job* job_to_help() const {
    for (Job* job = newest_; job != nullptr; job = job->older) {
      if (job->wants_help()) return job;
    }
    return nullptr;
  }

  void serve() {
    inside_task = true;
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      Job* job = job_to_help();
      if (job == nullptr) {
        sleep(lock);
        continue;
      }
      ++job->joined;
      job->helpers.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      job->work();
      lock.lock();
      if (job->helpers.fetch_sub(1, std::memory_order_release) == 1) done_.notify_all();
    }
  }

  void sleep(std::unique_lock<std::mutex>& lock) {
    const std::uint64_t seen = signal_.load(std::memory_order_acquire);
    lock.unlock();
    for (int spin = 0; spin < kSpins && signal_.load(std::memory_order_acquire) == seen; ++spin) pause();
    lock.lock();
    work_.wait(lock, [&] { return signal_.load(std::memory_order_acquire) != seen; });
  }

  const pid_t owner_;
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::vector<std::thread> workers_;
  Job* newest_ = nullptr;
  std::atomic<std::uint64_t> signal_{0};  // rises with every new job
  bool stopping_ = false;
};

std::atomic<Pool*> the_pool{nullptr};

/// The pool of this process. After fork() the child finds its parent's, whose threads and locks it must not touch: it leaves that
/// one alone and starts its own.
Pool& pool_of_this_process() {
  Pool* pool = the_pool.load(std::memory_order_acquire);
  if (pool != nullptr && pool->owner() == getpid()) return *pool;
  auto* fresh = new Pool;
  if (the_pool.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *pool;
}

/// Ends the threads when the program or the shared library that holds this code goes away.
struct PoolEnd {
  ~PoolEnd() {
    Pool* pool = the_pool.load(std::memory_order_acquire);
    if (pool == nullptr || pool->owner() != getpid()) return;
    the_pool.store(nullptr, std::memory_order_release);
    pool->stop();
    delete pool;
  }
} pool_end;

void run_serially(void*, std::int64_t tasks, Task task, void* argument) {
  for (std::int64_t i = 0; i < tasks; ++i) task(argument, i);
}

/// `context` is the number of threads.
void run_on_pool(void* context, std::int64_t tasks, Task task, void* argument) {
  const auto threads = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(context));
  if (inside_task || tasks <= 1 || threads <= 1) {
    run_serially(nullptr, tasks, task, argument);
    return;
  }
  Job job{task, argument, tasks, (threads < tasks ? threads : tasks) - 1};
  pool_of_this_process().run(job);
}

}  // namespace

Parallel serial() { return {1, nullptr, run_serially}; }

Parallel own_pool(int threads) {
  const int used = threads > 0 ? threads : usable_processors();
  return {used, reinterpret_cast<void*>(static_cast<std::intptr_t>(used)), run_on_pool};
}

}  // namespace flashqla
