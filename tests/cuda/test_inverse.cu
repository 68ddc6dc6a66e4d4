// The unit-triangular inverse of 64 x 64 against one in double: random, repeated and reflecting keys, decays.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/block/inverse.cuh"
#include "cuda/host/device.hpp"
#include "cuda/host/start.cuh"

namespace flashqla::cuda {
namespace {

constexpr int kTokens = 64, kThreads = 128;

template <int kMatrices>
struct Shared {
  block::InverseScratch<kMatrices> scratch[4];
  block::InverseExchange exchange[kMatrices];
};

/// lower, inverse: [kMatrices][64][64].
template <int kPartsB, int kMatrices>
__global__ void invert(const float* lower, float* inverse) {
  __shared__ __align__(128) std::byte memory[sizeof(Shared<kMatrices>)];
  auto& shared = *reinterpret_cast<Shared<kMatrices>*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, row = tile::lane_id() / 4, pair = tile::lane_id() % 4 * 2;
  for (int matrix = 0; matrix < kMatrices; ++matrix) {
    for (int block_j = 0; block_j <= warp; ++block_j) {
      tile::Accumulator minus[2];
      for (int at = 0; at < 8; ++at) {
        const int i = 16 * warp + row + at % 4 / 2 * 8, j = 16 * block_j + at / 4 * 8 + pair + at % 2;
        const float x = lower[(matrix * kTokens + i) * kTokens + j];
        minus[at / 4].c[at % 4] = -x;
        if (block_j == warp) shared.scratch[warp].lower[matrix][i % 16 * block::kInverseStride + j % 16] = x;
      }
      if (block_j == warp) break;
      block::store_parts(shared.exchange[matrix].minus_lower[warp * (warp - 1) / 2 + block_j],
                         block::to_parts_a<block::kInverseParts>(minus[0], minus[1]));
    }
  }
  block::invert_diagonal(shared.scratch[warp]);
  __syncthreads();  // the exchange and diagonal blocks
  for (int matrix = 0; matrix < kMatrices; ++matrix) {
    float* const to = inverse + matrix * kTokens * kTokens;
    block::PartsB<kPartsB> column[4];
    block::solve_block_column(shared.exchange[matrix], shared.scratch, matrix, warp, [](int, const auto&) {}, column);
    for (int below = 0; warp + below < 4; ++below) {
      for (int r = 0; r < 4; ++r) {  // a right operand: rows in pairs, columns by lanes
        float2 x = ptx::unpack_pair<ptx::F16>(column[below].part[0].b[r]);
        if constexpr (kPartsB == 2) {
          const float2 rest = ptx::unpack_pair<ptx::F16>(column[below].part[1].b[r]);
          x = {x.x + rest.x, x.y + rest.y};
        }
        const int i = 16 * (warp + below) + pair + r % 2 * 8, j = 16 * warp + row + r / 2 * 8;
        to[i * kTokens + j] = x.x;
        to[(i + 1) * kTokens + j] = x.y;
      }
    }
  }
}

double noise(std::uint64_t& state) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<double>(state >> 11) * 0x1p-52 - 1.0;
}

/// L of keys of length 1 of which so many tokens in a row are the same, with this beta and log decay a token.
std::vector<float> lower_of(int same, double beta, double decay, std::uint64_t seed) {
  constexpr int kDim = 16;
  std::vector<double> keys(kTokens * kDim);
  for (int t = 0; t < kTokens; ++t) {
    double square = 0;
    for (int k = 0; k < kDim; ++k) {
      double& x = keys[static_cast<std::size_t>(t * kDim + k)];
      x = t % same == 0 ? noise(seed) : keys[static_cast<std::size_t>((t - 1) * kDim + k)];
      square += x * x;
    }
    for (int k = 0; k < kDim; ++k) keys[static_cast<std::size_t>(t * kDim + k)] /= std::sqrt(square);
  }
  std::vector<float> lower(kTokens * kTokens, 0.0f);
  for (int i = 0; i < kTokens; ++i) {
    for (int j = 0; j < i; ++j) {
      double dot = 0;
      for (int k = 0; k < kDim; ++k) {
        dot += keys[static_cast<std::size_t>(i * kDim + k)] * keys[static_cast<std::size_t>(j * kDim + k)];
      }
      lower[static_cast<std::size_t>(i * kTokens + j)] = static_cast<float>(beta * dot * std::exp(decay * (i - j)));
    }
  }
  return lower;
}

std::vector<double> true_inverse(const float* lower) {
  std::vector<double> inverse(kTokens * kTokens, 0.0);
  for (int j = 0; j < kTokens; ++j) {
    for (int i = j; i < kTokens; ++i) {
      double x = i == j ? 1.0 : 0.0;
      for (int m = j; m < i; ++m)
        x -= static_cast<double>(lower[i * kTokens + m]) * inverse[static_cast<std::size_t>(m * kTokens + j)];
      inverse[static_cast<std::size_t>(i * kTokens + j)] = x;
    }
  }
  return inverse;
}

/// The root mean square of the errors over that of the inverse, the worst of the matrices.
template <int kPartsB, int kMatrices>
double error_of(const std::vector<float>& lower) {
  std::vector<float> all, found(kMatrices * kTokens * kTokens, NAN);
  for (int matrix = 0; matrix < kMatrices; ++matrix) all.insert(all.end(), lower.begin(), lower.end());
  if (kMatrices == 2) {
    for (int at = 0; at < kTokens * kTokens; ++at) all[static_cast<std::size_t>(kTokens * kTokens + at)] *= 0.5f;
  }
  const std::size_t bytes = all.size() * sizeof(float);
  float *from = nullptr, *to = nullptr;
  check(cudaMalloc(&from, bytes), "memory");
  check(cudaMalloc(&to, bytes), "memory");
  check(cudaMemcpy(from, all.data(), bytes, cudaMemcpyHostToDevice), "copy");
  check(cudaMemcpy(to, found.data(), bytes, cudaMemcpyHostToDevice), "copy");
  check(start_kernel(invert<kPartsB, kMatrices>, {1, kThreads, 0, nullptr}, static_cast<const float*>(from), to), "invert");
  check(cudaMemcpy(found.data(), to, bytes, cudaMemcpyDeviceToHost), "invert");
  check(cudaFree(from), "free");
  check(cudaFree(to), "free");
  double worst = 0;
  for (std::size_t matrix = 0; matrix < kMatrices; ++matrix) {
    const std::vector<double> truth = true_inverse(all.data() + matrix * kTokens * kTokens);
    double errors = 0, squares = 0;
    for (std::size_t i = 0; i < kTokens; ++i) {
      for (std::size_t j = 0; j <= i; ++j) {
        const double difference = static_cast<double>(found[(matrix * kTokens + i) * kTokens + j]) - truth[i * kTokens + j];
        errors += difference * difference;
        squares += truth[i * kTokens + j] * truth[i * kTokens + j];
      }
    }
    const double error = std::sqrt(errors / squares);
    worst = error <= worst ? worst : error;  // keeps NaN
  }
  return worst;
}

TEST(Inverse, HardTriangles) {
  std::uint64_t seed = 1;
  for (int same : {1, 4, kTokens}) {
    for (double beta : {0.1, 1.0, 1.98}) {
      for (double decay : {0.0, -0.05, -3.0, -20.0}) {
        const std::vector<float> lower = lower_of(same, beta, decay, ++seed);
        const std::string name =
            std::to_string(same) + " keys the same, beta " + std::to_string(beta) + ", decay " + std::to_string(decay);
        const double once = error_of<1, 1>(lower), together = error_of<1, 2>(lower), in_parts = error_of<2, 2>(lower);
        EXPECT_LT(once, 2e-3) << name;
        EXPECT_LT(together, 2e-3) << name << ", two matrices";
        EXPECT_LT(in_parts, 1e-5) << name << ", two parts of what is solved";
      }
    }
  }
}

}  // namespace
}  // namespace flashqla::cuda
