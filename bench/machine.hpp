// What this machine can do at most, measured in the same run as the cases: arithmetic of one instruction stream a thread, and
// memory bandwidth.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace flashqla::bench {

enum class Peak { fp32_avx512, fp32_avx2, fp32_plain, bf16_dot };

inline constexpr Peak kPeaks[] = {Peak::fp32_avx512, Peak::fp32_avx2, Peak::fp32_plain, Peak::bf16_dot};

/// "fp32_avx512", ...
const char* name_of(Peak peak);

/// GFLOP/s of all `threads` together, each running independent multiply-adds on registers for a few milliseconds; the best of
/// several batches. Absent when the processor lacks the instructions. `fp32_plain` is what the compiler makes of plain C++
/// without any target option.
std::optional<double> measure_peak(Peak peak, int threads);

/// GFLOP/s of the same instruction streams over about `seconds` on end: the peak that a piece of work of that length had at this
/// moment, with whatever the processor's clock and its neighbours were doing. 0 when the processor lacks the instructions.
double sustained_peak(Peak peak, int threads, double seconds);

/// Memory that is far larger than every cache, as 2 MB pieces visited in turn, so that a piece has left the caches when its turn
/// comes again. It comes from the allocator as any caller's states do, without asking for huge pages.
class ColdMemory {
 public:
  explicit ColdMemory(std::size_t bytes);

  std::byte* data() { return data_; }
  std::size_t bytes() const { return bytes_; }

  /// Bytes per second (both directions counted) of the fastest of several loops that scale fp32 numbers in place / copy them,
  /// median over the pieces of one pass over part of the memory. The threads work on neighbouring parts of each piece,
  /// at the same time.
  double update_bandwidth(int threads);
  double copy_bandwidth(int threads);
  /// Seconds in which the threads update `bytes` bytes from `offset` on, by the loop that the last update_bandwidth() found
  /// fastest.
  double update_seconds(int threads, std::size_t offset, std::size_t bytes);

 private:
  template <class Visit>
  double bandwidth(int threads, const Visit& visit);

  std::vector<std::byte> storage_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t next_piece_ = 0;
  std::size_t fastest_ = 0;
};

std::string processor_name();

}  // namespace flashqla::bench
