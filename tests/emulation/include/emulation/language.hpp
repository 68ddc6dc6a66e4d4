// CUDA C++ for a host compiler: keywords, vector types, variables and functions that device code uses. Included before everything
// else in every .cu file (cmake/emulation.cmake).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "emulation/block.hpp"
#include "emulation/warp.hpp"

#define __global__
#define __device__
#define __host__
#define __shared__ thread_local
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__  // also inside __attribute__(()), where the standard library has the name
#define __align__(bytes) __attribute__((aligned(bytes)))

#define threadIdx (::flashqla::emulation::thread_state.place->thread)
#define blockIdx (::flashqla::emulation::thread_state.place->block)
#define blockDim (::flashqla::emulation::thread_state.place->block_size)
#define gridDim (::flashqla::emulation::thread_state.place->grid_size)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

/// The `extern __shared__ std::byte memory[]` of kernels, which have to be functions of this namespace. Constant initialisation
/// is said here because without it every access would look for an initialiser.
namespace flashqla::cuda {
extern constinit thread_local std::byte memory[];
}

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  flashqla::emulation::wait_at_barrier(0, 0, {file, line});
}
inline void __syncwarp(unsigned mask = 0xffffffffu, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  flashqla::emulation::wait_for_warp(mask, {file, line});
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  flashqla::emulation::shuffle(flashqla::emulation::Shuffle::index, mask, &value, sizeof value, lane);
  return value;
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  flashqla::emulation::shuffle(flashqla::emulation::Shuffle::up, mask, &value, sizeof value, static_cast<int>(by));
  return value;
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by) {
  flashqla::emulation::shuffle(flashqla::emulation::Shuffle::down, mask, &value, sizeof value, static_cast<int>(by));
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int by) {
  flashqla::emulation::shuffle(flashqla::emulation::Shuffle::exclusive_or, mask, &value, sizeof value, by);
  return value;
}

inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  for (int step = 16; step > 0; step /= 2) value = std::max(value, __shfl_xor_sync(mask, value, step));
  return value;
}

inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  for (int step = 16; step > 0; step /= 2) value |= __shfl_xor_sync(mask, value, step);
  return value;
}

inline int __all_sync(unsigned mask, int predicate) { return __reduce_max_sync(mask, predicate == 0 ? 1u : 0u) == 0 ? 1 : 0; }

/// Fibers give way nowhere but where they meet: what lies between is atomic inside a block, and blocks run one after another.
template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = before + value;
  return before;
}

inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __popc(unsigned x) { return std::popcount(x); }
using std::max;
using std::min;

/// Functions that a device does not round correctly, for which a kernel may not take them: between half a unit and one and a half
/// in the last place off, up or down by a hash of the result, unless the result is a float.
namespace flashqla::cuda {
inline float nearly(double exact) {
  const auto x = static_cast<float>(exact);
  if (x == exact || !std::isnormal(x)) return x;
  const unsigned bits = __float_as_uint(x);
  return __uint_as_float((bits * 0x9e3779b1u >> 31) != 0 ? bits + 1 : bits - 1);
}
inline float expf(float x) { return nearly(std::exp(double{x})); }
inline float exp2f(float x) { return nearly(std::exp2(double{x})); }
inline float log1pf(float x) { return nearly(std::log1p(double{x})); }
inline float rsqrtf(float x) { return nearly(1.0 / std::sqrt(double{x})); }
}  // namespace flashqla::cuda
