// Every map of lanes to elements of ptx/ and tile/, element by element: tiles hold numbers that say where they lie, and each lane
// compares what it got with what the map says. A wrong element is named.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/host/device.hpp"
#include "cuda/host/start.cuh"
#include "cuda/tile/fragments.cuh"
#include "cuda/tile/rows.cuh"

namespace flashqla::cuda {
namespace {

/// What a lane found at variant, register, half: row * 1024 + column; -1 where it is as expected.
struct Finding {
  int expected, found;
};
constexpr KernelLaunch kOneWarp{1, 32, 0, nullptr};
constexpr int kVariants = 8, kRegisters = 4;
struct Findings {
  Finding at[kVariants][32][kRegisters][2];
};

template <int kRows, int kColumns>
__device__ void fill(std::byte* memory) {
  using Tile = tile::SharedTile<kRows, kColumns>;
  for (int at = static_cast<int>(threadIdx.x); at < kRows * kColumns; at += 32) {
    const int row = at / kColumns, column = at % kColumns;
    *reinterpret_cast<std::uint16_t*>(memory + Tile::offset(row, column / 8) + column % 8 * 2) =
        static_cast<std::uint16_t>(row * kColumns + column);
  }
  __syncwarp();
}

__device__ void record(Findings& findings, int variant, int reg, std::uint32_t pair, int expected_low, int expected_high) {
  Finding* const to = findings.at[variant][threadIdx.x][reg];
  to[0] = {expected_low, static_cast<int>(pair & 0xffff)};
  to[1] = {expected_high, static_cast<int>(pair >> 16)};
}

/// The 16 x 16 block at (row, column) through every way of loading it.
template <int kRows, int kColumns>
__global__ void load_block(int row, int column, Findings* findings) {
  __shared__ __align__(128) std::byte memory[tile::SharedTile<kRows, kColumns>::kBytes];
  fill<kRows, kColumns>(memory);
  const tile::SharedTile<kRows, kColumns> tile{ptx::shared_address(memory)};
  const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4 * 2;
  const auto number = [&](int r, int c) { return (row + r) * kColumns + column + c; };
  const tile::FragmentA a = tile::load_a(tile, row, column), ct = tile::load_c_transposed(tile, column, row);
  const tile::FragmentB b = tile::load_b(tile, row, column), bt = tile::load_b_transposed(tile, row, column);
  for (int i = 0; i < 4; ++i) {
    const int low = i % 2 * 8, high = i / 2 * 8;
    record(*findings, 0, i, a.a[i], number(g + low, t + high), number(g + low, t + high + 1));
    record(*findings, 1, i, b.b[i], number(g + high, t + low), number(g + high, t + low + 1));
    record(*findings, 2, i, bt.b[i], number(t + low, g + high), number(t + low + 1, g + high));
    record(*findings, 3, i, ct.a[i], number(t + high, g + low), number(t + high + 1, g + low));
    record(*findings, 4, i, ptx::movmatrix_trans(a.a[i]), number(t + low, g + high), number(t + 1 + low, g + high));
  }
}

/// Whether all pieces of eight rows at one place fall into different groups of banks, for every start and column of pieces.
template <int kRows, int kColumns>
void expect_no_conflicts() {
  using Tile = tile::SharedTile<kRows, kColumns>;
  for (int row = 0; row < kRows; row += 8) {
    for (int piece = 0; piece < Tile::kRowPieces; ++piece) {
      std::set<int> groups;
      for (int r = 0; r < 8; ++r) groups.insert(Tile::offset(row + r, piece) / 16 % 8);
      EXPECT_EQ(groups.size(), 8u) << kRows << " x " << kColumns << " row " << row << " piece " << piece;
    }
  }
  std::set<int> all;
  for (int row = 0; row < kRows; ++row) {
    for (int piece = 0; piece < Tile::kRowPieces; ++piece) all.insert(Tile::offset(row, piece));
  }
  EXPECT_EQ(all.size(), static_cast<std::size_t>(kRows * Tile::kRowPieces)) << "two pieces at one place";
  EXPECT_LT(*all.rbegin(), Tile::kBytes);
}

template <int kRows, int kColumns>
void expect_right() {
  expect_no_conflicts<kRows, kColumns>();
  Findings* device = nullptr;
  check(cudaMalloc(&device, sizeof(Findings)), "memory");
  for (int row = 0; row < kRows; row += 16) {
    for (int column = 0; column < kColumns; column += 16) {
      check(cudaMemset(device, 0xff, sizeof(Findings)), "fill");
      check(start_kernel(load_block<kRows, kColumns>, kOneWarp, row, column, device), "load_block");
      Findings found;
      check(cudaMemcpy(&found, device, sizeof found, cudaMemcpyDeviceToHost), "load_block");
      for (int variant = 0; variant < 5; ++variant) {
        const char* const names[] = {"load_a", "load_b", "load_b_transposed", "load_c_transposed", "movmatrix"};
        for (int lane = 0; lane < 32; ++lane) {
          for (int at = 0; at < 8; ++at) {
            const Finding& f = found.at[variant][lane][at / 2][at % 2];
            EXPECT_EQ(f.found, f.expected) << names[variant] << " of " << kRows << " x " << kColumns << " at (" << row << ", "
                                           << column << "): lane " << lane << " register " << at / 2 << " half " << at % 2;
          }
        }
      }
    }
  }
  check(cudaFree(device), "free");
}

TEST(Tile, EveryBlockOfEverySwizzle) {
  expect_right<64, 16>();
  expect_right<64, 32>();
  expect_right<64, 64>();
  expect_right<64, 128>();
  expect_right<16, 16>();
  expect_right<128, 64>();
  expect_right<64, 256>();
}

// C = A B over whole tiles with small integers, which both element types hold exactly.
template <class Element>
__global__ void multiply_tiles(const float* a, const float* b, float* c) {
  using Tile = tile::SharedTile<64, 64>;
  __shared__ __align__(128) std::byte memory[2][Tile::kBytes];
  for (int at = static_cast<int>(threadIdx.x); at < 64 * 64; at += 32) {
    const int row = at / 64, column = at % 64, place = Tile::offset(row, column / 8) + column % 8 * 2;
    *reinterpret_cast<Element*>(memory[0] + place) = static_cast<Element>(a[at]);
    *reinterpret_cast<Element*>(memory[1] + place) = static_cast<Element>(b[at]);
  }
  __syncwarp();
  const Tile left{ptx::shared_address(memory[0])}, right{ptx::shared_address(memory[1])};
  const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4 * 2;
  for (int row = 0; row < 64; row += 16) {
    for (int column = 0; column < 64; column += 16) {
      tile::Accumulator plain[2], transposed[2];
      tile::clear(plain);
      tile::clear(transposed);
      for (int k = 0; k < 64; k += 16) {
        const tile::FragmentA x = tile::load_a(left, row, k);
        tile::multiply<Element>(plain[0], plain[1], x, tile::load_b_transposed(right, k, column));
        tile::multiply<Element>(transposed[0], transposed[1], x, tile::load_b(right, column, k));
      }
      for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < 4; ++i) {
          const int at = (row + g + i / 2 * 8) * 64 + column + 8 * n + t + i % 2;
          c[at] = plain[n].c[i];
          c[64 * 64 + at] = transposed[n].c[i];
        }
      }
    }
  }
}

