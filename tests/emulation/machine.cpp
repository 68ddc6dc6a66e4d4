// Fibers of a block. A lane that waits switches straight to the next one: of its own warp as long as there is one, then of a warp
// that the seed chooses. Warps are switched only where their lanes have met, and there only now and then.
#include "machine.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif
#include <sys/mman.h>

#include <bit>
#include <boost/context/detail/fcontext.hpp>
#include <cstdlib>
#include <new>
#include <string>

#include "shared_scope.hpp"

namespace flashqla::emulation {

namespace {

namespace context = boost::context::detail;

constexpr std::size_t kPage = 4096, kStackBytes = 65 * kPage;  // one of them a guard

/// One in so many meetings lets another warp run.
constexpr std::uint32_t kMeetingsToTurn = 8;

#if defined(__SANITIZE_ADDRESS__)
/// Threads that have returned, or been given up, have left marks of their frames on their stacks.
void forget_frames(std::byte* stack) { __asan_unpoison_memory_region(stack + kPage, kStackBytes - kPage); }
#else
void forget_frames(std::byte*) {}
#endif

void release_stacks(std::byte* memory) { munmap(memory, kMostThreads * kStackBytes); }

std::byte* reserve_stacks() {
  void* const memory =
      mmap(nullptr, kMostThreads * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  for (int i = 0; i < kMostThreads; ++i) mprotect(static_cast<std::byte*>(memory) + i * kStackBytes, kPage, PROT_NONE);
  return static_cast<std::byte*>(memory);
}

/// Where a lane's stack begins. They begin at different places in their pages, or all would fall on the same lines of the cache.
std::byte* stack_top(std::byte* stacks, int thread) {
  return stacks + (thread + 1) * kStackBytes - static_cast<std::size_t>(thread % 61) * 64;
}

std::string from_environment(const char* name) {
  const char* const text = std::getenv(name);
  return text != nullptr ? text : "";
}
std::uint64_t seed_of_environment() {
  const std::string text = from_environment("FLASHQLA_EMULATION_SEED");
  return text.empty() ? 1 : std::strtoull(text.c_str(), nullptr, 10);
}

/// "kernel.cuh:12".
std::string text_of(const Site& site) {
  const std::string file = site.file;
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(site.line);
}

std::uint32_t mixed(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return static_cast<std::uint32_t>(x ^ x >> 31) | 1u;
}

struct BarrierArguments {
  int id, threads;
  Site site;
};
constexpr Operation kBarrier{
    "a barrier",
    [](void* const (&arguments)[kWarpLanes]) {
      const BarrierArguments* first = nullptr;
      for (void* one : arguments) {
        const auto* const own = static_cast<const BarrierArguments*>(one);
        if (own == nullptr) continue;
        if (first == nullptr) first = own;
        if (own->id != first->id || own->threads != first->threads) {
          fail("lanes of a warp come to barriers " + std::to_string(first->id) + " and " + std::to_string(own->id));
        }
      }
      Machine::of_this_thread().arrive(first->id, first->threads, first->site);
    },
    true};

void enter(context::transfer_t from) {
  static_cast<Lane*>(from.data)->context = from.fctx;
  Machine::of_this_thread().live();
}

std::string lanes_text(std::uint32_t lanes) {
  std::string text;
  for (int first = 0; first < kWarpLanes; ++first) {
    if ((lanes >> first & 1) == 0) continue;
    int last = first;
    while (last + 1 < kWarpLanes && (lanes >> (last + 1) & 1) != 0) ++last;
    if (!text.empty()) text += ',';
    text += std::to_string(first);
    if (last > first) text.append(1, '-').append(std::to_string(last));
    first = last;
  }
  return text;
}

}  // namespace

Machine& Machine::made_for_this_thread() {
  thread_local std::unique_ptr<Machine> machine(new Machine);
  return *(thread_state.machine = machine.get());
}

Machine::Machine()
    : stacks_(reserve_stacks(), release_stacks),
      seed_(seed_of_environment()),
      lanes_(kMostThreads),
      left_out_(from_environment("FLASHQLA_EMULATION_WITHOUT")) {}

void Machine::switch_to(Lane& lane) {
  if (&lane == running_) return;
  Lane& from = *running_;
  running_ = &lane;
  thread_state.place = &lane.place;
  const context::transfer_t came = context::jump_fcontext(lane.context, &from);
  static_cast<Lane*>(came.data)->context = came.fctx;
}

void Machine::live() {
  body_(arguments_);
  leave();
}

void Machine::leave() {
  Lane& lane = *running_;
  Warp& warp = *lane.warp;
  for (const Copy& copy : lane.copies) {
    if (copy.bytes > 0) fail("returned before its asynchronous copies had been waited for");
  }
  warp.returned |= 1u << lane.number;
  warp.arguments[lane.number] = nullptr;
  if (warp.operation != nullptr && (warp.came | warp.returned) == kAllLanes) finish_meeting(warp);
  if (warp.returned == kAllLanes) {
    live_ &= ~(1u << warp.number);
    for (Barrier& barrier : barriers_) {
      if (barrier.waiting != 0 && barrier.threads == 0 && barrier.waiting == live_) release(barrier);
    }
  }
  switch_to(next(warp));  // nobody comes back
}

void Machine::fail(const std::string& message) {
  const Index3& block = running_->place.block;
  failure_ = "block " + std::to_string(block.x) + " thread " + std::to_string(running_->place.thread.x) + ": " + message;
  switch_to(caller_);
  std::abort();
}

Lane& Machine::take(Warp& warp) {
  const int lane = warp.upwards ? std::countr_zero(warp.ready) : kWarpLanes - 1 - std::countl_zero(warp.ready);
  warp.ready &= ~(1u << lane);
  return lanes_[static_cast<std::size_t>(warp.number * kWarpLanes + lane)];
}

/// A lane of any warp that can run; what called the kernel when all have returned.
Lane& Machine::any() {
  if (ready_ == 0) {
    if (live_ == 0) return caller_;
    fail("no thread can go on:" + waits_of_all());
  }
  std::uint32_t among = ready_;
  for (std::uint32_t skip = random() % static_cast<std::uint32_t>(std::popcount(ready_)); skip > 0; --skip) among &= among - 1;
  return take(warps_[std::countr_zero(among)]);
}

/// What is to run after a lane of `warp` has begun to wait or has returned.
Lane& Machine::next(Warp& warp) {
  if (warp.barrier < 0 && warp.ready != 0) return take(warp);
  ready_ &= ~(1u << warp.number);
  return any();
}

void Machine::finish_meeting(Warp& warp) {
  const Operation& operation = *warp.operation;
  if (warp.returned != 0 && !operation.returned_lanes_allowed) {
    fail(std::string(operation.name) + " by lanes " + lanes_text(warp.came) + " of warp " + std::to_string(warp.number) +
         " alone: the others have returned");
  }
  operation.carry_out(warp.arguments);
  warp.operation = nullptr;
  warp.ready = warp.came;
  warp.came = 0;
  warp.upwards = (random() & 16) != 0;
}

void Machine::meet(const Operation& operation, void* arguments) {
  Lane& lane = *running_;
  Warp& warp = *lane.warp;
  const std::uint32_t bit = 1u << lane.number;
  if (warp.operation != nullptr && warp.operation != &operation) {
    fail(std::string(operation.name) + " while lanes " + lanes_text(warp.came) + " of warp " + std::to_string(warp.number) +
         " wait at " + warp.operation->name);
  }
  warp.operation = &operation;
  warp.arguments[lane.number] = arguments;
  warp.came |= bit;
  if ((warp.came | warp.returned) != kAllLanes) return switch_to(next(warp));
  finish_meeting(warp);
  if (warp.barrier >= 0) return switch_to(next(warp));
  if (&operation == &kBarrier || random() % kMeetingsToTurn == 0) return switch_to(any());
  warp.ready &= ~bit;
}

/// The warp of the running lane comes to a barrier: it waits there, unless it is the last.
void Machine::arrive(int id, int threads, const Site& site) {
  Warp& warp = *running_->warp;
  if (id < 0 || id >= kBarriers || threads < 0 || threads % kWarpLanes != 0) {
    fail("barrier " + std::to_string(id) + " for " + std::to_string(threads) + " threads: there are 0 to 15, for whole warps");
  }
  Barrier& barrier = barriers_[id];
  if (barrier.waiting != 0 && barrier.threads != threads) {
    fail("barrier " + std::to_string(id) + " for " + std::to_string(threads) + " threads, where others wait for " +
         std::to_string(barrier.threads));
  }
  barrier.waiting |= 1u << warp.number;
  barrier.threads = threads;
  warp.barrier = id;
  warp.site = site;
  if (threads == 0 ? barrier.waiting == live_ : std::popcount(barrier.waiting) * kWarpLanes == threads) release(barrier);
}

void Machine::release(Barrier& barrier) {
  for (Warp& warp : warps_) {
    if ((barrier.waiting >> warp.number & 1) != 0) warp.barrier = -1;
  }
  ready_ |= barrier.waiting;
  barrier.waiting = 0;
}

bool Machine::is_left_out(const Site& site) const { return text_of(site) == left_out_; }

std::string Machine::waits_of_all() const {
  std::string text;
  for (int w = 0; w < warp_count_; ++w) {
    const Warp& warp = warps_[w];
    if ((live_ >> w & 1) == 0) continue;
    text += "\n  warp " + std::to_string(w) + ": ";
    if (warp.barrier >= 0) {
      const int threads = barriers_[warp.barrier].threads;
      text += "at barrier " + std::to_string(warp.barrier) + " for " + (threads == 0 ? "all" : std::to_string(threads)) +
              " threads (" + text_of(warp.site) + ")";
    } else {
      text += "lanes " + lanes_text(warp.came) + " at " + (warp.operation != nullptr ? warp.operation->name : "nothing");
    }
    if (warp.returned != 0) text += ", lanes " + lanes_text(warp.returned) + " have returned";
  }
  return text;
}

/// The lanes of a block before its first.
void Machine::start(const Launch& launch, std::int64_t block) {
  random_ = mixed(seed_ * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(block));
  warp_count_ = (launch.threads + kWarpLanes - 1) / kWarpLanes;
  live_ = ready_ = warp_count_ == kWarpLanes ? kAllLanes : (1u << warp_count_) - 1;
  for (Barrier& barrier : barriers_) barrier = {};
  for (int w = 0; w < warp_count_; ++w) {
    const int threads = launch.threads - w * kWarpLanes;
    warps_[w] = {};
    warps_[w].number = w;
    warps_[w].ready = threads >= kWarpLanes ? kAllLanes : (1u << threads) - 1;
    warps_[w].returned = ~warps_[w].ready;
    warps_[w].upwards = (random() & 16) != 0;
  }
  for (int t = 0; t < launch.threads; ++t) {
    Lane& lane = lanes_[static_cast<std::size_t>(t)];
    lane.place = {{static_cast<unsigned>(t), 0, 0},
                  {static_cast<unsigned>(block), 0, 0},
                  {static_cast<unsigned>(launch.threads), 1, 1},
                  {static_cast<unsigned>(launch.blocks), 1, 1}};
    lane.warp = &warps_[t / kWarpLanes];
    lane.number = t % kWarpLanes;
    lane.copies.clear();
    lane.groups = 0;
    forget_frames(stacks_.get() + static_cast<std::size_t>(t) * kStackBytes);
    lane.context = context::make_fcontext(stack_top(stacks_.get(), t), kStackBytes - 2 * kPage, enter);
  }
}

std::string Machine::run(const Launch& launch, void (*body)(const void*), const void* arguments) {
  if (launch.threads < 1 || launch.threads > kMostThreads) return "a block of " + std::to_string(launch.threads) + " threads";
  body_ = body;
  arguments_ = arguments;
  failure_.clear();
  const SharedScope scope(launch.shared_bytes);
  for (std::int64_t turn = 0; turn < launch.blocks; ++turn) {
    const std::int64_t block = seed_ % 2 != 0 ? turn : launch.blocks - 1 - turn;  // nothing may depend on their order
    start(launch, block);
    scope.fill();
    switch_to(any());
    if (!failure_.empty()) break;
    if (const std::int64_t at = scope.written_past(); at >= 0) {
      failure_ = "block " + std::to_string(block) + ": wrote to byte " + std::to_string(at) + " of the " +
                 std::to_string(launch.shared_bytes) + " bytes of shared memory";
      break;
    }
  }
  return failure_;
}

void meet(const Operation& operation, void* arguments) { Machine::of_this_thread().meet(operation, arguments); }
void fail(const std::string& message) { Machine::of_this_thread().fail(message); }
std::string run_blocks(const Launch& launch, void (*body)(const void*), const void* arguments) {
  return Machine::made_for_this_thread().run(launch, body, arguments);
}
std::uint32_t random_number() { return Machine::of_this_thread().random(); }
void set_seed(std::uint64_t seed) { Machine::made_for_this_thread().set_seed(seed); }

void wait_at_barrier(int id, int threads, const Site& site) {
  if (Machine::of_this_thread().leaves_out(site)) return;
  BarrierArguments arguments{id, threads, site};
  meet(kBarrier, &arguments);
}

}  // namespace flashqla::emulation
