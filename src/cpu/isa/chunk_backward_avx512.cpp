// chunk_backward with AVX-512.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cpu/chunk_backward.hpp"
#include "cpu/operations.hpp"
#include "cpu/refusal.hpp"
#include "cpu/simd/avx512.hpp"

#include "cpu/simd/avx512_begin.inc"

#include "cpu/kernels/chunk_backward_all.inl"

const BackwardKernel kBackwardItems = kBackwardKernel<F32Dot>;

const ChunkBackwardOperation kChunkBackward{refuse_f64<ChunkBackward>, backward_workspace<F32Dot>, run_backward<F32Dot>};

#include "cpu/simd/avx512_end.inc"
