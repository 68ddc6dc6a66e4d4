#include "cuda/kernels/recurrent_forward/launch.hpp"

#include <algorithm>

#include "cuda/host/device.hpp"
#include "cuda/host/views.hpp"
#include "cuda/kernels/recurrent_forward/params.hpp"

namespace flashqla::cuda {

namespace {

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
  set_operation(params, in, a.o);
  params.layout = p.state_layout;
  params.tokens = p.tokens;
  if (p.packed) params.cu_seqlens = device_view(in.sequences.cu_seqlens);
  params.read = device_view(a.states.read);
  params.write = device_view(a.states.write);
  params.accepted = device_view(a.states.accepted);
  params.token_rows = device_view(a.token_rows);
  params.initial_state = state_of(a.states.initial_state);
  params.final_state = state_of(a.states.final_state);
  params.token_states = state_of(a.token_states);
  const std::int32_t padded_k = padded_dim_k(p.dim_k);
  const std::int64_t least = p.packed ? 1 : 0;  // a pack of none has rows past its last offset
  check(start_recurrent(params, padded_k, std::max(least, block_count(p)), stream.handle), "starting recurrent_steps");
}

}  // namespace flashqla::cuda
