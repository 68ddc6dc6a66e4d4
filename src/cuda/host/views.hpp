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
          x.stride_outer,
          0};
}
inline IndexTensor device_view(const IndexView& x) { return {x.data, x.dtype, x.stride_0, x.stride_1, x.size_0, x.size_1}; }

}  // namespace flashqla::cuda
