// write_extras for f32, with the products and the substitution of prepare_chunks_f32.
#include "cuda/kernels/chunk_forward/extras.cuh"
#include "cuda/kernels/chunk_forward/prepare_f32.cuh"
#include "cuda/kernels/chunk_forward/start.hpp"

namespace flashqla::cuda {

__global__ void __launch_bounds__(kFloatPrepareThreads, 2) write_extras_f32(const __grid_constant__ ChunkForwardParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<FloatPrepareShared*>(memory);
  PreparedChunk chunk;
  if (!find_chunk(p, chunk)) return zero_extras(p, chunk.index - chunk_count(p.sequences), chunk.head_qk);
  FloatProducts kk, none;
  if (p.a.data != nullptr) multiply_keys<false>(p, chunk, shared, kk, none);
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (std::int32_t first = 0; first < p.group; first += kHeadsAtOnce) {
    const std::int32_t head = chunk.head_qk * p.group + first;
    const std::int32_t count = p.group - first < kHeadsAtOnce ? p.group - first : kHeadsAtOnce;
    __syncthreads();  // factors, from all; all have left the panels or the last heads' triangles
    if (thread / 32 < count) take_gates(p, chunk, head + thread / 32, shared.heads.gates[thread / 32].column);
    if (p.a.data == nullptr) continue;
    __syncthreads();  // betas, for the products
    for (std::int32_t h = 0; h < count; ++h) {
      for_each_product([&](int i, int j, int row, int column) {
        const float x = shared.heads.gates[h].column[row] * shared.factors[0][row] * shared.factors[0][column] * kk[i][j];
        shared.heads.lower[h][tile::triangle_row(row) + column] = column < row ? x : 0.0f;
      });
    }
    __syncthreads();  // L, for its columns
    const int h = thread / kChunkTokens, column = thread % kChunkTokens;
    if (h >= count) continue;
    invert_column(shared.heads.lower[h], column, [&](int i, float x) { store_inverse(p, chunk, head + h, i, column, x); });
  }
}

int start_extras_f32(const ChunkForwardParams& params, std::int64_t blocks, void* stream) {
  return start_kernel(write_extras_f32, {blocks, kFloatPrepareThreads, sizeof(FloatPrepareShared), stream}, params);
}

}  // namespace flashqla::cuda
