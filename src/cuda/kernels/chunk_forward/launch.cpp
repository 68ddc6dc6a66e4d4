#include "cuda/kernels/chunk_forward/launch.hpp"

#include <cuda_runtime_api.h>

#include "cuda/host/device.hpp"
#include "cuda/host/views.hpp"
#include "cuda/kernels/chunk_forward/start.hpp"
#include "cuda/kernels/schedule/schedule.hpp"
#include "flashqla/error.hpp"

namespace flashqla::cuda {

namespace {

constexpr std::int64_t kAlignedElements = 8;  // of 16 bits, in 16 bytes

bool needs_table(const Problem& p, StoredStates stored) { return p.packed || stored == StoredStates::every; }

/// No fewer chunks than the sequences of the problem can have; exact without a table. Packed, with one besides for the rows past
/// the last offset (prepare_kernel.cuh).
std::int64_t chunk_bound(const Problem& p, StoredStates stored) {
  if (!needs_table(p, stored)) return p.sequences() * ((p.tokens + kTokensPerChunk - 1) / kTokensPerChunk);
  const std::int64_t whole = p.packed ? p.tokens / kTokensPerChunk : p.sequences() * (p.tokens / kTokensPerChunk);
  return whole + 2 * p.sequences() + 1;  // a sequence with a prefix may begin and end inside a chunk
}

template <class Byte>
bool rows_aligned(const TokenView<Byte>& x, const Problem& p, std::int64_t heads) {
  const auto multiple = [](std::int64_t size, std::int64_t stride) { return size <= 1 || stride % kAlignedElements == 0; };
  return reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 && multiple(p.tokens, x.stride_token) &&
         multiple(heads, x.stride_head) && multiple(p.batch, x.stride_batch);
}

ChunkForwardParams params_of(const ChunkForwardArguments& a, const ScheduleArrays& arrays, std::byte* units) {
  const InputArguments& in = a.inputs;
  const Problem& p = in.problem;
  const bool table = needs_table(p, a.stored_states);
  ChunkForwardParams params{};
  params.sequences.count = static_cast<std::int32_t>(p.sequences());
  params.sequences.tokens = p.tokens;
  params.sequences.chunk_bound = chunk_bound(p, a.stored_states);
  if (table) {
    params.sequences.offsets = p.packed ? arrays.offsets : nullptr;
    params.sequences.shifts = arrays.shifts;
    params.sequences.chunks = arrays.chunks;
    params.sequences.order = arrays.order;
    params.stored_begin = arrays.stored_begin;
    params.stored_phase = arrays.stored_phase;
  }
  set_operation(params, in, a.o);
  params.aligned = rows_aligned(in.q, p, p.heads_qk) && rows_aligned(in.k, p, p.heads_qk) && rows_aligned(in.v, p, p.heads_v) &&
                   rows_aligned(a.o, p, p.heads_v);
  params.initial_state = device_view(a.states.initial_state);
  params.final_state = device_view(a.states.final_state);
  params.stored = device_view(a.stored);
  params.read = device_view(a.states.read);
  params.write = device_view(a.states.write);
  params.stored_rows = device_view(a.stored_rows);
  params.stored_states = a.stored_states;
  params.states_every = a.states_every / kTokensPerChunk;
  params.units = units;
  return params;
}

/// As many columns of V a block as leave every multiprocessor one, as far as its shared memory goes.
AdvanceShape shape_of(const Problem& p, std::int32_t padded_k, const DeviceProperties& device) {
  for (const int stages : {2, 1}) {
    for (const int tiles : {4, 2, 1}) {
      const std::int64_t slab = 16 * tiles, blocks = p.sequences() * p.heads_v * ((p.dim_v + slab - 1) / slab);
      const bool fits = advance_shared_bytes(padded_k, {tiles, stages}) <= static_cast<std::size_t>(device.block_shared_bytes);
      const bool enough = blocks >= device.multiprocessors * 3 / 4 || tiles == 1;
      if (fits && enough && p.dim_v > slab / 2) return {tiles, stages};
    }
  }
  throw Unsupported("chunk_forward: " + std::to_string(device.block_shared_bytes) +
                    " bytes of shared memory a block are too few for K = " + std::to_string(p.dim_k));
}

std::size_t units_bytes(const ChunkForward& d) {
  return static_cast<std::size_t>(chunk_bound(d.problem, d.stored_states) * d.problem.heads_v) * ChunkUnit::kBytes;
}

std::size_t table_bytes(const ChunkForward& d) {
  return needs_table(d.problem, d.stored_states) ? schedule_bytes(d.problem.sequences()) : 0;
}

}  // namespace

std::string chunk_forward_refusal(const ChunkForward& d) {
  const Problem& p = d.problem;
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "computes with bfloat16 and float16 q, k and v only";
  if (p.dim_k % 16 != 0 || p.dim_v % 16 != 0) return "takes K and V that are multiples of 16";
  if (p.sequences() >= kMostBlocks || chunk_bound(p, d.stored_states) * p.heads_qk >= kMostBlocks ||
      p.sequences() * p.heads_v * ((p.dim_v + 15) / 16) >= kMostBlocks) {
    return "takes fewer than 2^31 chunks times heads";
  }
  return refuse_device(p.device.index);
}

std::size_t chunk_forward_workspace(const ChunkForward& d, int) { return table_bytes(d) + units_bytes(d); }

void launch_chunk_forward(const ChunkForwardArguments& a, std::byte* workspace, Stream stream) {
  const Problem& p = a.inputs.problem;
  if (a.g_cumulative.present() || a.a.present()) {
    throw Unsupported("chunk_forward: g_cumulative and a are computed on the CPU only");
  }
  if (p.sequences() == 0 && !p.packed) return;  // a pack of none has rows past its last offset
  const ChunkForward d{p, a.stored_states, a.states_every};
  const DeviceScope scope(p.device.index);
  const std::int32_t padded_k = padded_dim_k(p.dim_k);
  const AdvanceShape shape = shape_of(p, padded_k, properties_of(p.device.index));
  ScheduleArrays arrays;
  if (needs_table(p, a.stored_states)) {
    arrays = schedule_arrays(p.sequences(), workspace);
    ScheduleRequest request;
    if (p.packed) request.cu_seqlens = device_view(a.inputs.sequences.cu_seqlens);
    request.prefix_lengths = device_view(a.prefix_lengths);
    request.count = static_cast<std::int32_t>(p.sequences());
    request.tokens = p.tokens;
    request.states_every = a.stored_states == StoredStates::every ? a.states_every : 0;
    check(start_schedule(request, arrays, stream.handle), "starting the schedule of chunk_forward");
  }
  ChunkForwardParams params = params_of(a, arrays, workspace + table_bytes(d));
  const bool bf16 = p.dtype == DType::bf16;
  const std::int64_t prepare_blocks = params.sequences.chunk_bound * p.heads_qk;
  check((bf16 ? start_prepare_bf16 : start_prepare_f16)(params, padded_k, prepare_blocks, stream.handle),
        "starting prepare_chunks");
  params.stages = shape.stages;
  const std::int64_t slab = 16 * shape.tiles, advance_blocks = p.sequences() * p.heads_v * ((p.dim_v + slab - 1) / slab);
  check((bf16 ? start_advance_bf16 : start_advance_f16)(params, padded_k, shape.tiles, advance_blocks, stream.handle),
        "starting advance_states");
}

}  // namespace flashqla::cuda
