// Errors against the truth and the bounds that they must keep (tests/cases/tolerances.json).
#pragma once

#include <string>
#include <vector>

#include "harness/case.hpp"
#include "harness/tensor.hpp"

namespace flashqla::test {

/// sqrt(sum (x - truth)^2 / sum truth^2). Where both are NaN, or the same infinity, there is no difference; where one is, the
/// error is infinite. Against a truth of nothing but zeros, the root mean square of x.
double relative_rms(const std::vector<double>& x, const std::vector<double>& truth);

/// relative_rms of each head of a [.., heads] tensor, the largest.
double worst_head(const std::vector<double>& x, const std::vector<double>& truth, std::int64_t heads);

/// Relative RMS error of `output` that is allowed for the case. `recurrence` is the larger error of o and states of the same case
/// computed by a token recurrence in fp32.
double bound_of(const Case& c, const std::string& output, DType output_dtype, double recurrence);

/// Error of o and the final state of the fp32 token recurrence against the truth in double (the larger); of the forward operation
/// of the case.
double fp32_recurrence_error(const Case& c, const Tensors& inputs);

/// Empty when every output of `values` is as near to `expected` as the case's bounds (with `recurrence` as in bound_of) ask; else
/// one line for each that is not.
std::string differences(const Case& c, const Tensors& inputs, const Values& values, const Values& expected, double recurrence);

/// Runs `implementation` on the case and compares with the truth.
std::string check_case(const Case& c, const std::string& implementation, int threads = 1);

/// Likewise every cpu-* implementation that this processor runs, and the reference on the case's own dtypes.
std::string check_all(const Case& c, int threads = 1);

/// Bit for bit, NaN equal to NaN. Names the outputs that differ.
std::string bit_differences(const Values& a, const Values& b);

}  // namespace flashqla::test
