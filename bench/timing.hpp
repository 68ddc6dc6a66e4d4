// Clocks and repeated timing. One thread is judged by its own CPU time, which other processes on the machine disturb little;
// several threads by wall time.
#pragma once

#include <ctime>

#include <algorithm>
#include <vector>

namespace flashqla::bench {

inline double seconds_of(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// Seconds of each repeat.
struct Timings {
  std::vector<double> cpu;  ///< CPU time of the calling thread
  std::vector<double> wall;

  template <class Function>
  void time(const Function& function) {
    const double cpu_begin = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    const double wall_begin = seconds_of(CLOCK_MONOTONIC);
    function();
    wall.push_back(seconds_of(CLOCK_MONOTONIC) - wall_begin);
    cpu.push_back(seconds_of(CLOCK_THREAD_CPUTIME_ID) - cpu_begin);
  }
};

inline double minimum(const std::vector<double>& values) { return *std::min_element(values.begin(), values.end()); }

inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace flashqla::bench
