// Makes the SequenceTable of a call on the device, so that the host never reads offsets: one block of one kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/views/views.hpp"

namespace flashqla::cuda {

struct ScheduleRequest {
  IndexTensor cu_seqlens;      // absent: `count` sequences of `tokens` rows
  IndexTensor prefix_lengths;  // absent: 0
  std::int32_t count = 0;
  std::int64_t tokens = 0;
  /// Tokens between stored states; 0: none are counted.
  std::int64_t states_every = 0;
};

/// The arrays, in the workspace.
struct ScheduleArrays {
  std::int64_t *offsets = nullptr, *chunks = nullptr, *stored_begin = nullptr, *stored_phase = nullptr;
  std::int32_t *shifts = nullptr, *order = nullptr;
};

/// Bytes of the arrays for so many sequences, a multiple of 256.
std::size_t schedule_bytes(std::int64_t sequences);
ScheduleArrays schedule_arrays(std::int64_t sequences, std::byte* memory);

/// Starts the kernel. Returns a cudaError_t.
int start_schedule(const ScheduleRequest& request, const ScheduleArrays& arrays, void* stream);

}  // namespace flashqla::cuda
