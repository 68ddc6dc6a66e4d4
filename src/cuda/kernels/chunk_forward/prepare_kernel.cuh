// The kernel around prepare.cuh. Barriers are the block's: each says what is written before it for whom.
#pragma once

#include "cuda/kernels/chunk_forward/prepare.cuh"
#include "cuda/ptx/streaming.cuh"

namespace flashqla::cuda {

/// What the block so many blocks after this one will load, roughly: by then the second-level cache has it. A few microseconds
/// on a large card: much later, and the units on their way out have displaced it.
inline constexpr std::int64_t kBlocksAhead = 160;
template <class Element, int kDimK>
FLASHQLA_DEVICE void ask_ahead(const ChunkForwardParams& p, const PreparedChunk& chunk) {
  const std::int64_t first = chunk.token + kBlocksAhead / p.heads_qk * kChunkTokens;
  if (first + kChunkTokens > p.sequences.tokens) return;
  constexpr int kLine = 128, kLines = kDimK * 2 / kLine;  // of a row
  const int thread = static_cast<int>(threadIdx.x);
  for (int at = thread; at < kChunkTokens * kLines; at += kPrepareThreads) {
    const int column = at % kLines * kLine / 2;
    if (column >= p.dim_k) continue;
    for (const TokenTensor* x : {&p.k, &p.q}) {
      ptx::prefetch(static_cast<const Element*>(x->data) + offset_of(*x, chunk.batch, first + at / kLines, chunk.head_qk) +
                    column);
    }
  }
  const TokenTensor& gate = thread < kChunkTokens ? p.g : p.beta;
  if (gate.data == nullptr) return;
  const std::int64_t at = offset_of(gate, chunk.batch, first + thread % kChunkTokens, chunk.head_qk * p.group);
  ptx::prefetch(static_cast<const std::byte*>(gate.data) + at * (gate.dtype == DType::f32 ? 4 : 2));
}

template <class Element, int kDimK>
FLASHQLA_DEVICE void load_keys_and_queries(const ChunkForwardParams& p, const PreparedChunk& chunk,
                                           PrepareShared<Element, kDimK>& shared) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const TokenTensor& x = part == 0 ? p.k : p.q;
    const tile::GlobalRows rows{static_cast<const Element*>(x.data) + offset_of(x, chunk.batch, chunk.token, chunk.head_qk),
                                x.stride_token, chunk.tokens, p.dim_k};
    if (p.aligned != 0 && chunk.tokens == kChunkTokens && p.dim_k == kDimK) {
      using Cursor = tile::RowCursor<kPrepareThreads, kChunkTokens, kDimK>;
      Cursor(rows.first, rows.stride).copy(ptx::shared_address(shared.rows[part]) + Cursor::place());
    } else if (p.aligned != 0) {
      tile::copy_rows_async<kPrepareThreads>(typename PrepareShared<Element, kDimK>::Rows{ptx::shared_address(shared.rows[part])},
                                             rows);
    } else {
      tile::copy_rows<kPrepareThreads, kChunkTokens, kDimK>(shared.rows[part], rows);
    }
  }
  ptx::cp_async_commit();
}

/// This warp's 16 rows of K K^T and Q K^T, blocks on and below the diagonal; of Q Q^T the one on it.
template <class Element, int kDimK>
FLASHQLA_DEVICE void multiply_keys(const PrepareShared<Element, kDimK>& shared, tile::Accumulator (&kk)[8],
                                   tile::Accumulator (&qk)[8], tile::Accumulator (&qq)[2]) {
  using Rows = typename PrepareShared<Element, kDimK>::Rows;
  const Rows keys{ptx::shared_address(shared.rows[0])}, queries{ptx::shared_address(shared.rows[1])};
  const int warp = static_cast<int>(threadIdx.x) / 32;
  tile::clear(kk);
  tile::clear(qk);
  tile::clear(qq);
#pragma unroll 4
  for (int k0 = 0; k0 < kDimK; k0 += 16) {
    const tile::FragmentA key = tile::load_a(keys, 16 * warp, k0), query = tile::load_a(queries, 16 * warp, k0);
#pragma unroll
    for (int block_j = 0; block_j < 4; ++block_j) {
      if (block_j > warp) break;
      const tile::FragmentB b = tile::load_b(keys, 16 * block_j, k0);
      tile::multiply<Element>(kk[2 * block_j], kk[2 * block_j + 1], key, b);
      tile::multiply<Element>(qk[2 * block_j], qk[2 * block_j + 1], query, b);
    }
    tile::multiply<Element>(qq[0], qq[1], query, tile::load_b(queries, 16 * warp, k0));
  }
}

