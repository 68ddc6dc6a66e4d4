// What the lanes of a warp do together: matrix loads, mma, shuffles; and each lane's asynchronous copies.
#include "emulation/warp.hpp"

#include <cstring>
#include <string>

#include "common/scalar.hpp"
#include "emulation/shared_memory.hpp"
#include "machine.hpp"

namespace flashqla::emulation {

namespace {

using Arguments = void* const[kWarpLanes];

template <class T>
T& of(const Arguments& arguments, int lane) {
  return *static_cast<T*>(arguments[lane]);
}

std::uint32_t pair(std::uint16_t low, std::uint16_t high) { return low | static_cast<std::uint32_t>(high) << 16; }
std::uint16_t half_of(std::uint32_t pair, int which) { return static_cast<std::uint16_t>(pair >> 16 * which); }

struct MatrixLoad {
  std::uint32_t address;
  std::uint32_t* r;
};

template <bool kTransposed>
void load_four(const Arguments& arguments) {
  const char* const name = kTransposed ? "ldmatrix.trans" : "ldmatrix";
  for (int matrix = 0; matrix < 4; ++matrix) {
    std::uint16_t x[8][8];
    for (int row = 0; row < 8; ++row) {
      std::memcpy(x[row], from_shared_address(of<MatrixLoad>(arguments, 8 * matrix + row).address, 16, name), 16);
    }
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      const int row = lane / 4, column = lane % 4 * 2;
      of<MatrixLoad>(arguments, lane).r[matrix] =
          kTransposed ? pair(x[column][row], x[column + 1][row]) : pair(x[row][column], x[row][column + 1]);
    }
  }
}
constexpr Operation kLoad{"ldmatrix", load_four<false>}, kLoadTransposed{"ldmatrix.trans", load_four<true>};

constexpr Operation kTranspose{"movmatrix", [](const Arguments& arguments) {
                                 std::uint16_t x[8][8];
                                 for (int lane = 0; lane < kWarpLanes; ++lane) {
                                   for (int i = 0; i < 2; ++i)
                                     x[lane / 4][lane % 4 * 2 + i] = half_of(of<std::uint32_t>(arguments, lane), i);
                                 }
                                 for (int lane = 0; lane < kWarpLanes; ++lane) {
                                   const int row = lane / 4, column = lane % 4 * 2;
                                   of<std::uint32_t>(arguments, lane) = pair(x[column][row], x[column + 1][row]);
                                 }
                               }};

struct Product {
  float* c;
  const std::uint32_t* a;
  std::uint32_t b[2];
};

constexpr int kM = 16, kN = 8, kK = 16;

/// The operands of a warp: A row by row, B row by row, C row by row.
struct Operands {
  std::uint32_t a[kM * kK], b[kK * kN];
  alignas(32) float c[kM * kN];
};

/// Without a branch, so that compilers do several at once.
float decoded_f16(std::uint32_t bits) {
  // Exponents are moved by a product, which is exact for denormals too; infinity and NaN get the largest exponent.
  const std::uint32_t magnitude = (bits & 0x7fffu) << 13;
  const auto moved = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  const std::uint32_t not_finite = 0u - static_cast<std::uint32_t>(magnitude >= 0x0f800000u);
  return std::bit_cast<float>(moved | (not_finite & 0x7f800000u) | (bits & 0x8000u) << 16);
}
float decoded_bf16(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }

using Row = float __attribute__((vector_size(kN * sizeof(float))));  // of B and C

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FLASHQLA_FOR_BOTH __attribute__((target_clones("avx2", "default")))
#else
#define FLASHQLA_FOR_BOTH
#endif

template <int kDepth>
[[gnu::always_inline]] inline void multiply_rows(const float* a, const float* b, float* c) {
  Row rows[kDepth];
  std::memcpy(rows, b, sizeof rows);
  for (int m = 0; m < kM; ++m) {
    Row sum;
    std::memcpy(&sum, c + m * kN, sizeof sum);
    for (int k = 0; k < kDepth; ++k) sum += a[m * kDepth + k] * rows[k];
    std::memcpy(c + m * kN, &sum, sizeof sum);
  }
}
FLASHQLA_FOR_BOTH void multiply_16(const float* a, const float* b, float* c) { multiply_rows<16>(a, b, c); }
FLASHQLA_FOR_BOTH void multiply_8(const float* a, const float* b, float* c) { multiply_rows<8>(a, b, c); }
FLASHQLA_FOR_BOTH void decode_f16(const std::uint32_t* from, int count, float* to) {
  for (int i = 0; i < count; ++i) to[i] = decoded_f16(from[i]);
}
FLASHQLA_FOR_BOTH void decode_bf16(const std::uint32_t* from, int count, float* to) {
  for (int i = 0; i < count; ++i) to[i] = decoded_bf16(from[i]);
}

void load_accumulators(const Arguments& arguments, float (&c)[kM * kN]) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) std::memcpy(c + (g + 8 * i) * kN + t, of<Product>(arguments, lane).c + 2 * i, 2 * sizeof(float));
  }
}
void store_accumulators(const Arguments& arguments, const float (&c)[kM * kN]) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) std::memcpy(of<Product>(arguments, lane).c + 2 * i, c + (g + 8 * i) * kN + t, 2 * sizeof(float));
  }
}

