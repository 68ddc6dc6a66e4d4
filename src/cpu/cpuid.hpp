// What this processor and its operating system can run. Each function returns "" or says what is missing; the answers never
// change in a process.
#pragma once

#include <string>

namespace flashqla::cpu {

/// AVX2, FMA and F16C, with the YMM registers saved by the operating system.
std::string missing_avx2();

/// The above and AVX-512 F, BW, DQ and VL, with the ZMM and mask registers saved by the operating system.
std::string missing_avx512();

/// The above, AVX512_BF16 and AVX512_VNNI.
std::string missing_avx512bf16();

/// Whether its bf16 dot products do more work a cycle than f32 FMAs. AMD (Zen 4, Zen 5) issues as many vdpbf16ps as FMAs, each
/// with twice the work; Intel's processors with AVX-512 one every other cycle against two FMAs a cycle: half the work.
bool bf16_dot_is_fast();

/// Whether its hardware prefetching follows one stream of reads at a time: AMD's (Zen 4) reads two rows of 512 bytes side by side
/// at half the speed of one after the other, eight at less, prefetch instructions or not; Intel's follows eight.
bool prefers_one_stream();

}  // namespace flashqla::cpu
