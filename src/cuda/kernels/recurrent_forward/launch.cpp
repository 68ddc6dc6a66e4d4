#include "cuda/kernels/recurrent_forward/launch.hpp"

#include <algorithm>

#include "cuda/host/device.hpp"
#include "cuda/host/views.hpp"
#include "cuda/kernels/recurrent_forward/params.hpp"

namespace flashqla::cuda {

namespace {

constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 31) - 1;

std::int64_t block_count(const Problem& p) {
  return p.sequences() * p.heads_v * ((p.dim_v + kRecurrentColumns - 1) / kRecurrentColumns);
}

/// Whether four neighbouring elements can be moved together.
template <class Byte>
StateTensor state_of(const StateView<Byte>& x) {
  StateTensor view = device_view(x);
  const auto bytes = static_cast<std::uintptr_t>(4 * element_bytes(x.dtype));
  view.vectors = reinterpret_cast<std::uintptr_t>(x.data) % bytes == 0 && x.stride_row % 4 == 0 && x.stride_head % 4 == 0 &&
                 x.stride_outer % 4 == 0;
  return view;
}

}  // namespace

std::string recurrent_forward_refusal(const RecurrentForward& d) {
  const Problem& p = d.problem;
  if (p.dtype == DType::f64) return "computes in float32, not float64";
  if (p.dim_k % 16 != 0 || p.dim_v % 16 != 0) return "takes K and V that are multiples of 16";
  if (block_count(p) > kMostBlocks) return "takes fewer than 2^31 sequences times heads times 32 columns of V";
  return refuse_device(p.device.index);
}

std::size_t recurrent_forward_workspace(const RecurrentForward&, int) { return 0; }

void launch_recurrent_forward(const RecurrentForwardArguments& a, std::byte*, Stream stream) {
  const InputArguments& in = a.inputs;
  const Problem& p = in.problem;
  const DeviceScope scope(p.device.index);
  RecurrentParams params{};
  params.sequences = static_cast<std::int32_t>(p.sequences());
  params.heads_v = static_cast<std::int32_t>(p.heads_v);
  params.group = static_cast<std::int32_t>(in.group);
  params.dim_k = static_cast<std::int32_t>(p.dim_k);
  params.dim_v = static_cast<std::int32_t>(p.dim_v);
  params.layout = p.state_layout;
  params.tokens = p.tokens;
  params.scale = static_cast<float>(in.scale);
  params.l2norm_eps = p.qk_l2norm ? static_cast<float>(p.l2norm_eps) : -1.0f;
  params.gate = p.gate;
  params.beta_kind = p.beta;
  params.q = device_view(in.q);
  params.k = device_view(in.k);
  params.v = device_view(in.v);
  params.o = device_view(a.o);
  params.g = device_view(in.g);
  params.beta = device_view(in.beta);
  params.a_log = device_view(in.a_log);
  params.dt_bias = device_view(in.dt_bias);
  if (p.packed) params.cu_seqlens = device_view(in.sequences.cu_seqlens);
  params.read = device_view(a.states.read);
  params.write = device_view(a.states.write);
  params.accepted = device_view(a.states.accepted);
  params.token_rows = device_view(a.token_rows);
  params.initial_state = state_of(a.states.initial_state);
  params.final_state = state_of(a.states.final_state);
  params.token_states = state_of(a.token_states);
  const std::int32_t padded_k = p.dim_k <= 64 ? 64 : p.dim_k <= 128 ? 128 : 256;
  const std::int64_t least = p.packed ? 1 : 0;  // a pack of none has rows past its last offset
  check(start_recurrent(params, padded_k, std::max(least, block_count(p)), stream.handle), "starting recurrent_steps");
}

}  // namespace flashqla::cuda
