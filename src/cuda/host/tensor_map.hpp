// Descriptions of tensors for the copy engine of sm_90 and newer.
#pragma once

#include <cstdint>

#include "cuda/views/views.hpp"

namespace flashqla::cuda {

/// A CUtensorMap.
struct alignas(128) TensorMap {
  std::uint64_t opaque[16];
};

struct TensorSizes {
  std::int64_t batch, tokens, heads, columns;
};
/// Of x [B,T,H,D] of 16-bit elements, for boxes of 64 tokens by 64 columns of one head, rows of which have their pieces of 16
/// bytes swizzled. False where the engine cannot: rows that do not begin at multiples of 16 bytes, strides that are not positive,
/// sizes of 2^31 and more.
bool make_tensor_map(const TokenTensor& x, const TensorSizes& sizes, TensorMap& map);

}  // namespace flashqla::cuda
