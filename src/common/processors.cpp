// How many processors this process may use: threads beyond that only take turns.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <thread>

#include "common/parallel.hpp"

#if defined(__linux__)
#include <sched.h>
#endif

namespace flashqla {

namespace {

/// CPU quota of one control group in processors; infinite when it has none.
double quota_of(const std::string& folder) {
  std::string quota;
  double period = 0.0;
  if (std::ifstream v2(folder + "/cpu.max"); v2 >> quota >> period) {
    return quota == "max" || period <= 0.0 ? INFINITY : std::strtod(quota.c_str(), nullptr) / period;
  }
  double quota_us = 0.0;
  std::ifstream v1_quota(folder + "/cpu.cfs_quota_us"), v1_period(folder + "/cpu.cfs_period_us");
  if (v1_quota >> quota_us && v1_period >> period && quota_us > 0.0 && period > 0.0) return quota_us / period;
  return INFINITY;
}

/// The smallest quota of this process's control group and its parents (cgroup v2, or the cpu controller of v1).
double smallest_quota() {
  double smallest = INFINITY;
  std::ifstream groups("/proc/self/cgroup");  // lines of hierarchy:controllers:path
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    std::string path = line.substr(second + 1);
    for (;;) {
      smallest = std::min(smallest, quota_of(path == "/" ? root : root + path));
      const std::size_t slash = path.rfind('/');
      if (path.size() <= 1 || slash == std::string::npos) break;
      path.resize(slash == 0 ? 1 : slash);
    }
  }
  return smallest;
}

int affinity() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  return static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace

int usable_processors() {
  static const double quota = smallest_quota();
  const int processors = std::max(1, affinity());
  return quota >= processors ? processors : std::max(1, static_cast<int>(std::ceil(quota)));
}

}  // namespace flashqla
