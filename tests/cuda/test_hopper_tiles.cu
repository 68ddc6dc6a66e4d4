// Every product of ptx/wgmma.cuh in every form of its right operand that kernels use, element by element, and the matrices that
// stmatrix stores. Operands are integers that their types hold exactly, as are all sums. A wrong element is named.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/ptx/bulk_copy.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/wgmma.cuh"

#include "device/hopper.cuh"

namespace flashqla::cuda {
namespace {

constexpr int kRows = 64, kSteps = 4, kThreads = 128;

template <class Element>
constexpr bool kIsTf32 = std::is_same_v<Element, ptx::Tf32>;
/// Of a product, and of all of A.
template <class Element>
constexpr int kStepDepth = kIsTf32<Element> ? 8 : 16;
template <class Element>
constexpr int kDepth = kSteps * kStepDepth<Element>;

enum class Form { rows_of_n, rows_of_k, pieces };

/// Where elements of B lie, as bytes from its place on. TF32: of eight rows of K the even ones are a piece, then the odd ones.
template <class Element, Form kForm>
struct RightPlace {
  std::uint32_t next_k, next_n;  // as RightOperand takes them

  __device__ std::uint32_t of(std::uint32_t k, std::uint32_t n) const {
    if constexpr (kIsTf32<Element>) return (k / 8 * 2 + k % 2) * next_k + n / 8 * next_n + n % 8 * 16 + k % 8 / 2 * 4;
    if constexpr (kForm == Form::rows_of_n) return n * 128 + (k / 8 ^ n % 8) * 16 + k % 8 * 2;
    if constexpr (kForm == Form::rows_of_k) return n / 64 * next_n + k * 128 + (n % 64 / 8 ^ k % 8) * 16 + n % 8 * 2;
    return k / 8 * next_k + n / 8 * next_n + n % 8 * 16 + k % 8 * 2;
  }
  FLASHQLA_DEVICE ptx::RightOperand operand(std::uint32_t address, std::uint32_t step) const {
    if constexpr (kForm == Form::rows_of_n) return ptx::RightOperand::swizzled(address) + step * 32;
    if constexpr (kForm == Form::rows_of_k) return ptx::RightOperand::swizzled_rows_of_k(address, next_n) + step * 16 * 128;
    return ptx::RightOperand::pieces(address, next_k, next_n) + step * 2 * next_k;
  }
};

[[maybe_unused]] FLASHQLA_DEVICE std::uint32_t with_ignored(float x, std::uint32_t bits) { return __float_as_uint(x) | bits; }

/// Left operands of so many steps from `first` on, as accumulators of A [64][kDepth] become them.
template <class Element, int kCount>
FLASHQLA_DEVICE void load_left(const float* a, int first, std::uint32_t ignored, std::uint32_t (&left)[kCount]) {
  const int thread = static_cast<int>(threadIdx.x), row = thread / 32 * 16 + thread % 32 / 4, pair = thread % 4 * 2;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float* const upper = a + row * kDepth<Element> + (first + i / 4) * kStepDepth<Element> + pair;
    const float* const from = upper + i % 2 * 8 * kDepth<Element>;
    if constexpr (kIsTf32<Element>) {
      left[i] = with_ignored(from[i % 4 / 2], ignored);
    } else {
      left[i] = ptx::pack_pair<Element>(from[i % 4 / 2 * 8], from[i % 4 / 2 * 8 + 1]);
    }
  }
}

template <int kCount>
FLASHQLA_DEVICE int place_in_result(int i) {
  const int thread = static_cast<int>(threadIdx.x);
  return (thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8) * (2 * kCount) + i / 4 * 8 + thread % 4 * 2 + i % 2;
}

template <int kCount>
FLASHQLA_DEVICE void finish(float (&d)[kCount], float* result) {
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::keep_in_place(d);
#pragma unroll
  for (int i = 0; i < kCount; ++i) result[place_in_result<kCount>(i)] = d[i];
}

template <class Element>
FLASHQLA_DEVICE void fill_element(std::byte* to, float x, std::uint32_t ignored) {
  if constexpr (kIsTf32<Element>) {
    *reinterpret_cast<std::uint32_t*>(to) = with_ignored(x, ignored);
  } else {
    *reinterpret_cast<Element*>(to) = static_cast<Element>(x);
  }
}

/// Results [kSteps + 2][64][N]: the product of each step alone, by a block each; c with all of them added; all of them, the first
/// not added to what is there. A [64][kDepth], B [kDepth][N], c [64][N].
template <class Element, int kCount, Form kForm>
__global__ void __launch_bounds__(kThreads)
    multiply(const float* a, const float* b, const float* c, RightPlace<Element, kForm> place, std::uint32_t base,
             std::uint32_t ignored, float* results) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kColumns = 2 * kCount, kSize = kRows * kColumns;
  constexpr bool kRowsOfK = kForm == Form::rows_of_k;
  extern __shared__ __align__(1024) std::byte memory[];
  for (int at = static_cast<int>(threadIdx.x); at < kDepth<Element> * kColumns; at += kThreads) {
    const auto k = static_cast<std::uint32_t>(at / kColumns), n = static_cast<std::uint32_t>(at % kColumns);
    fill_element<Element>(memory + base + place.of(k, n), b[at], ignored);
  }
  ptx::fence_async_shared();
  __syncthreads();
  const std::uint32_t address = ptx::shared_address(memory) + base;
  const int block = static_cast<int>(blockIdx.x);
  if (block < kSteps) {
    std::uint32_t left[4];
    load_left<Element>(a, block, ignored, left);
    float d[kCount];
    ptx::wgmma_fence();
    ptx::Wgmma<Element, kCount, false, kRowsOfK>::multiply(d, left, place.operand(address, block));
    return finish(d, results + block * kSize);
  }
  std::uint32_t left[4 * kSteps];
  load_left<Element>(a, 0, ignored, left);
  float sum[kCount], all[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] = c[place_in_result<kCount>(i)];
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::Wgmma<Element, kCount, true, kRowsOfK>::multiply(sum, left + 4 * step, place.operand(address, step));
  }
  finish(sum, results + kSteps * kSize);
  ptx::wgmma_fence();
  ptx::Wgmma<Element, kCount, false, kRowsOfK>::multiply(all, left, place.operand(address, 0));
