// The operations of each instruction set, defined in src/cpu/isa/<operation>_<set>.cpp. All are constants, ready before any code
// runs.
#pragma once

#include "dispatch/implementation.hpp"

namespace flashqla::cpu {

using ChunkForwardOperation = detail::Operation<ChunkForward, ChunkForwardArguments>;
using ChunkBackwardOperation = detail::Operation<ChunkBackward, ChunkBackwardArguments>;
using RecurrentForwardOperation = detail::Operation<RecurrentForward, RecurrentForwardArguments>;

namespace scalar {
extern const ChunkForwardOperation kChunkForward;
extern const ChunkBackwardOperation kChunkBackward;
extern const RecurrentForwardOperation kRecurrentForward;
}  // namespace scalar

namespace avx2 {
extern const ChunkForwardOperation kChunkForward;
extern const ChunkBackwardOperation kChunkBackward;
extern const RecurrentForwardOperation kRecurrentForward;
}  // namespace avx2

namespace avx512 {
extern const ChunkForwardOperation kChunkForward;
extern const ChunkBackwardOperation kChunkBackward;
extern const RecurrentForwardOperation kRecurrentForward;
}  // namespace avx512

namespace avx512bf16 {
extern const ChunkForwardOperation kChunkForward;
extern const ChunkBackwardOperation kChunkBackward;
}  // namespace avx512bf16

}  // namespace flashqla::cpu