/// The two products of 64 x 64 that a kernel makes of a and b.
std::vector<float> two_products(void (*kernel)(const float*, const float*, float*), const std::vector<float>& a,
                                const std::vector<float>& b) {
  std::vector<float> c(2 * 64 * 64);
  float *da = nullptr, *db = nullptr, *dc = nullptr;
  check(cudaMalloc(&da, a.size() * 4), "memory");
  check(cudaMalloc(&db, b.size() * 4), "memory");
  check(cudaMalloc(&dc, c.size() * 4), "memory");
  check(cudaMemcpy(da, a.data(), a.size() * 4, cudaMemcpyHostToDevice), "copy");
  check(cudaMemcpy(db, b.data(), b.size() * 4, cudaMemcpyHostToDevice), "copy");
  check(start_kernel(kernel, kOneWarp, da, db, dc), "products");
  check(cudaMemcpy(c.data(), dc, c.size() * 4, cudaMemcpyDeviceToHost), "products");
  for (float* memory : {da, db, dc}) check(cudaFree(memory), "free");
  return c;
}

template <class Element>
void expect_products() {
  std::vector<float> a(64 * 64), b(64 * 64);
  for (int i = 0; i < 64 * 64; ++i) {
    a[static_cast<std::size_t>(i)] = static_cast<float>(i * 7 % 13 - 6);
    b[static_cast<std::size_t>(i)] = static_cast<float>(i * 5 % 11 - 5);
  }
  const std::vector<float> c = two_products(multiply_tiles<Element>, a, b);
  for (std::size_t i = 0; i < 64; ++i) {
    for (std::size_t j = 0; j < 64; ++j) {
      float plain = 0, transposed = 0;
      for (std::size_t k = 0; k < 64; ++k) {
        plain += a[i * 64 + k] * b[k * 64 + j];
        transposed += a[i * 64 + k] * b[j * 64 + k];
      }
      EXPECT_EQ(c[i * 64 + j], plain) << "A B at " << i << ", " << j;
      EXPECT_EQ(c[64 * 64 + i * 64 + j], transposed) << "A B^T at " << i << ", " << j;
    }
  }
}

