#include "bench/machine.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <thread>

#include "bench/timing.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flashqla::bench {
namespace {

constexpr int kAccumulators =
    12;  // more than latency times throughput of every multiply-add here, fewer than the registers of AVX2
constexpr std::int64_t kRounds = 20000;
constexpr int kBatches = 40;  // of about 0.1 to 1 ms each; the best counts
constexpr std::size_t kPieceBytes = std::size_t{2} << 20;
constexpr std::size_t kPassBytes = std::size_t{512} << 20;

using F4 = float __attribute__((vector_size(16)));

// Each stream returns the multiply-adds (counted as 2) it did.
double stream_plain() {
  const F4 x{0.5f, 0.5f, 0.5f, 0.5f}, y{1.0f, 1.0f, 1.0f, 1.0f};
  volatile float start = 0;  // read once for each accumulator, so that the compiler cannot know that all are equal
  const auto accumulator = [&start] { return F4{start, start, start, start}; };
  F4 a = accumulator(), b = accumulator(), c = accumulator(), d = accumulator(), e = accumulator(), f = accumulator();
  F4 g = accumulator(), h = accumulator(), i = accumulator(), j = accumulator(), k = accumulator(), l = accumulator();
  for (std::int64_t round = 0; round < kRounds; ++round) {
    a = a * x + y, b = b * x + y, c = c * x + y, d = d * x + y, e = e * x + y, f = f * x + y;
    g = g * x + y, h = h * x + y, i = i * x + y, j = j * x + y, k = k * x + y, l = l * x + y;
  }
  volatile float keep = (a + b + c + d + e + f + g + h + i + j + k + l)[0];
  static_cast<void>(keep);
  return static_cast<double>(kRounds) * kAccumulators * 4 * 2;
}

#if defined(__x86_64__)
// In assembly with registers by name: some compilers put an array of accumulators into memory. X is an instruction that adds to
// one register.
#define FLASHQLA_TWELVE(X) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
#define FLASHQLA_TWELVE_MORE(X) X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23) X(24) X(25) X(26) X(27)
#define FLASHQLA_ZERO_YMM(n) "vxorps %%ymm" #n ", %%ymm" #n ", %%ymm" #n "\n"
#define FLASHQLA_ZERO_ZMM(n) "vpxord %%zmm" #n ", %%zmm" #n ", %%zmm" #n "\n"
#define FLASHQLA_FMA_YMM(n) "vfmadd132ps %%ymm0, %%ymm1, %%ymm" #n "\n"
#define FLASHQLA_FMA_ZMM(n) "vfmadd132ps %%zmm0, %%zmm1, %%zmm" #n "\n"
#define FLASHQLA_DOT_ZMM(n) "vdpbf16ps %%zmm0, %%zmm1, %%zmm" #n "\n"
#define FLASHQLA_LOW_REGISTERS \
  "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13"
#define FLASHQLA_HIGH_REGISTERS \
  "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27"

__attribute__((target("avx2,fma"))) double stream_fp32_avx2() {
  const float x = 0.5f, y = 1.0f;
  std::int64_t rounds = kRounds;
  asm volatile("vbroadcastss %1, %%ymm0\n vbroadcastss %2, %%ymm1\n" FLASHQLA_TWELVE(FLASHQLA_ZERO_YMM) "1:\n" FLASHQLA_TWELVE(
                   FLASHQLA_FMA_YMM) "dec %0\n jnz 1b\n vzeroupper\n"
               : "+r"(rounds)
               : "m"(x), "m"(y)
               : FLASHQLA_LOW_REGISTERS);
  return static_cast<double>(kRounds) * kAccumulators * 8 * 2;
}

__attribute__((target("avx512f"))) double stream_fp32_avx512() {
  const float x = 0.5f, y = 1.0f;
  std::int64_t rounds = kRounds;
  asm volatile("vbroadcastss %1, %%zmm0\n vbroadcastss %2, %%zmm1\n" FLASHQLA_TWELVE(FLASHQLA_ZERO_ZMM) "1:\n" FLASHQLA_TWELVE(
                   FLASHQLA_FMA_ZMM) "dec %0\n jnz 1b\n vzeroupper\n"
               : "+r"(rounds)
               : "m"(x), "m"(y)
               : FLASHQLA_LOW_REGISTERS);
  return static_cast<double>(kRounds) * kAccumulators * 16 * 2;
}

/// Twice as many chains, since the dot product has a longer latency.
__attribute__((target("avx512f,avx512bf16"))) double stream_bf16_dot() {
  const std::uint32_t x = 0x3f003f00, y = 0x3e803e80;
  std::int64_t rounds = kRounds;
  asm volatile("vpbroadcastd %1, %%zmm0\n vpbroadcastd %2, %%zmm1\n" FLASHQLA_TWELVE(FLASHQLA_ZERO_ZMM)
                   FLASHQLA_TWELVE_MORE(FLASHQLA_ZERO_ZMM) "1:\n" FLASHQLA_TWELVE(FLASHQLA_DOT_ZMM)
                       FLASHQLA_TWELVE_MORE(FLASHQLA_DOT_ZMM) "dec %0\n jnz 1b\n vzeroupper\n"
               : "+r"(rounds)
               : "m"(x), "m"(y)
               : FLASHQLA_LOW_REGISTERS, FLASHQLA_HIGH_REGISTERS);
  return static_cast<double>(kRounds) * 2 * kAccumulators * 32 * 2;
}
#endif

using Stream = double (*)();

Stream stream_of(Peak peak) {
  if (peak == Peak::fp32_plain) return stream_plain;
#if defined(__x86_64__)
  if (peak == Peak::fp32_avx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return stream_fp32_avx2;
  if (peak == Peak::fp32_avx512 && __builtin_cpu_supports("avx512f")) return stream_fp32_avx512;
  if (peak == Peak::bf16_dot && __builtin_cpu_supports("avx512bf16")) return stream_bf16_dot;
#endif
  return nullptr;
}

/// Sum of what `threads` threads return when they run at once.
double sum_over_threads(int threads, const std::function<double(int)>& function) {
  std::vector<double> results(static_cast<std::size_t>(threads));
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back([&, i] { results[static_cast<std::size_t>(i)] = function(i); });
  results[0] = function(0);
  for (std::thread& other : others) other.join();
  double sum = 0;
  for (double result : results) sum += result;
  return sum;
}

void flip_plain(std::byte* data, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 16) {
    std::uint64_t words[2];
    std::memcpy(words, data + i, 16);
    words[0] ^= 0x8000000080000000u;
    words[1] ^= 0x8000000080000000u;
    std::memcpy(data + i, words, 16);
  }
}

void copy_plain(const std::byte* from, std::byte* to, std::size_t bytes) { std::memcpy(to, from, bytes); }

#if defined(__x86_64__)
// Flips signs and does no arithmetic, so that no value can become slow (denormal). kAhead: bytes fetched in advance, 0 leaves it
// to the hardware.
template <int kAhead>
__attribute__((target("avx512f"))) void flip_avx512(std::byte* data, std::size_t bytes) {
  const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  for (std::size_t i = 0; i < bytes; i += 256) {
    if (kAhead != 0)
      for (std::size_t j = 0; j < 256; j += 64) _mm_prefetch(reinterpret_cast<const char*>(data + i + j + kAhead), _MM_HINT_T0);
    for (std::size_t j = 0; j < 256; j += 64)
      _mm512_storeu_si512(data + i + j, _mm512_xor_si512(sign, _mm512_loadu_si512(data + i + j)));
  }
}

template <int kAhead>
__attribute__((target("avx2"))) void flip_avx2(std::byte* data, std::size_t bytes) {
  const __m256i sign = _mm256_set1_epi32(static_cast<int>(0x80000000u));
  for (std::size_t i = 0; i < bytes; i += 128) {
    if (kAhead != 0)
      for (std::size_t j = 0; j < 128; j += 64) _mm_prefetch(reinterpret_cast<const char*>(data + i + j + kAhead), _MM_HINT_T0);
    for (std::size_t j = 0; j < 128; j += 32) {
      auto* lane = reinterpret_cast<__m256i*>(data + i + j);
      _mm256_storeu_si256(lane, _mm256_xor_si256(sign, _mm256_loadu_si256(lane)));
    }
  }
}
#endif

using Flip = void (*)(std::byte*, std::size_t);

std::vector<Flip> flips() {
  std::vector<Flip> all = {flip_plain};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) all.insert(all.end(), {flip_avx2<0>, flip_avx2<2048>});
  if (__builtin_cpu_supports("avx512f")) all.insert(all.end(), {flip_avx512<0>, flip_avx512<1024>, flip_avx512<2048>});
#endif
  return all;
}

}  // namespace

