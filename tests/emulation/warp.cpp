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

float decoded(std::uint32_t bits, bool f16) {
  if (!f16) return std::bit_cast<float>(bits << 16);
  // Exponents are moved by a product, which is exact for denormals too; infinity and NaN get the largest exponent.
  const std::uint32_t magnitude = (bits & 0x7fffu) << 13;
  const float moved = std::bit_cast<float>(magnitude) * 0x1p112f;
  const std::uint32_t finite = std::bit_cast<std::uint32_t>(moved);
  return std::bit_cast<float>((magnitude >= 0x0f800000u ? finite | 0x7f800000u : finite) | (bits & 0x8000u) << 16);
}

template <bool kF16>
void multiply_all(const Arguments& arguments) {
  constexpr int kM = 16, kN = 8, kK = 16;
  std::uint32_t a_bits[kM][kK], b_bits[kK][kN];
  float a[kM][kK], b[kK][kN], c[kM][kN];
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const Product& own = of<Product>(arguments, lane);
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      a_bits[g][t + i] = half_of(own.a[0], i);
      a_bits[g + 8][t + i] = half_of(own.a[1], i);
      a_bits[g][t + 8 + i] = half_of(own.a[2], i);
      a_bits[g + 8][t + 8 + i] = half_of(own.a[3], i);
      b_bits[t + i][g] = half_of(own.b[0], i);
      b_bits[t + 8 + i][g] = half_of(own.b[1], i);
      c[g][t + i] = own.c[i];
      c[g + 8][t + i] = own.c[2 + i];
    }
  }
  for (int i = 0; i < kM * kK; ++i) a[i / kK][i % kK] = decoded(a_bits[i / kK][i % kK], kF16);
  for (int i = 0; i < kK * kN; ++i) b[i / kN][i % kN] = decoded(b_bits[i / kN][i % kN], kF16);
  for (int m = 0; m < kM; ++m) {
    for (int k = 0; k < kK; ++k) {
      for (int n = 0; n < kN; ++n) c[m][n] += a[m][k] * b[k][n];
    }
  }
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    float* const own = of<Product>(arguments, lane).c;
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      own[i] = c[g][t + i];
      own[2 + i] = c[g + 8][t + i];
    }
  }
}
constexpr Operation kMultiplyBf16{"mma of bf16", multiply_all<false>}, kMultiplyF16{"mma of f16", multiply_all<true>};

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

void shuffle(Shuffle kind, std::uint32_t mask, void* value, std::size_t bytes, int by) {
  need_all_lanes(mask, kShuffle.name);
  Shuffled arguments{kind, 0, by};
  std::memcpy(&arguments.value, value, bytes);
  meet(kShuffle, &arguments);
  std::memcpy(value, &arguments.value, bytes);
}
void wait_for_warp(std::uint32_t mask) {
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
void wait_for_copies(int pending) {
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
