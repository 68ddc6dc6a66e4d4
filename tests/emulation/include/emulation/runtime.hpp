// Streams: what is put on one is done at once, or kept for a graph while the stream is captured.
#pragma once

#include <functional>
#include <string>

namespace flashqla::emulation {

/// Empty, or what went wrong.
using Work = std::function<std::string()>;

/// Returns a cudaError_t. What went wrong is kept for cudaGetErrorString.
int enqueue(void* stream, Work work);

}  // namespace flashqla::emulation
