// cpuid and xgetbv, read directly: compilers' own tests do not know every bit that is needed.
#include "cpu/features.hpp"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace flashqla::cpu {

namespace {

#if defined(__x86_64__)

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  Leaf(unsigned leaf, unsigned sub) {
    if (!__get_cpuid_count(leaf, sub, &eax, &ebx, &ecx, &edx)) eax = ebx = ecx = edx = 0;
  }
};

bool bit(unsigned word, int index) { return ((word >> index) & 1u) != 0; }

/// Register states that the operating system saves (XCR0).
std::uint64_t saved_registers() {
  std::uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

Features detect() {
  Features found;
  const Leaf vendor(0, 0), basic(1, 0), extended(7, 0), more(7, 1);
  const bool xsave = bit(basic.ecx, 27);
  if (!xsave) return found;
  const std::uint64_t saved = saved_registers();
  const bool ymm = (saved & 0x6) == 0x6, zmm = (saved & 0xe6) == 0xe6;
  found.avx2 = ymm && bit(basic.ecx, 28) && bit(basic.ecx, 12) && bit(basic.ecx, 29) && bit(extended.ebx, 5);
  found.avx512 =
      found.avx2 && zmm && bit(extended.ebx, 16) && bit(extended.ebx, 17) && bit(extended.ebx, 30) && bit(extended.ebx, 31);
  found.avx512bf16 = found.avx512 && bit(more.eax, 5);
  // AMD issues two vdpbf16ps a cycle, as many as FMAs, each with twice the work; Intel's cores (Cooper Lake to Granite Rapids)
  // one every other cycle.
  found.fast_dot = found.avx512bf16 && std::memcmp(&vendor.ebx, "Auth", 4) == 0;
  return found;
}

#else

Features detect() { return {}; }

#endif

}  // namespace

const Features& features() {
  static const Features found = detect();
  return found;
}

std::string missing_nothing() { return {}; }
std::string missing_avx2() { return features().avx2 ? "" : "the processor lacks AVX2, FMA or F16C"; }
std::string missing_avx512() { return features().avx512 ? "" : "the processor lacks AVX-512 F, BW, DQ or VL"; }
std::string missing_avx512bf16() { return features().avx512bf16 ? "" : "the processor lacks AVX512_BF16"; }

}  // namespace flashqla::cpu
