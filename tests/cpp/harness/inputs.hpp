// Random tensors of a case. Everything that the operation must not read holds NaN: gaps between rows, rows past the last offset,
// pool rows that no sequence starts from.
#pragma once

#include "harness/case.hpp"
#include "harness/tensor.hpp"

namespace flashqla::test {

/// By the names of the public headers: q k v g beta a_log dt_bias cu_seqlens initial_state read write accepted stored_rows
/// prefix_lengths token_rows d_o d_final_state.
Tensors make_inputs(const Case& c);

/// The same values in double, contiguous (index tensors as they are): what the reference computes the truth from.
Tensors in_double(const Tensors& inputs);

}  // namespace flashqla::test
