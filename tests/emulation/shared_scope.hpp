// The shared memory of the blocks of a launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flashqla::emulation {

/// Static shared variables are thread-local ones, and nobody says which: for the time of a launch all thread-local memory of the
/// program is the blocks', and what was there comes back after it.
class SharedScope {
 public:
  explicit SharedScope(std::size_t dynamic_bytes);
  ~SharedScope();
  SharedScope(const SharedScope&) = delete;
  SharedScope& operator=(const SharedScope&) = delete;

  /// NaN everywhere, before a block.
  void fill() const;
  /// The first byte past the dynamic memory that was written; -1 if there is none.
  std::int64_t written_past() const;

 private:
  std::vector<std::byte> set_aside_;
};

}  // namespace flashqla::emulation
