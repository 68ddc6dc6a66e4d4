#include "cuda/implementations.hpp"

#include <array>

#include "cuda/host/device.hpp"
#include "cuda/kernels/chunk_backward/launch.hpp"
#include "cuda/kernels/chunk_forward/launch.hpp"
#include "cuda/kernels/recurrent_forward/launch.hpp"

namespace flashqla::cuda {

namespace {

using detail::Implementation;

constexpr detail::Operation<ChunkForward, ChunkForwardArguments> kChunkForward{chunk_forward_refusal, chunk_forward_workspace,
                                                                               nullptr, false, launch_chunk_forward};

constexpr detail::Operation<ChunkBackward, ChunkBackwardArguments> kChunkBackward{
    chunk_backward_refusal, chunk_backward_workspace, nullptr, false, launch_chunk_backward};

constexpr detail::Operation<RecurrentForward, RecurrentForwardArguments> kRecurrentForward{
    recurrent_forward_refusal, recurrent_forward_workspace, nullptr, false, launch_recurrent_forward};

constexpr Implementation kPortable{"cuda-portable",   missing_device,   kChunkForward, kChunkBackward,
                                   kRecurrentForward, DeviceType::cuda, fetch};

#ifndef FLASHQLA_WITHOUT_HOPPER
constexpr detail::Operation<ChunkForward, ChunkForwardArguments> kChunkForwardHopper{
    chunk_forward_hopper_refusal, chunk_forward_workspace, nullptr, false, launch_chunk_forward_hopper};

constexpr Implementation kHopper{kHopperName, missing_device, kChunkForwardHopper, {}, {}, DeviceType::cuda, fetch};
#endif

}  // namespace

std::span<const Implementation* const> implementations() {
#ifdef FLASHQLA_WITHOUT_HOPPER
  static constexpr std::array kRows{&kPortable};
#else
  static constexpr std::array kRows{&kHopper, &kPortable};
#endif
  return kRows;
}

}  // namespace flashqla::cuda
