// Views of checked arguments as kernels take them (src/cuda/views).
#pragma once

#include "common/arguments.hpp"
#include "cuda/views/views.hpp"

namespace flashqla::cuda {

template <class Byte>
TokenTensor device_view(const TokenView<Byte>& x) {
  return {const_cast<std::byte*>(x.data), x.dtype, x.stride_batch, x.stride_token, x.stride_head};
}
template <class Byte>
HeadTensor device_view(const HeadView<Byte>& x) {
  return {x.data, x.dtype, x.stride};
}
template <class Byte>
StateTensor device_view(const StateView<Byte>& x) {
  return {const_cast<std::byte*>(x.data),
          x.dtype,
          x.layout == StateLayout::value_key,
          x.rows,
          x.stride_row,
          x.stride_head,
          x.stride_outer};
}
inline IndexTensor device_view(const IndexView& x) { return {x.data, x.dtype, x.stride_0, x.stride_1, x.size_0, x.size_1}; }

/// Fills in the part of `params` that every operation has.
inline void set_operation(OperationParams& params, const InputArguments& in, const MutableTokenView& o) {
  const Problem& p = in.problem;
  params.heads_qk = static_cast<std::int32_t>(p.heads_qk);
  params.heads_v = static_cast<std::int32_t>(p.heads_v);
  params.group = static_cast<std::int32_t>(in.group);
  params.dim_k = static_cast<std::int32_t>(p.dim_k);
  params.dim_v = static_cast<std::int32_t>(p.dim_v);
  params.scale = static_cast<float>(in.scale);
  params.l2norm_eps = p.qk_l2norm ? static_cast<float>(p.l2norm_eps) : -1.0f;
  params.gate = p.gate;
  params.beta_kind = p.beta;
  params.q = device_view(in.q);
  params.k = device_view(in.k);
  params.v = device_view(in.v);
  params.o = device_view(o);
  params.g = device_view(in.g);
  params.beta = device_view(in.beta);
  params.a_log = device_view(in.a_log);
  params.dt_bias = device_view(in.dt_bias);
}

/// K as the kernels have it: 64, 128 or 256.
inline std::int32_t padded_dim_k(std::int64_t dim_k) { return dim_k <= 64 ? 64 : dim_k <= 128 ? 128 : 256; }

}  // namespace flashqla::cuda
