// How the CPU backend gets its threads: from the caller, or from a small pool of its own.
#pragma once

#include <cstdint>

namespace flashqla {

/// A way to run independent tasks. `run(context, n, task, argument)` must call `task(argument, i)` exactly once for each
/// i in [0, n), in any order and on any threads, and return when all are done. Tasks never throw and never wait for each other.
/// Results do not depend on `threads` nor on the order: one and many threads agree bit for bit.
struct Parallel {
  using Task = void (*)(void* argument, std::int64_t index);
  int threads = 1;  ///< how many tasks may usefully run at once (at least 1)
  void* context = nullptr;
  void (*run)(void* context, std::int64_t tasks, Task task, void* argument) = nullptr;  ///< null: run on the calling thread
};

/// Runs everything on the calling thread.
Parallel serial();

/// The library's own pool, started at first use, with `threads` threads (0: one for each processor this process may use).
/// Safe after fork() (the child starts its own) and when called from several threads at once.
Parallel own_pool(int threads = 0);

}  // namespace flashqla
