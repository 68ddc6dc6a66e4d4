// One block goes over the sequences 1024 at a time. Offsets become such that they never decrease and stay inside [0, T], whatever
// the tensor says: what kernels read and write through the table is inside the tensors. Sequences are ordered by the number of
// binary digits of their chunks, most first: roughly the longest first, in one pass. Their places inside a class come from atomic
// counters, on which nothing but the order of the work depends.
#include "cuda/kernels/schedule/schedule.hpp"

#include "cuda/host/start.cuh"
#include "cuda/views/views.cuh"

namespace flashqla::cuda {

namespace {

constexpr std::int64_t kMostPrefix = std::int64_t{1} << 62;  // as the host's checks for the CPU
constexpr int kThreads = 1024, kWarps = kThreads / 32, kClasses = 64;

struct Add {
  FLASHQLA_DEVICE std::int64_t operator()(std::int64_t a, std::int64_t b) const { return a + b; }
};
struct Larger {
  FLASHQLA_DEVICE std::int64_t operator()(std::int64_t a, std::int64_t b) const { return a > b ? a : b; }
};

/// Inclusive scan over the block, `carry` before all of it; becomes what comes before the next one.
template <class Operation>
__device__ std::int64_t block_scan(std::int64_t x, std::int64_t& carry, std::int64_t (&warps)[kWarps], Operation operation) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int step = 1; step < 32; step *= 2) {
    const std::int64_t before = __shfl_up_sync(0xffffffffu, x, step);
    if (lane >= step) x = operation(before, x);
  }
  __syncthreads();  // the last scan's sums of warps have been read
  if (lane == 31) warps[warp] = x;
  __syncthreads();  // sums of warps, for all threads
  std::int64_t before = carry;
  for (int w = 0; w < warp; ++w) before = operation(before, warps[w]);
  for (int w = 0; w < kWarps; ++w) carry = operation(carry, warps[w]);
  return operation(before, x);
}

FLASHQLA_DEVICE std::int64_t clamped(std::int64_t x, std::int64_t most) { return x < 0 ? 0 : x > most ? most : x; }

__device__ int length_class(std::int64_t chunks) { return 63 - __clzll(static_cast<long long>(chunks) | 1); }

__global__ void __launch_bounds__(kThreads) make_schedule(const ScheduleRequest request, const ScheduleArrays arrays) {
  __shared__ std::int64_t warps[kWarps];
  __shared__ unsigned classes[kClasses];
  const int thread = static_cast<int>(threadIdx.x);
  const bool packed = request.cu_seqlens.data != nullptr;
  std::int64_t offset = 0, chunks = 0, stored = 0;  // the first offset is 0, whatever the tensor says
  if (thread < kClasses) classes[thread] = 0;
  if (thread == 0) {
    if (packed) arrays.offsets[0] = offset;
    arrays.chunks[0] = 0;
  }
  for (std::int64_t base = 0; base < request.count; base += kThreads) {
    const std::int64_t n = base + thread;
    const bool there = n < request.count;
    const std::int64_t end = packed && there ? clamped(load_index(request.cu_seqlens, n + 1), request.tokens) : 0;
    const std::int64_t last = block_scan(end, offset, warps, Larger{});
    if (there && packed) arrays.offsets[n + 1] = last;
    __syncthreads();  // offsets, for the next thread
    std::int64_t length = 0, prefix = 0;
    if (there) {
      length = packed ? last - arrays.offsets[n] : request.tokens;
      prefix = request.prefix_lengths.data != nullptr ? load_index(request.prefix_lengths, n) : 0;
      prefix = clamped(prefix, kMostPrefix);
      arrays.shifts[n] = static_cast<std::int32_t>(prefix % kChunkTokens);
    }
    const std::int64_t own = length > 0 ? (prefix % kChunkTokens + length + kChunkTokens - 1) / kChunkTokens : 0;
    const std::int64_t all = block_scan(own, chunks, warps, Add{});
    if (there) {
      arrays.chunks[n + 1] = all;
      atomicAdd(&classes[length_class(own)], 1u);
    }
    if (request.states_every > 0) {
      const std::int64_t states = (prefix + length) / request.states_every - prefix / request.states_every;
      const std::int64_t up_to = block_scan(there ? states : 0, stored, warps, Add{});
      if (there) {
        arrays.stored_begin[n] = up_to - states;
        arrays.stored_phase[n] = prefix / kChunkTokens % (request.states_every / kChunkTokens);
      }
    }
  }
  __syncthreads();  // counts of classes, for one thread
  if (thread == 0) {
    unsigned before = 0;
    for (int c = kClasses - 1; c >= 0; --c) {
      const unsigned count = classes[c];
      classes[c] = before;
      before += count;
    }
  }
  __syncthreads();  // first places of classes, for all
  for (std::int64_t n = thread; n < request.count; n += kThreads) {
    const unsigned place = atomicAdd(&classes[length_class(arrays.chunks[n + 1] - arrays.chunks[n])], 1u);
    arrays.order[place] = static_cast<std::int32_t>(n);
  }
}

}  // namespace

std::size_t schedule_bytes(std::int64_t sequences) {
  const auto entries = static_cast<std::size_t>(sequences + 1);
  return (entries * (4 * sizeof(std::int64_t) + 2 * sizeof(std::int32_t)) + 255) / 256 * 256;
}

ScheduleArrays schedule_arrays(std::int64_t sequences, std::byte* memory) {
  const std::int64_t entries = sequences + 1;
  ScheduleArrays arrays;
  arrays.offsets = reinterpret_cast<std::int64_t*>(memory);
  arrays.chunks = arrays.offsets + entries;
  arrays.stored_begin = arrays.chunks + entries;
  arrays.stored_phase = arrays.stored_begin + entries;
  arrays.shifts = reinterpret_cast<std::int32_t*>(arrays.stored_phase + entries);
  arrays.order = arrays.shifts + entries;
  return arrays;
}

int start_schedule(const ScheduleRequest& request, const ScheduleArrays& arrays, void* stream) {
  return start_kernel(make_schedule, {1, kThreads, 0, stream}, request, arrays);
}

}  // namespace flashqla::cuda
