// chunk_forward on a CUDA device: what it takes, its workspace, its launches.
#pragma once

#include <cstddef>
#include <string>

#include "common/arguments.hpp"

namespace flashqla::cuda {

std::string chunk_forward_refusal(const ChunkForward& descriptor);
std::size_t chunk_forward_workspace(const ChunkForward& descriptor, int threads);
void launch_chunk_forward(const ChunkForwardArguments& arguments, std::byte* workspace, Stream stream);

inline constexpr const char* kHopperName = "cuda-hopper";
// With advance_states of Hopper GPUs; the workspace is the same. A call with tensors that the copy engine cannot reach takes the
// portable kernels.
std::string chunk_forward_hopper_refusal(const ChunkForward& descriptor);
void launch_chunk_forward_hopper(const ChunkForwardArguments& arguments, std::byte* workspace, Stream stream);

}  // namespace flashqla::cuda
