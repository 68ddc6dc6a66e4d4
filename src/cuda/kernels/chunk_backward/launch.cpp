#include "cuda/kernels/chunk_backward/launch.hpp"

#include <cuda_runtime_api.h>

#include "cuda/host/device.hpp"
#include "cuda/host/views.hpp"
#include "cuda/kernels/chunk_backward/launch_f32.hpp"
#include "cuda/kernels/chunk_backward/start.hpp"
#include "cuda/kernels/chunk_forward/setup.hpp"
#include "flashqla/error.hpp"

namespace flashqla::cuda {

namespace {

constexpr std::int64_t kBlockBytes = 512;  // 16 x 16 f16
constexpr StoredStates kStored = StoredStates::none;

/// Parts of the workspace, each at a multiple of 256 bytes. Without memory it counts bytes only.
class Parts {
 public:
  explicit Parts(std::byte* memory) : memory_(memory) {}
  template <class Item = std::byte>
  Item* take(std::int64_t count) {
    std::byte* const part = memory_ == nullptr ? nullptr : memory_ + bytes_;
    bytes_ += (static_cast<std::size_t>(count) * sizeof(Item) + 255) / 256 * 256;
    return reinterpret_cast<Item*>(part);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* memory_;
  std::size_t bytes_ = 0;
};

FloatKept take_float_kept(Parts& parts, const Problem& p, std::int64_t units) {
  FloatKept kept;
  for (float** states : {&kept.states, &kept.d_states}) *states = parts.take<float>(units * p.dim_k * p.dim_v);
  for (float** rows : {&kept.errors, &kept.d_values}) *rows = parts.take<float>(units * kTokensPerChunk * p.dim_v);
  return kept;
}

KeptChunks take_kept(Parts& parts, const Problem& p, std::int64_t units) {
  const std::int64_t tiles_v = p.dim_v / 16, tiles_k = p.dim_k / 16;
  KeptChunks kept;
  kept.states = parts.take(units * tiles_v * tiles_k * kBlockBytes);
  kept.rows = parts.take(units * 4 * tiles_v * kBlockBytes);
  kept.state_powers = parts.take<std::int16_t>(units * tiles_v * 4);
  kept.row_powers = parts.take<std::int16_t>(units * 4 * tiles_v);
  return kept;
}

struct BackwardWorkspace {
  std::byte* schedule = nullptr;
  std::byte* units = nullptr;
  KeptChunks kept, d_kept;
  FloatKept float_kept;
  float* dots = nullptr;
  double* head_sums = nullptr;
  std::byte* zeros = nullptr;  // a row of dO, where there is none
  std::size_t bytes = 0;

