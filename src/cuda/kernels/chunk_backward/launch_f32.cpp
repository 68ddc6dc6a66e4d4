#include "cuda/kernels/chunk_backward/launch_f32.hpp"

#include <algorithm>
#include <type_traits>

#include "cuda/host/device.hpp"
#include "cuda/host/views.hpp"
#include "cuda/kernels/chunk_backward/start.hpp"
#include "cuda/kernels/chunk_forward/setup.hpp"

namespace flashqla::cuda {

namespace {

/// A tensor from one of its heads on.
template <class Tensor>
void skip_heads(Tensor& x, std::int64_t heads, std::int64_t stride) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(x.data)>>, const std::byte, std::byte>;
  if (x.data != nullptr) x.data = static_cast<Byte*>(x.data) + heads * stride * element_bytes(x.dtype);
}

/// The same call for `count` q/k heads and their value heads, from `first` on.
ChunkBackwardParams part_of(ChunkBackwardParams params, std::int64_t first, std::int64_t count) {
  const std::int64_t first_v = first * params.group;
  for (TokenTensor* x : {&params.q, &params.k, &params.d_q, &params.d_k}) skip_heads(*x, first, x->stride_head);
  for (TokenTensor* x : {&params.v, &params.g, &params.beta, &params.d_o, &params.d_v, &params.d_g, &params.d_beta}) {
    skip_heads(*x, first_v, x->stride_head);
  }
  for (StateTensor* x : {&params.initial_state, &params.d_final_state, &params.d_initial_state}) {
    skip_heads(*x, first_v, x->stride_head);
  }
  for (HeadTensor* x : {&params.a_log, &params.dt_bias}) skip_heads(*x, first_v, x->stride);
  for (HeadResult* x : {&params.d_a_log, &params.d_dt_bias}) skip_heads(*x, first_v, x->stride);
  params.heads_qk = static_cast<std::int32_t>(count);
  params.heads_v = static_cast<std::int32_t>(count * params.group);
  return params;
}

void set_kept(ChunkBackwardParams& params, const FloatKept& kept) {
  const std::int64_t K = params.dim_k, V = params.dim_v, heads = params.heads_v, chunks = params.sequences.chunk_bound;
  const auto states = [&](float* data) { return StateTensor{data, DType::f32, 0, chunks, heads * K * V, K * V, V}; };
  const auto rows = [&](float* data) {
    return TokenTensor{data, DType::f32, heads * kTokensPerChunk * V, V, kTokensPerChunk * V};
  };
  params.kept_states = states(kept.states);
  params.d_kept_states = states(kept.d_states);
  params.kept_errors = rows(kept.errors);
  params.d_kept_values = rows(kept.d_values);
}

}  // namespace

void launch_chunk_backward_f32(const Problem& p, const ChunkBackwardParams& params, const FloatKept& kept, Stream stream) {
  const std::int32_t padded_k = padded_dim_k(p.dim_k);
  const DeviceProperties device = properties_of(p.device.index);
  for (std::int64_t first = 0; first < p.heads_qk; first += heads_qk_at_once(p)) {
    ChunkBackwardParams part = part_of(params, first, std::min(heads_qk_at_once(p), p.heads_qk - first));
    set_kept(part, kept);
    Problem heads = p;
    heads.heads_qk = part.heads_qk;
    heads.heads_v = part.heads_v;
    const AdvanceShape shape = advance_shape(heads, padded_k, device, {2, 2, 4}, "chunk_backward");
    const std::int64_t chunk_blocks = part.sequences.chunk_bound * part.heads_qk;
    check(start_prepare_f32(part, chunk_blocks, stream.handle), "starting prepare_chunks_f32");
    check(start_states_f32(part, shape.tiles, 2 * advance_blocks(heads, shape), stream.handle), "starting states_both_ways_f32");
    check(start_gradients_f32(part, padded_k, chunk_blocks, stream.handle), "starting chunk_gradients_f32");
    if (part.head_sums != nullptr) check(start_head_sums(part, stream.handle), "starting add_head_sums");
  }
}

}  // namespace flashqla::cuda
