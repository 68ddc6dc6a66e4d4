// A block of threads on one thread of the host: every device thread is a fiber that runs until it meets others. What device code
// and the emulated instructions need of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace flashqla::emulation {

inline constexpr int kWarpLanes = 32;
inline constexpr std::uint32_t kAllLanes = 0xffffffffu;

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};

struct Launch {
  std::int64_t blocks;
  int threads;
  std::size_t shared_bytes;
};

/// What all lanes of a warp do together, once the last of them has come. Its address says which operation it is.
struct Operation {
  const char* name;
  /// `arguments`: what each lane brought; null for lanes that have returned.
  void (*carry_out)(void* const (&arguments)[kWarpLanes]);
  bool returned_lanes_allowed = false;
};

/// The calling thread's place, all that device code asks for.
struct Place {
  Index3 thread;
  Index3 block, block_size, grid_size;
};

class Machine;

/// All that the emulation keeps in thread-local memory, which is the kernel's for the time of a launch.
struct ThreadState {
  const Place* place = nullptr;
  Machine* machine = nullptr;
  std::byte* shared = nullptr;  // dynamic, and its size
  std::size_t shared_bytes = 0;
};
inline constinit thread_local ThreadState thread_state;

/// Waits for the warp's other lanes, then goes on after `operation` has been carried out for all of them.
void meet(const Operation& operation, void* arguments);

/// A place in the source, said by errors. FLASHQLA_EMULATION_WITHOUT=file:line leaves out the waits of that line.
struct Site {
  const char* file;
  int line;
};

/// Waits for the warp, then with it at barrier `id` until `threads` have come; 0: all threads of the block that have not
/// returned.
void wait_at_barrier(int id, int threads, const Site& site);

/// Ends the launch with an error. Called on a fiber.
[[noreturn]] void fail(const std::string& message);

/// Runs a kernel: `body(arguments)` once a thread. Empty, or what went wrong.
std::string run_blocks(const Launch& launch, void (*body)(const void*), const void* arguments);

/// One number of a sequence that the seed decides (FLASHQLA_EMULATION_SEED, default 1).
std::uint32_t random_number();
/// Takes a seed instead of the environment's, for the launches of this thread.
void set_seed(std::uint64_t seed);

}  // namespace flashqla::emulation