const char* name_of(Peak peak) {
  switch (peak) {
    case Peak::fp32_avx512:
      return "fp32_avx512";
    case Peak::fp32_avx2:
      return "fp32_avx2";
    case Peak::fp32_plain:
      return "fp32_plain";
    case Peak::bf16_dot:
      return "bf16_dot";
  }
  return "";
}

std::optional<double> measure_peak(Peak peak, int threads) {
  const Stream stream = stream_of(peak);
  if (stream == nullptr) return std::nullopt;
  return sum_over_threads(threads, [stream](int) {
    double best = 0;
    for (int batch = 0; batch < kBatches; ++batch) {
      const double begin = seconds_of(CLOCK_THREAD_CPUTIME_ID);
      const double flops = stream();
      best = std::max(best, 1e-9 * flops / (seconds_of(CLOCK_THREAD_CPUTIME_ID) - begin));
    }
    return best;
  });
}

double sustained_peak(Peak peak, int threads, double seconds) {
  const Stream stream = stream_of(peak);
  if (stream == nullptr) return 0;
  const clockid_t clock = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  const double start = seconds_of(clock);
  const double flops = sum_over_threads(threads, [&](int) {
    double done = 0;
    do {
      done += stream();
    } while (seconds_of(clock) - start < seconds);
    return done;
  });
  return 1e-9 * flops / (seconds_of(clock) - start);
}

