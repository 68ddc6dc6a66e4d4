#include "cuda/kernels/chunk_forward/prepare_f32.cuh"

#include "cuda/host/start.cuh"
#include "cuda/kernels/chunk_forward/start.hpp"

namespace flashqla::cuda {

__global__ void __launch_bounds__(kFloatPrepareThreads, 2) prepare_chunks_f32(const __grid_constant__ ChunkForwardParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<FloatPrepareShared*>(memory);
  PreparedChunk chunk;
  if (!find_chunk(p, chunk)) return zero_slack(p, chunk.index - chunk_count(p.sequences), chunk.head_qk);
  FloatProducts kk, qk;
  multiply_keys<true>(p, chunk, shared, kk, qk);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float* const units =
      reinterpret_cast<float*>(p.units) + (chunk.index * p.heads_v + chunk.head_qk * p.group) * FloatUnit::kFloats;
#pragma unroll 1
  for (std::int32_t first = 0; first < p.group; first += kHeadsAtOnce) {
    const std::int32_t count = p.group - first < kHeadsAtOnce ? p.group - first : kHeadsAtOnce;
    float* const unit = units + std::int64_t{first} * FloatUnit::kFloats;
    __syncthreads();  // factors, from all; all have left the panels or the last heads' triangles
    if (warp < count) {
      prepare_gates(p, chunk, chunk.head_qk * p.group + first + warp, shared.factors, shared.heads.gates[warp],
                    unit + warp * FloatUnit::kFloats);
    }
    __syncthreads();  // gates, for the products
#pragma unroll 1
    for (std::int32_t h = 0; h < count; ++h) {
      gate_products(shared.factors, shared.heads.gates[h], p.scale, kk, qk, shared.heads.lower[h], unit + h * FloatUnit::kFloats);
    }
    __syncthreads();  // L, for its columns
    const int h = static_cast<int>(threadIdx.x) / kChunkTokens, column = static_cast<int>(threadIdx.x) % kChunkTokens;
    if (h >= count) continue;
    float* const solve = unit + h * FloatUnit::kFloats + FloatUnit::kSolve + column;
    invert_column(shared.heads.lower[h], column, [&](int i, float x) {
      if (i / 16 >= column / 16) solve[tile::triangle_row(i)] = x;
    });
  }
}

int start_prepare_f32(const ChunkForwardParams& params, std::int64_t blocks, void* stream) {
  return start_kernel(prepare_chunks_f32, {blocks, kFloatPrepareThreads, sizeof(FloatPrepareShared), stream}, params);
}

}  // namespace flashqla::cuda
