#include "cuda/kernels/chunk_forward/launch.hpp"

#include <cuda_runtime_api.h>

#include "cuda/host/device.hpp"
#include "cuda/host/views.hpp"
#include "cuda/kernels/chunk_forward/setup.hpp"
#include "cuda/kernels/chunk_forward/start.hpp"
#include "cuda/kernels/schedule/schedule.hpp"
#include "flashqla/error.hpp"

namespace flashqla::cuda {

namespace {

ChunkForwardParams params_of(const ChunkForwardArguments& a, const ScheduleArrays& arrays, std::byte* units) {
  const InputArguments& in = a.inputs;
  const Problem& p = in.problem;
  const bool table = needs_table(p, a.stored_states);
  ChunkForwardParams params{};
  params.sequences = sequence_table(p, a.stored_states, arrays);
  if (table) {
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

std::size_t units_bytes(const ChunkForward& d) {
  return static_cast<std::size_t>(chunk_bound(d.problem, d.stored_states) * d.problem.heads_v * unit_bytes(d.problem.dtype));
}

std::size_t table_bytes(const ChunkForward& d) {
  return needs_table(d.problem, d.stored_states) ? schedule_bytes(d.problem.sequences()) : 0;
}

/// Besides, with states after every n tokens: chunks are counted from the prefixes there, but those of g_cumulative and a are
/// not.
std::size_t extras_table_bytes(const ChunkForward& d) {
  return d.stored_states == StoredStates::every ? schedule_bytes(d.problem.sequences()) : 0;
}

ScheduleRequest schedule_request(const ChunkForwardArguments& a) {
  const Problem& p = a.inputs.problem;
  ScheduleRequest request;
  if (p.packed) request.cu_seqlens = device_view(a.inputs.sequences.cu_seqlens);
  request.prefix_lengths = device_view(a.prefix_lengths);
  request.count = static_cast<std::int32_t>(p.sequences());
  request.tokens = p.tokens;
  request.states_every = a.stored_states == StoredStates::every ? a.states_every : 0;
  return request;
}

/// g_cumulative and a. `memory`: for a table of their own.
void launch_extras(const ChunkForwardArguments& a, ChunkForwardParams params, std::byte* memory, Stream stream) {
  const Problem& p = a.inputs.problem;
  if (a.prefix_lengths.present()) {
    const ScheduleArrays arrays = schedule_arrays(p.sequences(), memory);
    ScheduleRequest request = schedule_request(a);
    request.prefix_lengths = {};
    request.states_every = 0;
    check(start_schedule(request, arrays, stream.handle), "starting the schedule of g_cumulative and a");
    params.sequences = sequence_table(p, a.stored_states, arrays);
  }
  params.g_cumulative = device_view(a.g_cumulative);
  params.a = device_view(a.a);
  const std::int64_t blocks = params.sequences.chunk_bound * p.heads_qk;
  const std::int32_t padded_k = padded_dim_k(p.dim_k);
  const int status = p.dtype == DType::f32    ? start_extras_f32(params, blocks, stream.handle)
                     : p.dtype == DType::bf16 ? start_extras_bf16(params, padded_k, blocks, stream.handle)
                                              : start_extras_f16(params, padded_k, blocks, stream.handle);
  check(status, "starting write_extras");
}

}  // namespace

std::string chunk_forward_refusal(const ChunkForward& d) {
  const Problem& p = d.problem;
  if (p.dtype == DType::f64) return "computes with float32, bfloat16 and float16 q, k and v only";
  if (p.dim_k % 16 != 0 || p.dim_v % 16 != 0) return "takes K and V that are multiples of 16";
  if (p.sequences() >= kMostBlocks || chunk_bound(p, d.stored_states) * p.heads_qk >= kMostBlocks ||
      p.sequences() * p.heads_v * ((p.dim_v + 15) / 16) >= kMostBlocks) {
    return "takes fewer than 2^31 chunks times heads";
  }
  return refuse_device(p.device.index);
}

std::size_t chunk_forward_workspace(const ChunkForward& d, int) {
  return table_bytes(d) + extras_table_bytes(d) + units_bytes(d);
}

ChunkForwardParams begin_chunk_forward(const ChunkForwardArguments& a, std::byte* workspace, Stream stream) {
  const Problem& p = a.inputs.problem;
  const ChunkForward d{p, a.stored_states, a.states_every};
  ScheduleArrays arrays;
  if (needs_table(p, a.stored_states)) {
    arrays = schedule_arrays(p.sequences(), workspace);
    check(start_schedule(schedule_request(a), arrays, stream.handle), "starting the schedule of chunk_forward");
  }
  std::byte* const extras_table = workspace + table_bytes(d);
  const ChunkForwardParams params = params_of(a, arrays, extras_table + extras_table_bytes(d));
  if (a.g_cumulative.present() || a.a.present()) launch_extras(a, params, extras_table, stream);
  return params;
}

void start_prepare(const Problem& p, const ChunkForwardParams& params, Stream stream) {
  const std::int64_t blocks = params.sequences.chunk_bound * p.heads_qk;
  const std::int32_t padded_k = padded_dim_k(p.dim_k);
  const int status = p.dtype == DType::f32    ? start_prepare_f32(params, blocks, stream.handle)
                     : p.dtype == DType::bf16 ? start_prepare_bf16(params, padded_k, blocks, stream.handle)
                                              : start_prepare_f16(params, padded_k, blocks, stream.handle);
  check(status, "starting prepare_chunks");
}

void launch_chunk_forward(const ChunkForwardArguments& a, std::byte* workspace, Stream stream) {
  const Problem& p = a.inputs.problem;
  if (p.sequences() == 0 && !p.packed) return;  // a pack of none has rows past its last offset
  const DeviceScope scope(p.device.index);
  const std::int32_t padded_k = padded_dim_k(p.dim_k);
  const AdvanceShape shape = advance_shape(p, padded_k, properties_of(p.device.index), {1, 1, 4}, "chunk_forward");
  ChunkForwardParams params = begin_chunk_forward(a, workspace, stream);
  start_prepare(p, params, stream);
  params.stages = shape.stages;
  const std::int64_t blocks = advance_blocks(p, shape);
  const int status = p.dtype == DType::f32    ? start_advance_f32(params, shape.tiles, blocks, stream.handle)
                     : p.dtype == DType::bf16 ? start_advance_bf16(params, padded_k, shape.tiles, blocks, stream.handle)
                                              : start_advance_f16(params, padded_k, shape.tiles, blocks, stream.handle);
  check(status, "starting advance_states");
}

}  // namespace flashqla::cuda
