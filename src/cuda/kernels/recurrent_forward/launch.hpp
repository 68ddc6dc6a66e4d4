// recurrent_forward on a CUDA device: what it takes, its launch. It needs no workspace.
#pragma once

#include <cstddef>
#include <string>

#include "common/arguments.hpp"

namespace flashqla::cuda {

std::string recurrent_forward_refusal(const RecurrentForward& descriptor);
std::size_t recurrent_forward_workspace(const RecurrentForward& descriptor, int threads);
void launch_recurrent_forward(const RecurrentForwardArguments& arguments, std::byte* workspace, Stream stream);

}  // namespace flashqla::cuda
