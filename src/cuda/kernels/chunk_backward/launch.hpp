// chunk_backward on a CUDA device: what it takes, its workspace, its launches.
#pragma once

#include <cstddef>
#include <string>

#include "common/arguments.hpp"

namespace flashqla::cuda {

std::string chunk_backward_refusal(const ChunkBackward& descriptor);
std::size_t chunk_backward_workspace(const ChunkBackward& descriptor, int threads);
void launch_chunk_backward(const ChunkBackwardArguments& arguments, std::byte* workspace, Stream stream);

}  // namespace flashqla::cuda
