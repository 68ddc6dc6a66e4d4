// What callers of the separate forward and backward ask for besides: cumulative log decays and the ungated inverse
// (I + stril(beta_i k_i.k_j))^-1 of every chunk of 64 tokens, counted from the start of the sequence. One block of 128 threads a
// chunk and q/k head, in the manner of prepare_chunks.
#pragma once

#include "cuda/host/start.cuh"
#include "cuda/kernels/chunk_forward/prepare_kernel.cuh"

namespace flashqla::cuda {

inline constexpr double kLeastCumulativeDecay = -128.0;  // of one token, in what callers see

template <int kDimK>
struct ExtrasShared {
  using Rows = tile::SharedTile<kChunkTokens, kDimK>;
  alignas(128) std::byte rows[Rows::kBytes];
  block::InverseScratch<1> scratch[kPrepareWarps];
  block::InverseExchange exchange;
  float factors[kChunkTokens], beta[kChunkTokens];
};

/// This warp's 16 rows of K K^T on and below the diagonal, and the factors of its keys.
template <class Element, int kDimK>
FLASHQLA_DEVICE void multiply_own_keys(const ChunkForwardParams& p, const PreparedChunk& chunk, ExtrasShared<kDimK>& shared,
                                       tile::Accumulator (&kk)[8]) {
  using Rows = typename ExtrasShared<kDimK>::Rows;
  const Rows keys{ptx::shared_address(shared.rows)};
  const int warp = static_cast<int>(threadIdx.x) / 32;
  tile::clear(kk);
#pragma unroll 2
  for (int k0 = 0; k0 < kDimK; k0 += 16) {
    const tile::FragmentA key = tile::load_a(keys, 16 * warp, k0);
#pragma unroll
    for (int block_j = 0; block_j < 4; ++block_j) {
      if (block_j > warp) break;
      tile::multiply<Element>(kk[2 * block_j], kk[2 * block_j + 1], key, tile::load_b(keys, 16 * block_j, k0));
    }
  }
#pragma unroll
  for (int block_j = 0; block_j < 4; ++block_j) {
    if (block_j != warp) continue;
    const tile::Accumulator diagonal[2] = {kk[2 * block_j], kk[2 * block_j + 1]};
    for_each_square(diagonal, [&](int row, float square) {
      shared.factors[row] = p.l2norm_eps >= 0.0f && row < chunk.tokens ? rsqrtf(square + p.l2norm_eps) : 1.0f;
    });
  }
}

/// Betas of a value head to shared memory and its cumulative log decays to the caller's, by one warp.
FLASHQLA_DEVICE void take_gates(const ChunkForwardParams& p, const PreparedChunk& chunk, std::int32_t head, float* beta) {
  const int lane = tile::lane_id();
  block::TokenGates gates[2];
  for (int half = 0; half < 2; ++half) {
    gates[half] = block::token_gates(p, chunk.batch, chunk.token, head, lane + 32 * half, chunk.tokens);
    beta[lane + 32 * half] = gates[half].beta;
    if (gates[half].log_decay < kLeastCumulativeDecay) gates[half].log_decay = kLeastCumulativeDecay;
  }
  if (p.g_cumulative.data == nullptr) return;
  const double first = block::warp_sums(gates[0].log_decay), half = __shfl_sync(0xffffffffu, first, 31);
  const double sums[2] = {first, half + block::warp_sums(gates[1].log_decay)};
  for (int i = 0; i < 2; ++i) {
    const int token = lane + 32 * i;
    if (token >= chunk.tokens) continue;
    const std::int64_t at = offset_of(p.g_cumulative, chunk.batch, chunk.token + token, head);
    store_scalar(p.g_cumulative.data, p.g_cumulative.dtype, at, static_cast<float>(sums[i]));
  }
}

/// From this warp's rows of K K^T: -L to the exchange and L_ii to the scratch.
template <int kDimK>
FLASHQLA_DEVICE void strengthen_products(const tile::Accumulator (&kk)[8], ExtrasShared<kDimK>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = tile::lane_id();
#pragma unroll
  for (int block_j = 0; block_j < 4; ++block_j) {
    if (block_j > warp) break;
    tile::Accumulator lower[2];
#pragma unroll
    for (int at = 0; at < 8; ++at) {
      const int i = 16 * warp + lane / 4 + at % 4 / 2 * 8, j = 16 * block_j + at / 4 * 8 + lane % 4 * 2 + at % 2;
      const float x = -shared.beta[i] * shared.factors[i] * shared.factors[j] * kk[2 * block_j + at / 4].c[at % 4];
      lower[at / 4].c[at % 4] = j < i ? x : 0.0f;
      if (block_j == warp) {
        float* const scratch = shared.scratch[warp].lower[0];
        scratch[(i - 16 * warp) * block::kInverseStride + j - 16 * block_j] = -lower[at / 4].c[at % 4];
      }
    }
    if (block_j == warp) break;
    block::store_parts(shared.exchange.minus_lower[warp * (warp - 1) / 2 + block_j],
                       block::to_parts_a<block::kInverseParts>(lower[0], lower[1]));
  }
}

/// An element of the inverse to the caller's row, if there is such a token.
FLASHQLA_DEVICE void store_inverse(const ChunkForwardParams& p, const PreparedChunk& chunk, std::int32_t head, int i, int j,
                                   float x) {
  if (i >= chunk.tokens) return;
  store_scalar(p.a.data, p.a.dtype, offset_of(p.a, chunk.batch, chunk.token + i, head) + j, x);
}

/// The inverse by the warps' columns of blocks, zeros above the diagonal. Has a barrier.
template <int kDimK>
FLASHQLA_DEVICE void invert_products(const ChunkForwardParams& p, const PreparedChunk& chunk, std::int32_t head,
                                     ExtrasShared<kDimK>& shared) {
  const int column = static_cast<int>(threadIdx.x) / 32, lane = tile::lane_id();
  block::invert_diagonal(shared.scratch[column]);
  const block::PartsB<2> diagonal = block::diagonal_right<2>(shared.scratch[column], 0);
  __syncthreads();  // the exchange and diagonal blocks, for columns of blocks
  const auto store_block = [&](int block_i, const tile::Accumulator(&t)[2]) {
    for (int at = 0; at < 8; ++at) {
      const int i = 16 * block_i + lane / 4 + at % 4 / 2 * 8, j = 16 * column + at / 4 * 8 + lane % 4 * 2 + at % 2;
      store_inverse(p, chunk, head, i, j, t[at / 4].c[at % 4]);
    }
  };
  for (int block_i = 0; block_i < column; ++block_i) store_block(block_i, {});
  for (int r = 0; r < 4; ++r) {  // a right operand: rows in pairs, columns by lanes
    const float2 high = ptx::unpack_pair<ptx::F16>(diagonal.part[0].b[r]),
                 low = ptx::unpack_pair<ptx::F16>(diagonal.part[1].b[r]);
    const int i = 16 * column + lane % 4 * 2 + r % 2 * 8, j = 16 * column + lane / 4 + r / 2 * 8;
    store_inverse(p, chunk, head, i, j, high.x + low.x);
    store_inverse(p, chunk, head, i + 1, j, high.y + low.y);
  }
  block::PartsB<2> blocks[4];
  block::solve_block_column(shared.exchange, shared.scratch, 0, column, store_block, blocks);
}

/// Rows past the last offset, 64 a block past the last chunk.
FLASHQLA_DEVICE void zero_extras(const ChunkForwardParams& p, std::int64_t idle, std::int32_t head_qk) {
  if (p.sequences.offsets == nullptr) return;
  const std::int64_t first = p.sequences.offsets[p.sequences.count] + idle * kChunkTokens;
  const std::int64_t left = p.sequences.tokens - first, rows = left < kChunkTokens ? left : kChunkTokens;
  for (std::int64_t at = threadIdx.x; at < rows * p.group; at += blockDim.x) {
    const std::int64_t row = first + at / p.group, head = head_qk * p.group + at % p.group;
    if (p.g_cumulative.data != nullptr) {
      store_scalar(p.g_cumulative.data, p.g_cumulative.dtype, offset_of(p.g_cumulative, 0, row, head), 0.0f);
    }
    if (p.a.data == nullptr) continue;
    for (int j = 0; j < kChunkTokens; ++j) store_scalar(p.a.data, p.a.dtype, offset_of(p.a, 0, row, head) + j, 0.0f);
  }
}

template <class Element, int kDimK>
__global__ void __launch_bounds__(kPrepareThreads) write_extras(const __grid_constant__ ChunkForwardParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<ExtrasShared<kDimK>*>(memory);
  PreparedChunk chunk;
  if (!find_chunk(p, chunk)) return zero_extras(p, chunk.index - chunk_count(p.sequences), chunk.head_qk);
  tile::Accumulator kk[8];
  if (p.a.data != nullptr) {
    const tile::GlobalRows rows{static_cast<const Element*>(p.k.data) + offset_of(p.k, chunk.batch, chunk.token, chunk.head_qk),
                                p.k.stride_token, chunk.tokens, p.dim_k};
    tile::copy_rows<kPrepareThreads, kChunkTokens, kDimK>(shared.rows, rows);
    __syncthreads();  // the keys, for the products
    multiply_own_keys<Element, kDimK>(p, chunk, shared, kk);
  }
  for (std::int32_t h = 0; h < p.group; ++h) {
    const std::int32_t head = chunk.head_qk * p.group + h;
    __syncthreads();  // factors of keys; the last head's betas and exchange have been read
    if (threadIdx.x < 32) take_gates(p, chunk, head, shared.beta);
    if (p.a.data == nullptr) continue;
    __syncthreads();  // betas, for the products
    strengthen_products<kDimK>(kk, shared);
    invert_products<kDimK>(p, chunk, head, shared);
  }
}

template <class Element, int kDimK>
int start_extras_of(const ChunkForwardParams& params, std::int64_t blocks, void* stream) {
  const KernelLaunch launch{blocks, kPrepareThreads, sizeof(ExtrasShared<kDimK>), stream};
  return start_kernel(write_extras<Element, kDimK>, launch, params);
}

template <class Element>
int start_extras(const ChunkForwardParams& params, std::int32_t padded_k, std::int64_t blocks, void* stream) {
  if (padded_k == 64) return start_extras_of<Element, 64>(params, blocks, stream);
  if (padded_k == 128) return start_extras_of<Element, 128>(params, blocks, stream);
  return start_extras_of<Element, 256>(params, blocks, stream);
}

}  // namespace flashqla::cuda
