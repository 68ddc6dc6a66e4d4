// Independent work items on the caller's threads, for kernels: items are handed out in order as threads become free, each thread
// has a slot number (and with it scratch of its own), and every item is computed in the floating-point environment of the calling
// thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "flashqla/parallel.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace flashqla {

/// Rounding mode, flush-to-zero, denormals-are-zero, exception masks and flags of the current thread.
class FloatEnvironment {
 public:
#if defined(__x86_64__)
  static FloatEnvironment current() { return FloatEnvironment{_mm_getcsr()}; }
  void install() const { _mm_setcsr(state_); }
  friend bool operator==(const FloatEnvironment& x, const FloatEnvironment& y) { return x.state_ == y.state_; }

 private:
  explicit FloatEnvironment(unsigned state) : state_(state) {}
  unsigned state_;
#else
  static FloatEnvironment current() {
    FloatEnvironment environment;
    std::fegetenv(&environment.state_);
    return environment;
  }
  void install() const { std::fesetenv(&state_); }

 private:
  FloatEnvironment() = default;
  std::fenv_t state_;
#endif
};

/// Installs an environment and puts the thread's own back at the end of the scope.
class ScopedFloatEnvironment {
 public:
  explicit ScopedFloatEnvironment(const FloatEnvironment& environment) : saved_(FloatEnvironment::current()) {
    environment.install();
  }
  ~ScopedFloatEnvironment() { saved_.install(); }
  ScopedFloatEnvironment(const ScopedFloatEnvironment&) = delete;
  ScopedFloatEnvironment& operator=(const ScopedFloatEnvironment&) = delete;

 private:
  FloatEnvironment saved_;
};

/// For as long as it lives no floating-point exception traps; then the thread's environment is as it was, its exception flags
/// included. Masked lanes of a kernel may overflow where no result does: the caller must not see that.
class QuietFloatEnvironment {
 public:
#if defined(__x86_64__)
  QuietFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kMasks); }
  ~QuietFloatEnvironment() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kMasks = 0x1f80;
  unsigned saved_;
#else
  QuietFloatEnvironment() { std::feholdexcept(&saved_); }
  ~QuietFloatEnvironment() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif

 public:
  QuietFloatEnvironment(const QuietFloatEnvironment&) = delete;
  QuietFloatEnvironment& operator=(const QuietFloatEnvironment&) = delete;
};

/// Number of slots that for_each_item uses for so many items.
inline std::int64_t num_slots(const Parallel& parallel, std::int64_t items) {
  const std::int64_t threads = parallel.run == nullptr ? 1 : parallel.threads;
  return threads < items ? threads : items;
}

/// Scratch of one slot: `bytes_per_slot` bytes, a multiple of 64.
inline std::byte* slot_scratch(std::byte* workspace, std::size_t bytes_per_slot, std::int64_t slot) {
  return workspace + static_cast<std::size_t>(slot) * bytes_per_slot;
}

/// Calls body(slot, item) once for each item in [0, items), each slot in [0, num_slots) on one thread at a time. Items start in
/// increasing order, so put the longest first. The body must not throw. Returns when all are done; allocates nothing.
template <class Body>
void for_each_item(const Parallel& parallel, std::int64_t items, Body&& body) {
  const std::int64_t slots = num_slots(parallel, items);
  if (slots <= 1) {
    for (std::int64_t item = 0; item < items; ++item) body(std::int64_t{0}, item);
    return;
  }
  struct Shared {
    std::remove_reference_t<Body>* body;
    std::int64_t items;
    FloatEnvironment environment;
    std::atomic<std::int64_t> next{0};
  };
  Shared shared{std::addressof(body), items, FloatEnvironment::current()};
  parallel.run(
      parallel.context, slots,
      [](void* argument, std::int64_t slot) {
        auto& work = *static_cast<Shared*>(argument);
        const ScopedFloatEnvironment scope(work.environment);
        for (std::int64_t item = work.next.fetch_add(1); item < work.items; item = work.next.fetch_add(1))
          (*work.body)(slot, item);
      },
      &shared);
}

/// Processors that this process may use: its affinity mask, limited by the CPU quota of its control group. At least 1.
int usable_processors();

}  // namespace flashqla
