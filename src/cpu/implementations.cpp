// The CPU backend's rows and their order. x86-64 has four, other processors one.
#include "cpu/implementations.hpp"

#include <array>

#include "cpu/cpuid.hpp"
#include "cpu/operations.hpp"

namespace flashqla::cpu {

namespace {

using detail::Implementation;

std::string missing_nothing() { return {}; }

#if defined(__x86_64__)

struct Rows {
  Implementation scalar{"cpu-scalar", missing_nothing, scalar::kChunkForward, scalar::kChunkBackward, scalar::kRecurrentForward};
  Implementation avx2{"cpu-avx2", missing_avx2, avx2::kChunkForward, avx2::kChunkBackward, avx2::kRecurrentForward};
  Implementation avx512{"cpu-avx512", missing_avx512, avx512::kChunkForward, avx512::kChunkBackward, avx512::kRecurrentForward};
  Implementation avx512bf16{"cpu-avx512bf16", missing_avx512bf16, avx512bf16::kChunkForward, avx512bf16::kChunkBackward,
                            avx512::kRecurrentForward};
  std::array<const Implementation*, 4> order;

  Rows() {
    if (bf16_dot_is_fast()) {
      order = {&avx512bf16, &avx512, &avx2, &scalar};
    } else {  // the bf16 dot instructions are there but slower than widening to f32: only when asked for by name
      order = {&avx512, &avx512bf16, &avx2, &scalar};
    }
  }
};

#else

struct Rows {
  Implementation scalar{"cpu-scalar", missing_nothing, scalar::kChunkForward, scalar::kChunkBackward, scalar::kRecurrentForward};
  std::array<const Implementation*, 1> order{&scalar};
};

#endif

}  // namespace

std::span<const Implementation* const> implementations() {
  static const Rows rows;
  return rows.order;
}

}  // namespace flashqla::cpu