template <class Element, int kDimK>
__global__ void __launch_bounds__(kPrepareThreads, 4) prepare_chunks(const __grid_constant__ ChunkForwardParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<PrepareShared<Element, kDimK>*>(memory);
  PreparedChunk chunk;
  if (!find_chunk(p, chunk)) return zero_slack(p, chunk.index - chunk_count(p.sequences), chunk.head_qk);

  const int warp = static_cast<int>(threadIdx.x) / 32;
  load_keys_and_queries<Element>(p, chunk, shared);
  ask_ahead<Element, kDimK>(p, chunk);
  if (warp < p.group) sum_gates(p, chunk, chunk.head_qk * p.group + warp, shared.sums[warp]);
  ptx::cp_async_wait<0>();
  __syncthreads();  // the rows, for the products and the factors
  tile::Accumulator kk[8], qk[8];
  {
    tile::Accumulator qq[2], k_k[2];
    multiply_keys<Element>(shared, kk, qk, qq);
#pragma unroll
    for (int block_j = 0; block_j < 4; ++block_j) {
      if (block_j != static_cast<int>(threadIdx.x) / 32) continue;
      k_k[0] = kk[2 * block_j];
      k_k[1] = kk[2 * block_j + 1];
    }
    row_factors<Element>(shared, p, chunk.tokens, k_k, qq);
  }

  typename PrepareShared<Element, kDimK>::Heads& heads = shared.heads;
  std::byte* const units = p.units + (chunk.index * p.heads_v + chunk.head_qk * p.group) * ChunkUnit::kBytes;
  for (std::int32_t first = 0; first < p.group; first += kPrepareWarps) {
    __syncthreads();  // all have read the rows and factors of rows are written; or the last heads' gates have been read
    const std::int32_t own = first + warp;
    if (own < p.group) {
      if (first > 0) sum_gates(p, chunk, chunk.head_qk * p.group + own, shared.sums[warp]);
      prepare_gates(p, chunk, chunk.head_qk * p.group + own, shared.sums[warp], shared, heads.gates[warp],
                    units + std::int64_t{own} * ChunkUnit::kBytes);
    }
    __syncthreads();  // gates, for the products
    const std::int32_t count = p.group - first < kPrepareWarps ? p.group - first : kPrepareWarps;
#pragma unroll 1
    for (std::int32_t h = 0; h < count; h += kHeadsTogether) {
      const std::int32_t together = count - h < kHeadsTogether ? count - h : kHeadsTogether;
      std::byte* const unit = units + std::int64_t{first + h} * ChunkUnit::kBytes;
      if (h > 0) __syncthreads();  // all have read the last heads' exchange, scores and diagonal blocks
#pragma unroll 1
      for (std::int32_t i = 0; i < together; ++i) {
        gate_products(shared, heads.gates[h + i], p.scale, kk, qk, i);
      }
      block::invert_diagonal(heads.scratch[warp]);  // of a head that is not there, too: nobody reads it
      __syncthreads();                              // all of these, for columns of blocks
#pragma unroll 1
      for (std::int32_t i = 0; i < together; ++i) store_solve(p, shared, i, unit + i * ChunkUnit::kBytes);
    }
  }
}

}  // namespace flashqla::cuda
