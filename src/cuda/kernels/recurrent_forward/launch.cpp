#include "cuda/kernels/recurrent_forward/launch.hpp"

#include <algorithm>
#include <bit>

#include "cuda/host/device.hpp"
#include "cuda/host/views.hpp"
#include "cuda/kernels/recurrent_forward/params.hpp"

namespace flashqla::cuda {

namespace {

std::int64_t slab_count(const Problem& p) { return (p.dim_v + kRecurrentColumns - 1) / kRecurrentColumns; }
std::int64_t block_count(const Problem& p) { return p.sequences() * p.heads_v * slab_count(p); }

Divisor divisor_of(std::int64_t x) {
  const auto divisor = static_cast<std::uint32_t>(x);
  const auto shift = static_cast<std::uint32_t>(std::bit_width(divisor - 1));
  return {divisor, static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + shift)) + divisor - 1) / divisor), shift};
}

Number number_of(DType dtype) { return dtype == DType::f32 ? Number::f32 : dtype == DType::bf16 ? Number::bf16 : Number::f16; }
std::int64_t bytes_of(Number number) { return number == Number::f32 ? 4 : 2; }

template <class Byte>
StepTensor step_tensor(const TokenView<Byte>& x, bool packed) {
  const std::int64_t bytes = element_bytes(x.dtype);
  return {const_cast<std::byte*>(x.data), number_of(x.dtype), (packed ? x.stride_token : x.stride_batch) * bytes,
          x.stride_token * bytes, x.stride_head * bytes};
}

HeadNumbers head_numbers(const ConstHeadView& x) { return {x.data, number_of(x.dtype), x.stride * element_bytes(x.dtype)}; }

IndexRows index_rows(const IndexView& x) {
  const std::int64_t bytes = element_bytes(x.dtype);
  return {static_cast<const std::byte*>(x.data), x.dtype == DType::i64, x.stride_0 * bytes, x.stride_1 * bytes, x.size_1};
}

/// Whether data and strides let four neighbouring elements of `bytes` be moved together.
template <class... Strides>
bool lie_in_fours(const void* data, std::int64_t bytes, Strides... strides) {
  const std::int64_t all = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data)) | (strides | ...);
  return all % (4 * bytes) == 0;
}
bool lie_in_fours(const StepTensor& x) {
  return lie_in_fours(x.data, bytes_of(x.type), x.stride_sequence, x.stride_token, x.stride_head);
}

template <class Byte>
SlabTensor slab_tensor(const StateView<Byte>& x) {
  const std::int64_t bytes = element_bytes(x.dtype);
  SlabTensor slab{const_cast<std::byte*>(x.data),
                  number_of(x.dtype),
                  static_cast<std::int32_t>(bytes),
                  0,
                  x.present() ? x.rows : 0,
                  x.stride_row * bytes,
                  x.stride_head * bytes,
                  x.stride_outer * bytes};
  slab.vectors =
      slab.stride_outer >> 32 == 0 && lie_in_fours(x.data, bytes, slab.stride_row, slab.stride_head, slab.stride_outer);
  return slab;
}

void set_tensors(RecurrentParams& params, const RecurrentForwardArguments& a) {
  const InputArguments& in = a.inputs;
  const bool packed = in.problem.packed;
  params.q = step_tensor(in.q, packed);
  params.k = step_tensor(in.k, packed);
  params.v = step_tensor(in.v, packed);
  params.o = step_tensor(a.o, packed);
  params.g = step_tensor(in.g, packed);
  params.beta = step_tensor(in.beta, packed);
  params.a_log = head_numbers(in.a_log);
  params.dt_bias = head_numbers(in.dt_bias);
  params.vectors = lie_in_fours(params.q) && lie_in_fours(params.k);
  if (packed) params.cu_seqlens = index_rows(in.sequences.cu_seqlens);
  params.read = index_rows(a.states.read);
  params.write = index_rows(a.states.write);
  params.accepted = index_rows(a.states.accepted);
  params.token_rows = index_rows(a.token_rows);
  params.initial_state = slab_tensor(a.states.initial_state);
  params.final_state = slab_tensor(a.states.final_state);
  params.token_states = slab_tensor(a.token_states);
}

GateKind gate_kind(Gate gate) {
  return gate == Gate::none ? GateKind::none : gate == Gate::computed ? GateKind::computed : GateKind::log_decay;
}
BetaKind beta_kind(Beta beta) {
  if (beta == Beta::one) return BetaKind::one;
  if (beta == Beta::given) return BetaKind::given;
  return beta == Beta::sigmoid ? BetaKind::sigmoid : BetaKind::doubled_sigmoid;
}

template <class Byte>
RowSource row_source(const StateView<Byte>& x, const IndexView& index) {
  return !x.present() ? RowSource::none : index.present() ? RowSource::index : RowSource::number;
}

void set_operation(RecurrentParams& params, const RecurrentForwardArguments& a) {
  const InputArguments& in = a.inputs;
  const Problem& p = in.problem;
  params.slabs = divisor_of(slab_count(p));
  params.heads = divisor_of(p.heads_v);
  params.group = divisor_of(in.group);
  params.sequences = static_cast<std::int32_t>(p.sequences());
  params.dim_k = static_cast<std::int32_t>(p.dim_k);
  params.dim_v = static_cast<std::int32_t>(p.dim_v);
  params.packed = p.packed;
  params.pads = a.states.read.present() && a.states.write.present();
  params.layout = p.state_layout;
  params.type = number_of(p.dtype);
  params.bytes = static_cast<std::int32_t>(element_bytes(p.dtype));
  params.scale = static_cast<float>(in.scale);
  params.l2norm_eps = p.qk_l2norm ? static_cast<float>(p.l2norm_eps) : -1.0f;
  params.gate = gate_kind(p.gate);
  params.beta_kind = beta_kind(p.beta);
  params.tokens = p.tokens;
  params.read_from = row_source(a.states.initial_state, a.states.read);
  if (params.read_from == RowSource::index && a.states.accepted.present()) params.read_from = RowSource::draft;
  params.write_to = row_source(a.states.final_state, a.states.write);
  params.keep_in = row_source(a.token_states, a.token_rows);
}

Steps steps_of(const RecurrentParams& params, std::int32_t padded_k) {
  const auto in_fours = [](const SlabTensor& x) { return x.rows == 0 || x.vectors != 0; };
  const bool even = params.dim_k == padded_k && params.dim_v % kRecurrentColumns == 0 && params.vectors != 0 &&
                    in_fours(params.initial_state) && in_fours(params.final_state) && in_fours(params.token_states);
  return even && params.packed == 0 && params.tokens == 1 ? Steps::one_even : Steps::any;
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
  const Problem& p = a.inputs.problem;
  const DeviceScope scope(p.device.index);
  RecurrentParams params{};
  set_operation(params, a);
  set_tensors(params, a);
  const std::int64_t least = p.packed ? 1 : 0;  // a pack of none has rows past its last offset
  const std::int32_t padded_k = padded_dim_k(p.dim_k);
  check(start_recurrent(params, padded_k, steps_of(params, padded_k), std::max(least, block_count(p)), stream.handle),
        "starting recurrent_steps");
}

}  // namespace flashqla::cuda
