// What the processor this runs on can execute.
#pragma once

#include <string>

namespace flashqla::cpu {

struct Features {
  bool avx2 = false;        // AVX2, FMA, F16C, and the system saves ymm registers
  bool avx512 = false;      // AVX-512 F, BW, DQ, VL besides, and the system saves zmm registers
  bool avx512bf16 = false;  // AVX512_BF16 besides
  bool fast_dot = false;    // vdpbf16ps does more work a cycle than f32 FMA
};

/// Asked once.
const Features& features();

/// For Implementation::missing: empty, or the instruction sets that this processor lacks.
std::string missing_nothing();
std::string missing_avx2();
std::string missing_avx512();
std::string missing_avx512bf16();

}  // namespace flashqla::cpu
