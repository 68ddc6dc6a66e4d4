#include <cuda_runtime_api.h>

#include <string>

#include "common/environment.hpp"

#include "cuda/host/device.hpp"
#include "cuda/host/tensor_map.hpp"
#include "cuda/host/views.hpp"
#include "cuda/kernels/chunk_forward/launch.hpp"
#include "cuda/kernels/chunk_forward/setup.hpp"
#include "cuda/kernels/chunk_forward/start.hpp"

namespace flashqla::cuda {

namespace {

constexpr std::int64_t kDimK = 128, kBlockColumns = 64;  // of V
constexpr std::int64_t kLeastColumns = 16 * 128;         // of V, of all heads

/// False where one of them is out of the copy engine's reach.
bool make_maps(const Problem& p, const ChunkForwardParams& params, ChunkForwardMaps& maps) {
  const TensorSizes keys{p.batch, p.tokens, p.heads_qk, p.dim_k}, values{p.batch, p.tokens, p.heads_v, p.dim_v};
  return make_tensor_map(params.q, keys, maps.q) && make_tensor_map(params.k, keys, maps.k) &&
         make_tensor_map(params.v, values, maps.v) && make_tensor_map(params.o, values, maps.o);
}

}  // namespace

std::string chunk_forward_hopper_refusal(const ChunkForward& d) {
  const Problem& p = d.problem;
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "computes with bfloat16 and float16 q, k and v only";
  if (p.dim_k != kDimK || p.dim_v % (2 * kBlockColumns) != 0) return "takes K = 128 and V = 128 or 256";
  // Not a matter of how many sequences there are: a sequence has the same bits alone and in a pack.
  if (p.heads_v * p.dim_v < kLeastColumns && environment::forced_implementation() != kHopperName) {
    return "takes 16 value heads of 128 columns, or as many columns, and more: with fewer cuda-portable is as fast or faster";
  }
  if (std::string portable = chunk_forward_refusal(d); !portable.empty()) return portable;
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, p.device.index), "properties of the CUDA device");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, p.device.index), "properties of the CUDA device");
  if (major != 9 || minor != 0) return "needs a Hopper GPU (compute capability 9.0)";
  if (properties_of(p.device.index).block_shared_bytes < kHopperSharedBytes) {
    return "needs " + std::to_string(kHopperSharedBytes) + " bytes of shared memory a block";
  }
  const DeviceScope scope(p.device.index);
  if (!has_hopper_code()) return "this library was built without code for sm_90a";
  return {};
}

void launch_chunk_forward_hopper(const ChunkForwardArguments& a, std::byte* workspace, Stream stream) {
  const Problem& p = a.inputs.problem;
  if (p.sequences() == 0 && !p.packed) return;
  const DeviceScope scope(p.device.index);
  ChunkForwardMaps maps;
  ChunkForwardParams views{};
  set_operation(views, a.inputs, a.o);
  if (p.tokens == 0 || !make_maps(p, views, maps)) return launch_chunk_forward(a, workspace, stream);
  ChunkForwardParams params = begin_chunk_forward(a, workspace, stream);
  params.pieces = 1;
  start_prepare(p, params, stream);
  const std::int64_t blocks = p.sequences() * p.heads_v * (p.dim_v / kBlockColumns);
  const auto start = p.dtype == DType::bf16 ? start_advance_hopper_bf16 : start_advance_hopper_f16;
  check(start(params, maps, blocks, stream.handle), "starting advance_states_hopper");
}

}  // namespace flashqla::cuda
