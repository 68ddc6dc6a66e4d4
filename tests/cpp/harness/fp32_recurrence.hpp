// The token recurrence in fp32: only a yardstick for what single precision can give on a case.
#pragma once

#include "harness/case.hpp"
#include "harness/tensor.hpp"

namespace flashqla::test {

/// Relative RMS error of o and of the last states of the sequences (the larger of the two) of the fp32 recurrence against the
/// same in double.
double fp32_recurrence_against_double(const Case& c, const Tensors& inputs);

/// The same in double: o of every row that belongs to a sequence, and the last state of each sequence and head, [K,V].
void double_recurrence(const Case& c, const Tensors& inputs, std::vector<double>& o, std::vector<double>& states);

}  // namespace flashqla::test