  BackwardWorkspace(const Problem& p, std::byte* memory) {
    Parts parts(memory);
    const std::int64_t count = chunk_bound(p, kStored) * heads_qk_at_once(p) * (p.heads_v / p.heads_qk);
    if (needs_table(p, kStored)) schedule = parts.take(static_cast<std::int64_t>(schedule_bytes(p.sequences())));
    units = parts.take(count * unit_bytes(p.dtype));
    if (p.dtype == DType::f32) {
      float_kept = take_float_kept(parts, p, count);
    } else {
      kept = take_kept(parts, p, count);
      kept.gates = parts.take<KeptGates>(count);
      d_kept = take_kept(parts, p, count);
    }
    if (p.dtype == DType::f16) {  // rests lie where the way back puts something else as soon as it has read them
      kept.state_rests = d_kept.states;
      kept.row_rests = d_kept.rows;
      dots = parts.take<float>(count * (p.dim_v / 16) * kDots);
    }
    if (p.gate == Gate::computed) head_sums = parts.take<double>(2 * count);
    zeros = parts.take(p.dim_v * element_bytes(p.dtype));
    bytes = parts.bytes();
  }
};

HeadResult result_of(const MutableHeadView& x) { return {x.data, x.dtype, x.stride}; }

ChunkBackwardParams params_of(const ChunkBackwardArguments& a, const BackwardWorkspace& memory, const ScheduleArrays& arrays) {
  const InputArguments& in = a.inputs;
  const Problem& p = in.problem;
  ChunkBackwardParams params{};
  params.sequences = sequence_table(p, kStored, arrays);
  set_operation(params, in, {});
  params.initial_state = device_view(a.initial_state);
  params.units = memory.units;
  params.kept = memory.kept;
  params.d_kept = memory.d_kept;
  params.dots = memory.dots;
  params.head_sums = memory.head_sums;
  params.d_o = a.d_o.present() ? device_view(a.d_o) : TokenTensor{memory.zeros, p.dtype, 0, 0, 0};
  params.d_q = device_view(a.d_q);
  params.d_k = device_view(a.d_k);
  params.d_v = device_view(a.d_v);
  params.d_g = device_view(a.d_g);
  params.d_beta = device_view(a.d_beta);
  params.d_final_state = device_view(a.d_final_state);
  params.d_initial_state = device_view(a.d_initial_state);
  params.d_a_log = result_of(a.d_a_log);
  params.d_dt_bias = result_of(a.d_dt_bias);
  const auto aligned = [&](const auto& x, std::int64_t heads) { return !x.present() || rows_aligned(x, p, heads); };
  params.aligned = aligned(in.q, p.heads_qk) && aligned(in.k, p.heads_qk) && aligned(in.v, p.heads_v) &&
                   aligned(a.d_o, p.heads_v) && aligned(a.d_v, p.heads_v);
  return params;
}

void make_table(const ChunkBackwardArguments& a, const ScheduleArrays& arrays, Stream stream) {
  const Problem& p = a.inputs.problem;
  ScheduleRequest request;
  if (p.packed) request.cu_seqlens = device_view(a.inputs.sequences.cu_seqlens);
  request.count = static_cast<std::int32_t>(p.sequences());
  request.tokens = p.tokens;
  check(start_schedule(request, arrays, stream.handle), "starting the schedule of chunk_backward");
}

using StatesStarter = int (*)(const ChunkBackwardParams&, int, std::int64_t, void*);
StatesStarter states_starter(bool bf16, std::int32_t padded_k) {
  if (padded_k == 64) return bf16 ? start_states_bf16_64 : start_states_f16_64;
  if (padded_k == 128) return bf16 ? start_states_bf16_128 : start_states_f16_128;
  return bf16 ? start_states_bf16_256 : start_states_f16_256;
}

}  // namespace

std::string chunk_backward_refusal(const ChunkBackward& d) {
  const Problem& p = d.problem;
  if (p.dtype == DType::f64) return "computes with float32, bfloat16 and float16 q, k and v only";
  if (p.dim_k % 16 != 0 || p.dim_v % 16 != 0) return "takes K and V that are multiples of 16";
  if (p.sequences() >= kMostBlocks || chunk_bound(p, kStored) * p.heads_qk >= kMostBlocks ||
      p.sequences() * p.heads_v * ((p.dim_v + 15) / 16) >= kMostBlocks / 2) {
    return "takes fewer than 2^31 chunks times heads";
  }
  return refuse_device(p.device.index);
}

std::size_t chunk_backward_workspace(const ChunkBackward& d, int) { return BackwardWorkspace(d.problem, nullptr).bytes; }

void launch_chunk_backward(const ChunkBackwardArguments& a, std::byte* workspace, Stream stream) {
  const Problem& p = a.inputs.problem;
  if (a.d_o.present() && a.d_o.dtype != p.dtype) {
    throw Unsupported(std::string("chunk_backward: takes d_o in the type of q, which is ") + name_of(p.dtype) + ", not " +
                      name_of(a.d_o.dtype));
  }
  const DeviceScope scope(p.device.index);
  const BackwardWorkspace memory(p, workspace);
  const std::int32_t padded_k = padded_dim_k(p.dim_k);
  ScheduleArrays arrays;
  if (needs_table(p, kStored)) {
    arrays = schedule_arrays(p.sequences(), memory.schedule);
    make_table(a, arrays, stream);
  }
  ChunkBackwardParams params = params_of(a, memory, arrays);
  const auto native = static_cast<cudaStream_t>(stream.handle);
  if (!a.d_o.present()) {
    check(cudaMemsetAsync(memory.zeros, 0, static_cast<std::size_t>(p.dim_v * element_bytes(p.dtype)), native), "a row of zeros");
  }
  if (p.dtype == DType::f32) return launch_chunk_backward_f32(p, params, memory.float_kept, stream);
  const bool bf16 = p.dtype == DType::bf16;
  const int together = bf16 ? 2 : 1;  // with f16 a block goes both ways, one after the other
  const AdvanceShape shape =
      advance_shape(p, padded_k, properties_of(p.device.index), {2, together, most_state_tiles(padded_k)}, "chunk_backward");
  params.stages = shape.stages;
  const std::int64_t chunk_blocks = params.sequences.chunk_bound * p.heads_qk, blocks = together * advance_blocks(p, shape);
  check((bf16 ? start_prepare_bf16 : start_prepare_f16)(params, padded_k, chunk_blocks, stream.handle),
        "starting prepare_chunks");
  check(states_starter(bf16, padded_k)(params, shape.tiles, blocks, stream.handle), "starting states_both_ways");
  const auto most_shared = static_cast<std::size_t>(properties_of(p.device.index).block_shared_bytes);
  check((bf16 ? start_gradients_bf16 : start_gradients_f16)(params, padded_k, chunk_blocks, most_shared, stream.handle),
        "starting chunk_gradients");
  if (params.head_sums != nullptr) check(start_head_sums(params, stream.handle), "starting add_head_sums");
}

}  // namespace flashqla::cuda
