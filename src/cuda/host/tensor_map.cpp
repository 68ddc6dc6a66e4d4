#include "cuda/host/tensor_map.hpp"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "cuda/host/device.hpp"
#include "flashqla/error.hpp"

namespace flashqla::cuda {

namespace {

constexpr std::int64_t kElementBytes = 2;
constexpr int kDriverVersion = 12000;  // the first whose copy engine is Hopper's

/// From the driver that the process has: nothing is linked to it.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const PFN_cuTensorMapEncodeTiled_v12000 found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kDriverVersion, cudaEnableDefault, &result),
          "asking the driver for cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess) throw DeviceError("the CUDA driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return found;
}

}  // namespace

bool make_tensor_map(const TokenTensor& x, const TensorSizes& sizes, TensorMap& map) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap));
  constexpr std::int64_t kMostSize = (std::int64_t{1} << 31) - 1, kMostStride = std::int64_t{1} << 40;
  if (reinterpret_cast<std::uintptr_t>(x.data) % 16 != 0 || sizes.tokens > kMostSize || sizes.batch > kMostSize) return false;
  const cuuint64_t extents[4] = {static_cast<cuuint64_t>(sizes.columns), static_cast<cuuint64_t>(sizes.heads),
                                 static_cast<cuuint64_t>(sizes.tokens), static_cast<cuuint64_t>(sizes.batch)};
  const std::int64_t given[3] = {x.stride_head, x.stride_token, x.stride_batch};
  cuuint64_t strides[3];
  for (int i = 0; i < 3; ++i) {
    // That of a dimension of one element means nothing, and may be anything.
    const std::int64_t bytes = extents[i + 1] > 1 ? given[i] * kElementBytes : 16;
    if (bytes <= 0 || bytes % 16 != 0 || bytes >= kMostStride) return false;
    strides[i] = static_cast<cuuint64_t>(bytes);
  }
  const cuuint32_t box[4] = {64, 1, 64, 1}, steps[4] = {1, 1, 1, 1};
  CUtensorMap made;
  const CUresult status =
      encoder()(&made, x.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, x.data,
                extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) return false;
  std::memcpy(&map, &made, sizeof(map));
  return true;
}

}  // namespace flashqla::cuda
