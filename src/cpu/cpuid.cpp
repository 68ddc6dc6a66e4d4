// Asks the processor itself (cpuid, xgetbv): compilers' own queries do not all know AVX512_BF16.
#include "cpu/cpuid.hpp"

#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace flashqla::cpu {

namespace {

struct Features {
  std::string missing_avx2, missing_avx512, missing_avx512bf16;
  bool amd = false;
};

#if defined(__x86_64__)

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);  // leaves all zero when the leaf does not exist
  return r;
}

/// Register state that the operating system saves (XCR0); readable only with OSXSAVE.
unsigned saved_state() {
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

bool bit(unsigned word, int position) { return ((word >> position) & 1u) != 0; }

struct Feature {
  const char* name;
  bool present;
};

std::string missing_of(std::initializer_list<Feature> features) {
  std::string missing;
  for (const Feature& feature : features) {
    if (feature.present) continue;
    missing += missing.empty() ? "this processor lacks " : ", ";
    missing += feature.name;
  }
  return missing;
}

Features detect() {
  const Registers leaf1 = cpuid(1, 0), leaf7 = cpuid(7, 0), leaf7_1 = leaf7.eax >= 1 ? cpuid(7, 1) : Registers{};
  const bool osxsave = bit(leaf1.ecx, 27);
  const unsigned xcr0 = osxsave ? saved_state() : 0u;
  constexpr unsigned kYmm = 0x6, kZmm = 0xe6;  // XMM+YMM; and opmask, upper halves, registers 16 to 31

  const Feature avx2{"AVX2", bit(leaf7.ebx, 5)}, fma{"FMA", bit(leaf1.ecx, 12)}, f16c{"F16C", bit(leaf1.ecx, 29)},
      ymm{"YMM registers enabled by the operating system", (xcr0 & kYmm) == kYmm};
  const Feature avx512f{"AVX512F", bit(leaf7.ebx, 16)}, avx512bw{"AVX512BW", bit(leaf7.ebx, 30)},
      avx512dq{"AVX512DQ", bit(leaf7.ebx, 17)}, avx512vl{"AVX512VL", bit(leaf7.ebx, 31)},
      zmm{"ZMM registers enabled by the operating system", (xcr0 & kZmm) == kZmm};
  const Feature avx512bf16{"AVX512_BF16", bit(leaf7_1.eax, 5)}, avx512vnni{"AVX512_VNNI", bit(leaf7.ecx, 11)};
  const Registers vendor = cpuid(0, 0);
  const bool amd = vendor.ebx == 0x68747541u && vendor.edx == 0x69746e65u && vendor.ecx == 0x444d4163u;  // "AuthenticAMD"
  return {missing_of({avx2, fma, f16c, ymm}), missing_of({avx2, fma, f16c, ymm, avx512f, avx512bw, avx512dq, avx512vl, zmm}),
          missing_of({avx2, fma, f16c, ymm, avx512f, avx512bw, avx512dq, avx512vl, zmm, avx512bf16, avx512vnni}), amd};
}

#else

Features detect() {
  const std::string missing = "this processor is not an x86-64";
  return {missing, missing, missing, false};
}

#endif

const Features& features() {
  static const Features detected = detect();
  return detected;
}

}  // namespace

std::string missing_avx2() { return features().missing_avx2; }
std::string missing_avx512() { return features().missing_avx512; }
std::string missing_avx512bf16() { return features().missing_avx512bf16; }
bool bf16_dot_is_fast() { return features().amd && features().missing_avx512bf16.empty(); }
bool prefers_one_stream() { return features().amd; }

}  // namespace flashqla::cpu