TEST(Tile, ProductsOfBothTypes) {
  expect_products<ptx::Bf16>();
  expect_products<ptx::F16>();
}

// The same in TF32, with A of 11 digits from accumulators: c[0] as it is, c[1] after rounding.
__global__ void multiply_wide_tiles(const float* a, const float* b, float* c) {
  using Tile = tile::SharedTile<64, 64>;
  __shared__ __align__(128) std::byte memory[Tile::kBytes];
  for (int at = static_cast<int>(threadIdx.x); at < 64 * 64; at += 32) {
    const int row = at / 64, column = at % 64, place = Tile::offset(row, column / 8) + column % 8 * 2;
    *reinterpret_cast<ptx::F16*>(memory + place) = static_cast<ptx::F16>(b[at]);
  }
  __syncwarp();
  const Tile right{ptx::shared_address(memory)};
  const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4 * 2;
  for (int row = 0; row < 64; row += 16) {
    for (int column = 0; column < 64; column += 16) {
      tile::Accumulator plain[2], rounded[2];
      tile::clear(plain);
      tile::clear(rounded);
      for (int k = 0; k < 64; k += 16) {
        tile::Accumulator x[2];
        for (int n = 0; n < 2; ++n) {
          for (int i = 0; i < 4; ++i) x[n].c[i] = a[(row + g + i / 2 * 8) * 64 + k + 8 * n + t + i % 2];
        }
        const tile::WideB block = tile::widen(tile::load_b_transposed(right, k, column));
        tile::multiply(plain[0], plain[1], tile::wide_a(x), block);
        tile::multiply(rounded[0], rounded[1], tile::to_wide_a(x), block);
      }
      for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < 4; ++i) {
          const int at = (row + g + i / 2 * 8) * 64 + column + 8 * n + t + i % 2;
          c[at] = plain[n].c[i];
          c[64 * 64 + at] = rounded[n].c[i];
        }
      }
    }
  }
}

TEST(Tile, ProductsOfTf32) {
  std::vector<float> a(64 * 64), b(64 * 64);
  for (int i = 0; i < 64 * 64; ++i) {
    a[static_cast<std::size_t>(i)] = static_cast<float>(i * 773 % 4095 - 2047);  // 11 digits
    b[static_cast<std::size_t>(i)] = static_cast<float>(i * 5 % 11 - 5);
  }
  const std::vector<float> c = two_products(multiply_wide_tiles, a, b);
  for (std::size_t i = 0; i < 64; ++i) {
    for (std::size_t j = 0; j < 64; ++j) {
      float sum = 0;
      for (std::size_t k = 0; k < 64; ++k) sum += a[i * 64 + k] * b[k * 64 + j];
      EXPECT_EQ(c[i * 64 + j], sum) << "at " << i << ", " << j;
      EXPECT_EQ(c[64 * 64 + i * 64 + j], sum) << "rounded, at " << i << ", " << j;
    }
  }
}

__global__ void round_all(const float* x, float* y) { y[threadIdx.x] = ptx::round_tf32(x[threadIdx.x]); }

