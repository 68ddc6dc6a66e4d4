// The threads of the block that runs on this thread of the host, and who of them runs next.
#pragma once

#include <memory>
#include <vector>

#include "emulation/block.hpp"

namespace flashqla::emulation {

inline constexpr int kMostThreads = 1024, kMostWarps = kMostThreads / kWarpLanes, kBarriers = 16;

/// A cp.async that has been issued and not waited for.
struct Copy {
  std::byte* to;
  const void* from;
  std::uint32_t bytes;
  int group;
};

struct Warp;

/// A device thread; without a warp, what called the kernel.
struct Lane {
  Place place;
  Warp* warp = nullptr;
  int number = 0;           // in the warp
  void* context = nullptr;  // where it goes on, while it does not run
  std::vector<Copy> copies;
  int groups = 0;  // of copies that have been ended
};

struct Warp {
  int number = 0;
  std::uint32_t ready = 0, came = 0, returned = 0;  // lanes that can run; that wait for `operation`; that are no more
  bool upwards = true;                              // the order in which ready lanes run
  const Operation* operation = nullptr;
  void* arguments[kWarpLanes] = {};
  int barrier = -1;  // that the warp waits at
  Site site = {};    // where in the source
};

struct Barrier {
  std::uint32_t waiting = 0;  // warps
  int threads = 0;            // wanted; 0: all of the block that have not returned
};

class Machine {
 public:
  static Machine& of_this_thread() { return *thread_state.machine; }
  static Machine& made_for_this_thread();

  /// The whole of a lane's life, to whose end nobody comes back.
  void live();
  std::string run(const Launch& launch, void (*body)(const void*), const void* arguments);
  void meet(const Operation& operation, void* arguments);
  void arrive(int id, int threads, const Site& site);
  bool leaves_out(const Site& site) const { return !left_out_.empty() && is_left_out(site); }
  [[noreturn]] void fail(const std::string& message);
  std::uint32_t random() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 17;
    return random_ ^= random_ << 5;
  }
  Lane& running() { return *running_; }
  void set_seed(std::uint64_t seed) { seed_ = seed; }

 private:
  Machine();
  void leave();
  void start(const Launch& launch, std::int64_t block);
  void finish_meeting(Warp& warp);
  void release(Barrier& barrier);
  Lane& next(Warp& warp);
  Lane& take(Warp& warp);
  Lane& any();
  void switch_to(Lane& lane);
  std::string waits_of_all() const;
  bool is_left_out(const Site& site) const;

  std::unique_ptr<std::byte, void (*)(std::byte*)> stacks_;
  std::uint64_t seed_;
  std::uint32_t random_ = 1;
  Lane caller_;
  Lane* running_ = &caller_;
  std::vector<Lane> lanes_;
  Warp warps_[kMostWarps];
  Barrier barriers_[kBarriers];
  int warp_count_ = 0;
  std::uint32_t live_ = 0, ready_ = 0;  // warps that have not returned; that have ready lanes
  void (*body_)(const void*) = nullptr;
  const void* arguments_ = nullptr;
  std::string failure_;
  std::string left_out_;
};

}  // namespace flashqla::emulation
