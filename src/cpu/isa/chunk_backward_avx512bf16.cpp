// chunk_backward with the bf16 dot products of AVX512_BF16.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cpu/chunk_backward.hpp"
#include "cpu/operations.hpp"
#include "cpu/refusal.hpp"
#include "cpu/simd/avx512bf16.hpp"

#include "cpu/simd/avx512bf16_begin.inc"

#include "cpu/kernels/chunk_backward_all.inl"

#include "cpu/kernels/gemm_bf16.inl"

#include "cpu/kernels/chunk_backward_bf16.inl"

const ChunkBackwardOperation kChunkBackward{refuse_all_but_bf16<ChunkBackward>, backward_workspace<Bf16Dot>,
                                            run_backward<Bf16Dot>};

#include "cpu/simd/avx512bf16_end.inc"