ColdMemory::ColdMemory(std::size_t bytes) : storage_(bytes + 4096) {
  // 1 KB past the end may be prefetched, never read.
  void* start = storage_.data();
  std::size_t space = storage_.size();
  data_ = static_cast<std::byte*>(std::align(64, bytes, start, space));
  bytes_ = bytes;
}

namespace {

/// Seconds of each of `count` visits of all threads to their parts of a piece. One thread: by its own CPU time. Several visit
/// their parts at the same moment, and the wall time from the first start to the last end counts: each by its own CPU time would
/// add up rates that the memory never gave at once.
template <class Piece, class Visit>
std::vector<double> seconds_of_visits(int threads, std::size_t count, std::size_t part, const Piece& piece, const Visit& visit) {
  std::vector<std::vector<double>> begins(static_cast<std::size_t>(threads), std::vector<double>(count)), ends = begins;
  std::atomic<std::size_t> arrived{0};
  sum_over_threads(threads, [&](int thread) {
    const auto t = static_cast<std::size_t>(thread);
    const clockid_t clock = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    for (std::size_t i = 0; i < count; ++i) {
      ++arrived;
      while (arrived < (i + 1) * begins.size()) std::this_thread::yield();
      begins[t][i] = seconds_of(clock);
      visit(piece(i) + part * t, part);
      ends[t][i] = seconds_of(clock);
    }
    return 0.0;
  });
  std::vector<double> seconds(count);
  for (std::size_t i = 0; i < count; ++i) {
    double begin = begins[0][i], end = ends[0][i];
    for (std::size_t t = 1; t < begins.size(); ++t) begin = std::min(begin, begins[t][i]), end = std::max(end, ends[t][i]);
    seconds[i] = end - begin;
  }
  return seconds;
}

std::size_t part_of(std::size_t bytes, int threads) { return bytes / static_cast<std::size_t>(threads) / 4096 * 4096; }

}  // namespace

template <class Visit>
double ColdMemory::bandwidth(int threads, const Visit& visit) {
  const std::size_t pieces = bytes_ / kPieceBytes;
  const std::size_t first = next_piece_;
  const std::size_t count = std::min(pieces, kPassBytes / kPieceBytes);
  next_piece_ = (first + count) % pieces;
  const std::size_t part = part_of(kPieceBytes, threads);
  const auto piece = [&](std::size_t i) { return data_ + (first + i) % pieces * kPieceBytes; };
  const std::vector<double> seconds = seconds_of_visits(threads, count, part, piece, visit);
  return 2 * static_cast<double>(part * static_cast<std::size_t>(threads)) / median(seconds);
}

double ColdMemory::update_bandwidth(int threads) {
  const std::vector<Flip> loops = flips();
  double best = 0;
  for (std::size_t i = 0; i < loops.size(); ++i) {
    const double found = bandwidth(threads, loops[i]);
    if (found > best) best = found, fastest_ = i;
  }
  return best;
}

double ColdMemory::update_seconds(int threads, std::size_t offset, std::size_t bytes) {
  const std::size_t part = part_of(bytes, threads);
  const double seconds = seconds_of_visits(threads, 1, part, [&](std::size_t) { return data_ + offset; }, flips()[fastest_])[0];
  return seconds * static_cast<double>(bytes) / static_cast<double>(part * static_cast<std::size_t>(threads));
}

double ColdMemory::copy_bandwidth(int threads) {
  // Within a piece: its first half to its second; half the bytes of an update move.
  return 0.5 * bandwidth(threads, [](std::byte* data, std::size_t bytes) { copy_plain(data, data + bytes / 2, bytes / 2); });
}

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line))
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown processor";
}

}  // namespace flashqla::bench