#pragma unroll
  for (int step = 1; step < kSteps; ++step) {
    ptx::Wgmma<Element, kCount, true, kRowsOfK>::multiply(all, left + 4 * step, place.operand(address, step));
  }
  finish(all, results + (kSteps + 1) * kSize);
#endif
}

/// Whole numbers between -most and most.
std::vector<float> whole_numbers(int size, int most, std::uint32_t seed) {
  std::vector<float> x(static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::uint32_t any = mixed(static_cast<std::uint32_t>(i) + seed * 0x10001u);
    x[i] = static_cast<float>(static_cast<int>(any % static_cast<std::uint32_t>(2 * most + 1)) - most);
  }
  return x;
}

/// With B at the beginning and near the end of shared memory.
template <class Element, int kCount, Form kForm>
void expect_products(const std::string& what, const RightPlace<Element, kForm>& place, std::uint32_t ignored = 0) {
  constexpr int kColumns = 2 * kCount, kDeep = kDepth<Element>, kStep = kStepDepth<Element>;
  constexpr std::uint32_t kBases[] = {0, 192 * 1024};
  constexpr std::size_t kSharedBytes = 224 * 1024, kSize = kRows * kColumns;
  constexpr int kMostLeft = kIsTf32<Element> ? 2047 : 127, kMostRight = kIsTf32<Element> ? 31 : 127;
  for (const std::uint32_t base : kBases) {
    const std::vector<float> a = whole_numbers(kRows * kDeep, kMostLeft, base + kCount),
                             b = whole_numbers(kDeep * kColumns, kMostRight, base + kCount + 1),
                             c = whole_numbers(kRows * kColumns, 5000, base + kCount + 2);
    const DeviceArray<float> da(a), db(b), dc(c), results((kSteps + 2) * kSize);
    const KernelLaunch launch{kSteps + 1, kThreads, kSharedBytes, nullptr};
    check(start_kernel(multiply<Element, kCount, kForm>, launch, da.data(), db.data(), dc.data(), place, base, ignored,
                       results.data()),
          "multiply");
    const std::vector<float> found = results.fetch();
    const std::string name = what + ", N = " + std::to_string(kColumns) + ", B at " + std::to_string(base);
    const auto sum = [&](int row, int column, int from, int to) {
      float total = 0;
      for (int k = from; k < to; ++k) {
        total += a[static_cast<std::size_t>(row * kDeep + k)] * b[static_cast<std::size_t>(k * kColumns + column)];
      }
      return total;
    };
    for (int step = 0; step < kSteps; ++step) {
      expect_matrix(name + ", step " + std::to_string(step), found, static_cast<std::size_t>(step) * kSize, kRows, kColumns,
                    [&](int row, int column) { return sum(row, column, step * kStep, (step + 1) * kStep); });
    }
    expect_matrix(name + ", added", found, kSteps * kSize, kRows, kColumns, [&](int row, int column) {
      return c[static_cast<std::size_t>(row * kColumns + column)] + sum(row, column, 0, kDeep);
    });
    expect_matrix(name + ", all", found, (kSteps + 1) * kSize, kRows, kColumns,
                  [&](int row, int column) { return sum(row, column, 0, kDeep); });
  }
}

template <int kCount, Form kForm>
void expect_products_of_both(const std::string& what, std::uint32_t next_k, std::uint32_t next_n) {
  expect_products<ptx::Bf16, kCount>("bf16, " + what, RightPlace<ptx::Bf16, kForm>{next_k, next_n});
  expect_products<ptx::F16, kCount>("f16, " + what, RightPlace<ptx::F16, kForm>{next_k, next_n});
}

TEST_F(Hopper, ProductsWithSwizzledRowsOfN) {
  expect_products_of_both<16, Form::rows_of_n>("rows of N", 0, 0);
  expect_products_of_both<32, Form::rows_of_n>("rows of N", 0, 0);
  expect_products_of_both<64, Form::rows_of_n>("rows of N", 0, 0);
}