template <bool kF16>
void multiply_all(const Arguments& arguments) {
  Operands x;
  const auto put = [](std::uint32_t* to, std::uint32_t pair, int stride) {
    to[0] = pair & 0xffffu;
    to[stride] = pair >> 16;
  };
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const Product& own = of<Product>(arguments, lane);
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) put(x.a + (g + i % 2 * 8) * kK + t + i / 2 * 8, own.a[i], 1);
    for (int i = 0; i < 2; ++i) put(x.b + (t + 8 * i) * kN + g, own.b[i], kN);
  }
  load_accumulators(arguments, x.c);
  float a[kM * kK], b[kK * kN];
  (kF16 ? decode_f16 : decode_bf16)(x.a, kM * kK, a);
  (kF16 ? decode_f16 : decode_bf16)(x.b, kK * kN, b);
  multiply_16(a, b, x.c);
  store_accumulators(arguments, x.c);
}
constexpr Operation kMultiplyBf16{"mma of bf16", multiply_all<false>}, kMultiplyF16{"mma of f16", multiply_all<true>};

constexpr int kWideK = 8;
void multiply_wide(const Arguments& arguments) {
  float a[kM * kWideK], b[kWideK * kN];
  alignas(32) float c[kM * kN];
  const auto cut = [](std::uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000u); };
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const Product& own = of<Product>(arguments, lane);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) a[(g + i % 2 * 8) * kWideK + t + i / 2 * 4] = cut(own.a[i]);
    for (int i = 0; i < 2; ++i) b[(t + 4 * i) * kN + g] = cut(own.b[i]);
  }
  load_accumulators(arguments, c);
  multiply_8(a, b, c);
  store_accumulators(arguments, c);
}
constexpr Operation kMultiplyWide{"mma of TF32", multiply_wide};

struct Shuffled {
  Shuffle kind;
  std::uint64_t value;
  int by;
};
constexpr Operation kShuffle{"a shuffle", [](const Arguments& arguments) {
                               std::uint64_t given[kWarpLanes];
                               for (int lane = 0; lane < kWarpLanes; ++lane) given[lane] = of<Shuffled>(arguments, lane).value;
                               for (int lane = 0; lane < kWarpLanes; ++lane) {
                                 Shuffled& own = of<Shuffled>(arguments, lane);
                                 if (own.kind != of<Shuffled>(arguments, 0).kind)
                                   fail("lanes of a warp come to different shuffles");
                                 const int from = own.kind == Shuffle::index  ? own.by % kWarpLanes
                                                  : own.kind == Shuffle::up   ? lane - own.by
                                                  : own.kind == Shuffle::down ? lane + own.by
                                                                              : lane ^ own.by;
                                 if (from >= 0 && from < kWarpLanes) own.value = given[from];
                               }
                             }};

constexpr Operation kWait{"__syncwarp", [](const Arguments&) {}, true};

void need_all_lanes(std::uint32_t mask, const char* name) {
  if (mask != kAllLanes) fail(std::string(name) + " of a part of the warp is not emulated");
}

}  // namespace

void load_matrices(std::uint32_t (&r)[4], std::uint32_t address) {
  MatrixLoad arguments{address, r};
  meet(kLoad, &arguments);
}
void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
  MatrixLoad arguments{address, r};
  meet(kLoadTransposed, &arguments);
}
std::uint32_t transpose_matrix(std::uint32_t matrix) {
  meet(kTranspose, &matrix);
  return matrix;
}
void multiply_bf16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  Product arguments{c, a, {b0, b1}};
  meet(kMultiplyBf16, &arguments);
}
void multiply_f16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  Product arguments{c, a, {b0, b1}};
  meet(kMultiplyF16, &arguments);
}
void multiply_tf32(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  Product arguments{c, a, {b0, b1}};
  meet(kMultiplyWide, &arguments);
}

void shuffle(Shuffle kind, std::uint32_t mask, void* value, std::size_t bytes, int by) {
  need_all_lanes(mask, kShuffle.name);
  Shuffled arguments{kind, 0, by};
  std::memcpy(&arguments.value, value, bytes);
  meet(kShuffle, &arguments);
  std::memcpy(value, &arguments.value, bytes);
}
void wait_for_warp(std::uint32_t mask, const Site& site) {
  if (Machine::of_this_thread().leaves_out(site)) return;
  need_all_lanes(mask, kWait.name);
  meet(kWait, nullptr);
}

void copy_later(std::uint32_t to, const void* from, std::uint32_t bytes) {
  Lane& lane = Machine::of_this_thread().running();
  if (bytes > 16) fail("cp.async of more than 16 bytes");
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) fail("cp.async from an address that is not aligned");
  std::byte* const memory = from_shared_address(to, 16, "cp.async");
  std::memset(memory, 0xff, 16);
  lane.copies.push_back({memory, from, bytes, lane.groups});
}
void end_group_of_copies() { ++Machine::of_this_thread().running().groups; }
void wait_for_copies(int pending, const Site& site) {
  if (Machine::of_this_thread().leaves_out(site)) return;
  Lane& lane = Machine::of_this_thread().running();
  std::size_t done = 0;
  for (; done < lane.copies.size() && lane.copies[done].group < lane.groups - pending; ++done) {
    const Copy& copy = lane.copies[done];
    std::memset(copy.to, 0, 16);
    if (copy.bytes > 0) std::memcpy(copy.to, copy.from, copy.bytes);
  }
  lane.copies.erase(lane.copies.begin(), lane.copies.begin() + static_cast<std::ptrdiff_t>(done));
}

float bf16_to_float(std::uint16_t bits) { return flashqla::bf16_to_float(bits); }
float f16_to_float(std::uint16_t bits) { return flashqla::f16_to_float(bits); }
std::uint16_t float_to_bf16(float value) { return flashqla::float_to_bf16(value); }
std::uint16_t float_to_f16(float value) { return flashqla::float_to_f16(value); }

}  // namespace flashqla::emulation
