#include "bench/machine.hpp"

#include <algorithm>
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
  F4 sum[kAccumulators] = {};
  F4 x{0.5f, 0.5f, 0.5f, 0.5f}, y{1.0f, 1.0f, 1.0f, 1.0f};
  for (std::int64_t round = 0; round < kRounds; ++round)
    for (F4& lane : sum) lane = lane * x + y;
  F4 total{};
  for (const F4& lane : sum) total += lane;
  volatile float keep = total[0];
  static_cast<void>(keep);
  return static_cast<double>(kRounds) * kAccumulators * 4 * 2;
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) double stream_fp32_avx2() {
  __m256 sum[kAccumulators];
  for (__m256& lane : sum) lane = _mm256_setzero_ps();
  const __m256 x = _mm256_set1_ps(0.5f), y = _mm256_set1_ps(1.0f);
  for (std::int64_t round = 0; round < kRounds; ++round) {
    for (__m256& lane : sum) {
      lane = _mm256_fmadd_ps(lane, x, y);
      asm volatile("" : "+x"(lane));
    }
  }
  return static_cast<double>(kRounds) * kAccumulators * 8 * 2;
}

__attribute__((target("avx512f"))) double stream_fp32_avx512() {
  __m512 sum[kAccumulators];
  for (__m512& lane : sum) lane = _mm512_setzero_ps();
  const __m512 x = _mm512_set1_ps(0.5f), y = _mm512_set1_ps(1.0f);
  for (std::int64_t round = 0; round < kRounds; ++round) {
    for (__m512& lane : sum) {
      lane = _mm512_fmadd_ps(lane, x, y);
      asm volatile("" : "+v"(lane));
    }
  }
  return static_cast<double>(kRounds) * kAccumulators * 16 * 2;
}

__attribute__((target("avx512f,avx512bf16"))) double stream_bf16_dot() {
  constexpr int kChains = 2 * kAccumulators;  // the dot product has a longer latency
  __m512 sum[kChains];
  for (__m512& lane : sum) lane = _mm512_setzero_ps();
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3f003f00), y = (__m512bh)_mm512_set1_epi32(0x3e803e80);
  for (std::int64_t round = 0; round < kRounds; ++round) {
    for (__m512& lane : sum) {
      lane = _mm512_dpbf16_ps(lane, x, y);
      asm volatile("" : "+v"(lane));
    }
  }
  return static_cast<double>(kRounds) * kChains * 32 * 2;
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

ColdMemory::ColdMemory(std::size_t bytes) : storage_(bytes + 4096) {
  // 1 KB past the end may be prefetched, never read.
  void* start = storage_.data();
  std::size_t space = storage_.size();
  data_ = static_cast<std::byte*>(std::align(64, bytes, start, space));
  bytes_ = bytes;
}

template <class Visit>
double ColdMemory::bandwidth(int threads, const Visit& visit) {
  const std::size_t pieces = bytes_ / kPieceBytes;
  const std::size_t first = next_piece_;
  const std::size_t count = std::min(pieces, kPassBytes / kPieceBytes);
  next_piece_ = (first + count) % pieces;
  const auto part = kPieceBytes / static_cast<std::size_t>(threads) / 4096 * 4096;
  return sum_over_threads(threads, [&](int thread) {
    Timings timings;
    for (std::size_t i = 0; i < count; ++i) {
      std::byte* begin = data_ + (first + i) % pieces * kPieceBytes + part * static_cast<std::size_t>(thread);
      timings.time([&] { visit(begin, part); });
    }
    return 2 * static_cast<double>(part) / median(timings.cpu);
  });
}

double ColdMemory::update_bandwidth(int threads) {
  double best = 0;
  for (Flip flip : flips()) best = std::max(best, bandwidth(threads, flip));
  return best;
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
