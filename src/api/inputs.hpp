// Checks of what all three operations read: q, k, v, g, beta, the gate's parameters and cu_seqlens.
#pragma once

#include "api/tensors.hpp"

namespace flashqla::api {

/// Shapes, dtypes and strides; `problem` is a resolved descriptor's.
InputArguments check_inputs(Checker& checker, const Problem& problem, const InputTensors& tensors);

/// Shape and dtype of cu_seqlens alone, for a question that needs no other input.
Sequences check_sequences(Checker& checker, const Problem& problem, const ConstTensorView& cu_seqlens);

/// Shape and dtype of `saved`, if it is there.
void check_saved(Checker& checker, const Problem& problem, const ConstTensorView& saved, Role role);

/// Contents of cu_seqlens: linear in the number of sequences.
void check_offsets(const Sequences& sequences);

}  // namespace flashqla::api