TEST_F(Hopper, ProductsWithSwizzledRowsOfK) {
  constexpr std::uint32_t kBoxBytes = 64 * 128;
  expect_products_of_both<16, Form::rows_of_k>("rows of K", 0, kBoxBytes);
  expect_products_of_both<32, Form::rows_of_k>("rows of K", 0, kBoxBytes);
  expect_products_of_both<64, Form::rows_of_k>("rows of K", 0, kBoxBytes);
  expect_products_of_both<64, Form::rows_of_k>("rows of K, boxes with a gap", 0, kBoxBytes + 3 * 1024);
}

template <int kCount>
void expect_products_with_pieces() {
  constexpr std::uint32_t kPiecesOfN = kCount / 4, kPiecesOfK = 8;
  expect_products_of_both<kCount, Form::pieces>("pieces along K", 128, kPiecesOfK * 128);
  expect_products_of_both<kCount, Form::pieces>("pieces along N", kPiecesOfN * 128, 128);
  expect_products_of_both<kCount, Form::pieces>("pieces along K with a gap", 128, kPiecesOfK * 128 + 384);
}

TEST_F(Hopper, ProductsWithPieces) {
  expect_products_with_pieces<16>();
  expect_products_with_pieces<32>();
  expect_products_with_pieces<64>();
}

template <int kCount>
void expect_products_of_tf32(std::uint32_t ignored) {
  using Place = RightPlace<ptx::Tf32, Form::pieces>;
  const std::string bits = ignored == 0 ? "" : " with low bits";
  expect_products<ptx::Tf32, kCount>("TF32, pieces along K" + bits, Place{128, 1024}, ignored);
  expect_products<ptx::Tf32, kCount>("TF32, pieces along N" + bits, Place{kCount / 4 * 128, 128}, ignored);
}

TEST_F(Hopper, ProductsOfTf32) {
  expect_products_of_tf32<16>(0);
  expect_products_of_tf32<32>(0);
}

TEST_F(Hopper, Tf32IgnoresTheLowestBits) {
  expect_products_of_tf32<16>(0x1fff);
  expect_products_of_tf32<32>(0x1fff);
}

// stmatrix: each register of a lane has the elements (row lane / 4, columns 2 (lane % 4) and + 1) of a transposed matrix. The
// rows of the matrices lie in a box of 16 rows of 128 bytes as outputs of kernels do.
constexpr int kBoxElements = 16 * 64;

/// To `stored` the box; to `again`, for each lane and register, what ldmatrix then loads.
__global__ void store_matrices(int first_piece, std::uint16_t* stored, std::uint32_t* again) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(1024) std::uint16_t box[kBoxElements];
  const int lane = static_cast<int>(threadIdx.x);
  for (int at = lane; at < kBoxElements; at += 32) box[at] = 0xffff;
  __syncwarp();
  const int row = lane % 8 + lane / 16 * 8, piece = first_piece + lane / 8 % 2;
  const std::uint32_t address = ptx::shared_address(box) + static_cast<std::uint32_t>(row * 128 + (piece ^ row % 8) * 16);
  std::uint32_t matrices[4], loaded[4];
  for (std::uint32_t m = 0; m < 4; ++m) {
    const std::uint32_t low = m * 64 + static_cast<std::uint32_t>(lane / 4 + lane % 4 * 2 * 8);  // matrix, row, column
    matrices[m] = low | (low + 8) << 16;
  }
  ptx::stmatrix_x4_trans(address, matrices);
  __syncwarp();
  for (int at = lane; at < kBoxElements; at += 32) stored[at] = box[at];
  ptx::ldmatrix_x4_trans(loaded, address);
  for (int m = 0; m < 4; ++m) again[m * 32 + lane] = loaded[m];
#endif
}

TEST_F(Hopper, StoredMatrices) {
  for (int first_piece = 0; first_piece < 8; first_piece += 2) {
    const DeviceArray<std::uint16_t> stored(kBoxElements);
    const DeviceArray<std::uint32_t> again(4 * 32);
    check(start_kernel(store_matrices, {1, 32, 0, nullptr}, first_piece, stored.data(), again.data()), "store_matrices");
    expect_matrix("box, matrices at piece " + std::to_string(first_piece), stored.fetch(), 0, 16, 64, [&](int row, int place) {
      const int piece = (place / 8 ^ row % 8) - first_piece;
      if (piece < 0 || piece > 1) return std::uint16_t{0xffff};
      return static_cast<std::uint16_t>((row / 8 * 2 + piece) * 64 + row % 8 * 8 + place % 8);
    });
    expect_matrix("loaded again", again.fetch(), 0, 4, 32, [](int m, int lane) {
      const auto low = static_cast<std::uint32_t>(m * 64 + lane % 4 * 2 * 8 + lane / 4);
      return low | (low + 8) << 16;
    });
  }
}

}  // namespace
}  // namespace flashqla::cuda