TEST(Tile, RoundingToTf32) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> x(32, 0.0f), y(32);
  const std::vector<std::pair<float, float>> pairs = {
      {1.0f, 1.0f},
      {1.0f + 0x1p-11f, 1.0f + 0x1p-10f},
      {1.0f + 0x1p-12f, 1.0f},
      {-1.0f - 0x1p-11f, -1.0f - 0x1p-10f},
      {0.0f, 0.0f},
      {2.0f - 0x1p-12f, 2.0f},
      {infinity, infinity},
      {-infinity, -infinity},
      {nan, nan},
      {0x1p-126f, 0x1p-126f},
      {-nan, nan},
      {0x1.8p100f, 0x1.8p100f},
  };
  for (std::size_t i = 0; i < pairs.size(); ++i) x[i] = pairs[i].first;
  std::memcpy(&x[12], "\xff\xff\xff\x7f", 4);  // what the hardware makes of 0 times infinity
  float *dx = nullptr, *dy = nullptr;
  check(cudaMalloc(&dx, 128), "memory");
  check(cudaMalloc(&dy, 128), "memory");
  check(cudaMemcpy(dx, x.data(), 128, cudaMemcpyHostToDevice), "copy");
  check(start_kernel(round_all, kOneWarp, static_cast<const float*>(dx), dy), "round_all");
  check(cudaMemcpy(y.data(), dy, 128, cudaMemcpyDeviceToHost), "round_all");
  for (std::size_t i = 0; i <= pairs.size(); ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, &y[i], 4);
    bits &= 0xffffe000u;  // what a product takes
    float taken;
    std::memcpy(&taken, &bits, 4);
    const float expected = i < pairs.size() ? pairs[i].second : nan;
    EXPECT_TRUE(std::isnan(expected) ? std::isnan(taken) : taken == expected) << x[i] << " became " << taken;
  }
  check(cudaFree(dx), "free");
  check(cudaFree(dy), "free");
}

// Accumulators as operands: their own transposes, by the maps of ptx/mma.cuh.
__global__ void convert(Findings* findings) {
  const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4 * 2;
  const auto number = [](int r, int c) { return r * 16 + c; };
  tile::Accumulator c[2];
  for (int n = 0; n < 2; ++n) {
    for (int i = 0; i < 4; ++i) c[n].c[i] = static_cast<float>(number(g + i / 2 * 8, 8 * n + t + i % 2));
  }
  const tile::FragmentA a = tile::to_a<ptx::F16>(c[0], c[1]);
  const tile::FragmentB b = tile::to_b_transposed<ptx::F16>(c[0], c[1]);
  for (int i = 0; i < 4; ++i) {
    const float2 x = ptx::unpack_pair<ptx::F16>(a.a[i]), y = ptx::unpack_pair<ptx::F16>(b.b[i]);
    const int low = i % 2 * 8, high = i / 2 * 8;
    Finding* to = findings->at[0][threadIdx.x][i];
    to[0] = {number(g + low, t + high), static_cast<int>(x.x)};
    to[1] = {number(g + low, t + high + 1), static_cast<int>(x.y)};
    to = findings->at[1][threadIdx.x][i];  // B[k][n] = C[n][k]: rows k along the pair, column n = g
    to[0] = {number(g + high, t + low), static_cast<int>(y.x)};
    to[1] = {number(g + high, t + low + 1), static_cast<int>(y.y)};
  }
}

TEST(Tile, AccumulatorsAsOperands) {
  Findings* device = nullptr;
  check(cudaMalloc(&device, sizeof(Findings)), "memory");
  check(start_kernel(convert, kOneWarp, device), "convert");
  Findings found;
  check(cudaMemcpy(&found, device, sizeof found, cudaMemcpyDeviceToHost), "convert");
  for (int variant = 0; variant < 2; ++variant) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int at = 0; at < 8; ++at) {
        const Finding& f = found.at[variant][lane][at / 2][at % 2];
        EXPECT_EQ(f.found, f.expected) << (variant == 0 ? "to_a" : "to_b_transposed") << " lane " << lane << " register "
                                       << at / 2;
      }
    }
  }
  check(cudaFree(device), "free");
}

}  // namespace
}  // namespace flashqla::cuda
